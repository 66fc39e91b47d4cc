"""Parquet files as shards: a block is a row group, of which the chunks of some columns are read.

    file ── footer ──> chunks: row group x leaf
    chunks ── pyarrow ──> a record batch ──> rows

The footer is all that is read to index a shard, and it is what the index keeps of it. pyarrow may
end the process for a damaged one, so `apart.py` has another process look at it first.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forebay.base.table_files import refuse
from forebay.errors import InputError
from forebay.shards.apart import EndedError, call_apart
from forebay.shards.arrow_rows import MOST_BYTES, BatchDecoder, bytes_of_batch, refuse_claim
from forebay.shards.format import BlockDecoder, FoundBlocks, ShardFile, ShardFormat, check_names

if TYPE_CHECKING:
    from pyarrow import parquet

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_MOST_FOOTER_BYTES = 256 << 20
_AGAIN = "If it is truncated, copy it again; otherwise, write it again."
# Exceptions of pyarrow, which have no common root.
_DAMAGES = (pa.ArrowException, OSError, ValueError, LookupError, RuntimeError, ArithmeticError)
# pyarrow reads so many bytes more of a chunk where the first versions of parquet-mr said too few.
_written = re.compile(r"parquet-mr(?: version (\d+)\.(\d+)\.(\d+))?").match
_FIXED, _PADDING = (1, 2, 9), 100
# Rows that are decoded at once, and where a file ends of which only stretches are there.
_ROWS, _END = 4096, 1 << 62


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
        end = shard.size - 8 - length
        footer = bytes(shard.read(end, length + 8))
        try:
            found = np.load(io.BytesIO(call_apart(find_row_groups, end.to_bytes(8) + footer)))
        except EndedError as error:
            refuse(shard.name, f"its footer ended the process that read it: {error}", _AGAIN, error)
        if words := str(found["error"]):
            raise InputError(f"{shard.name}: {words}")
        arrays = {name: found[name] for name in ("rows", "extents", "nbytes")}
        return FoundBlocks(info=found["info"].tobytes(), **arrays)

    def chosen(
        self, info: bytes, extents: npt.NDArray[np.int64], columns: Sequence[str]
    ) -> npt.NDArray[np.bool_]:
        """See `ShardFormat`."""
        known = FileInfo.of(info)
        is_chosen = np.isin(np.arange(known.leaves), known.chosen(columns))
        return np.tile(is_chosen, len(extents) // known.leaves)

    def decoder(self, info: bytes, columns: Sequence[str] | None) -> BlockDecoder:
        """See `ShardFormat`."""
        return _RowGroups(info, columns)


class FileInfo(NamedTuple):
    """What the index keeps of a file.

    Attributes:
        columns: How many leaves each has, which are chunks of a row group.
        groups: The number of each block's row group, and how many rows it has: [blocks, 2].
        chunks: Offset, bytes, and bytes decompressed of each: [blocks, leaves, 3].
        footer: With its length.
    """

    columns: dict[str, int]
    groups: npt.NDArray[np.int64]
    chunks: npt.NDArray[np.int64]
    footer: bytes

    @classmethod
    def of(cls, info: bytes) -> FileInfo:
        """Return what `to_bytes` wrote; ValueError if that cannot be."""
        begin = 4 + int.from_bytes(info[:4], "little")
        count, columns = json.loads(info[4:begin])
        if not all(isinstance(each, int) and each >= 0 for each in (count, *columns.values())):
            raise ValueError(f"{count} row groups")
        leaves = sum(columns.values())
        numbers = np.frombuffer(info, np.int64, count * (2 + 3 * leaves), begin)
        groups, chunks = numbers[: 2 * count], numbers[2 * count :]
        footer = info[begin + numbers.nbytes :]
        return cls(columns, groups.reshape(-1, 2), chunks.reshape(count, leaves, 3), footer)

    def to_bytes(self) -> bytes:
        """Return it as the index has it."""
        head = json.dumps([len(self.groups), self.columns]).encode()
        head += b" " * (-(4 + len(head)) % 8)
        numbers = self.groups.tobytes() + self.chunks.tobytes()
        return len(head).to_bytes(4, "little") + head + numbers + self.footer

    @property
    def leaves(self) -> int:
        """How many chunks a row group has."""
        return sum(self.columns.values())

    def chosen(self, columns: Sequence[str] | None) -> list[int]:
        """Return the numbers of the chunks of some columns; InputError for unknown ones."""
        check_names([*self.columns], columns)
        found, at = list[int](), 0
        for name, count in self.columns.items():
            found += range(at, at + count) if columns is None or name in columns else ()
            at += count
        return found


def find_row_groups(data: bytes) -> bytes:
    """Return the blocks of a file, as `np.savez` writes arrays, or why it has none.

    Args:
        data: In 8 bytes where the footer begins, and the footer with its length.
    """
    out = io.BytesIO()
    found: dict[str, Any] = {"error": np.array("")}
    try:
        found |= _arrays(data[8:], int.from_bytes(data[:8]))._asdict()
        found["info"] = np.frombuffer(found["info"], np.uint8)
        del found["starts"]
    except InputError as error:
        found = {"error": np.array(str(error))}
    except _DAMAGES as error:
        found = {"error": np.array(f"its footer cannot be read: {error}\n  {_AGAIN}")}
    np.savez(out, **found)
    return out.getvalue()


def _arrays(footer: bytes, end: int) -> FoundBlocks:
    metadata = _metadata_of(footer)
    schema = metadata.schema.to_arrow_schema()
    check_names(schema.names, None)
    columns = {each.name: _leaves(each.type) for each in schema}
    leaves = sum(columns.values())
    if leaves != metadata.num_columns or not leaves:
        raise ValueError(f"{leaves} columns instead of {metadata.num_columns}")
    version = _written(metadata.created_by or "")
    is_short = version and tuple(int(each or 0) for each in version.groups()) < _FIXED
    groups, chunks, nbytes = [], [], []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if not group.num_rows:  # it has no chunks
            continue
        if not 0 < group.num_rows < 1 << 31 or group.num_columns != leaves:
            what = f"{group.num_rows:,} rows and {group.num_columns:,} columns"
            raise ValueError(f"row group {number:,} has {what}")
        for leaf in range(leaves):
            chunk = group.column(leaf)
            if chunk.file_path:
                raise ValueError("columns that are in another file")
            begin, before = chunk.data_page_offset, chunk.dictionary_page_offset or 0
            begin, size = before if 0 < before < begin else begin, chunk.total_compressed_size
            if not 4 <= begin <= end - size < end:
                raise ValueError(f"a column of row group {number:,} lies outside of the file")
            size += min(_PADDING, end - begin - size) if is_short else 0
            chunks.append((begin, size, chunk.total_uncompressed_size))
        groups.append((number, group.num_rows))
        nbytes.append(min(max(group.total_byte_size, 1), MOST_BYTES))
    table = np.array(chunks, np.int64).reshape(len(groups), leaves, 3)
    known = FileInfo(columns, np.array(groups, np.int64).reshape(-1, 2), table, footer)
    block = np.repeat(np.arange(len(groups)), leaves)
    stretches = np.column_stack([block, table[..., :2].reshape(-1, 2)])
    sizes = np.array(nbytes, np.int64)
    return FoundBlocks(known.groups[:, 1], stretches, known.to_bytes(), nbytes=sizes)


def _leaves(kind: pa.DataType) -> int:
    """Return how many chunks a column of a type has."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    parts = [kind.field(at).type for at in range(kind.num_fields)]
    return sum(map(_leaves, parts)) if parts else 1


