r"""Values of rows: what Python, libraries and Arrow have, as JSON has it.

One conversion for every way in and out: the rows of a table in a file or in memory, of any library,
and what a function returns. So a value is the same string wherever it comes from, and a row is the
same input.

    str, int, bool, None, and subclasses          as they are
    float                                         a number; for NaN see `json_value`
    dict, list, tuple, range, set                 dict, list; a set is sorted
    dataclass, NamedTuple, attrs, pydantic        dict; see `record_fields`
    date, time                                    a string in ISO format
    duration                                      a string as of a `timedelta`: "1 day, 0:00:01"
    path, Decimal, Fraction, UUID, and            a string
      Period and Interval of pandas
    an Enum                                       its value
    NaT, NA, NaN of Decimal                       None, a missing value
    numbers and arrays of numpy, torch, pandas    numbers and lists

What a function returns becomes a column of a table, so a date, time, duration, Decimal, bytes or
vector of numbers is marked with its type there: `{"\0date": [what it is in JSON, ...]}`; see
`marked`, and `base/typed_columns.py`.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

_AS_THEY_ARE = frozenset({int, bool, type(None)})
_NUMBERS = _AS_THEY_ARE | {float}
# Types known by their strings, with the first part of their module: none is imported for this.
_AS_STRINGS = frozenset(
    {
        ("decimal", "Decimal"),
        ("fractions", "Fraction"),
        ("uuid", "UUID"),
        ("pandas", "Period"),
        ("pandas", "Interval"),
    }
)
_MISSING = ("NaTType", "NAType")
# Nanoseconds in each unit of numpy's durations; others have no length or are finer.
_SECOND = 1_000_000_000
_NANOSECONDS = {
    "W": 604_800 * _SECOND,
    "D": 86_400 * _SECOND,
    "h": 3_600 * _SECOND,
    "m": 60 * _SECOND,
    "s": _SECOND,
    "ms": 1_000_000,
    "us": 1_000,
    "ns": 1,
}


def json_value(
    value: Any, string: Callable[[str], Any] | None = None, is_returned: bool = False
) -> Any:
    """Return a value of a row as strings, numbers, booleans, None, lists and dicts.

    The infinities stay floats: the level of silence in dB is one.

    Args:
        string: What each string becomes, except the keys of dicts; None to leave them.
        is_returned: Whether a function returned it. Then NaN is a number, and values are marked
            with their types. Otherwise NaN is None: that is how tables mark a missing value.

    Raises:
        TypeError: JSON has no such value; or two keys of a dict are the same string.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is str:
        return value if string is None else string(value)
    if kind is float:
        return value if is_returned or value == value else None
    if kind is dict or isinstance(value, Mapping):
        return _of_mapping(value, string, is_returned)
    is_list = isinstance(value, list | tuple) and not hasattr(kind, "_fields")
    if kind is list or kind is tuple or is_list:
        types = {*map(type, value)}  # no call for each of many numbers
        if types <= (_NUMBERS if is_returned else _AS_THEY_ARE):
            return list(value)
        if types == {str}:
            return list(value) if string is None else [*map(string, value)]
        return [json_value(each, string, is_returned) for each in value]
    if isinstance(value, str):  # subclasses, such as numpy's strings and enumerations
        return json_value(str.__str__(value), string, is_returned)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return json_value(float(value), string, is_returned)
    return _of_object(value, string, is_returned)


def _of_mapping(
    value: Mapping[Any, Any], string: Callable[[str], Any] | None, is_returned: bool
) -> dict[str, Any]:
    plain = _NUMBERS if is_returned else _AS_THEY_ARE
    found = {
        key if type(key) is str else _key(key): (
            each if type(each) in plain else json_value(each, string, is_returned)
        )
        for key, each in value.items()
    }
    if len(found) == 1 and next(iter(found))[:1] == MARK:
        raise TypeError("a dict with a key that begins with a NUL character")
    if len(found) < len(value):
        seen: dict[str, Any] = {}
        for key in value:
            other = seen.setdefault(_key(key), key)
            if other is not key:
                raise TypeError(f"a dict with the keys {other!r} and {key!r}, one string in JSON")
    return found


def _key(key: Any) -> str:
    """Return a key of a dict as JSON writes it."""
    if isinstance(key, str):
        return str.__str__(key)
    plain = unmarked(json_value(key, is_returned=True))
    if isinstance(plain, list | dict):
        raise TypeError(f"a dict with the key {key!r}, which is not a string")
    if isinstance(plain, bool | None):
        return {True: "true", False: "false", None: "null"}[plain]
    return str(plain)


