"""Records: values that have fields with names, of whichever library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def record_of(value: Any) -> dict[Any, Any] | None:
    """Return the fields of a value by name; None for a value that has none.

    Those of a mapping, dataclass, NamedTuple, attrs object, pydantic model, row of a database, or
    Series of pandas with labels that are strings.
    """
    kind = type(value)
    if kind is dict or isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str | bytes | list | type):
        return None
    if isinstance(value, tuple):
        return value._asdict() if hasattr(kind, "_fields") and hasattr(kind, "_asdict") else None
    if fields := getattr(kind, "__dataclass_fields__", None):
        return {name: getattr(value, name) for name in fields if hasattr(value, name)}
    if attributes := getattr(kind, "__attrs_attrs__", None):
        return {each.name: getattr(value, each.name) for each in attributes}
    if callable(dump := getattr(kind, "model_dump", None)):
        return dict(dump(value))
    if kind.__name__ == "Series" and kind.__module__.partition(".")[0] == "pandas":
        are_names = len(value) and all(isinstance(each, str) for each in value.index)
        return dict(zip(value.index, value, strict=True)) if are_names else None
    if (kind.__module__, kind.__name__) == ("sqlite3", "Row"):
        return dict(value)
    return None
