"""Parquet files as shards: a block is a row group, of which the chunks of some columns are read.

    file ── footer ──> chunks: row group x column
    chunks ── `parquet_rows` ──> a record batch ──> rows

The footer is all that is read to index a shard, and it is what the index keeps of it. A large row
group is several blocks: see `parquet_pieces`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forebay.base.table_files import refuse
from forebay.shards.arrow_rows import MOST_BYTES
from forebay.shards.format import BlockDecoder, FoundBlocks, ShardFile, ShardFormat
from forebay.shards.parquet_info import (
    MAGIC,
    OF_CHUNK,
    OF_PIECE,
    FileInfo,
    columns_of,
    metadata_of,
    of_piece,
)
from forebay.shards.parquet_pages import row_groups, schema_bytes

_ENCRYPTED = b"PARE"
_MOST_FOOTER_BYTES = 256 << 20
_AGAIN = "If it is truncated, copy it again; otherwise, write it again."
# A footer is of other bytes than those of pyarrow's exceptions, which have no common root.
_DAMAGES = (pa.ArrowException, OSError, ValueError, LookupError, RuntimeError, ArithmeticError)


class ParquetShards(ShardFormat):
    """Parquet files; a sample is a dict of columns."""

    name = "parquet"
    suffixes = (".parquet", ".pq")
    reads_all = False

    def matches(self, head: bytes) -> bool:
        """See `ShardFormat`."""
        return head.startswith(MAGIC)

    def find(self, shard: ShardFile) -> FoundBlocks:
        """See `ShardFormat`."""
        if shard.size < 12:
            refuse(shard.name, f"{shard.size:,} bytes are no Parquet file", _AGAIN)
        tail = bytes(shard.read(shard.size - 8, 8))
        length, magic = int.from_bytes(tail[:4], "little"), tail[4:]
        if magic == _ENCRYPTED:
            refuse(shard.name, "its footer is encrypted", "Write it without encryption.")
        if magic != MAGIC or length > min(shard.size - 12, _MOST_FOOTER_BYTES):
            refuse(shard.name, "it does not end as a Parquet file", _AGAIN)
        footer = bytes(shard.read(shard.size - 8 - length, length + 8))
        try:
            return _found(shard, footer, shard.size - 8 - length)
        except _DAMAGES as error:
            refuse(shard.name, f"its footer cannot be read: {error}", _AGAIN, error)

    def chosen(
        self, info: bytes, extents: npt.NDArray[np.int64], columns: Sequence[str]
    ) -> npt.NDArray[np.bool_]:
        """See `ShardFormat`."""
        known = FileInfo.of(info)
        is_chosen = np.isin(np.arange(known.columns.leaves), known.columns.chosen(columns))
        is_chosen = np.repeat(is_chosen, min(known.chunks.shape[2], 4) // 2)
        return np.tile(is_chosen, len(extents) // len(is_chosen))

    def decoder(self, info: bytes, columns: Sequence[str] | None) -> BlockDecoder:
        """See `ShardFormat`."""
        from forebay.shards.parquet_rows import RowGroups

        return RowGroups(info, columns)


def _found(shard: ShardFile, footer: bytes, end: int) -> FoundBlocks:
    """Return the blocks of a file, given its footer, and where that begins."""
    from forebay.shards.parquet_pieces import pieces_of

    metadata = metadata_of(footer)
    columns = columns_of(schema_bytes(footer[:-8]))
    leaves, names = columns.leaves, metadata.schema.to_arrow_schema().names
    if (leaves, [*columns.chunks]) != (metadata.num_columns, names) or not leaves:
        raise ValueError(f"{leaves} columns instead of {metadata.num_columns}")
    blocks = list[tuple[int, int, int, npt.NDArray[np.int64]]]()
    for group, each in enumerate(row_groups(footer[:-8])):
        if not each.rows:  # it has no chunks
            continue
        if not 0 < each.rows < 1 << 31 or len(each.chunks) != leaves:
            what = f"{each.rows:,} rows and {len(each.chunks):,} columns"
            raise ValueError(f"row group {group:,} has {what}")
        if not all(4 <= at <= end - size < end for at, size in each.chunks):
            raise ValueError(f"a column of row group {group:,} lies outside of the file")
        if group >= metadata.num_row_groups:
            raise ValueError(f"more than {metadata.num_row_groups:,} row groups")
        if (pieces := pieces_of(shard, each, [*columns.chunks.values()], columns.flat)) is not None:
            blocks += [(group, piece.rows, piece.nbytes, piece.leaves) for piece in pieces]
        else:
            blocks.append((group, each.rows, each.nbytes, np.array(each.chunks, np.int64)))
    is_cut = any(table.shape[1] > OF_CHUNK for *_, table in blocks)
    tables = [of_piece(table, rows) if is_cut else table for _, rows, _, table in blocks]
    numbers = OF_PIECE if is_cut else OF_CHUNK
    table = np.array(tables, np.int64).reshape(len(blocks), leaves, numbers)
    groups, rows, nbytes = (np.array([each[at] for each in blocks], np.int64) for at in range(3))
    head = np.array([len(blocks), leaves, numbers, *groups, *rows], np.int64)
    stretches = table[..., :4].reshape(-1, 2)
    number = np.repeat(np.arange(len(blocks)), len(stretches) // max(len(blocks), 1))
    info = b"".join((head.tobytes(), table.tobytes(), footer))
    nbytes = np.clip(nbytes, 1, MOST_BYTES)
    return FoundBlocks(rows, np.column_stack([number, stretches]), info, nbytes=nbytes)
