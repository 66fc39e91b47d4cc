"""Shards, Arrow files: mapped to be read. `shard_writer.py` writes them.

    file ── one private map ──> Arrow record batches ──> per leaf: row -> value
                 │                                         tensors and arrays: views
                 │                                         numbers, strings: new objects
                 └─ compressed: decompressed block by block, a few are kept ──> copies

The map is private and copied on write, so a write to a tensor stays in this process. It needs no
open file, and all processes share pages that are only read.
"""

from __future__ import annotations

import json
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from forebay.base.file_stores import Folder
from forebay.base.files import open_regular
from forebay.base.formatting import counted
from forebay.base.process import descriptor_path
from forebay.base.value_classes import Classes
from forebay.base.value_columns import column_of
from forebay.base.value_inference import spec_of, widened
from forebay.base.value_readers import Bytes, Getter, getter_of, own, widened_array
from forebay.base.value_types import Spec, arrow_type, schema_of
from forebay.caching.arrow_messages import decompressed, read_message, record_batches
from forebay.caching.block_dataset import KEPT_BYTES
from forebay.caching.index import CachePlan, Index, Layout
from forebay.caching.layout import Blocks, shard_name
from forebay.caching.structure import (
    generalized,
    is_generalized,
    leaves_of,
    names_of,
    rebuilder,
)
from forebay.errors import InputError

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


