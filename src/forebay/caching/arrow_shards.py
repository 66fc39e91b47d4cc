"""Shards, Arrow files: mapped to be read. `shard_writer.py` writes them.

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
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from forebay.base.file_stores import Folder
from forebay.base.files import open_regular
from forebay.base.formatting import counted
from forebay.base.process import descriptor_path
from forebay.base.value_casts import widened_array
from forebay.base.value_classes import Classes
from forebay.base.value_columns import column_of
from forebay.base.value_inference import spec_of, widened
from forebay.base.value_readers import Bytes, getter_of, own
from forebay.base.value_types import Spec, arrow_type, schema_of
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
