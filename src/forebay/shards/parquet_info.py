"""What the index keeps of a Parquet file: its footer, and where the chunks of each block are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.shards.format import check_names
from forebay.shards.parquet_pages import schema_bytes, schema_elements

if TYPE_CHECKING:
    from pyarrow import parquet

MAGIC = b"PAR1"
# How many numbers the index has of a chunk, and of each leaf of a piece: see `parquet_pieces`. One
# of them says that a block is a whole row group.
OF_CHUNK, OF_PIECE, IS_WHOLE = 2, 6, -1


def of_piece(table: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    """Return the chunks of a row group as those of a piece, where the file has pieces."""
    if table.shape[1] == OF_PIECE:
        return table
    whole = np.zeros((len(table), OF_PIECE), np.int64)
    whole[:, 0], whole[:, 2:4], whole[:, 4], whole[:, 5] = table[:, 0], table, IS_WHOLE, rows
    return whole


class FileInfo(NamedTuple):
    """What the index keeps of a file.

    Attributes:
        footer: With its length.
        groups: The number of each block's row group.
        rows: How many rows each has.
        chunks: Blocks x leaves x `OF_CHUNK` or `OF_PIECE`.
    """

    footer: bytes
    groups: list[int]
    rows: list[int]
    chunks: npt.NDArray[np.int64]

    @classmethod
    def of(cls, info: bytes) -> FileInfo:
        """Return what `_found` wrote; ValueError if that cannot be."""
        count, leaves, numbers = np.frombuffer(info, np.int64, 3).tolist()
        is_credible = 0 <= count <= len(info) and 0 < leaves <= len(info)
        if not is_credible or numbers not in (OF_CHUNK, OF_PIECE):
            raise ValueError(f"{count:,} row groups of {leaves:,} columns")
        table = np.frombuffer(info, np.int64, count * (2 + leaves * numbers), 24)
        groups, rows = table[: 2 * count].reshape(2, count).tolist()
        chunks = table[2 * count :].reshape(count, leaves, numbers)
        found = cls(info[24 + table.nbytes :], groups, rows, chunks)
        if (known := found.columns.leaves) != leaves:
            raise ValueError(f"{leaves:,} columns instead of {known:,}")
        return found

    @property
    def columns(self) -> ParquetColumns:
        """The columns of the file."""
        return columns_of(schema_bytes(self.footer))


def metadata_of(footer: bytes) -> parquet.FileMetaData:
    """Return what pyarrow has of a footer with its length."""
    from pyarrow import BufferReader, parquet  # takes a while, and who only chooses does without

    return parquet.read_metadata(BufferReader(MAGIC + footer))


class ParquetColumns(NamedTuple):
    """The columns of a file.

    Attributes:
        chunks: Which chunks each consists of.
        leaves: How many chunks a row group has.
        flat: The chunks that have one value for each row.
    """

    chunks: dict[str, range]
    leaves: int
    flat: frozenset[int]

    def chosen(self, columns: Sequence[str] | None) -> list[int]:
        """Return the numbers of the chunks of some columns; InputError for unknown ones."""
        check_names([*self.chunks], columns)
        return sorted({at for name in columns or self.chunks for at in self.chunks[name]})


@lru_cache(64)
def columns_of(schema: bytes) -> ParquetColumns:
    """Return the columns of a schema, as a footer has it."""
    root, *elements = schema_elements(schema)
    names, chunks, flat, leaves = list[str](), dict[str, range](), set[int](), 0
    # Of the elements around the next one: how many of their parts are left, and if one may repeat.
    around = [(root[1], False)]
    for name, parts, repeats in elements:
        while not around[-1][0]:
            around.pop()
        left, is_repeated = around[-1]
        around[-1] = left - 1, is_repeated
        if len(around) == 1:
            names.append(name)
        if parts:
            around.append((parts, is_repeated or repeats))
            continue
        if not (is_repeated or repeats):
            flat.add(leaves)
        leaves += 1
        first = chunks.setdefault(names[-1], range(leaves - 1, leaves)).start
        chunks[names[-1]] = range(first, leaves)
    check_names(names, None)
    return ParquetColumns(chunks, leaves, frozenset(flat))
