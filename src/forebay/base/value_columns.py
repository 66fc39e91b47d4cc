"""Arrow columns made of Python values, one by one.

Values are copied when they are added, since a Dataset may reuse a tensor. Arrow arrays are built
from buffers: to build them from lists, Arrow imports pandas, which takes more than a second.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from forebay.base.arrow_arrays import array_of, bits_of
from forebay.base.batches import tensor_bytes
from forebay.base.typed_columns import scaled
from forebay.base.value_classes import is_unicode, items_of
from forebay.base.value_inference import number_of, spec_of
from forebay.base.value_types import (
    IMAGE,
    PARSED,
    Nested,
    Spec,
    arrow_type,
    field_type,
    record_parts,
)


def column_of(spec: Spec) -> ValueColumn:
    """Return an empty column for values of a type."""
    if isinstance(spec, Nested):
        if spec.is_record:
            return _Record(spec) if spec.parts else _Flags(spec)
        return _Pairs(spec) if spec.kind == "pairs" else _List(spec)
    if spec.kind in ("tensor", "array", "number"):
        return _Arrays(spec)
    if spec.kind == "decimal" and spec.dtype:
        return _Decimals(spec)
    found: ValueColumn = _FLAT.get(spec.kind, _Times)(spec)
    return found


class ValueColumn(ABC):
    """The values of one type for the next record batch; a null has no value."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self._type = spec, arrow_type(spec)
        self._gaps: list[bool] = []
        self._begin()

    def _begin(self) -> None:  # noqa: B027 - some have only gaps
        """Start without values."""

    @property
    def nbytes(self) -> int:
        """About how many bytes the values have, without those that say which is where."""
        return 0

    def add(self, value: Any) -> None:
        """Append a value of the type, or None."""
        self._gaps.append(value is None)
        self._add(value)

    def extend(self, values: Sequence[Any]) -> None:
        """Append some values."""
        for value in values:
            self.add(value)

    @abstractmethod
    def _add(self, value: Any) -> None: ...

    def taken(self) -> pa.Array:
        """Return all values as an Arrow array, and start an empty one."""
        gaps, self._gaps = self._gaps, []
        valid = bits_of([not gap for gap in gaps]) if True in gaps else None
        found = self._array(len(gaps), valid)
        self._begin()
        return found

    @abstractmethod
    def _array(self, rows: int, valid: pa.Buffer | None) -> pa.Array: ...


class _Nothing(ValueColumn):
    """None alone."""

    def _add(self, value: Any) -> None:
        pass

    def _array(self, rows: int, valid: pa.Buffer | None) -> pa.Array:
        return pa.nulls(rows)


class _Flags(ValueColumn):
    """Booleans; containers without items are True."""

    def _begin(self) -> None:
        self._flags: list[bool] = []

    def _add(self, value: Any) -> None:
        self._flags.append(value is not None and (value is True or isinstance(self.spec, Nested)))

    def _array(self, rows: int, valid: pa.Buffer | None) -> pa.Array:
        return pa.Array.from_buffers(self._type, rows, [valid, bits_of(self._flags)])


class _Data(ValueColumn):
    """Values whose bytes are one after the other."""

    def _begin(self) -> None:
        self._data = bytearray()

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def _array(self, rows: int, valid: pa.Buffer | None) -> pa.Array:
        return pa.Array.from_buffers(self._type, rows, [valid, pa.py_buffer(self._data)])


class _Ints(_Data):
    def _add(self, value: Any) -> None:
        self._data += int(value or 0).to_bytes(8, sys.byteorder, signed=True)

    def extend(self, values: Sequence[Any]) -> None:
        if {*map(type, values)} != {int}:
            super().extend(values)
            return
        self._gaps += [False] * len(values)
        self._data += array("q", values).tobytes()


class _Floats(_Data):
    def _add(self, value: Any) -> None:
        self._data += struct.pack("d", 0 if value is None else value)

    def extend(self, values: Sequence[Any]) -> None:
        if {*map(type, values)} != {float}:
            super().extend(values)
            return
        self._gaps += [False] * len(values)
        self._data += array("d", values).tobytes()


