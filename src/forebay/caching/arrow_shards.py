"""Shards, Arrow files: mapped to be read, and written one record batch at a time.

    file ── one private map ──> Arrow record batches ──> per leaf: row -> value
                                                           tensors and arrays: views
                                                           numbers, strings: new objects

The map is private and copied on write, so a write to a tensor stays in this process. It needs no
open file, and all processes share pages that are only read.
"""

from __future__ import annotations

import json
import os
import struct
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from forebay.base.datasets import OwnedGenerators
from forebay.base.earlier_rows import EarlierRows
from forebay.base.file_stores import Folder
from forebay.base.files import open_regular
from forebay.base.formatting import counted
from forebay.base.process import descriptor_path
from forebay.base.randomness import seed_generators, seed_of_text
from forebay.base.value_casts import widened_array
from forebay.base.value_classes import Classes, MisfitError
from forebay.base.value_columns import column_of
from forebay.base.value_inference import named_misfit, spec_of, widened
from forebay.base.value_readers import Bytes, getter_of, own
from forebay.base.value_types import Spec, arrow_type, schema_of
from forebay.caching.earlier_shards import earlier_samples
from forebay.caching.index import CachePlan, Index, Layout
from forebay.caching.layout import BLOCK, MOST_BLOCK_BYTES, Blocks, checksums, shard_name
from forebay.caching.structure import (
    MISSING,
    generalized,
    is_generalized,
    leaves_of,
    names_of,
    rebuilder,
    structure_of,
)
from forebay.errors import FailuresError, InputError
from forebay.failures import Failure, failure_to_json, message_of

FORMAT = 1
# The key in a shard's schema under which its columns are described.
KEY = "forebay"
# Maps of a process at a time; Linux allows 65,530 in total.
MOST_MAPS = 16_384

