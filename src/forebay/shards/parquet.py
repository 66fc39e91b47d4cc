"""Parquet files as shards: a block is a row group, of which the chunks of some columns are read.

    file ── footer ──> chunks: row group x column
    chunks ── pyarrow ──> a record batch ──> rows

The footer is all that is read to index a shard, and it is what the index keeps of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from forebay.base.table_files import refuse
from forebay.shards.arrow_rows import (
    MOST_BYTES,
    batch_of_bytes,
    bytes_of_batch,
    has_dictionaries,
    most_bytes,
    refuse_claim,
    samples_of_batch,
)
from forebay.shards.format import (
    BlockDecoder,
    FoundBlocks,
    ShardFile,
    ShardFormat,
    check_names,
)
from forebay.shards.parquet_pages import claims_of, row_groups

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_MOST_FOOTER_BYTES = 256 << 20
# Where a file ends of which only stretches are there: each read is checked by itself.
_END = 1 << 62
_AGAIN = "If it is truncated, copy it again; otherwise, write it again."
# What a value takes at least while it is decoded: its levels, its place, its number.
_VALUE_BYTES = 16
# A footer is of other bytes than those of pyarrow's exceptions, which have no common root.
_DAMAGES = (pa.ArrowException, OSError, ValueError, LookupError, RuntimeError, ArithmeticError)


class ParquetShards(ShardFormat):
    """Parquet files; a sample is a dict of columns."""

    name = "parquet"
    suffixes = (".parquet", ".pq")
    reads_all = False

    def matches(self, head: bytes) -> bool:
        """See `ShardFormat`."""
        return head.startswith(_MAGIC)

    def find(self, shard: ShardFile) -> FoundBlocks:
        """See `ShardFormat`."""
        if shard.size < 12:
            refuse(shard.name, f"{shard.size:,} bytes are no Parquet file", _AGAIN)
        tail = bytes(shard.read(shard.size - 8, 8))
        length, magic = int.from_bytes(tail[:4], "little"), tail[4:]
        if magic == _ENCRYPTED:
            refuse(shard.name, "its footer is encrypted", "Write it without encryption.")
        if magic != _MAGIC or length > min(shard.size - 12, _MOST_FOOTER_BYTES):
            refuse(shard.name, "it does not end as a Parquet file", _AGAIN)
        info = _MAGIC + bytes(shard.read(shard.size - 8 - length, length + 8))
        try:
            return _found(info, shard.size - 8 - length)
        except _DAMAGES as error:
            refuse(shard.name, f"its footer cannot be read: {error}", _AGAIN, error)

    def chosen(
        self, info: bytes, extents: npt.NDArray[np.int64], columns: Sequence[str]
    ) -> npt.NDArray[np.bool_]:
        """See `ShardFormat`."""
        metadata = _Info.of(info).metadata
        is_chosen = np.zeros(metadata.num_columns, bool)
        is_chosen[_leaves(metadata, columns)] = True
        return np.tile(is_chosen, len(extents) // len(is_chosen))

    def decoder(self, info: bytes, columns: Sequence[str] | None) -> BlockDecoder:
        """See `ShardFormat`."""
        return _RowGroups(info, columns)


def _found(footer: bytes, end: int) -> FoundBlocks:
    """Return the blocks of a file, given its footer, and where that begins."""
    metadata = parquet.read_metadata(pa.BufferReader(footer))
    leaves = len(_leaves(metadata, None))
    rows, nbytes, numbers = list[int](), list[int](), list[int]()
    chunks = list[tuple[int, int]]()
    for number, group in enumerate(row_groups(footer[len(_MAGIC) : -8])):
        if not group.rows:  # it has no chunks
            continue
        if not 0 < group.rows < 1 << 31 or len(group.chunks) != leaves:
            what = f"{group.rows:,} rows and {len(group.chunks):,} columns"
            raise ValueError(f"row group {number:,} has {what}")
        if not all(4 <= at <= end - size < end for at, size in group.chunks):
            raise ValueError(f"a column of row group {number:,} lies outside of the file")
        chunks += group.chunks
        rows.append(group.rows)
        nbytes.append(min(max(group.nbytes, 1), MOST_BYTES))
        numbers.append(number)
    if numbers and numbers[-1] >= metadata.num_row_groups:
        raise ValueError(f"{numbers[-1] + 1:,} row groups instead of {metadata.num_row_groups:,}")
    table = np.array(chunks, np.int64).reshape(-1, 2)
    blocks = np.repeat(np.arange(len(rows)), leaves)
    head = np.array([len(rows), leaves, *numbers, *rows], np.int64)
    info = b"".join((head.tobytes(), table.tobytes(), footer))
    extents = np.column_stack([blocks, table])
    return FoundBlocks(np.array(rows, np.int64), extents, info, nbytes=np.array(nbytes, np.int64))


class _Info(NamedTuple):
    """What the index keeps of a file.

    Attributes:
        groups: The number of each block's row group.
        rows: How many rows each has.
        chunks: Offset and length: blocks x columns x 2.
    """

    metadata: parquet.FileMetaData
    groups: list[int]
    rows: list[int]
    chunks: npt.NDArray[np.int64]

    @classmethod
    def of(cls, info: bytes) -> _Info:
        """Return what `_found` wrote; ValueError if that cannot be."""
        count, leaves = np.frombuffer(info, np.int64, 2).tolist()
        if not (0 <= count <= len(info) and 0 < leaves <= len(info)):
            raise ValueError(f"{count:,} row groups of {leaves:,} columns")
        table = np.frombuffer(info, np.int64, 2 * count * (1 + leaves), 16)
        groups, rows = table[: 2 * count].reshape(2, count).tolist()
        chunks = table[2 * count :].reshape(count, leaves, 2)
        metadata = parquet.read_metadata(pa.BufferReader(info[16 + table.nbytes :]))
        return cls(metadata, groups, rows, chunks)


def _leaves(metadata: parquet.FileMetaData, columns: Sequence[str] | None) -> list[int]:
    """Return the numbers of the chunks that columns consist of; InputError for unknown ones."""
    schema, first, leaves = metadata.schema.to_arrow_schema(), 0, {}
    check_names(schema.names, None)
    if columns is not None:
        check_names(schema.names, columns)
    for each in schema:
        leaves[each.name] = range(first, first := first + _width(each.type))
    if first != metadata.num_columns or not first:
        raise ValueError(f"{first} columns instead of {metadata.num_columns}")
    return sorted({at for name in columns or leaves for at in leaves[name]})


def _width(kind: pa.DataType) -> int:
    """Return how many chunks a row group has for a column of a type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _width(kind.storage_type)
    if pa.types.is_map(kind):
        return _width(kind.key_type) + _width(kind.item_type)
    if pa.types.is_dictionary(kind) or not kind.num_fields:
        return 1
    return sum(_width(kind.field(at).type) for at in range(kind.num_fields))