class _Times(_Data):
    def _add(self, value: Any) -> None:
        number, size = 0 if value is None else number_of(value), self._type.bit_width // 8
        self._data += number.to_bytes(size, sys.byteorder, signed=True)


class _Decimals(_Data):
    def _add(self, value: Any) -> None:
        number = 0 if value is None else int(scaled(value, self._type.scale))
        self._data += number.to_bytes(16, "little", signed=True)


def _json_of(value: Any) -> str:
    """Return a value of JSON as a string of which `json.loads` makes an equal one."""
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    return text if is_unicode(text) else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else [*value]


_WRITTEN: dict[str, Callable[[Any], str]] = {**dict.fromkeys(PARSED, str), "json": _json_of}


class _Strings(_Data):
    """Strings, bytes, and what is written as a string or as JSON."""

    def _begin(self) -> None:
        super()._begin()
        self._ends = array("q", [0])

    def _add(self, value: Any) -> None:
        if value is not None and self.spec.kind in _WRITTEN:
            value = _WRITTEN[self.spec.kind](value)
        is_text = isinstance(value, str)
        self._data += value.encode("utf-8", "surrogatepass") if is_text else value or b""
        self._ends.append(len(self._data))

    def _array(self, rows: int, valid: pa.Buffer | None) -> pa.Array:
        buffers = [valid, pa.py_buffer(self._ends), pa.py_buffer(self._data)]
        return pa.Array.from_buffers(self._type, rows, buffers)