# Exceptions of NumPy, Arrow and JSON for a file that is not in the expected format.
_DAMAGES = (
    *(OSError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(pa.ArrowException, struct.error),
)


class Shard:
    """One shard, mapped.

    Args:
        plan: The plan of the cache; None if the shard does not belong to one yet.
        classes: See `getter_of`.
    """

    def __init__(
        self,
        path: Path,
        plan: CachePlan | None = None,
        number: int = 0,
        classes: Classes | None = None,
    ) -> None:
        self._path = path
        try:
            self._map = _mapped(path)
            self._reader = pa.ipc.open_file(pa.py_buffer(self._map))
            header = json.loads((self._reader.schema.metadata or {})[KEY.encode()])
            if header["format"] != FORMAT:
                raise InputError(f"it has format {header['format']}; this forebay reads {FORMAT}")
            self.layout = Layout.from_json(header)
            if self._reader.schema != schema_of(self.layout.names, self.layout.specs):
                raise InputError("its columns are not those that it describes")
            record_batches(self._map.data)  # refuses compressed ones
            batches = [self._reader.get_batch(at) for at in range(self._reader.num_record_batches)]
            for batch in batches:
                batch.validate()
            ends = np.cumsum([batch.num_rows for batch in batches]).tolist()
            if plan is not None:
                self._check_number(plan, number, header["first"], ends[-1] if ends else 0)
            known = {} if classes is None else classes
            self._getters = [
                [
                    getter_of(spec, column, self._map, known)
                    for spec, column in zip(self.layout.specs, batch.columns, strict=True)
                ]
                for batch in batches
            ]
            self._rebuild = rebuilder(self.layout.structure, known)
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

    def sample(self, row: int, *, is_copy: bool = False) -> Any:
        """Return a sample by its position in the shard."""
        leaves = self.leaves(row)
        try:
            return self._rebuild(map(own, leaves) if is_copy else iter(leaves))
        except _DAMAGES as error:
            raise _damaged(self._path, error) from error

    def table(self) -> pa.Table:
        """Return all rows, as views of the map."""
        return self._reader.read_all()

    def _check_number(self, plan: CachePlan, number: int, found: int, rows: int) -> None:
        """Raise InputError if this is not the shard with this number."""
        first = number * plan.per_shard
        wanted = min(plan.per_shard, plan.samples - first)
        if (found, rows) != (first, wanted):
            raise InputError(
                f"it holds {counted(rows, 'sample')}, starting at sample {found:,}, instead of "
                f"{wanted:,}, starting at sample {first:,}"
            )
        if not is_generalized(self.layout.structure, plan.layout.structure):
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

    def __init__(self, location: Path, plan: CachePlan) -> None:
        self.location, self._plan = location, plan
        self.classes: Classes = {}
        self._open: dict[int, Shard] = {}

    def __reduce__(self) -> Any:
        return Shards, (self.location, self._plan)

    def __getitem__(self, number: int) -> Shard:
        shard = self._open.get(number)
        if shard is None:
            path = self.location / shard_name(number)
            shard = Shard(path, self._plan, number, self.classes)
            if len(self._open) >= MOST_MAPS:
                with suppress(RuntimeError):  # another thread is removing one, too
                    self._open.pop(next(iter(self._open)), None)
            self._open[number] = shard
        return shard

    def __len__(self) -> int:
        return self._plan.shards

    def sample(self, position: int, *, is_copy: bool = False) -> Any:
        """Return a sample; its tensors view the map, unless it is a copy."""
        number, row = divmod(position, self._plan.per_shard)
        return self[number].sample(row, is_copy=is_copy)

    def samples(self, positions: Sequence[int], *, are_copies: bool = False) -> list[Any]:
        """Return several samples."""
        return [self.sample(position, is_copy=are_copies) for position in positions]

    def table(self) -> pa.Table:
        """Return all samples as one Arrow table."""
        return cache_table([self[at] for at in range(len(self))])

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


# ---- cache table ---------------------------------------------------------------------------------
# All shards as one Arrow table over their memory maps.
#
# The column types of shards may differ: all samples of one shard may have the same shape, and those
# of another not. The table has the wider type, for which only small offsets are rebuilt, unless
# samples differ in structure.


def cache_table(shards: list[Shard]) -> pa.Table:
    """Return the rows of all shards, in order."""
    wide = common_layout(shards)
    return pa.concat_tables([_as_wide(shard, wide) for shard in shards])


def common_layout(shards: Sequence[Shard]) -> Layout:
    """Return the layout that holds the samples of all shards."""
    node = shards[0].layout.structure
    for shard in shards:
        if shard.layout.structure != node:
            for row in range(len(shard)):
                if leaves_of(node, sample := shard.sample(row)) is None:
                    node = generalized(node, sample)
    specs = [Spec("none")] * len(names_of(node))
    for shard in shards:
        if shard.layout.structure == node:
            found = [shard.layout.specs]
        else:
            samples = map(shard.sample, range(len(shard)))
            found = [[*map(spec_of, leaves_of(node, each) or ())] for each in samples]
        for each in found:
            specs = [widened(*pair) for pair in zip(specs, each, strict=True)]
    return Layout(node, specs)


def _as_wide(shard: Shard, wide: Layout) -> pa.Table:
    """Return the rows of a shard with the columns of a wider layout."""
    schema = schema_of(wide.names, wide.specs)
    if shard.layout.structure != wide.structure:
        batches = BlockBuilder(wide).batches(map(shard.sample, range(len(shard))))
        return pa.Table.from_batches([batch.cast(schema) for batch in batches], schema)
    columns, table = [], shard.table()
    pairs = zip(shard.layout.specs, wide.specs, strict=True)
    for column, pair in zip(table.columns, pairs, strict=True):
        chunks = [widened_array(chunk, *pair) for chunk in column.chunks]
        columns.append(pa.chunked_array(chunks, arrow_type(pair[1])))
    return pa.table(columns, schema=schema)


# ---- writer --------------------------------------------------------------------------------------
#     sample ── leaves ──> columns ── full ──> record batch ──> file
#                             └── a sample that does not fit: begin another file, with a wider
#                                 layout; at the end, all rows are written with the widest
#
# The types of a sample's leaves are known only once it is loaded, but an Arrow file has one schema.
# So a shard begins with the layout of the samples that were probed first. A later sample may not
# fit: another shape, a string that is not UTF-8, a key more. However often that happens, a row is
# written twice at most.

# Size of a block in bytes: a larger sample ends its block.
BATCH_BYTES = 4 * 2**20


def specs_of(names: list[str], leaves: list[Any]) -> list[Spec]:
    """Return the specs of a sample's leaves."""
    return [_named(spec_of, *pair) for pair in zip(names, leaves, strict=True)]


def _named(rule: Callable[..., Spec], name: str, *given: Any) -> Spec:
    try:
        return rule(*given)
    except MisfitError as error:
        raise named_misfit(name, error) from None


def layout_of(samples: Sequence[Any]) -> Layout:
    """Return the layout that holds some samples."""
    node = structure_of(samples[0])
    for sample in samples[1:]:
        if leaves_of(node, sample) is None:
            node = generalized(node, sample)
    names = names_of(node)
    specs = [Spec("none")] * len(names)
    for sample in samples:
        own = specs_of(names, leaves_of(node, sample) or [])
        specs = [_named(widened, *each) for each in zip(names, specs, own, strict=True)]
    return Layout(node, specs)


class BlockBuilder:
    """Collects samples until they make a record batch."""

    def __init__(self, layout: Layout) -> None:
        self._structure = layout.structure
        self._schema = schema_of(layout.names, layout.specs)
        self._columns = [column_of(spec) for spec in layout.specs]
        self.rows = 0

    def add(self, leaves: Sequence[Any]) -> bool:
        """Append the leaves of a sample; return whether the block is full."""
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.add(leaf)
        self.rows += 1
        # An empty sample is a row, too.
        nbytes = 8 * self.rows + sum(column.nbytes for column in self._columns)
        return nbytes >= BATCH_BYTES

    def taken(self) -> pa.RecordBatch:
        """Return all rows, and start without any."""
        self.rows = 0
        return pa.record_batch([each.taken() for each in self._columns], schema=self._schema)

    def batches(self, samples: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of some samples, which fit."""
        for sample in samples:
            if self.add(leaves_of(self._structure, sample) or ()):
                yield self.taken()
        if self.rows:
            yield self.taken()


class ShardWriter:
    """Writes one shard; as a context manager, finishes the file unless an exception is raised.

    Attributes:
        layout: What the shard has, at the end.
        firsts: Of each block, its first sample.
    """

    def __init__(self, path: Path, layout: Layout, first: int) -> None:
        self._path, self._first = path, first
        self._earlier: list[Path] = []  # files of this shard with narrower layouts
        self._begin(layout)

    def _begin(self, layout: Layout) -> None:
        self.layout, self._names = layout, layout.names
        self._block = BlockBuilder(layout)
        self._next, self.firsts = self._first, list[int]()
        header = {"format": FORMAT, **layout.to_json(), "first": self._first}
        schema = schema_of(self._names, layout.specs).with_metadata({KEY: json.dumps(header)})
        self._file = self._path.open("wb")
        options = pa.ipc.IpcWriteOptions(allow_64bit=True)  # a sample may have 2**31 numbers
        self._writer = pa.ipc.new_file(self._file, schema, options=options)

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
        node, specs = self.layout.structure, self.layout.specs
        leaves = leaves_of(node, sample)
        if leaves is None:
            node = generalized(node, sample)
            leaves = leaves_of(node, sample)
            assert leaves is not None, "it holds this sample"
            self._set_aside(Layout(node, specs_of(names_of(node), leaves)))
        elif (own_specs := specs_of(self._names, leaves)) != specs:
            pairs = zip(self._names, specs, own_specs, strict=True)
            wide = [_named(widened, *each) for each in pairs]
            if wide != specs:
                self._set_aside(Layout(node, wide))
        if self._block.add(leaves):
            self._flush()

    def _flush(self) -> None:
        self.firsts.append(self._next)
        self._next += self._block.rows
        batch = self._block.taken()
        if batch.nbytes > MOST_BLOCK_BYTES:
            raise MisfitError(
                f"the sample has about {batch.nbytes:,} bytes; a cache can store at most "
                f"{MOST_BLOCK_BYTES:,}"
            )
        self._writer.write_batch(batch)

    def _close(self) -> None:
        if self._block.rows:
            self._flush()
        self._writer.close()
        self._file.close()

    def _set_aside(self, layout: Layout) -> None:
        """Continue in another file, with another layout."""
        if not self.firsts and not self._block.rows:
            self._file.close()
            self._begin(layout)
            return
        self._close()
        narrow = self._path.with_name(f"{self._path.name}.narrow{len(self._earlier)}")
        os.rename(self._path, narrow)
        self._earlier.append(narrow)
        self._begin(layout)

    def _finish(self) -> None:
        if not self._earlier:
            self._close()
            return
        self._set_aside(self.layout)
        self._file.close()
        parts = [part for path in self._earlier if len(part := Shard(path))]
        self._begin(common_layout(parts) if parts else self.layout)
        for part in parts:
            for row in range(len(part)):
                leaves = leaves_of(self.layout.structure, part.sample(row))
                if self._block.add(leaves or ()):
                    self._flush()
        self._close()
        for path in self._earlier:
            path.unlink()


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
            earlier_samples(earlier, Shard) as sample_at,
            ShardWriter(path, plan.layout, first) as writer,
        ):
            for index in range(first, first + row["count"]):
                sample = sample_at(index)
                if sample is not MISSING:
                    writer.add(sample)
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
        return shard_record(path, writer)

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


def shard_record(path: Path, writer: ShardWriter) -> dict[str, Any]:
    """Return what the index of a cache says of a shard, JSON-serializable."""
    data = np.memmap(path, np.uint8, "r").data
    places = record_batches(data)
    found, outside = checksums(data, places)
    blocks = np.zeros(len(places), BLOCK)
    blocks["first"], blocks["crc32"] = writer.firsts, found
    blocks["offset"], blocks["length"] = zip(*places, strict=True)
    known = writer.layout.to_json()
    return {"blocks": b64encode(blocks.tobytes()).decode(), "outside": outside, **known}


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