class _RowGroups(BlockDecoder):
    """The row groups of a file, decoded to record batches."""

    def __init__(self, info: bytes, columns: Sequence[str] | None) -> None:
        self._info = _Info.of(info)
        self._metadata = self._info.metadata
        self._leaves = _leaves(self._metadata, columns)
        schema = self._metadata.schema.to_arrow_schema()
        self._names = schema.names if columns is None else [*columns]
        self._schema = pa.schema([schema.field(each) for each in self._names])
        self._is_stream = has_dictionaries(self._schema)

    @property
    def schema(self) -> pa.Schema:
        """See `BlockDecoder`."""
        return self._schema

    def prepared(self, block: int, data: memoryview) -> Any:
        """Return the record batch of a row group, as bytes."""
        rows, chunks = self._info.rows[block], self._info.chunks[block].tolist()
        file, at, nbytes, repeatable = _Stretches(), 0, 0, 0
        for leaf in self._leaves:
            offset, length = chunks[leaf]
            file.stretches[offset] = part = data[at : at + length]
            claims = claims_of(part)
            nbytes += claims.nbytes + _VALUE_BYTES * claims.values
            repeatable, at = repeatable + claims.repeatable, at + length
        if at != len(data):
            raise ValueError(f"a row group of {at:,} bytes instead of {len(data):,}")
        refuse_claim("a row group", nbytes, len(data))
        # Of what may be given again and again, so many rows take a part of what is allowed.
        most = max(most_bytes(len(data)) // max(repeatable, 1), 1)
        batch = self._batch(file, self._info.groups[block], min(most, rows), len(data))
        if batch.num_rows != rows:
            raise ValueError(f"{batch.num_rows:,} rows instead of {rows:,}")
        batch.validate(full=True)  # strings of other writers may not be UTF-8
        return bytes_of_batch(batch)

    def _batch(self, file: _Stretches, group: int, rows: int, stored: int) -> pa.RecordBatch:
        """Decode a row group, so many rows at a time."""
        reader = parquet.ParquetFile(
            pa.PythonFile(file, "r"), metadata=self._metadata, pre_buffer=False
        ).reader
        batches, total = [], 0
        for batch in reader.iter_batches(
            rows, row_groups=[group], column_indices=self._leaves, use_threads=False
        ):
            total += batch.nbytes
            refuse_claim("a row group", total, stored)
            batches.append(batch)
        table = pa.Table.from_batches(batches).combine_chunks().select(self._names)
        (found,) = table.cast(self._schema).to_batches()
        return found

    def record_batch(self, block: int, data: memoryview) -> pa.RecordBatch:
        """See `BlockDecoder`."""
        return batch_of_bytes(data, self._schema, self._is_stream)

    def samples(self, block: int, data: memoryview, rows: Sequence[int]) -> list[Any]:
        """See `BlockDecoder`."""
        return self.reader(block, data)(rows)

    def reader(self, block: int, data: memoryview) -> Callable[[Sequence[int]], list[Any]]:
        """See `BlockDecoder`."""
        return partial(samples_of_batch, self.record_batch(block, data))


class _Stretches:
    """A file of which only some stretches are there, as pyarrow reads it: each at once."""

    closed = False

    def __init__(self) -> None:
        self.stretches: dict[int, memoryview] = {}
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = _END if whence else offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read_buffer(self, size: int) -> pa.Buffer:
        found = self.stretches.get(self._at, memoryview(b""))[:size]
        if len(found) < size:
            raise ValueError(f"{size:,} bytes at {self._at:,}, which are in no column")
        self._at += size
        return pa.py_buffer(found)

    read = read_buffer

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        pass
