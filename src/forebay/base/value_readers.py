"""Python values read from Arrow columns: for each column a function from a row to its value.

With them `widened_array` makes a column anew with a wider type.

Tensors and arrays are views of the column's memory; everything else is a new object. What a column
says may be anybody's: a value lies within the buffers of its column, or reading raises.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from forebay.base.arrow_arrays import array_of, array_of_numpy
from forebay.base.batches import mapped, opened
from forebay.base.typed_columns import scaled
from forebay.base.value_classes import MAPPINGS, SEQUENCES, Classes, class_of, with_fields
from forebay.base.value_columns import column_of
from forebay.base.value_inference import EPOCH
from forebay.base.value_types import (
    PARSED,
    TIMES,
    Nested,
    Spec,
    arrow_type,
    may_be_missing,
    nulls,
    record_parts,
    zone_of,
)

# The NumPy dtype to read a torch dtype as, if NumPy lacks it or has another name for it.
_READ_AS = {
    "bool": "bool",
    "bfloat16": "int16",
    "complex32": "int32",
    "complex64": "complex64",
    "complex128": "complex128",
}
_BYTE, _LONG, _INT = np.dtype(np.uint8), np.dtype(np.int64), np.dtype(np.int32)

# Values of these types are not views, and have no parts.
_PLAIN = frozenset([int, float, bool, str, bytes, type(None)])

_FROM_STRINGS: dict[str, Callable[[str], Any]] = {
    **{kind: parse for kind, (_, parse) in PARSED.items()},
    "json": json.loads,
}

Bytes = npt.NDArray[np.uint8]
Getter = Callable[[int], Any]


def getter_of(spec: Spec, column: pa.Array, whole: Bytes | None, classes: Classes) -> Getter:
    """Return a function that returns the value of a row.

    Args:
        column: Arrow's view of `whole`, with the offset 0.
        whole: The memory that tensors and arrays shall view; None for a copy of Arrow's.
        classes: Classes that the user's process has, beside those that it finds by their names.
    """
    if spec.kind == "none":
        return lambda _: None
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if isinstance(spec, Nested):
        get = _nested(spec, column, whole, classes)
    else:
        get = _present(spec, column, whole)
    if not column.null_count:
        return get
    valid = _flags(column.buffers()[0], len(column), whole)
    return lambda row: get(row) if valid[row] else None


def _present(spec: Spec, column: pa.Array, whole: Bytes | None) -> Getter:
    """Return the getter for a type without parts; it ignores nulls."""
    rows = len(column)
    if spec.kind == "bool":
        return _flags(column.buffers()[1], rows, whole).__getitem__
    if spec.kind in ("int", "float"):
        # Items of a memoryview are Python numbers.
        return _numbers(column.buffers()[1], whole, spec.stored[0]).data.__getitem__
    if spec.kind == "decimal" and spec.dtype:
        data, scale = _numbers(column.buffers()[1], whole).data, column.type.scale
        return lambda row: scaled(_integer(data[16 * row : 16 * row + 16]), -scale)
    if spec.kind in ("str", "bytes") or spec.kind in _FROM_STRINGS:
        return _strings(spec, column, whole)
    if spec.kind in TIMES:
        width = np.dtype(f"i{column.type.bit_width // 8}")
        number = _numbers(column.buffers()[1], whole, width).data
        make, zone = _TIMES[spec.kind], zone_of(spec.dtype)
        return lambda row: make(number[row], zone)
    if spec.kind == "image":
        return _images(column, whole)
    dtype = _read_as(spec)
    if spec.shape is None:
        lists = column.field("data")
        starts = _numbers(lists.buffers()[1], whole, _LONG) // math.prod(spec.stored[1])
        shape = _shapes(column.field("shape"), whole)
        flat, finish = _numbers(lists.values.buffers()[1], whole, dtype), _finish(spec, whole)
        return lambda row: finish(flat[starts[row] : starts[row + 1]].reshape(shape(row)))
    flat = _numbers(column.buffers()[-1], whole, dtype)
    if spec.kind == "number":
        return flat.__getitem__
    finish = _finish(spec, whole)
    if spec.shape == ():
        return lambda row: finish(flat[row : row + 1].reshape(()))
    table = flat[: rows * math.prod(spec.shape)].reshape(rows, *spec.shape)
    return lambda row: finish(table[row])


def _integer(data: Any) -> Decimal:
    return Decimal(int.from_bytes(data, "little", signed=True))


def _strings(spec: Spec, column: pa.Array, whole: Bytes | None) -> Getter:
    _, ends, data = column.buffers()
    at, text = _numbers(ends, whole, _LONG).data, _numbers(data, whole).data
    if spec.kind == "bytes":
        return lambda row: bytes(text[at[row] : at[row + 1]])
    if spec.kind == "str":
        return lambda row: str(text[at[row] : at[row + 1]], "utf-8", "surrogatepass")
    parse = _FROM_STRINGS[spec.kind]
    return lambda row: parse(str(text[at[row] : at[row + 1]], "utf-8"))


def _shapes(column: pa.Array, whole: Bytes | None) -> Callable[[int], list[int]]:
    """Return a function that returns the shape of a row's array."""
    sizes = _numbers(column.values.buffers()[1], whole, _LONG).tolist()
    ends = _numbers(column.buffers()[1], whole, _INT).tolist()
    return lambda row: sizes[ends[row] : ends[row + 1]]


