"""The rows of the metadata table in what a function returned, as JSON. PURE."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
# Tuples, since `list | tuple | dict` would be a new object each time.
_SCALARS = (str, bytes, os.PathLike)
_NESTED = (list, tuple, dict)


def rows_of(returned: Any) -> list[dict[str, Any]] | None:
    """Return the rows in what a function returned, exhausting it if it is a generator.

    None is returned as it is. A mapping is one row, and an iterable of mappings is one row for
    each; anything else is one row with the value in the column `metadata`.

    Raises:
        TypeError: Some elements are mappings and others are not; or it is a DataFrame.
    """
    if returned is None:
        return None
    if type(returned) is dict or isinstance(returned, Mapping):
        return [dict(returned)]
    if hasattr(kind := type(returned), "__arrow_c_stream__") and hasattr(kind, "columns"):
        # To iterate over a DataFrame would give the names of its columns, and no row.
        raise TypeError(
            f"metadata must be dicts, one for each row, not a {kind.__name__}\n"
            "  Return to_dict('records') of pandas, to_dicts() of polars, to_pylist() of pyarrow."
        )
    if isinstance(returned, _SCALARS) or not isinstance(returned, Iterable):
        return [{"metadata": returned}]
    values = list(returned)
    mappings = sum(isinstance(value, Mapping) for value in values)
    if mappings == len(values):
        return [dict(value) for value in values]
    if mappings:
        other = next(value for value in values if not isinstance(value, Mapping))
        raise TypeError(
            f"metadata must all be dicts, but one of {len(values)} values is of type "
            f"{type(other).__name__}"
        )
    return [{"metadata": values}]


def encode(
    rows: list[dict[str, Any]] | None, names: list[str], final_name: Callable[[str], str | None]
) -> str:
    """Return the rows as JSON, with every staged path replaced by its final name.

    A missing `destination` is filled in for an input with one output; a function that returns
    None gets one row with a `destination` for each output.

    Args:
        rows: What `rows_of` returned.
        names: Final names of the input's outputs, in order.
        final_name: Returns the final name of a staged path, None for any other string.

    Raises:
        TypeError: A value is not JSON-serializable; the message names the column.
    """
    if rows is None:
        rows = [{"destination": name} for name in names] or [{}]
    elif len(names) == 1:
        rows = [row if "destination" in row else {"destination": names[0], **row} for row in rows]

    for row in rows:
        for column, value in row.items():
            if type(value) is str:
                row[column] = final_name(value) or value
            elif isinstance(value, _NESTED):
                row[column] = _named(value, final_name)
    try:
        return _ENCODER.encode(rows)  # the usual case, which is much faster
    except (TypeError, ValueError):
        pass
    plain = partial(_plain, final_name)
    try:
        return json.dumps(rows, ensure_ascii=False, default=plain, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TypeError(_what_is_wrong(rows, plain)) from error


def _plain(final_name: Callable[[str], str | None], value: Any) -> Any:
    """Return a value that JSON can hold, or that holds such values, for one that it cannot."""
    if isinstance(value, os.PathLike):
        text = os.fspath(value)
        return final_name(text) or text
    for method in ("item", "tolist"):  # numpy's and torch's numbers, then arrays
        if hasattr(value, method) and hasattr(value, "dtype"):
            try:
                return getattr(value, method)()
            except (ValueError, RuntimeError):
                continue
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(type(value).__name__)


def _named(value: Any, final_name: Callable[[str], str | None]) -> Any:
    if type(value) is str:
        return final_name(value) or value
    if isinstance(value, list | tuple):
        return [_named(one, final_name) for one in value]
    if isinstance(value, dict):
        return {key: _named(one, final_name) for key, one in value.items()}
    return value


def _what_is_wrong(rows: list[dict[str, Any]], plain: Callable[[Any], Any]) -> str:
    for row in rows:
        for column, value in row.items():
            try:
                json.dumps({column: value}, default=plain)
            except (TypeError, ValueError) as error:
                return (
                    f"metadata {column!r} is not JSON-serializable: {error} "
                    f"(type {type(value).__name__})\n"
                    "  Return numbers, strings, lists and dicts; write anything else to out.file()."
                )
    return "the metadata is not JSON-serializable"
