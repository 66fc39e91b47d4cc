"""Reading shards: each is memory-mapped once, and its values are views of the map.

    file ── one private map ──> Arrow record batches ──> per leaf: row -> value
                                                           tensors and arrays: views
                                                           numbers, strings: new objects

The map is private and copied on write, so a write to a tensor stays in this process. It needs no
open file, and all processes share pages that are only read.
"""

from __future__ import annotations

import json
import math
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index as as_index
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from forebay.base.arrow_arrays import array_of, array_of_numpy
from forebay.base.files import is_url, local_path, open_regular
from forebay.base.formatting import counted, summary
from forebay.base.output_names import PRIVATE
from forebay.base.process import descriptor_path
from forebay.caching import layout
from forebay.caching.columns import (
    CachePlan,
    Index,
    Spec,
    arrow_type,
    from_json,
    schema_of,
    shard_name,
    widened,
)
from forebay.caching.layout import Classes, loaded_class, namedtuples_of, rebuilder
from forebay.errors import InputError, OptionError
from forebay.failures import short_tracebacks

FORMAT = 1
# The key in a shard's schema under which its columns are described.
KEY = "forebay"
# Maps of a process at a time; Linux allows 65,530 in total.
MOST_MAPS = 16_384

# The NumPy dtype to read a torch dtype as, if NumPy lacks it or has another name for it.
_READ_AS = {
    "bool": "bool",
    "bfloat16": "int16",
    "complex32": "int32",
    "complex64": "complex64",
    "complex128": "complex128",
}