# ---- times and images ----------------------------------------------------------------------------


def _datetime(number: int, zone: Any) -> datetime:
    found = EPOCH[zone is not None] + timedelta(microseconds=number)
    return found if zone is None else found.astimezone(zone)


def _time(number: int, _: Any) -> time:
    return (EPOCH[False] + timedelta(microseconds=number)).time()


def _of_pandas(name: str) -> Callable[[int, Any], Any]:
    def make(number: int, zone: Any) -> Any:
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError:
            return (np.datetime64 if name == "Timestamp" else np.timedelta64)(number, "ns")
        if name == "Timedelta":
            return pandas.Timedelta(number, "ns")
        found = pandas.Timestamp(number, unit="ns")
        return found if zone is None else found.tz_localize("UTC").tz_convert(zone)

    return make


_TIMES: dict[str, Callable[[int, Any], Any]] = {
    "date": lambda number, _: date.fromordinal(number + date(1970, 1, 1).toordinal()),
    "time": _time,
    "datetime": _datetime,
    "timedelta": lambda number, _: timedelta(microseconds=number),
    "Timestamp": _of_pandas("Timestamp"),
    "Timedelta": _of_pandas("Timedelta"),
}


def _images(column: pa.Array, whole: Bytes | None) -> Getter:
    kinds = zip(("str", "int", "int", "bytes", "bytes"), _fields(column), strict=True)
    specs = ((Spec(kind, "utf8" * (kind == "str")), each) for kind, each in kinds)
    parts = [getter_of(*each, whole, {}) for each in specs]
    return lambda row: _image(*[get(row) for get in parts])


def _image(mode: str, width: int, height: int, data: bytes, palette: bytes | None) -> Any:
    from PIL import Image, ImageMode

    known = ImageMode.getmode(mode)  # KeyError for no mode
    each = len(known.bands) * np.dtype(known.typestr).itemsize
    line = (width + 7) // 8 if mode == "1" else width * each
    if min(width, height) < 0 or line * height != len(data):  # before memory is taken for it
        raise ValueError(f"an image of {width} x {height} with {len(data)} bytes")
    size = width, height
    image: Any = Image.frombytes(mode, size, data) if data else Image.new(mode, size)
    if palette:
        form, _, colors = palette.partition(b":")
        image.putpalette(colors, "RGBA" if form == b"RGBA" else "RGB")
    return image


# ---- containers ----------------------------------------------------------------------------------


def _nested(spec: Nested, column: pa.Array, whole: Bytes | None, classes: Classes) -> Getter:
    if spec.is_record:
        return _record(spec, column, whole, classes)
    if spec.kind == "pairs":
        pairs = Nested("tuple", parts=spec.parts, keys=("key", "value"))
        items, make = _items(pairs, column, whole, classes), MAPPINGS[spec.dtype]
        return lambda row: make(items(row))
    items = _items(spec.parts[0], column, whole, classes)
    if spec.kind == "list":
        return items
    sequence = SEQUENCES[spec.kind]
    return lambda row: sequence(items(row))


def _fields(column: pa.Array) -> list[pa.Array]:
    """Return the columns of a struct, without the nulls of the struct itself."""
    return [column.field(at) for at in range(column.type.num_fields)]


def _items(
    spec: Spec, column: pa.Array, whole: Bytes | None, classes: Classes
) -> Callable[[int], list[Any]]:
    """Return a function that returns the items of a row's list."""
    values = column.values
    ends, count = _numbers(column.buffers()[1], whole, _LONG).data, len(values)
    get = getter_of(spec, values, whole, classes)

    def span(row: int) -> tuple[int, int]:
        first, end = ends[row], ends[row + 1]
        if not 0 <= first <= end <= count:  # or a damaged file could have any number of items
            raise ValueError("the items of a list lie outside of its column")
        return first, end

    if spec.kind in ("int", "float") and not values.null_count:
        flat = _numbers(values.buffers()[1], whole, spec.stored[0])
        return lambda row: flat[slice(*span(row))].tolist()
    return lambda row: [get(at) for at in range(*span(row))]


def _record(spec: Nested, column: pa.Array, whole: Bytes | None, classes: Classes) -> Getter:
    make = _maker(spec, classes)
    if not spec.parts:
        return lambda _: make({})
    parts: list[tuple[str, Getter, Callable[[int], bool]]] = []
    fields = zip(spec.keys, record_parts(spec), may_be_missing(spec), _fields(column), strict=True)
    for key, (part, is_wrapped), is_optional, field in fields:
        bits = field.storage if isinstance(field, pa.ExtensionArray) else field
        inner = field.field(0) if is_wrapped else field
        get = getter_of(part, inner, whole, classes)
        there: Callable[[int], bool] = lambda _: True  # noqa: E731
        if is_optional and part.kind == "none" and not is_wrapped:
            there = lambda _: False  # noqa: E731
        elif is_optional and bits.null_count:
            there = _flags(bits.buffers()[0], len(bits), whole).__getitem__
        parts.append((key, get, there))
    if not any(may_be_missing(spec)):
        pairs = [(key, get) for key, get, _ in parts]
        return lambda row: make({key: get(row) for key, get in pairs})
    return lambda row: make({key: get(row) for key, get, there in parts if there(row)})


