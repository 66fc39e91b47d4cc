"""Shards, Arrow files: mapped to be read, and written one record batch at a time.

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
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from forebay.base.arrow_arrays import array_of, array_of_numpy
from forebay.base.datasets import OwnedGenerators
from forebay.base.earlier_rows import EarlierRows
from forebay.base.files import Folder, open_regular
from forebay.base.formatting import counted
from forebay.base.process import descriptor_path
from forebay.base.randomness import seed_generators, seed_of_text
from forebay.caching import columns, layout
from forebay.caching.columns import (
    CachePlan,
    Column,
    Index,
    Spec,
    arrow_type,
    schema_of,
    spec_of,
    widened,
)
from forebay.caching.earlier_shards import earlier_leaves
from forebay.caching.layout import (
    BLOCK,
    MOST_BLOCK_BYTES,
    Blocks,
    MisfitError,
    Node,
    checksums,
    leaves_of,
    names_of,
    shard_name,
)
from forebay.errors import FailuresError, InputError
from forebay.failures import Failure, failure_to_json, message_of

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
            self.specs = [columns.from_json(spec) for spec in header["columns"]]
            self.structure = layout.from_json(header["structure"])
            names = names_of(self.structure)
            if self._reader.schema != schema_of(names, self.specs):
                raise InputError("its columns are not those that it describes")
            record_batches(self._map.data)  # refuses compressed ones
            batches = [self._reader.get_batch(at) for at in range(self._reader.num_record_batches)]
            for batch in batches:
                batch.validate()
            ends = np.cumsum([batch.num_rows for batch in batches]).tolist()
            if plan is not None:
                _check_number(plan, number, header, ends[-1] if ends else 0)
            self._getters = [
                [
                    getter_of(spec, column, self._map)
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
    """The shards of a local cache, each mapped when it is first read. Pickled as its plan."""

    owns = False  # what is read views the map

    def __init__(self, location: Path, plan: CachePlan) -> None:
        self.location, self._plan = location, plan
        self._open: dict[int, Shard] = {}

    def __reduce__(self) -> Any:
        return Shards, (self.location, self._plan)

    def __getitem__(self, number: int) -> Shard:
        shard = self._open.get(number)
        if shard is None:
            shard = Shard(self.location / shard_name(number), self._plan, number)
            if len(self._open) >= MOST_MAPS:
                with suppress(RuntimeError):  # another thread is removing one, too
                    self._open.pop(next(iter(self._open)), None)
            self._open[number] = shard
        return shard

    def __len__(self) -> int:
        return self._plan.shards

    def leaves(self, position: int) -> list[Any]:
        """Return the leaves of a sample."""
        number, row = divmod(position, self._plan.per_shard)
        return self[number].leaves(row)

    def many(self, positions: Sequence[int]) -> list[list[Any]]:
        """Return the leaves of each sample."""
        return [*map(self.leaves, positions)]

    def table(self) -> pa.Table:
        """Return all samples as one Arrow table."""
        return table_of([self[at] for at in range(len(self))])

    @property
    def blocks(self) -> Blocks:
        """Where the blocks are."""
        folder = Folder(self.location)
        index = Index.read(folder)
        if index is None:
            raise InputError(f"{str(self.location)!r} holds no finished cache now")
        return index.read_blocks(folder)


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


def record_batches(data: memoryview) -> list[tuple[int, int]]:
    """Return offset and length of each record batch of a file; ValueError if one is compressed."""
    end = len(data) - 10  # its length, and "ARROW1"
    footer = _target(data, end - _number(data, "i", end))
    if (at := _field(data, footer, _DICTIONARIES)) and _number(data, "I", _target(data, at)):
        raise ValueError("it has dictionaries")
    blocks, found = _target(data, _field(data, footer, _BATCHES)), []
    for block in range(_number(data, "I", blocks)):
        start, metadata, body = struct.unpack_from(
            "<qi4xq", data, blocks + 4 + block * _BLOCK_BYTES
        )
        refuse_compressed(data, start)
        found.append((start, metadata + body))
    return found


def refuse_compressed(data: memoryview, start: int = 0) -> None:
    """Raise ValueError if a record batch is compressed.

    To read that, Arrow would decompress it: a few bytes may become gigabytes, and a shard of a
    cache is not compressed.
    """
    message = _target(data, start + (8 if _number(data, "i", start) == -1 else 4))
    batch = _target(data, _field(data, message, _HEADER))
    # As Arrow has it, and as Arrow 0.17 had it.
    if _field(data, batch, _COMPRESSION) or _field(data, message, _CUSTOM):
        raise ValueError("its columns are compressed")


def _number(data: memoryview, form: str, at: int) -> int:
    return int(struct.unpack_from(f"<{form}", data, at)[0])


def _target(data: memoryview, at: int) -> int:
    return at + _number(data, "I", at)


def _field(data: memoryview, table: int, index: int) -> int:
    """Return where a field of a table is; 0 if the table does not have it."""
    fields, at = table - _number(data, "i", table), 4 + 2 * index
    offset = _number(data, "H", fields + at) if at < _number(data, "H", fields) else 0
    return offset and table + offset


def getter_of(spec: Spec, column: pa.Array, whole: Bytes) -> Getter:
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


def own(leaf: Any) -> Any:
    """Return a leaf that does not view a map."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


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


