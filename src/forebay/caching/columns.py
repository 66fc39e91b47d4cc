"""The types of leaves, and the Arrow columns that hold their values.

    leaf                                Arrow
    tensor, array, all of one shape     fixed_shape_tensor<T, shape>; T where it is one number
    tensor, array, of several shapes    struct<data: large_list<T>, shape: list<int64>>
    int, float, bool, NumPy's numbers   int64, double, bool, T
    str                                 large_string; large_binary if one of them is not UTF-8
    bytes                               large_binary
    None                                null, in any of these

Numbers that Arrow has no type for are stored as their bytes: bool tensors as uint8, bfloat16 as
uint16, complex numbers as pairs. A `Spec` describes them.
"""

from __future__ import annotations

import errno
import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from forebay.base.arrow_arrays import array_of, bits_of
from forebay.base.files import Folder, Store
from forebay.caching import layout
from forebay.caching.layout import (
    BLOCK,
    BLOCKS,
    DAMAGES,
    INDEX,
    INDEX_BYTES,
    LEAST_BLOCK_BYTES,
    MOST_SHARD_BYTES,
    Blocks,
    MisfitError,
    Node,
    is_shard,
    shard_name,
)
from forebay.errors import InputError, shortened, shown_location

# The dtype that an Arrow column has instead of a torch dtype, and how many numbers of it one takes.
_TORCH: dict[str, tuple[str, int]] = {
    **{
        f"{sign}int{bits}": (f"{sign}int{bits}", 1)
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": (f"float{bits}", 1) for bits in (16, 32, 64)},
    **{f"float8_{kind}": ("uint8", 1) for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")},
    "float8_e8m0fnu": ("uint8", 1),
    "bool": ("uint8", 1),
    "bfloat16": ("uint16", 1),
    "complex32": ("float16", 2),
    "complex64": ("float32", 2),
    "complex128": ("float64", 2),
}
_NAMES = {getattr(torch, name): name for name in _TORCH if hasattr(torch, name)}
_SCALARS = {int: "int", float: "float", bool: "bool", bytes: "bytes", type(None): "none"}
# NumPy's scalar strings have a length in their dtype, which differs from sample to sample.
_BUILTIN: dict[type, type] = {np.str_: str, np.bytes_: bytes}
_KINDS = frozenset(["tensor", "array", "number", "str", *_SCALARS.values()])
_ARRAYS = frozenset("biufcmMSU")  # kinds of dtypes whose values are plain bytes


@dataclass(frozen=True, slots=True)
class Spec:
    """The type of a leaf's values.

    Attributes:
        kind: "tensor", "array", "number" (NumPy's), "int", "float", "bool", "str", "bytes" or
            "none" (only None so far).
        shape: Of a tensor or array; None if it varies.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] | None = ()

    @property
    def stored(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The dtype that Arrow stores, and the shape of one number in it."""
        if self.kind == "int":
            return np.dtype(np.int64), ()
        if self.kind == "float":
            return np.dtype(np.float64), ()
        if self.kind == "tensor":
            name, count = _TORCH[self.dtype]
            return np.dtype(name), (count,) * (count > 1)
        dtype = np.dtype(self.dtype)
        if dtype.kind in "iuf" and dtype.isnative and dtype.itemsize <= 8:
            return dtype, ()
        if dtype.kind == "c" and dtype.isnative and dtype.itemsize <= 16:
            return np.dtype(f"float{dtype.itemsize * 4}"), (2,)
        if dtype.kind in "mM" and dtype.isnative:
            return np.dtype(np.int64), ()
        return np.dtype(np.uint8), (dtype.itemsize,) * (dtype.itemsize != 1)


def spec_of(value: Any) -> Spec:
    """Return the spec of a leaf."""
    kind = _BUILTIN.get(type(value), type(value))
    if kind is torch.Tensor:
        return _tensor_spec(value)
    if kind is np.ndarray or kind is np.memmap or issubclass(kind, np.generic):
        what = "number" if issubclass(kind, np.generic) else "array"
        if value.dtype.kind not in _ARRAYS or value.dtype.itemsize == 0:
            raise MisfitError(f"is a NumPy {what} of dtype {value.dtype}; use a numeric dtype")
        return Spec(what, value.dtype.str, value.shape)
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:  # a lone surrogate, as in a file name that is not UTF-8
            return Spec("str", "binary")
        return Spec("str", "utf8")
    if kind is int and not -(1 << 63) <= value < 1 << 63:
        raise MisfitError(f"is {value}, which does not fit in 64 bits; make it a string or a float")
    if kind not in _SCALARS:
        raise MisfitError(
            f"is of type {kind.__module__}.{kind.__qualname__}, which a cache cannot store; "
            "make it a plain tensor, an array, a number or a string"
        )
    return Spec(_SCALARS[kind])


def _tensor_spec(value: torch.Tensor) -> Spec:
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        raise MisfitError("is a sparse, nested or quantized tensor; make it a dense one")
    if value.device.type != "cpu":
        raise MisfitError(f"is on the device {value.device}; move it to the CPU with .cpu()")
    if value.requires_grad:
        raise MisfitError("requires a gradient, which a cache cannot store; return tensor.detach()")
    name = _NAMES.get(value.dtype)
    if name is None:
        raise MisfitError(f"is a tensor of {value.dtype}, which a cache does not support")
    return Spec("tensor", name, tuple(value.shape))


def widened(old: Spec, new: Spec) -> Spec:
    """Return the spec that holds both."""
    if old == new or new.kind == "none":
        return old
    if old.kind == "none":
        return new
    if old.kind == new.kind == "str":
        return Spec("str", "binary")
    if old.kind == new.kind and old.dtype == new.dtype:
        return replace(old, shape=None)
    advice = "return the same type for all"
    if {old.dtype[1:2], new.dtype[1:2]} <= {"U", "S"}:  # NumPy's types of strings have a length
        advice = "use one length for all: array.astype('U20')"
    raise MisfitError(f"is {described(new)} here and {described(old)} in other samples; {advice}")


def described(spec: Spec) -> str:
    """Return a description of a spec for messages."""
    if spec.kind in ("tensor", "array", "number"):
        library = "torch" if spec.kind == "tensor" else "NumPy"
        return f"a {library} {spec.kind} of {spec.dtype}"
    return f"of type {spec.kind}"


def arrow_type(spec: Spec) -> pa.DataType:
    """Return the type of a column."""
    if spec.kind in ("str", "bytes"):
        return pa.large_string() if spec == Spec("str", "utf8") else pa.large_binary()
    if spec.kind in ("bool", "none"):
        return pa.bool_() if spec.kind == "bool" else pa.null()
    dtype, each = spec.stored
    value = pa.from_numpy_dtype(dtype)
    if spec.shape is None:
        return pa.struct([("data", pa.large_list(value)), ("shape", pa.list_(pa.int64()))])
    shape = (*spec.shape, *each)
    return pa.fixed_shape_tensor(value, shape) if shape else value


def schema_of(names: list[str], specs: list[Spec]) -> pa.Schema:
    """Return the schema of a shard, without metadata."""
    pairs = zip(names, specs, strict=True)
    return pa.schema([pa.field(name, arrow_type(spec)) for name, spec in pairs])


def nbytes_of(value: Any) -> int:
    """Return the approximate size of a leaf in a column, in bytes."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return int(value.nbytes)
    return len(value) + 8 if isinstance(value, str | bytes) else 8


class Column:
    """The values of one leaf for the next record batch.

    Values are copied when they are added, since a Dataset may reuse a tensor. Arrow arrays are
    built from buffers: to build them from lists, Arrow imports pandas, which takes more than a
    second.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._is_array = spec.kind in ("tensor", "array", "number")
        self._begin()

    def _begin(self) -> None:
        self._gaps: list[bool] = []
        self._data = bytearray()
        self._flags: list[bool] = []
        self._ends = array("q", [0])  # bytes of strings; numbers in values that vary in shape
        self._shapes: list[tuple[int, ...]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without those that say which is where."""
        return len(self._data)

    def add(self, value: Any) -> None:
        """Append a value that fits the spec."""
        self._gaps.append(value is None)
        kind = self.spec.kind
        if self._is_array:
            self._add_array(value)
        elif kind == "int":
            self._data += (value or 0).to_bytes(8, sys.byteorder, signed=True)
        elif kind == "float":
            self._data += struct.pack("d", 0 if value is None else value)
        elif kind == "bool":
            self._flags.append(bool(value))
        elif kind != "none":
            is_text = isinstance(value, str)
            self._data += value.encode("utf-8", "surrogatepass") if is_text else value or b""
            self._ends.append(len(self._data))

    def _add_array(self, value: Any) -> None:
        if value is not None:
            self._data += _bytes_of(value)
        elif self.spec.shape is not None:
            dtype, each = self.spec.stored
            self._data += bytes(math.prod((*self.spec.shape, *each)) * dtype.itemsize)
        if self.spec.shape is None:
            self._ends.append(len(self._data) // self.spec.stored[0].itemsize)
            self._shapes.append(() if value is None else tuple(value.shape))

    def taken(self) -> pa.Array:
        """Return all values as an Arrow array, and start an empty one."""
        kind, rows = arrow_type(self.spec), len(self._gaps)
        valid = bits_of([not gap for gap in self._gaps]) if any(self._gaps) else None
        data, ends = pa.py_buffer(self._data), pa.py_buffer(self._ends)
        if self.spec.kind == "none":
            found = pa.nulls(rows)
        elif self.spec.kind == "bool":
            found = pa.Array.from_buffers(kind, rows, [valid, bits_of(self._flags)])
        elif self.spec.kind in ("str", "bytes"):
            found = pa.Array.from_buffers(kind, rows, [valid, ends, data])
        elif self.spec.shape is None:
            values = self._values(data)
            lists = pa.Array.from_buffers(kind[0].type, rows, [None, ends], children=[values])
            parts = [lists, array_of(self._shapes, kind[1].type)]
            found = pa.Array.from_buffers(kind, rows, [valid], children=parts)
        elif isinstance(kind, pa.FixedShapeTensorType):
            values = self._values(data)
            flat = pa.Array.from_buffers(kind.storage_type, rows, [valid], children=[values])
            found = pa.ExtensionArray.from_storage(kind, flat)
        else:
            found = pa.Array.from_buffers(kind, rows, [valid, data])
        self._begin()
        return found

    def _values(self, data: pa.Buffer) -> pa.Array:
        dtype, _ = self.spec.stored
        kind = pa.from_numpy_dtype(dtype)
        return pa.Array.from_buffers(kind, data.size // dtype.itemsize, [None, data])


def _bytes_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        # torch treats a tensor with one element as contiguous, whatever its stride.
        return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data
    return value.tobytes()


def to_json(spec: Spec) -> Any:
    """Return a spec as JSON values."""
    shape = None if spec.shape is None else list(spec.shape)
    return {"kind": spec.kind, "dtype": spec.dtype, "shape": shape}


def from_json(found: Any) -> Spec:
    """Return the spec that `to_json` described."""
    kind, dtype, shape = found["kind"], str(found["dtype"]), found["shape"]
    known = kind in _KINDS
    if kind == "tensor":
        known = dtype in _NAMES.values()
    elif kind in ("array", "number"):
        known = np.dtype(dtype).kind in _ARRAYS
    if not known:
        raise ValueError(f"{kind} of {dtype}")
    sizes = None if shape is None else tuple(map(int, shape))
    if sizes and not all(0 <= size <= sys.maxsize for size in sizes):
        raise ValueError(f"a shape of {shortened(sizes)}")
    return Spec(kind, dtype, sizes)


# ---- index ---------------------------------------------------------------------------------------
# The index of a finished cache: a small JSON file, written last, that lists the shards.
#
# Without it, the cache is not finished. A second call reads only this file.

INDEX_FORMAT = 2


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How a dataset is divided into shards."""

    samples: int
    per_shard: int
    structure: Node
    specs: list[Spec]

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.samples // self.per_shard)

    def names(self) -> list[str]:
        """Return the names of the shards, in order."""
        return [shard_name(at) for at in range(self.shards)]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "samples": self.samples,
            "per_shard": self.per_shard,
            "structure": layout.to_json(self.structure),
            "columns": [to_json(spec) for spec in self.specs],
        }

    @classmethod
    def from_json(cls, found: Any) -> CachePlan:
        """Return the plan that `to_json` described."""
        specs = [from_json(spec) for spec in found["columns"]]
        samples, per_shard = int(found["samples"]), int(found["per_shard"])
        if not 1 <= samples <= sys.maxsize or per_shard < 1:
            raise ValueError(f"{samples} samples, {per_shard} in a shard")
        structure = layout.from_json(found["structure"])
        if len(leaves := layout.names_of(structure)) != len(specs):
            raise ValueError(f"{len(specs)} columns for {len(leaves)} leaves")
        return cls(samples, per_shard, structure, specs)


_AGAIN = "  Remove it and call forebay.cache again: completed shards are kept."


@dataclass(frozen=True, slots=True)
class Index:
    """A finished cache.

    Attributes:
        sizes: The size of each shard in bytes.
        outside: For each shard the CRC-32 of its bytes that are in no block: its schema, its end.
        specs: The types of the columns of each shard.
        blocks: How many blocks there are, and the CRC-32 of the file that lists them.
        samples: A hash of where the samples come from.
    """

    plan: CachePlan
    sizes: tuple[int, ...]
    outside: tuple[int, ...]
    specs: tuple[list[Spec], ...]
    blocks: tuple[int, int]
    fingerprint: str
    version: str | None
    samples: str

    @classmethod
    def of(cls, plan: CachePlan, shards: Sequence[Any], data: bytes, *others: Any) -> Index:
        """Return the index of a cache, given the record and size of each shard, and its blocks."""
        sizes = tuple(size for _, size in shards)
        Blocks(data, plan.samples, plan.per_shard, sizes)
        outside = tuple(int(record["outside"]) for record, _ in shards)
        specs = tuple([from_json(spec) for spec in record["columns"]] for record, _ in shards)
        blocks = len(data) // BLOCK.itemsize, zlib.crc32(data)
        return cls(plan, sizes, outside, specs, blocks, *others)

    def to_json(self) -> bytes:
        """Return the content of its file."""
        kinds = [json.dumps([*map(to_json, specs)]) for specs in self.specs]
        known = [*dict.fromkeys(kinds)]
        record = {
            "format": INDEX_FORMAT,
            "plan": self.plan.to_json(),
            "sizes": self.sizes,
            "outside": self.outside,
            "columns": [*map(json.loads, known)],
            "columns_of": [*map({kind: at for at, kind in enumerate(known)}.get, kinds)],
            "blocks": dict(zip(("count", "crc32"), self.blocks, strict=True)),
            "fingerprint": self.fingerprint,
            "version": self.version,
            "samples": self.samples,
        }
        return json.dumps(record).encode()

    @classmethod
    def from_json(cls, data: bytes | memoryview, path: str) -> Index:
        """Return the index that `to_json` wrote to a path or URL."""
        try:
            found = json.loads(bytes(data))
            if found["format"] != INDEX_FORMAT:
                raise InputError(
                    f"{path!r} has format {found['format']}; this forebay reads format "
                    f"{INDEX_FORMAT}\n"
                    "  Use the forebay that wrote it, or call forebay.cache(..., resume=False)."
                )
            plan = CachePlan.from_json(found["plan"])
            sizes, outside = (tuple(map(int, found[name])) for name in ("sizes", "outside"))
            known = [[from_json(spec) for spec in specs] for specs in found["columns"]]
            specs = tuple(known[at] for at in found["columns_of"])
            blocks = int(found["blocks"]["count"]), int(found["blocks"]["crc32"])
            texts = str(found["fingerprint"]), found["version"], str(found["samples"])
            if {len(sizes), len(outside), len(specs)} != {plan.shards}:
                raise ValueError(f"{len(sizes)} sizes")
            if {*map(len, specs)} != {len(plan.specs)}:
                raise ValueError("the columns of a shard")
            if not all(0 <= size < MOST_SHARD_BYTES for size in sizes):
                raise ValueError("the size of a shard")
            if not plan.shards <= blocks[0] <= sum(sizes) // LEAST_BLOCK_BYTES:
                raise ValueError(f"{blocks[0]} blocks")
            return cls(plan, sizes, outside, specs, blocks, *texts)
        except InputError:
            raise
        except DAMAGES as error:
            raise InputError(f"{path!r} is damaged: {shortened(error)}\n{_AGAIN}") from error

    @classmethod
    def read(cls, place: Store | Folder) -> Index | None:
        """Return the index of a cache; None if the cache is not finished."""
        path = shown_location(place.locate(INDEX))
        try:
            data = place.read(INDEX, INDEX_BYTES)
        except OSError as error:
            raise InputError(
                f"{path!r} cannot be read: {error.strerror}\n"
                "  Check its permissions, or remove it and call forebay.cache again: completed "
                "shards are kept."
            ) from error
        return None if data is None else cls.from_json(data, path)

    def read_blocks(self, place: Store | Folder) -> Blocks:
        """Return where the blocks are; of a local cache, this reads the whole file."""
        path = shown_location(place.locate(BLOCKS))
        try:
            return self.blocks_in(place.read(BLOCKS, self.block_bytes) or b"", path)
        except OSError as error:
            what = "is damaged" if error.errno == errno.EFBIG else "cannot be read"
            raise InputError(f"{path!r} {what}: {error.strerror}\n{_AGAIN}") from error

    def blocks_in(self, data: bytes | memoryview, path: str) -> Blocks:
        """Return where the blocks are, given the content of the file that lists them."""
        try:
            return Blocks(data, self.plan.samples, self.plan.per_shard, self.sizes, self.blocks)
        except DAMAGES as error:
            raise InputError(f"{path!r} is damaged: {shortened(error)}\n{_AGAIN}") from error

    @property
    def block_bytes(self) -> int:
        """Bytes of the file that lists the blocks."""
        return self.blocks[0] * BLOCK.itemsize

    def missing(self, place: Store | Folder) -> list[str]:
        """Return the files that a cache lacks."""
        names = self.plan.names()
        found = {name: size for name, size in place.files() if is_shard(name)}
        lost = []
        for name, size in zip(names, self.sizes, strict=True):
            there = found.pop(name, None)
            if there is None:
                lost.append(name)
            else:
                check_size(place.locate(name), there, size)
        if found:
            raise InputError(
                f"{shown_location(place.locate(min(found)))!r} does not belong to this cache, "
                f"which has {len(names)} shards\n"
                "  Nothing can be added to a cache. Remove the file, or make a cache of both "
                "datasets in another directory."
            )
        return lost if place.size(BLOCKS) == self.block_bytes else [*lost, BLOCKS]


def check_size(path: str, there: int, written: int) -> None:
    """Raise InputError if a shard does not have the size that was written."""
    if there != written:
        raise InputError(
            f"{shown_location(path)!r} has {there:,} bytes instead of the {written:,} that were "
            "written\n"
            "  It is truncated, or something else wrote to it. Remove it and call forebay.cache "
            "again, with the same dataset and location: it writes that shard again."
        )
