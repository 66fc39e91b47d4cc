"""Row groups of Parquet that are too large for a block: cut into pieces of some pages each.

    row group ── offset index, or page headers ──> pages ──> pieces: rows, and each column's pages
    pages of a piece ── a footer that is made for them ──> what pyarrow reads as a row group

Pages of different columns end at different rows, so a piece has all pages that have some of its
rows, and is decoded column by column: what is before its first row is cut off.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.errors import InputError
from forebay.shards.format import ShardFile
from forebay.shards.parquet_pages import (
    I64,
    LIST,
    STRUCT,
    RowGroup,
    elements,
    list_of,
    number,
    page_at,
    page_locations,
    raw_fields,
    struct_of,
)

# What a piece has in memory, about. Row groups of less than twice as much are not cut.
PIECE_BYTES = 64 << 20
# Pieces are not used if they have so many times the bytes of their row group.
_MOST_SHARE = 1.5
_MOST_INDEX = 64 << 20
# What is read of a page to find its header; and if that is longer.
_HEADER_BYTES = 4 << 10, 1 << 20


class Piece(NamedTuple):
    """Some rows of a row group.

    Attributes:
        leaves: For each leaf its dictionary and its pages, each as offset and length; how many rows
            they have before the piece; and how many in all.
    """

    rows: int
    nbytes: int
    leaves: npt.NDArray[np.int64]


class _Pages(NamedTuple):
    """The data pages of a chunk: the first row of each, where they are, and both ends."""

    begin: int
    rows: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


def pieces_of(
    shard: ShardFile, group: RowGroup, columns: Sequence[range], flat: Container[int]
) -> list[Piece] | None:
    """Return a row group in pieces; None if it is small, or its pages do not say where rows are.

    Args:
        columns: The leaves of each column.
        flat: The leaves that have one value for each row.
    """
    if group.nbytes < 2 * PIECE_BYTES:
        return None
    try:
        pages = [_pages_of(shard, group, leaf, leaf in flat) for leaf in range(len(group.chunks))]
    except (ValueError, LookupError, TypeError, InputError):
        return None
    # Where the pages of all leaves of a column begin.
    starts = list[npt.NDArray[np.int64]]()
    for leaves in columns:
        same = pages[leaves[0]].rows
        for leaf in leaves[1:]:
            same = np.intersect1d(same, pages[leaf].rows)
        starts.append(same)
    sizes = [sum(group.chunks[leaf][1] for leaf in leaves) for leaves in columns]
    most = starts[int(np.argmax(sizes))]
    count = min(-(-group.nbytes // PIECE_BYTES), len(most))
    ideal = np.arange(count) * group.rows // count
    cuts = np.unique(np.append(most[np.searchsorted(most, ideal)], group.rows))
    pieces = [
        _piece(begin, end, columns, pages, starts, group) for begin, end in pairwise(cuts.tolist())
    ]
    fetched = sum(int(each.leaves[:, [1, 3]].sum()) for each in pieces)
    return None if len(pieces) < 2 or fetched > _MOST_SHARE * sum(sizes) else pieces


def _piece(
    begin: int,
    end: int,
    columns: Sequence[range],
    pages: Sequence[_Pages],
    starts: Sequence[npt.NDArray[np.int64]],
    group: RowGroup,
) -> Piece:
    table = np.zeros((len(pages), 6), np.int64)
    for leaves, known in zip(columns, starts, strict=True):
        first = int(known[np.searchsorted(known, begin, "right") - 1])
        last = int(known[np.searchsorted(known, end)])
        for leaf in leaves:
            own = pages[leaf]
            low, high = own.places[np.searchsorted(own.rows, [first, last])].tolist()
            before = int(own.places[0]) - own.begin
            table[leaf] = own.begin if before else low, before, low, high - low, begin - first, 0
            table[leaf, 5] = last - first
    share = int(table[:, [1, 3]].sum()) / max(sum(size for _, size in group.chunks), 1)
    return Piece(end - begin, max(int(group.nbytes * share), 1), table)


def _pages_of(shard: ShardFile, group: RowGroup, leaf: int, is_flat: bool) -> _Pages:
    """Return the pages of a chunk; ValueError if it is not known which rows they have."""
    begin, size = group.chunks[leaf]
    at, length = group.indexes[leaf]
    if 0 < length <= _MOST_INDEX:
        found = page_locations(bytes(shard.read(at, length)))
    else:
        found = [*_by_headers(shard, begin, begin + size, is_flat)]
    rows = np.array([*(row for _, _, row in found), group.rows], np.int64)
    places = np.array([*(place for place, _, _ in found), begin + size], np.int64)
    ends = [place + size for place, size, _ in found]
    if not found or rows[0] or (np.diff(rows) < 0).any() or ends != places[1:].tolist():
        raise ValueError("pages that are not behind each other")
    if places[0] < begin:
        raise ValueError("pages outside of their chunk")
    _, first = np.unique(rows, return_index=True)  # a page may have no rows
    return _Pages(begin, rows[first], places[first])


def _by_headers(
    shard: ShardFile, at: int, end: int, is_flat: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield offset, size and first row of each data page of a chunk, by their headers."""
    row = 0
    while at < end:
        for most in _HEADER_BYTES:
            try:
                page = page_at(shard.read(at, min(most, end - at)))
                break
            except IndexError:
                page = None
        if page is None or page.size > end - at:
            raise ValueError("a page header that has no end")
        if page.values is not None:
            rows = page.values if is_flat else page.rows
            if rows is None:
                raise ValueError("pages of lists that do not say how many rows they have")
            yield at, page.size, row
            row += rows
        at += page.size


class PieceFooters:
    """Makes footers of pieces, by which pyarrow reads their pages as a row group.

    Args:
        footer: That of the file, without its length and what is around it.
    """

    def __init__(self, footer: bytes) -> None:
        self._fields, _ = raw_fields(footer, 0)
        self._groups = [*elements(self._fields.pop(4)[1])]
        self._kept = [(field, *self._fields[field]) for field in sorted(self._fields)]

    def footer(self, group: int, rows: int, chunks: Sequence[tuple[int, int, int, int]]) -> bytes:
        """Return the footer of a file with one row group.

        Args:
            group: The one whose columns it has.
            chunks: Of each leaf: how many values its pages have, where they begin, and the bytes of
                its dictionary and of all.
        """
        known = elements(raw_fields(self._groups[group], 0)[0][1][1])
        columns = []
        for each, (values, at, before, length) in zip(known, chunks, strict=True):
            meta = raw_fields(raw_fields(each, 0)[0][3][1], 0)[0]
            numbers = {5: values, 6: length, 7: length, 9: at + before}
            numbers |= {11: at} if before else {}
            parts = [(field, *meta[field]) for field in (1, 2, 3, 4)]
            parts += [(field, I64, number(value)) for field, value in numbers.items()]
            own = struct_of(parts)
            columns.append(struct_of([(2, I64, number(at)), (3, STRUCT, own)]))
        total = number(sum(length for *_, length in chunks))
        parts = [(1, LIST, list_of(columns)), (2, I64, total), (3, I64, number(rows))]
        own = list_of([struct_of(parts)])
        fields = [each for each in self._kept if each[0] != 3]
        fields += [(3, I64, number(rows)), (4, LIST, own)]
        return struct_of(sorted(fields))