class _Arrays(_Data):
    """Tensors, arrays and NumPy's numbers."""

    def _begin(self) -> None:
        super()._begin()
        self._ends = array("q", [0])  # numbers in values that vary in shape
        self._shapes: list[tuple[int, ...]] = []
        dtype, each = self.spec.stored
        self._number_bytes = dtype.itemsize
        self._dtype = np.dtype(self.spec.dtype) if self.spec.kind != "tensor" else None
        shape = self.spec.shape
        self._null_bytes = 0 if shape is None else math.prod((*shape, *each)) * dtype.itemsize

    def _add(self, value: Any) -> None:
        if self._dtype is not None and value is not None:
            value = np.asarray(value, self._dtype)  # a number among others, of another type
        self._data += bytes(self._null_bytes) if value is None else _bytes_of(value)
        if self.spec.shape is None:
            self._ends.append(len(self._data) // self._number_bytes)
            self._shapes.append(() if value is None else tuple(value.shape))

    def _array(self, rows: int, valid: pa.Buffer | None) -> pa.Array:
        kind, data = self._type, pa.py_buffer(self._data)
        if self.spec.shape is None:
            lists, shapes = kind[0].type, array_of(self._shapes, kind[1].type)
            ends, values = pa.py_buffer(self._ends), self._values(data)
            flat = pa.Array.from_buffers(lists, rows, [None, ends], children=[values])
            return pa.Array.from_buffers(kind, rows, [valid], children=[flat, shapes])
        if isinstance(kind, pa.FixedShapeTensorType):
            children = [self._values(data)]
            flat = pa.Array.from_buffers(kind.storage_type, rows, [valid], children=children)
            return pa.ExtensionArray.from_storage(kind, flat)
        return pa.Array.from_buffers(kind, rows, [valid, data])

    def _values(self, data: pa.Buffer) -> pa.Array:
        kind = pa.from_numpy_dtype(self.spec.stored[0])
        return pa.Array.from_buffers(kind, data.size // self._number_bytes, [None, data])


def _bytes_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor_bytes(value).data
    return value.tobytes()


class _List(ValueColumn):
    """Lists, and tuples of several lengths."""

    def __init__(self, spec: Nested) -> None:
        self._items = column_of(spec.parts[0])
        super().__init__(spec)

    def _begin(self) -> None:
        self._ends = array("q", [0])

    @property
    def nbytes(self) -> int:
        return 8 * len(self._ends) + self._ends[-1] + self._items.nbytes

    def _add(self, value: Any) -> None:
        items: Sequence[Any] = () if value is None else self._items_of(value)
        self._items.extend(items)
        self._ends.append(self._ends[-1] + len(items))

    def _items_of(self, value: Any) -> Sequence[Any]:
        return value if isinstance(value, list | tuple) else list(value)

    def _array(self, rows: int, valid: pa.Buffer | None) -> pa.Array:
        buffers, children = [valid, pa.py_buffer(self._ends)], [self._items.taken()]
        return pa.Array.from_buffers(self._type, rows, buffers, children=children)


class _Struct(ValueColumn):
    """Values that have a column for each part."""

    def __init__(self, spec: Spec, columns: list[ValueColumn]) -> None:
        self._columns = columns
        super().__init__(spec)

    @property
    def nbytes(self) -> int:
        return len(self._gaps) + sum(column.nbytes for column in self._columns)

    def _add(self, value: Any) -> None:
        parts = [None] * len(self._columns) if value is None else self._parts_of(value)
        for column, part in zip(self._columns, parts, strict=True):
            column.add(part)

    @abstractmethod
    def _parts_of(self, value: Any) -> Sequence[Any]: ...

    def _array(self, rows: int, valid: pa.Buffer | None) -> pa.Array:
        children = [column.taken() for column in self._columns]
        return pa.Array.from_buffers(self._type, rows, [valid], children=children)


class _Record(_Struct):
    """Dicts, tuples of one length, NamedTuples and dataclasses."""

    spec: Nested

    def __init__(self, spec: Nested) -> None:
        columns = [
            _Wrapped(*each) if each[1] else column_of(each[0]) for each in record_parts(spec)
        ]
        super().__init__(spec, columns)
        self._is_named = spec.kind in ("dict", "OrderedDict", "fields")
        self._wrapped = [is_wrapped for _, is_wrapped in record_parts(spec)]

    def _parts_of(self, value: Any) -> Sequence[Any]:
        if not self._is_named:
            parts: Sequence[Any] = value
            return parts
        known = dict(zip(*items_of(value, self.spec.kind), strict=True))
        if True not in self._wrapped:
            return [known.get(key) for key in self.spec.keys]
        pairs = zip(self.spec.keys, self._wrapped, strict=True)
        return [
            [known[key]] if is_wrapped and key in known else known.get(key)
            for key, is_wrapped in pairs
        ]


class _Wrapped(_Struct):
    """Values of a key that may be missing, each in a list, and None for a key that is."""

    def __init__(self, spec: Spec, _: bool) -> None:
        super().__init__(spec, [column_of(spec)])
        self._type = field_type((spec, True))

    def _parts_of(self, value: Any) -> Sequence[Any]:
        parts: Sequence[Any] = value
        return parts


class _Pairs(_List):
    """Mappings, as lists of their keys and values."""

    def __init__(self, spec: Nested) -> None:
        pair = Nested("tuple", parts=spec.parts, keys=("key", "value"))
        super().__init__(Nested("list", parts=(pair,)))
        self.spec = spec

    def _items_of(self, value: Any) -> Sequence[Any]:
        return [*value.items()]


class _Images(_Struct):
    """Images of PIL: mode, size, bytes, and the palette of those that have one."""

    def __init__(self, spec: Spec) -> None:
        kinds = ("str", "int", "int", "bytes", "bytes")
        super().__init__(spec, [column_of(Spec(kind, "utf8" * (kind == "str"))) for kind in kinds])
        assert self._type == IMAGE

    def _parts_of(self, value: Any) -> Sequence[Any]:
        palette = None
        if value.mode in ("P", "PA"):
            rgba = value.palette is not None and value.palette.mode == "RGBA"
            colors = value.getpalette("RGBA" if rgba else "RGB")
            palette = (b"RGBA" if rgba else b"RGB") + b":" + bytes(colors or ())
        return [value.mode, *value.size, value.tobytes(), palette]


_FLAT: dict[str, Any] = {
    "none": _Nothing,
    "bool": _Flags,
    "int": _Ints,
    "float": _Floats,
    "str": _Strings,
    "bytes": _Strings,
    "image": _Images,
    **dict.fromkeys(_WRITTEN, _Strings),
}


def nbytes_of(value: Any) -> int:
    """Return the approximate size of a value in a column, in bytes."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value) + 8
    if isinstance(value, int | float) or value is None:
        return 8
    column = column_of(spec_of(value))
    column.add(value)
    return column.nbytes + 8
