"""What the index keeps of a Parquet file: its footer, and where the chunks of each block are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from forebay.shards.format import check_names

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
        footer: Without its length.
        groups: The number of each block's row group.
        rows: How many rows each has.
        chunks: Blocks x leaves x `OF_PIECE`.
        stretches: How many of them each leaf of a block has.
    """

    metadata: parquet.FileMetaData
    footer: bytes
    groups: list[int]
    rows: list[int]
    chunks: npt.NDArray[np.int64]
    stretches: int

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
        chunks = np.array([of_piece(*each) for each in zip(chunks, rows, strict=True)])
        footer = info[24 + table.nbytes :]
        metadata = parquet.read_metadata(pa.BufferReader(MAGIC + footer))
        return cls(metadata, footer[:-8], groups, rows, chunks, min(numbers, 4) // 2)


def columns_of(metadata: parquet.FileMetaData) -> dict[str, range]:
    """Return which chunks each column consists of."""
    schema, first, leaves = metadata.schema.to_arrow_schema(), 0, {}
    check_names(schema.names, None)
    for each in schema:
        leaves[each.name] = range(first, first := first + _width(each.type))
    if first != metadata.num_columns or not first:
        raise ValueError(f"{first} columns instead of {metadata.num_columns}")
    return leaves


def leaves_of_columns(metadata: parquet.FileMetaData, columns: Sequence[str] | None) -> list[int]:
    """Return the numbers of the chunks that columns consist of; InputError for unknown ones."""
    leaves = columns_of(metadata)
    check_names([*leaves], columns)
    return sorted({at for name in columns or leaves for at in leaves[name]})


def flat_leaves(metadata: parquet.FileMetaData) -> set[int]:
    """Return the chunks that have one value for each row."""
    kinds = zip(metadata.schema.to_arrow_schema().types, columns_of(metadata).values(), strict=True)
    return {leaf for kind, leaves in kinds if not _repeats(kind) for leaf in leaves}


def _repeats(kind: pa.DataType) -> bool:
    """Return whether a row may have several values."""
    if isinstance(kind, pa.BaseExtensionType):
        return _repeats(kind.storage_type)
    if not pa.types.is_struct(kind):
        return bool(pa.types.is_nested(kind))
    return any(_repeats(kind.field(at).type) for at in range(kind.num_fields))


def _width(kind: pa.DataType) -> int:
    """Return how many chunks a row group has for a column of a type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _width(kind.storage_type)
    if pa.types.is_map(kind):
        return _width(kind.key_type) + _width(kind.item_type)
    if pa.types.is_dictionary(kind) or not kind.num_fields:
        return 1
    return sum(_width(kind.field(at).type) for at in range(kind.num_fields))