def _metadata_of(footer: bytes) -> parquet.FileMetaData:
    from pyarrow import BufferReader, parquet  # takes a while, and who only chooses does without

    return parquet.read_metadata(BufferReader(_MAGIC + footer))


class _RowGroups(BatchDecoder):
    """The row groups of a file, decoded to record batches."""

    def __init__(self, info: bytes, columns: Sequence[str] | None) -> None:
        self._info = FileInfo.of(info)
        self._leaves = self._info.chosen(columns)
        self._names = [*self._info.columns] if columns is None else [*columns]

    @cached_property
    def _metadata(self) -> parquet.FileMetaData:
        return _metadata_of(self._info.footer)

    @cached_property
    def schema(self) -> pa.Schema:
        """See `BlockDecoder`."""
        whole = self._metadata.schema.to_arrow_schema()
        return pa.schema([whole.field(each) for each in self._names])

    def prepared(self, block: int, data: memoryview) -> Any:
        """Return the record batch of a row group, as bytes."""
        from pyarrow import parquet

        (group, rows), chunks = self._info.groups[block].tolist(), self._info.chunks[block]
        refuse_claim("a row group", int(chunks[self._leaves, 2].sum()), len(data))
        file, at = _Stretches(), 0
        for leaf in self._leaves:
            begin, size, _ = chunks[leaf].tolist()
            file.stretches[begin], at = data[at : at + size], at + size
        if at != len(data):
            raise ValueError(f"a row group of {at:,} bytes instead of {len(data):,}")
        source = pa.PythonFile(file, "r")
        reader = parquet.ParquetFile(source, metadata=self._metadata, pre_buffer=False).reader
        batches, total = [], 0
        for batch in reader.iter_batches(
            _ROWS, row_groups=[group], column_indices=self._leaves, use_threads=False
        ):
            total += batch.nbytes
            refuse_claim("a row group", total, len(data))
            batches.append(batch)
        table = pa.Table.from_batches(batches).select(self._names).cast(self.schema)
        (batch,) = table.combine_chunks().to_batches()
        if batch.num_rows != rows:
            raise ValueError(f"{batch.num_rows:,} rows instead of {rows:,}")
        batch.validate(full=True)  # strings of other writers may not be UTF-8
        return bytes_of_batch(batch)


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
        found: Any = self.stretches.get(self._at, memoryview(b""))[:size]
        if len(found) < size <= len(found) + _PADDING:
            found = bytes(found).ljust(size, b"\0")
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