class DecodedBlocks:
    """The blocks that a process decoded last, each as what reads its rows.

    At least the last one is kept, however large.

    Args:
        most: Bytes of all that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: dict[Any, tuple[Any, int]] = {}  # the oldest first

    def get(self, key: Any, make: Callable[[], tuple[Any, int]]) -> Any:
        """Return a block that is kept, or make it: what reads it, and its bytes.

        Threads may call this at once: each has what it asked for, and what is kept may be less.
        """
        if (found := self._blocks.pop(key, None)) is None:
            found = make()
            with suppress(RuntimeError):  # another thread changes it, too
                left = self._most - found[1] - sum(size for _, size in self._blocks.values())
                for old in [*self._blocks]:
                    if left >= 0:
                        break
                    left += self._blocks.pop(old, (None, 0))[1]
        self._blocks[key] = found
        return found[0]


class Shard:
    """One shard, mapped.

    Args:
        plan: The plan of the cache; None if the shard does not belong to one yet.
        classes: See `getter_of`.
        compression: That of its blocks, without a plan.
        decompressed: Where decompressed blocks are kept, for all shards of a cache.
    """

    def __init__(
        self,
        path: Path,
        plan: CachePlan | None = None,
        number: int = 0,
        classes: Classes | None = None,
        *,
        compression: str | None = None,
        decompressed: DecodedBlocks | None = None,
    ) -> None:
        self._path, self._number = path, number
        self._compression = compression if plan is None else plan.compression
        self._decompressed = decompressed or DecodedBlocks(KEPT_BYTES)
        try:
            self._map = mapped_file(path)
            self._reader = pa.ipc.open_file(pa.py_buffer(self._map))
            header = json.loads((self._reader.schema.metadata or {})[KEY.encode()])
            if header["format"] != FORMAT:
                raise InputError(f"it has format {header['format']}; this forebay reads {FORMAT}")
            self.layout = Layout.from_json(header)
            self._schema = schema_of(self.layout.names, self.layout.specs)
            if self._reader.schema != self._schema:
                raise InputError("its columns are not those that it describes")
            is_compressed = self._compression is not None
            self._blocks = record_batches(self._map.data, is_compressed=is_compressed)
            self._classes = {} if classes is None else classes
            self._getters: list[list[Getter]] = []  # of a shard that is not compressed
            if self._compression is None:
                count = self._reader.num_record_batches
                batches = [self._reader.get_batch(at) for at in range(count)]
                rows = [batch.num_rows for batch in batches]
                self._getters = [self._getters_of(batch, self._map) for batch in batches]
            else:
                rows = [read_message(self._map.data, start).rows for start, _ in self._blocks]
                if min(rows, default=0) < 0:
                    raise ValueError(f"a block of {min(rows)} rows")
            ends = [*accumulate(rows)]
            if plan is not None:
                self._check_number(plan, number, header["first"], ends[-1] if ends else 0)
            self._rebuild = rebuilder(self.layout.structure, self._classes)
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
            return [get(row) for get in self._getters_at(at)]
        except _DAMAGES as error:
            raise _damaged(self._path, error) from error

    def _getters_at(self, block: int) -> list[Getter]:
        if self._compression is None:
            return self._getters[block]

        def make() -> tuple[list[Getter], int]:
            batch, memory = self._decompressed_batch(block)
            return self._getters_of(batch, memory), len(memory)

        found: list[Getter] = self._decompressed.get((self._number, block), make)
        return found

    def _decompressed_batch(self, block: int) -> tuple[pa.RecordBatch, Bytes]:
        """Return a block of a compressed shard, and the memory that it views."""
        start, length = self._blocks[block]
        data, codec = self._map.data[start : start + length], self._compression
        assert codec is not None, "only blocks of a compressed shard are decompressed"
        memory = np.frombuffer(decompressed(data, self._schema, codec), np.uint8)
        batch = pa.ipc.read_record_batch(pa.py_buffer(memory), self._schema)
        return batch, memory

    def _getters_of(self, batch: pa.RecordBatch, whole: Bytes) -> list[Getter]:
        """Return for each leaf what returns that of a row."""
        batch.validate()
        return [
            getter_of(spec, column, whole, self._classes)
            for spec, column in zip(self.layout.specs, batch.columns, strict=True)
        ]

    def sample(self, row: int, *, is_copy: bool = False) -> Any:
        """Return a sample by its position in the shard; one of a compressed shard is a copy."""
        leaves = self.leaves(row)
        is_copy |= self._compression is not None  # or a tensor would keep its whole block
        try:
            return self._rebuild(map(own, leaves) if is_copy else iter(leaves))
        except _DAMAGES as error:
            raise _damaged(self._path, error) from error

    def table(self) -> pa.Table:
        """Return all rows, as views of the map, or decompressed."""
        if self._compression is None:
            return self._reader.read_all()
        try:
            batches = [self._decompressed_batch(at)[0] for at in range(len(self._blocks))]
        except _DAMAGES as error:
            raise _damaged(self._path, error) from error
        return pa.Table.from_batches(batches, self._schema)

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
    """The shards of a local cache, each mapped when it is first read. Pickled as its plan.

    Args:
        kept: Bytes of decompressed blocks that are kept.
    """

    def __init__(self, location: Path, plan: CachePlan, kept: int = KEPT_BYTES) -> None:
        self.location, self._plan, self._kept = location, plan, kept
        self.classes: Classes = {}
        self._open: dict[int, Shard] = {}
        self._decompressed = DecodedBlocks(kept)

    def __reduce__(self) -> Any:
        return Shards, (self.location, self._plan, self._kept)

    def __getitem__(self, number: int) -> Shard:
        shard = self._open.get(number)
        if shard is None:
            path = self.location / shard_name(number)
            decompressed = self._decompressed
            shard = Shard(path, self._plan, number, self.classes, decompressed=decompressed)
            if len(self._open) >= MOST_MAPS:
                with suppress(RuntimeError):  # another thread is removing one, too
                    self._open.pop(next(iter(self._open)), None)
            self._open[number] = shard
        return shard

    def __len__(self) -> int:
        return self._plan.shards

    def sample(self, position: int, *, is_copy: bool = False) -> Any:
        """Return a sample; its tensors view the map, unless it is a copy, or compressed."""
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


def mapped_file(path: str | os.PathLike[str]) -> Bytes:
    """Return a file as an array over a private map, which does not keep it open."""
    with open_regular(path) as file:
        # Of any name, while torch takes only names that are UTF-8.
        name, size = descriptor_path(file.fileno()), os.fstat(file.fileno()).st_size
        name = os.fspath(path) if name is None else name
        return torch.from_file(name, shared=False, size=size, dtype=torch.uint8).numpy()


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


# Size of a block in bytes: a larger sample ends its block.
BATCH_BYTES = 4 * 2**20


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