def _maker(spec: Nested, classes: Classes) -> Callable[[dict[str, Any]], Any]:
    """Return a function that makes a container of its fields."""
    if spec.kind in MAPPINGS:
        return MAPPINGS[spec.kind] if spec.kind != "dict" else lambda found: found
    if spec.kind == "tuple":
        return lambda found: tuple(found.values())
    cls: Any = class_of(spec.identity, spec.kind == "namedtuple", classes)
    if spec.kind == "namedtuple":
        return lambda found: cls(*found.values())
    return lambda found: with_fields(cls, found.items())


# ---- arrays --------------------------------------------------------------------------------------


def _finish(spec: Spec, whole: Bytes | None) -> Callable[[Any], Any]:
    """Return a function that makes the value from an array over its bytes."""
    if whole is None and spec.kind == "tensor":  # torch warns of memory that is not writable
        view = _finish_view(spec)
        return lambda array: view(array.copy())
    return _finish_view(spec)


def _finish_view(spec: Spec) -> Callable[[Any], Any]:
    if spec.kind == "array":
        return lambda array: array if array.size else np.empty(array.shape, array.dtype)
    dtype = getattr(torch, spec.dtype)
    if spec.shape is None or 0 in spec.shape:  # NumPy chooses the strides of empty arrays
        full = _finish_view(replace(spec, shape=()))
        return lambda array: full(array) if array.size else torch.empty(array.shape, dtype=dtype)
    if torch.from_numpy(np.empty(0, _read_as(spec))).dtype == dtype:
        # A storage of these bytes only: otherwise a pickled sample would include its shard.
        return torch.from_numpy
    return lambda array: torch.from_numpy(array).view(dtype)


def _read_as(spec: Spec) -> np.dtype[Any]:
    if spec.kind != "tensor":
        return np.dtype(spec.dtype)
    return np.dtype(_READ_AS.get(spec.dtype, spec.stored[0]))


def _flags(bits: pa.Buffer | None, rows: int, whole: Bytes | None) -> list[bool]:
    flags = np.unpackbits(_numbers(bits, whole), count=rows, bitorder="little")
    return flags.astype(bool).tolist()


def _numbers(
    buffer: pa.Buffer | None, whole: Bytes | None, dtype: np.dtype[Any] = _BYTE
) -> npt.NDArray[Any]:
    """Return a buffer of the memory as an array, writable if that is."""
    if buffer is None or not buffer.size:
        return np.empty(0, dtype)
    nbytes = buffer.size // dtype.itemsize * dtype.itemsize
    if whole is None:
        return np.frombuffer(buffer, dtype, nbytes // dtype.itemsize).copy()
    start = buffer.address - whole.ctypes.data
    if not 0 <= start <= len(whole) - nbytes:
        raise ValueError("its columns are compressed")
    return whole[start : start + nbytes].view(dtype)


def own(value: Any) -> Any:
    """Return a value that does not view the memory of its column."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in _PLAIN:
        return value
    return mapped(own, value) if opened(value) is not None else value


# ---- wider types ---------------------------------------------------------------------------------


def widened_array(array: pa.Array, own: Spec, wanted: Spec) -> pa.Array:
    """Return an array of the type `own` as one of a type that holds its values.

    Numbers of tensors and arrays, and strings, are not copied; other values are made anew.
    """
    if own == wanted:
        return array
    if array.offset:
        array = array.take(array_of_numpy(np.arange(len(array))))
    kind = arrow_type(wanted)
    if own.kind == "none":
        return nulls(len(array), kind)
    if own.kind == wanted.kind == "str":
        return array.cast(kind)
    if not isinstance(own, Nested) and (own.kind, own.dtype) == (wanted.kind, wanted.dtype):
        return _in_any_shape(array, own, kind)
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    get, column = getter_of(own, storage, None, {}), column_of(wanted)
    column.extend([get(row) for row in range(len(array))])
    return column.taken()


def _in_any_shape(array: pa.Array, own: Spec, kind: Any) -> pa.Array:
    """Return tensors or arrays of one shape as a column of any shapes."""
    shape = own.shape or ()
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    values = storage.values if isinstance(storage, pa.FixedSizeListArray) else storage
    each = math.prod((*shape, *own.stored[1]))
    ends = array_of_numpy(np.arange(len(array) + 1) * each)
    shapes = array_of([shape] * len(array), pa.list_(pa.int64()))
    lists = pa.LargeListArray.from_arrays(ends, values)
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays([lists, shapes], fields=list(kind), mask=mask)