# ---- writer --------------------------------------------------------------------------------------
#     sample ── leaves ──> columns ── full ──> record batch ──> file
#                             └── a leaf that does not fit its column: rewrite the file, wider
#
# The types of a sample's leaves are known only once it is loaded, but an Arrow file has one schema.
# So a shard begins with the specs of the samples that were probed first. If a later one does not
# fit (another shape, a string that is not UTF-8), the rows written so far are read and written
# again.

# Size of a block in bytes: a larger sample ends its block.
BATCH_BYTES = 4 * 2**20


def specs_of(names: list[str], leaves: list[Any]) -> list[Spec]:
    """Return the specs of a sample's leaves."""
    return [_named(spec_of, *pair) for pair in zip(names, leaves, strict=True)]


def wider(names: list[str], specs: list[Spec], others: list[Spec]) -> list[Spec]:
    """Return specs that fit both."""
    return [_named(widened, *each) for each in zip(names, specs, others, strict=True)]


def _named(rule: Callable[..., Spec], name: str, *given: Any) -> Spec:
    try:
        return rule(*given)
    except MisfitError as error:
        raise MisfitError(f"{name!r} {error}") from None


class ShardWriter:
    """Writes one shard; as a context manager, finishes the file unless an exception is raised."""

    def __init__(self, path: Path, structure: Node, specs: list[Spec], first: int) -> None:
        self._path, self._structure, self._first = path, structure, first
        self._names = names_of(structure)
        self._begin(specs)

    def _begin(self, specs: list[Spec]) -> None:
        self.specs = specs
        self._columns = [Column(spec) for spec in specs]
        self._next, self._rows = self._first, 0  # the next block's first sample, and its samples
        self.firsts: list[int] = []  # of each block, its first sample
        header = {
            "format": FORMAT,
            "structure": layout.to_json(self._structure),
            "columns": [columns.to_json(spec) for spec in specs],
            "first": self._first,
        }
        schema = schema_of(self._names, specs)
        self._schema = schema.with_metadata({KEY: json.dumps(header)})
        self._file = self._path.open("wb")
        options = pa.ipc.IpcWriteOptions(allow_64bit=True)  # a sample may have 2**31 numbers
        self._writer = pa.ipc.new_file(self._file, self._schema, options=options)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()

    def add(self, sample: Any) -> None:
        """Append a sample."""
        self.add_leaves(leaves_of(self._structure, sample))

    def add_leaves(self, leaves: list[Any]) -> None:
        """Append a sample, given its leaves."""
        specs = specs_of(self._names, leaves)
        if specs != self.specs:
            specs = wider(self._names, self.specs, specs)
            if specs != self.specs:
                self._restart_wider(specs)
        self._append(leaves)

    def _append(self, leaves: list[Any]) -> None:
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.add(leaf)
        self._rows += 1
        # An empty sample is a row, too.
        if 8 * self._rows + sum(column.nbytes for column in self._columns) >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        self.firsts.append(self._next)
        self._next, self._rows = self._next + self._rows, 0
        batch = pa.record_batch([each.taken() for each in self._columns], schema=self._schema)
        if batch.nbytes > MOST_BLOCK_BYTES:
            raise MisfitError(
                f"the sample has about {batch.nbytes:,} bytes; a cache can store at most "
                f"{MOST_BLOCK_BYTES:,}"
            )
        self._writer.write_batch(batch)

    def _finish(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()

    def _restart_wider(self, specs: list[Spec]) -> None:
        self._finish()
        self._file.close()
        narrow = self._path.with_name(f"{self._path.name}.narrow")
        os.rename(self._path, narrow)
        self._begin(specs)
        shard = Shard(narrow)
        for row in range(len(shard)):
            self._append(shard.leaves(row))
        narrow.unlink()


# ---- shard job -----------------------------------------------------------------------------------
# The job of a cache's worker: write a range of samples to one shard.
#
# After a sample fails, the others of its shard are still tried, so that one run names all samples
# that must be fixed. A worker that dies leaves the index of the sample it was processing.

# Number of failed samples of a shard whose messages are kept, and the characters of each.
MOST_DESCRIBED = 20
MOST_TEXT = 1000


class ShardWork:
    """Makes one shard, for rows of "first" and "count".

    Samples that `earlier` has are taken over from shards of an earlier run.
    """

    def __init__(
        self,
        dataset: Any,
        plan: CachePlan,
        marks: Path,
        earlier: EarlierRows,
        name_of: Callable[[int], str | None],
    ) -> None:
        self._dataset, self._plan, self._marks = dataset, plan, marks
        self._earlier, self._name_of = earlier, name_of
        self._owned: OwnedGenerators | None = None  # found in the worker
        self._has_read = False

    def __call__(self, row: dict[str, int], out: Any) -> dict[str, Any]:
        """Write the shard; return the record of it that the index needs."""
        if self._owned is None:
            self._owned = OwnedGenerators(dataset=self._dataset)
        first, plan = row["first"], self._plan
        failures: list[Failure] = []
        failed, cause = 0, None
        path = out.file(shard_name(first // plan.per_shard))
        earlier = self._earlier.taken(first, row["count"])
        with (
            _marked(self._marks / str(first)) as mark,
            earlier_leaves(earlier, Shard, plan.structure) as leaves_at,
            ShardWriter(path, plan.structure, list(plan.specs), first) as writer,
        ):
            for index in range(first, first + row["count"]):
                leaves = leaves_at(index)
                if leaves is not None:
                    writer.add_leaves(leaves)
                    continue
                mark(index)
                error = self._add(index, writer)
                if error is not None:
                    failed, cause = failed + 1, cause or error
                    if failed <= MOST_DESCRIBED:
                        failures.append(sample_failure(index, error).named(self._name_of(index)))
        if failed:
            more = failed - len(failures)
            lines = [*map(line_of, failures), *[f"and {more} more of this shard"] * (more > 0)]
            failure = FailuresError("\n".join(lines))
            failure.record = {"failures": [*map(failure_to_json, failures)], "failed": failed}
            raise failure from cause
        return record_of(path, writer)

    def _add(self, index: int, writer: ShardWriter) -> BaseException | None:
        """Add a sample to the shard, or return why it failed."""
        seed = seed_of_text(str(index))
        seed_generators(seed)
        if self._owned is not None:
            self._owned.seed(seed)
        try:
            sample = self._dataset[index]
            if not self._has_read and self._owned is not None:
                self._has_read = True
                if (more := self._owned.grown()) is not None:  # made when they were needed
                    self._owned = more
                    return self._add(index, writer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too
            return error
        try:
            writer.add(sample)
        except MisfitError as error:
            return error
        return None


def record_of(path: Path, writer: ShardWriter) -> dict[str, Any]:
    """Return what the index of a cache says of a shard, JSON-serializable."""
    data = np.memmap(path, np.uint8, "r").data
    places = record_batches(data)
    found, outside = checksums(data, places)
    blocks = np.zeros(len(places), BLOCK)
    blocks["first"], blocks["crc32"] = writer.firsts, found
    blocks["offset"], blocks["length"] = zip(*places, strict=True)
    specs = [columns.to_json(spec) for spec in writer.specs]
    return {"blocks": b64encode(blocks.tobytes()).decode(), "outside": outside, "columns": specs}


def sample_failure(index: int, error: BaseException) -> Failure:
    """Return the failure of a sample, with the first line of its message."""
    words = next(iter(message_of(error).splitlines()), "")[:MOST_TEXT]
    return Failure("exception", type(error).__name__, words, source=index)


def line_of(failure: Failure) -> str:
    """Return the failure of a sample in one line; what cannot be cached needs no type of error."""
    return str(failure).replace(f"{MisfitError.__name__}: ", "", 1)[:MOST_TEXT]


@contextmanager
def _marked(path: Path) -> Iterator[Callable[[int], object]]:
    """Yield a function that stores an index in a file, which remains if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        yield lambda index: os.pwrite(file, b"%20d" % index, 0)
    finally:
        os.close(file)
        path.unlink(missing_ok=True)
