"""PURE: the values of a row as JSON has them, whichever library they come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

_AS_THEY_ARE = frozenset({str, int, bool, type(None)})
# Types whose values are told apart by their strings.
_AS_STRINGS = (Decimal, UUID, timedelta)


def plain(value: Any) -> Any:
    """Return a value of a row as strings, numbers, booleans, None, lists and dicts.

    NaN, NaT and pandas' NA are None: that is how tables mark a missing value. The infinities stay
    floats: the level of silence in dB is one.
    A date or time is a string in ISO format; a path, Decimal, UUID or timedelta a string; numbers
    and arrays of numpy and torch are numbers and lists.

    Raises:
        TypeError: JSON has no such value: bytes, a set, any other object; or a key of a dict is
            not a string.
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, str | int):  # subclasses, such as numpy's strings and enumerations
        return value
    if isinstance(value, float):
        return None if value != value else float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a dict with the key {key!r}, which is not a string")
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return plain(os.fspath(value))
    if type(value).__name__ in ("NaTType", "NAType"):
        return None
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, _AS_STRINGS):
        return None if value != value else str(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return _of_array(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def _of_array(value: Any) -> Any:
    """Return a number or an array of numpy or torch as numbers and lists."""
    if getattr(value.dtype, "kind", "") not in ("m", "M"):
        return plain(value.tolist())
    # numpy turns times into integers, whose unit is lost.
    return [_of_array(item) for item in value] if value.ndim else _of_time(value)


def _of_time(value: Any) -> str | None:
    """Return a datetime64 or timedelta64 of numpy as a string; None for NaT."""
    return None if value != value else str(value)