def _of_object(value: Any, string: Callable[[str], Any] | None, is_returned: bool) -> Any:
    """Return a value that is of none of Python's basic types as JSON has it."""
    kind = type(value)
    if kind.__name__ in _MISSING:
        return None
    if isinstance(value, Enum):
        return json_value(value.value, string, is_returned)
    if (record := record_fields(value)) is not None:
        return json_value(record, string, is_returned)
    if is_returned and (known := marked(value)) is not None:
        return known
    if isinstance(value, os.PathLike):
        return json_value(os.fspath(value), string, is_returned)
    if isinstance(value, Set):
        try:
            ordered = sorted(value)
        except TypeError:  # of several types: any order, but the same in each run
            ordered = sorted(value, key=lambda each: (type(each).__name__, repr(each)))
        return json_value(ordered, string, is_returned)
    names = {(each.__module__.partition(".")[0], each.__name__) for each in kind.__mro__}
    if ("datetime", "timedelta") in names:  # that of pandas is one, in another format
        micros = value.days * 86_400_000_000 + value.seconds * 1_000_000 + value.microseconds
        return _duration(micros * 1000 + getattr(value, "nanoseconds", 0))
    if hasattr(kind, "isoformat"):
        return value.isoformat()
    if not _AS_STRINGS.isdisjoint(names):
        return str(value) if value == value else None
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return _of_array(value, string, is_returned)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return json_value(list(value), string, is_returned)
    raise TypeError(f"a value of type {kind.__name__}")


def _of_array(value: Any, string: Callable[[str], Any] | None, is_returned: bool) -> Any:
    """Return a number or an array of numpy, torch or pandas as numbers and lists."""
    kind = getattr(value.dtype, "kind", "")
    if kind not in ("m", "M"):
        try:
            found = value.tolist()
        except (ValueError, RuntimeError) as error:  # such as a sparse tensor
            raise TypeError(f"a value of type {type(value).__name__}: {error}") from error
        dtype = str(value.dtype).removeprefix("torch.")
        if is_returned and value.ndim == 1 and len(found) and dtype in VECTORS:
            return {f"{MARK}vector": [found, dtype]}
        is_plain = (
            is_returned and kind in ("b", "i", "u", "f") and type(value).__module__ == "numpy"
        )
        return found if is_plain else json_value(found, string, is_returned)
    # `tolist` turns times into integers, whose unit is lost.
    if value.ndim:
        return [json_value(each, string, is_returned) for each in value]
    if value != value:
        return None
    unit, count = _unit(value)
    if value.dtype.kind == "m":
        known = _NANOSECONDS.get(unit)
        return str(value) if known is None else _duration(int(value.view("i8")) * count * known)
    text = str(value.astype("M8[s]") if unit in ("h", "m") else value)
    whole, _, digits = text.partition(".")
    if len(digits) > 9:
        return text
    digits = digits.ljust(9, "0")
    if not int(digits):
        return whole
    return f"{whole}.{digits.removesuffix('000')}"


def _unit(value: Any) -> tuple[str, int]:
    """Return the unit of a numpy time, and how many of them one step is."""
    import numpy as np

    unit, count = np.datetime_data(value.dtype)
    return str(unit), int(count)


def _duration(nanoseconds: int) -> str:
    """Return a duration as `str` of a `timedelta` has it, with nanoseconds if there are any."""
    micros, rest = divmod(nanoseconds, 1000)
    seconds, micros = divmod(micros, 1_000_000)
    days, seconds = divmod(seconds, 86_400)
    text = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if micros or rest:
        text += f".{micros:06}" + (f"{rest:03}" if rest else "")
    return f"{days} day{'s' * (abs(days) != 1)}, {text}" if days else text


# ---- records -------------------------------------------------------------------------------------


def record_fields(value: Any) -> dict[Any, Any] | None:
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
        as_dict = getattr(value, "_asdict", None)
        return dict(as_dict()) if callable(as_dict) and hasattr(kind, "_fields") else None
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


# ---- marks ---------------------------------------------------------------------------------------