# Exceptions of NumPy, Arrow and JSON for a file that is not in the expected format.
_DAMAGES = (
    *(OSError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(pa.ArrowException, struct.error),
)

_BYTE, _LONG = np.dtype(np.uint8), np.dtype(np.int64)

Bytes = npt.NDArray[np.uint8]
Getter = Callable[[int], Any]


class Shard:
    """One shard, mapped.

    Args:
        plan: The plan of the cache; None if the shard does not belong to one yet.
    """

    def __init__(self, path: Path, plan: CachePlan | None = None, number: int = 0) -> None:
        self._path = path
        try:
            self._map = _mapped(path)
            self._reader = pa.ipc.open_file(pa.py_buffer(self._map))
            header = json.loads((self._reader.schema.metadata or {})[KEY.encode()])
            if header["format"] != FORMAT:
                raise InputError(f"it has format {header['format']}; this forebay reads {FORMAT}")
            self.specs = [from_json(spec) for spec in header["columns"]]
            names = layout.names_of(layout.from_json(header["structure"]))
            if self._reader.schema != schema_of(names, self.specs):
                raise InputError("its columns are not those that it describes")
            _refuse_compressed(self._map.data)
            batches = [self._reader.get_batch(at) for at in range(self._reader.num_record_batches)]
            for batch in batches:
                batch.validate()
            ends = np.cumsum([batch.num_rows for batch in batches]).tolist()
            if plan is not None:
                _check_number(plan, number, header, ends[-1] if ends else 0)
            self._getters = [
                [
                    _getter(spec, column, self._map)
                    for spec, column in zip(self.specs, batch.columns, strict=True)
                ]
                for batch in batches
            ]
        except FileNotFoundError as error:
            raise InputError(
                f"the shard {str(path)!r} was removed after the cache was opened\n"
                "  Call forebay.cache again, with the same dataset and directory: it writes that "
                "shard again."
            ) from error
        except _DAMAGES as error:
            raise _damaged(path, error) from error
        self._starts = [0, *ends[:-1]]
        self._rows = ends[-1] if ends else 0

    def __len__(self) -> int:
        return self._rows

    def leaves(self, row: int) -> list[Any]:
        """Return the leaves of a sample by its position in the shard."""
        at = bisect_right(self._starts, row) - 1
        row -= self._starts[at]
        try:
            return [get(row) for get in self._getters[at]]
        except _DAMAGES as error:
            raise _damaged(self._path, error) from error

    def table(self) -> pa.Table:
        """Return all rows, as views of the map."""
        return self._reader.read_all()


def _check_number(plan: CachePlan, number: int, header: Any, rows: int) -> None:
    """Raise InputError if a shard is not the one with this number."""
    first = number * plan.per_shard
    wanted = min(plan.per_shard, plan.samples - first)
    if (header["first"], rows) != (first, wanted):
        raise InputError(
            f"it holds {counted(rows, 'sample')}, starting at sample {header['first']:,}, instead "
            f"of {wanted:,}, starting at sample {first:,}"
        )
    known = layout.to_json(plan.structure), len(plan.specs)
    if (header["structure"], len(header["columns"])) != known:
        raise InputError("its samples have a different structure from those of this cache")


def _damaged(path: Path, error: Exception) -> InputError:
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    return InputError(
        f"{str(path)!r} cannot be read as a shard of this cache: {words}\n"
        "  Remove the file and call forebay.cache again, with the same dataset and directory: it "
        "writes that shard again."
    )


class Shards:
    """The shards of a cache, each mapped when it is first read. Pickled as its plan."""

    def __init__(self, folder: Path, plan: CachePlan) -> None:
        self._folder, self._plan = folder, plan
        self._open: dict[int, Shard] = {}

    def __reduce__(self) -> Any:
        return Shards, (self._folder, self._plan)

    def __getitem__(self, number: int) -> Shard:
        shard = self._open.get(number)
        if shard is None:
            shard = Shard(self._folder / shard_name(number), self._plan, number)
            if len(self._open) >= MOST_MAPS:
                with suppress(RuntimeError):  # another thread is removing one, too
                    self._open.pop(next(iter(self._open)), None)
            self._open[number] = shard
        return shard

    def __len__(self) -> int:
        return self._plan.shards


def _mapped(path: Path) -> Bytes:
    """Return a file as an array over a private map, which does not keep it open."""
    with open_regular(path) as file:
        # Of any name, while torch takes only names that are UTF-8.
        name, size = descriptor_path(file.fileno()), os.fstat(file.fileno()).st_size
        name = str(path) if name is None else name
        return torch.from_file(name, shared=False, size=size, dtype=torch.uint8).numpy()


# Where FlatBuffers has a field: the offsets of the tables `Footer`, `Message` and `RecordBatch` of
# Arrow's file format, and the bytes of a `Block`, which begins with an offset.
_DICTIONARIES, _BATCHES, _HEADER, _CUSTOM, _COMPRESSION = 2, 3, 2, 4, 3
_BLOCK_BYTES = 24


def _refuse_compressed(data: memoryview) -> None:
    """Raise ValueError if a record batch is compressed: to read it, Arrow would decompress it.

    A few bytes may become gigabytes, and a shard of a cache is not compressed.
    """

    def number(form: str, at: int) -> int:
        return int(struct.unpack_from(f"<{form}", data, at)[0])

    def target(at: int) -> int:
        return at + number("I", at)

    def field(table: int, index: int) -> int:
        """Return where a field of a table is; 0 if the table does not have it."""
        fields, at = table - number("i", table), 4 + 2 * index
        offset = number("H", fields + at) if at < number("H", fields) else 0
        return offset and table + offset

    end = len(data) - 10  # its length, and "ARROW1"
    footer = target(end - number("i", end))
    if (at := field(footer, _DICTIONARIES)) and number("I", target(at)):
        raise ValueError("it has dictionaries")
    blocks = target(field(footer, _BATCHES))
    for block in range(number("I", blocks)):
        start = number("q", blocks + 4 + block * _BLOCK_BYTES)
        message = target(start + (8 if number("i", start) == -1 else 4))
        batch = target(field(message, _HEADER))
        if field(batch, _COMPRESSION) or field(message, _CUSTOM):  # as Arrow 0.17 had it
            raise ValueError("its columns are compressed")


def _getter(spec: Spec, column: pa.Array, whole: Bytes) -> Getter:
    """Return a function that returns the value of a row; `column` is Arrow's view of `whole`."""
    if spec.kind == "none":
        return lambda _: None
    get = _present(spec, column, whole)
    if not column.null_count:
        return get
    storage = column.storage if isinstance(column, pa.ExtensionArray) else column
    valid = _flags(storage.buffers()[0], len(column), whole)
    return lambda row: get(row) if valid[row] else None


def _present(spec: Spec, column: pa.Array, whole: Bytes) -> Getter:
    rows = len(column)
    if spec.kind == "bool":
        return _flags(column.buffers()[1], rows, whole).__getitem__
    if spec.kind in ("int", "float"):
        # Items of a memoryview are Python numbers.
        return _numbers(column.buffers()[1], whole, spec.stored[0]).data.__getitem__
    if spec.kind in ("str", "bytes"):
        _, ends, data = column.buffers()
        at, text = _numbers(ends, whole, _LONG).data, _numbers(data, whole).data
        if spec.kind == "bytes":
            return lambda row: bytes(text[at[row] : at[row + 1]])
        return lambda row: str(text[at[row] : at[row + 1]], "utf-8", "surrogatepass")
    dtype = _read_as(spec)
    if spec.shape is None:
        lists, shapes = column.field("data"), column.field("shape")
        starts = _numbers(lists.buffers()[1], whole, _LONG) // math.prod(spec.stored[1])
        sizes = _numbers(shapes.values.buffers()[1], whole, _LONG).tolist()
        ends = _numbers(shapes.buffers()[1], whole, np.dtype(np.int32)).tolist()
        flat, finish = _numbers(lists.values.buffers()[1], whole, dtype), _finish(spec)
        return lambda row: finish(
            flat[starts[row] : starts[row + 1]].reshape(sizes[ends[row] : ends[row + 1]])
        )
    storage = column.storage if isinstance(column, pa.ExtensionArray) else column
    flat = _numbers(storage.buffers()[-1], whole, dtype)
    if spec.kind == "number":
        return flat.__getitem__
    finish = _finish(spec)
    if spec.shape == ():
        return lambda row: finish(flat[row : row + 1].reshape(()))
    table = flat[: rows * math.prod(spec.shape)].reshape(rows, *spec.shape)
    return lambda row: finish(table[row])


def _finish(spec: Spec) -> Callable[[Any], Any]:
    """Return a function that makes the value from an array over its bytes."""
    if spec.kind == "array":
        return lambda array: array if array.size else np.empty(array.shape, array.dtype)
    dtype = getattr(torch, spec.dtype)
    if spec.shape is None or 0 in spec.shape:  # NumPy chooses the strides of empty arrays
        full = _finish(replace(spec, shape=()))
        return lambda array: full(array) if array.size else torch.empty(array.shape, dtype=dtype)
    if torch.from_numpy(np.empty(0, _read_as(spec))).dtype == dtype:
        # A storage of these bytes only: otherwise a pickled sample would include its shard.
        return torch.from_numpy
    return lambda array: torch.from_numpy(array).view(dtype)


def _read_as(spec: Spec) -> np.dtype[Any]:
    if spec.kind != "tensor":
        return np.dtype(spec.dtype)
    return np.dtype(_READ_AS.get(spec.dtype, spec.stored[0]))


def _flags(bits: pa.Buffer, rows: int, whole: Bytes) -> list[bool]:
    flags = np.unpackbits(_numbers(bits, whole), count=rows, bitorder="little")
    return flags.astype(bool).tolist()


def _numbers(
    buffer: pa.Buffer | None, whole: Bytes, dtype: np.dtype[Any] = _BYTE
) -> npt.NDArray[Any]:
    """Return a buffer of the map as a writable array."""
    if buffer is None or not buffer.size:
        return np.empty(0, dtype)
    start = buffer.address - whole.ctypes.data
    nbytes = buffer.size // dtype.itemsize * dtype.itemsize
    if not 0 <= start <= len(whole) - nbytes:
        raise ValueError("its columns are compressed")
    return whole[start : start + nbytes].view(dtype)


# ---- cache table ---------------------------------------------------------------------------------
# All shards as one Arrow table over their memory maps.
#
# The column types of shards may differ: all samples of one shard may have the same shape, and those
# of another not. The table has the wider type; only its small offsets are rebuilt.


def table_of(shards: list[Shard]) -> pa.Table:
    """Return the rows of all shards, in order."""
    specs = shards[0].specs
    for shard in shards[1:]:
        specs = [widened(*pair) for pair in zip(specs, shard.specs, strict=True)]
    tables = [_as_wide(shard.table(), shard.specs, specs) for shard in shards]
    return pa.concat_tables([table.replace_schema_metadata(None) for table in tables])


def _as_wide(table: pa.Table, specs: list[Spec], wide: list[Spec]) -> pa.Table:
    for at, (own, wanted) in enumerate(zip(specs, wide, strict=True)):
        if own != wanted:
            kind = arrow_type(wanted)
            chunks = [_cast(chunk, own, wanted) for chunk in table.column(at).chunks]
            table = table.set_column(
                at, table.field(at).with_type(kind), pa.chunked_array(chunks, kind)
            )
    return table


def _cast(chunk: pa.Array, own: Spec, wanted: Spec) -> pa.Array:
    kind = arrow_type(wanted)
    if own.kind == "none":
        return pa.nulls(len(chunk), kind)
    if own.kind == "str":
        return chunk.cast(kind)
    shape = own.shape or ()
    storage = chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk
    values = storage.values if isinstance(storage, pa.FixedSizeListArray) else storage
    each = math.prod((*shape, *own.stored[1]))
    ends = array_of_numpy(np.arange(len(chunk) + 1) * each)
    shapes = array_of([shape] * len(chunk), pa.list_(pa.int64()))
    lists = pa.LargeListArray.from_arrays(ends, values)
    mask = chunk.is_null() if chunk.null_count else None
    return pa.StructArray.from_arrays([lists, shapes], fields=list(kind), mask=mask)


# ---- dataset -------------------------------------------------------------------------------------
# `CachedDataset`: the samples of a finished cache, over memory-mapped files.
#
# index ── // per_shard ──> shard, mapped when first read ──> leaves ──> sample ──> transform


class CachedDataset(Dataset[Any]):
    """The samples of a cache, as the dataset returned them; made by `cache` and `open_cache`.

    Tensors and arrays are contiguous and view the file's pages in memory, which all processes
    share. They may be written to: neither the file nor other processes change, but this process
    sees the change when it reads the sample again, so `clone()` what you change in place. A
    `transform` need not: it receives copies.

    It is pickled as the names of its files, so little is sent to spawned workers. It keeps no file
    open.

    Attributes:
        directory: Where the files are.
        transform: Called with each sample, each time it is read; may be set at any time.
    """

    def __init__(
        self,
        directory: Path,
        plan: CachePlan,
        transform: Callable[[Any], Any] | None = None,
        classes: Classes | None = None,
    ) -> None:
        self.directory = directory
        self.transform = transform
        self._plan = plan
        known = ((each, loaded_class(each)) for each in namedtuples_of(plan.structure))
        self._classes = {**{each: cls for each, cls in known if cls}, **(classes or {})}
        self._shards = Shards(directory, plan)
        self._rebuild = rebuilder(plan.structure, self._classes)

    def __len__(self) -> int:
        return self._plan.samples

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        sample = self._read(self._position(index))
        return sample if self.transform is None else self.transform(_own(sample))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples, in the order asked for."""
        samples = [self._read(self._position(index)) for index in indices]
        if self.transform is None:
            return samples
        return [self.transform(_own(sample)) for sample in samples]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def table(self) -> pa.Table:
        """Return all samples as an Arrow table over the mapped files: one row each, in order."""
        return table_of([self._shards[at] for at in range(len(self._shards))])

    def __repr__(self) -> str:
        shards = counted(len(self._shards), "shard")
        return f"<CachedDataset {str(self.directory)!r}: {len(self):,} samples in {shards}>"

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        facts = {
            "samples": len(self),
            "shards": len(self._shards),
            "directory": self.directory,
            "transform": self.transform,
        }
        return summary("CachedDataset", facts)

    def __reduce__(self) -> Any:
        classes = {at: cls for at, cls in self._classes.items() if loaded_class(at) is cls}
        return CachedDataset, (self.directory, self._plan, self.transform, classes)

    def _position(self, index: int) -> int:
        at = as_index(index)  # also of a tensor, as the indices of a Subset may be
        position = at if at >= 0 else at + self._plan.samples
        if not 0 <= position < self._plan.samples:
            raise IndexError(f"there is no sample {index}: there are {len(self):,}")
        return position

    def _read(self, position: int) -> Any:
        number, row = divmod(position, self._plan.per_shard)
        return self._rebuild(iter(self._shards[number].leaves(row)))


@short_tracebacks
def open_cache(
    directory: str | os.PathLike[str], transform: Callable[[Any], Any] | None = None
) -> CachedDataset:
    """Open a finished cache without the dataset that it was made from.

    Args:
        directory: The folder.
        transform: As in `cache`.

    Returns:
        The dataset. A NamedTuple has the user's own class if its module was imported before,
        and otherwise a substitute with the same name and fields.

    Raises:
        InputError: There is no finished cache, or a file of it is missing or truncated.
    """
    folder = folder_of(directory)
    index = Index.read(folder / PRIVATE)
    if index is None:
        raise InputError(
            f"{str(folder)!r} holds no finished cache\n"
            "  forebay.cache(dataset, directory) creates one, or finishes an incomplete one. If "
            "this is a copy, copy its .forebay folder too."
        )
    lost = index.missing(folder)
    if lost:
        raise InputError(
            f"the cache {str(folder)!r} lacks {lost[0]}: {len(lost)} of its "
            f"{len(index.sizes)} shards are missing\n"
            "  Call forebay.cache again, with the same dataset and directory: it writes the "
            "missing shards again. If this is a copy, copy the whole folder."
        )
    return CachedDataset(folder, index.plan, transform)


def folder_of(directory: str | os.PathLike[str]) -> Path:
    """Return the folder of a cache; raise OptionError if it is a URL."""
    text = local_path(directory)
    if is_url(text):
        raise OptionError(
            f"directory={os.fspath(directory)!r} is a URL, but a cache is memory-mapped"
            "\n  Name a local folder, or one that all nodes mount."
        )
    return Path(os.path.abspath(text))


def _own(sample: Any) -> Any:
    """Return a sample with copies of its tensors and arrays."""
    if isinstance(sample, torch.Tensor):
        return sample.clone()
    if isinstance(sample, np.ndarray):
        return sample.copy()
    if isinstance(sample, dict):
        for key, value in sample.items():  # it was created by this call
            sample[key] = _own(value)
        return sample
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*map(_own, sample))
    if isinstance(sample, list | tuple):
        return type(sample)(map(_own, sample))
    return sample
