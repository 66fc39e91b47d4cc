r"""Columns of marked values: dates, times, durations, Decimals, bytes, vectors of numbers.

    kind        a value                          in Arrow
    date        {"\0date": [text, days]}         date32
    time        {"\0time": [text, us]}           time64[us]
    datetime    {"\0datetime": [text, ns, zone]} timestamp[us], or [ns] if one needs that
    duration    {"\0duration": [text, ns]}       duration[us], or [ns] if one needs that
    decimal     {"\0decimal": [text]}            decimal128
    bytes       {"\0bytes": [base64]}            binary
    vector      {"\0vector": [numbers, dtype]}   fixed_size_list of that dtype

The `detail` of a kind says which of these types it is. Datetimes of several time zones are in UTC.
Of no common type are those with a zone and those without; such a column holds strings, as one of
values of several kinds does.
"""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections.abc import Sequence
from decimal import Decimal
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from forebay.base.row_values import MARK

if TYPE_CHECKING:
    import pyarrow

MOST_DIGITS = 38  # of a decimal128
_NANO = 1000  # nanoseconds in a microsecond
_INT64 = 1 << 63


def mark_of(value: Any) -> tuple[str, list[Any]] | None:
    """Return the kind and the parts of a marked value; None for any other."""
    if type(value) is not dict or len(value) != 1:
        return None
    ((name, parts),) = value.items()
    return (name[1:], parts) if name[:1] == MARK else None


def detail_of(kind: str, parts: Sequence[Any]) -> str | None:
    """Return which type of its kind a value needs; None if there is none."""
    if kind in ("datetime", "duration"):
        unit = "ns" if parts[1] % _NANO else "us"
        if not -_INT64 <= parts[1] // (1 if unit == "ns" else _NANO) < _INT64:
            return None
        return f"{unit} {parts[2]}" if kind == "datetime" else unit
    if kind == "decimal":
        _, digits, exponent = Decimal(parts[0]).as_tuple()
        scale = max(-int(exponent), 0)
        whole = max(len(digits) + int(exponent), 0)
        return f"{whole} {scale}" if whole + scale <= MOST_DIGITS else None
    return f"{parts[1]} {len(parts[0])}" if kind == "vector" else ""


def common_detail(kind: str, one: str, other: str) -> str | None:
    """Return the type that holds what either of two does; None if there is none."""
    if one == other:
        return one
    (first, _, mine), (second, _, yours) = one.partition(" "), other.partition(" ")
    if kind == "decimal":
        whole, scale = max(int(first), int(second)), max(int(mine), int(yours))
        return f"{whole} {scale}" if whole + scale <= MOST_DIGITS else None
    if kind == "duration":
        return "ns"
    if kind != "datetime" or bool(mine) != bool(yours):
        return None
    return f"{max(first, second, key=('us', 'ns').index)} {mine if mine == yours else 'UTC'}"


def arrow_type_of(kind: str, detail: str) -> pyarrow.DataType:
    """Return the Arrow type of a column."""
    import pyarrow

    first, _, second = detail.partition(" ")
    if kind == "decimal":
        return pyarrow.decimal128(max(int(first) + int(second), 1), int(second))
    if kind == "datetime":
        return pyarrow.timestamp(first, second or None)
    if kind == "vector":
        dtype = {"float16": "halffloat", "float32": "float", "float64": "double"}.get(first, first)
        return pyarrow.list_(pyarrow.type_for_alias(dtype), int(second))
    if kind == "duration":
        return pyarrow.duration(first)
    return {"date": pyarrow.date32(), "time": pyarrow.time64("us"), "bytes": pyarrow.binary()}[kind]


def typed_array(
    values: Sequence[Any], kind: str, column: pyarrow.DataType, valid: Any
) -> pyarrow.Array:
    """Return marked values, or None, as an Arrow array, of buffers: see `arrow_arrays`.

    Args:
        valid: The buffer of bits that are set where there is a value; None for everywhere.
    """
    import numpy as np
    import pyarrow

    parts = [None if value is None else next(iter(value.values())) for value in values]
    if kind == "vector":
        dtype = str(column.value_type.to_pandas_dtype().__name__)
        empty = [0] * column.list_size
        numbers = np.array([empty if each is None else each[0] for each in parts], dtype)
        item = pyarrow.Array.from_buffers(
            column.value_type, numbers.size, [None, pyarrow.py_buffer(numbers.reshape(-1))]
        )
        return pyarrow.Array.from_buffers(column, len(values), [valid], children=[item])
    if kind == "bytes":
        data = [b"" if each is None else b64decode(each[0]) for each in parts]
        ends = array("i", accumulate(map(len, data), initial=0))
        buffers = [valid, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"".join(data))]
        return pyarrow.Array.from_buffers(column, len(values), buffers)
    if kind == "decimal":
        whole = [
            0 if each is None else int(scaled(Decimal(each[0]), column.scale)) for each in parts
        ]
        text = b"".join(each.to_bytes(16, "little", signed=True) for each in whole)
        return pyarrow.Array.from_buffers(column, len(values), [valid, pyarrow.py_buffer(text)])
    step = _NANO if getattr(column, "unit", "") == "us" and kind in ("datetime", "duration") else 1
    counts = [0 if each is None else each[1] // step for each in parts]
    buffer = pyarrow.py_buffer(array("i" if kind == "date" else "q", counts))
    return pyarrow.Array.from_buffers(column, len(values), [valid, buffer])


def scaled(value: Decimal, scale: int) -> Decimal:
    """Return a Decimal times a power of ten, with all of its digits."""
    sign, digits, exponent = value.as_tuple()
    return Decimal((sign, digits, int(exponent) + scale))