# Before the name of a type that a value is marked with. No other key of a dict may begin so.
MARK = "\0"
# The dtypes of numbers that a vector has in Arrow.
VECTORS = frozenset(
    [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + [f"float{bits}" for bits in (16, 32, 64)]
)
_EPOCH = 719_163  # the ordinal of 1970-01-01


def marked(value: Any) -> dict[str, list[Any]] | None:
    """Return a value with its type: what it is in JSON, and what a column of that type needs.

    None if it is of no such type.
    """
    names = {(each.__module__.partition(".")[0], each.__name__) for each in type(value).__mro__}
    if isinstance(value, bytes | bytearray | memoryview):
        return {f"{MARK}bytes": [b64encode(value).decode()]}
    if ("decimal", "Decimal") in names:
        return {f"{MARK}decimal": [str(value)]} if value.is_finite() else None
    if ("datetime", "timedelta") in names:
        micros = value.days * 86_400_000_000 + value.seconds * 1_000_000 + value.microseconds
        count = micros * 1000 + getattr(value, "nanoseconds", 0)
        return {f"{MARK}duration": [_duration(count), count]}
    if ("datetime", "datetime") in names:
        return _marked_datetime(value)
    if ("datetime", "date") in names:
        return {f"{MARK}date": [value.isoformat(), value.toordinal() - _EPOCH]}
    if ("datetime", "time") in names and value.tzinfo is None:
        seconds = (value.hour * 60 + value.minute) * 60 + value.second
        return {f"{MARK}time": [value.isoformat(), seconds * 1_000_000 + value.microsecond]}
    if getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M") and not value.ndim:
        return _marked_numpy(value)
    return None


def _marked_numpy(value: Any) -> dict[str, list[Any]] | None:
    text = _of_array(value, None, False)
    unit, count = _unit(value)
    step = _NANOSECONDS.get(unit)
    if text is None or step is None:
        return None
    number = int(value.view("i8")) * count * step
    if value.dtype.kind == "m":
        return {f"{MARK}duration": [text, number]}
    if unit == "D":
        return {f"{MARK}date": [text, number // _NANOSECONDS["D"]]}
    return {f"{MARK}datetime": [text, number, ""]}


def _marked_datetime(value: Any) -> dict[str, list[Any]]:
    days = value.toordinal() - _EPOCH
    seconds = (value.hour * 60 + value.minute) * 60 + value.second
    count = (days * 86_400 + seconds) * _SECOND + value.microsecond * 1000
    count += getattr(value, "nanosecond", 0)
    zone = ""
    if (offset := value.utcoffset()) is not None:
        count -= (offset.days * 86_400 + offset.seconds) * _SECOND
        zone = str(getattr(value.tzinfo, "key", None) or getattr(value.tzinfo, "zone", None) or "")
        if not zone:
            minutes = offset.days * 1440 + offset.seconds // 60
            zone = f"{'+-'[minutes < 0]}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"
    return {f"{MARK}datetime": [value.isoformat(), count, zone]}


def unmarked(value: Any) -> Any:
    """Return what a marked value is in JSON; any other value as it is."""
    if type(value) is dict and len(value) == 1:
        ((name, parts),) = value.items()
        if name[:1] == MARK:
            return parts[0]
    return value


# ---- arrow ---------------------------------------------------------------------------------------


def python_values(array: pyarrow.Array | pyarrow.ChunkedArray) -> list[Any]:
    """Return the values of an Arrow array as Python has them.

    A date, time or duration that Python's `datetime` cannot hold, such as one beyond the year 9999,
    is a `numpy.datetime64` or `numpy.timedelta64`; that of a time with a time zone is in UTC.
    """
    try:
        values: list[Any] = array.to_pylist()
    except (OverflowError, ValueError):
        return [_python_value(each) for each in array]
    return values


def python_rows(table: pyarrow.Table | pyarrow.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a table as dicts; see `python_values`."""
    names, columns = table.schema.names, [python_values(each) for each in table.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _python_value(scalar: pyarrow.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        import numpy as np
        from pyarrow import types

        kind = scalar.type
        if types.is_timestamp(kind):
            return np.datetime64(scalar.value, kind.unit)
        if types.is_duration(kind):
            return np.timedelta64(scalar.value, kind.unit)
        if types.is_date(kind):
            return np.datetime64(scalar.value, "D" if types.is_date32(kind) else "ms")
        if types.is_dictionary(kind):
            return _python_value(scalar.value)
        if types.is_struct(kind) and len({each.name for each in kind}) == kind.num_fields:
            return {name: _python_value(each) for name, each in scalar.items()}
        if types.is_struct(kind) or types.is_map(kind) or not types.is_nested(kind):
            raise
        return [_python_value(each) for each in scalar.values]
