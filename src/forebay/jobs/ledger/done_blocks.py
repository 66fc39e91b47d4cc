"""Blocks of done inputs: the rows of 4,096 consecutive inputs in one compressed row.

    inputs    one row for each input of a block in which anything is still to be done
    blocks    one row for each block in which every input is done

An input that is done rarely changes again. So a block is compressed by the transaction in which the
last of its inputs becomes done, which takes about a tenth of the space, and expanded by the one in
which one of its inputs changes. Everything else in the ledger works on rows of `inputs`.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

from forebay.jobs.ledger.database import (
    DONE,
    FAILED,
    chunks,
    fetch,
    reading,
    storable,
    storable_or_none,
    write_counts,
)
from forebay.jobs.ledger.records import Counts

# Inputs in a block. It is part of the format.
BLOCK = 4096
# A block with more bytes of JSON stays as rows; one that has more is damaged.
LARGEST = 64 << 20
_PAGE = 4096  # rows a query brings into memory at once
_LAST_BLOCK = 1 << 50

_COLUMNS = "ordinal, source, row, identity, state, attempts, seconds, outputs, metadata, error"
_INSERT = (
    "INSERT INTO inputs VALUES(?, CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT), "
    f"{DONE}, ?, ?, CAST(? AS TEXT), CAST(? AS TEXT), NULL)"
)
_TEXT: frozenset[type] = frozenset({str})
# The types of the columns that are compressed, in their order.
_TYPES: tuple[frozenset[type], ...] = (
    _TEXT,
    frozenset({str, type(None)}),
    _TEXT,
    frozenset({int}),
    frozenset({int, float}),
    _TEXT,
    _TEXT,
)

# Executes SQL with these parameters, and returns all rows.
Query = Callable[[str, Sequence[Any]], list[Any]]


class InputRow(NamedTuple):
    """A row of `inputs`; see the schema in `database.py`."""

    ordinal: int
    source: str
    row: str | None
    identity: str
    state: int
    attempts: int
    seconds: float
    outputs: Any  # a string, unless the ledger is damaged or the input is not done
    metadata: Any
    error: str | None

    @property
    def key(self) -> str:
        """What identifies the input; see `Input.key`."""
        return self.source if self.row is None else self.row


def block_of(ordinal: int) -> int:
    """Return the block of an input: 0 for the first 4,096."""
    return (ordinal - 1) // BLOCK


def compress(db: sqlite3.Connection, ordinals: Iterable[int]) -> None:
    """Pack the blocks of these inputs in which every input is done."""
    rows = "FROM inputs WHERE ordinal BETWEEN ? AND ?"
    for block in {block_of(ordinal) for ordinal in ordinals if ordinal > 0}:
        # From the end, where most blocks have an input that is not done yet.
        todo = f"SELECT 1 {rows} AND state != {DONE} ORDER BY ordinal DESC LIMIT 1"
        if db.execute(todo, _bounds(block)).fetchone() is None:
            (done,) = db.execute(f"SELECT count(*) {rows}", _bounds(block)).fetchone()
            if done == BLOCK:
                _compress(db, block)


def compress_all(db: sqlite3.Connection) -> None:
    """Compress every block in which every input is done."""
    sql = (
        f"SELECT (ordinal - 1) / {BLOCK} AS block FROM inputs WHERE ordinal > 0 "  # noqa: S608
        f"AND state = {DONE} GROUP BY block HAVING count(*) = {BLOCK}"
    )
    for (block,) in db.execute(sql).fetchall():
        _compress(db, block)


def expand(db: sqlite3.Connection, ordinals: Iterable[int]) -> None:
    """Make rows of the compressed blocks that hold these inputs, which are going to change."""
    with reading("inputs"):
        blocks = {*map(block_of, ordinals)}
    for part, marks in chunks(sorted(blocks)):
        found = db.execute(f"SELECT block, body FROM blocks WHERE block IN ({marks})", part)  # noqa: S608
        for block, body in found.fetchall():
            _expand(db, block, body)


def expand_all(db: sqlite3.Connection) -> None:
    """Make rows of all compressed blocks."""
    for block, body in _blocks(query_of(db)):
        _expand(db, block, body)


def count_in_blocks(db: sqlite3.Connection, after: int = 0) -> int:
    """Return how many inputs after an ordinal are in compressed blocks."""
    (whole,) = db.execute(
        "SELECT count(*) FROM blocks WHERE block > ?", (after // BLOCK,)
    ).fetchone()
    begun = db.execute("SELECT 1 FROM blocks WHERE block = ?", (after // BLOCK,)).fetchone()
    return int(whole) * BLOCK + (BLOCK - after % BLOCK if begun else 0)


def recount(db: sqlite3.Connection) -> None:
    """Count all inputs again, after a change of too many of them to keep track."""
    states = dict(db.execute("SELECT state, count(*) FROM inputs WHERE ordinal > 0 GROUP BY state"))
    compressed = count_in_blocks(db)
    total = compressed + sum(states.values())
    write_counts(db, Counts(total, compressed + states.get(DONE, 0), states.get(FAILED, 0)))


def last_ordinal(db: sqlite3.Connection) -> int:
    """Return the highest ordinal of all inputs; 0 if there are none."""
    (row,) = db.execute("SELECT coalesce(max(ordinal), 0) FROM inputs").fetchone()
    (block,) = db.execute("SELECT coalesce(max(block), -1) FROM blocks").fetchone()
    return max(int(row), (int(block) + 1) * BLOCK, 0)


def row_in_block(query: Query, ordinal: int) -> InputRow | None:
    """Return an input's row from its compressed block; None if that is not compressed."""
    found = query("SELECT body FROM blocks WHERE block = ?", (block_of(ordinal),))
    return None if not found else _rows(block_of(ordinal), found[0][0])[(ordinal - 1) % BLOCK]


def listed_rows(query: Query, where: str = "1") -> Iterator[InputRow]:
    """Yield the rows of all listed inputs in order, compressed or not, a page at a time.

    Args:
        query: Executes SQL.
        where: A condition for rows that are in no block; those in blocks are done.
    """
    row_pages = _row_pages(query, where)
    rows = next(row_pages, [])
    last = 0
    for block, body in _blocks(query):
        first, _ = _bounds(block)
        while rows and rows[0].ordinal < first:
            count = bisect_left(rows, first, key=itemgetter(0))
            yield from rows[:count]
            last = rows[count - 1].ordinal
            rows = rows[count:] or next(row_pages, [])
        # A driver may have compressed the block since its rows were read.
        yield from (each for each in _rows(block, body) if each.ordinal > last)
    while rows:
        yield from rows
        rows = next(row_pages, [])


def listed_keys(query: Query) -> Iterator[list[str]]:
    """Yield what identifies the listed inputs, their rows or else their paths, in any order."""
    for _, body in _blocks(query):
        with reading("a block of inputs"):
            source, row, *_ = _columns(body)
        yield [name if text is None else text for name, text in zip(source, row, strict=True)]
    sql = (
        "SELECT ordinal, coalesce(row, source) FROM inputs WHERE ordinal > ? "
        "ORDER BY ordinal LIMIT ?"
    )
    for page in pages(query, sql):
        yield [key for _, key in page]


def query_of(db: sqlite3.Connection) -> Query:
    """Return the `Query` of a connection."""
    return partial(fetch, db)


def pages(query: Query, sql: str, after: int = 0, size: int = _PAGE) -> Iterator[list[Any]]:
    """Yield rows in lists; no query is open while the caller uses them.

    Args:
        query: Executes SQL.
        sql: Selects rows in the order of their first column; its parameters are the number in that
            column after which they begin, and how many there may be.
        after: The first of those numbers.
        size: Rows in memory at once.
    """
    while page := query(sql, (after, size)):
        yield page
        after = page[-1][0]


def _row_pages(query: Query, where: str) -> Iterator[list[InputRow]]:
    sql = f"SELECT {_COLUMNS} FROM inputs WHERE ordinal > ? AND {where} ORDER BY ordinal LIMIT ?"  # noqa: S608
    return ([*map(InputRow._make, page)] for page in pages(query, sql))


def _blocks(query: Query) -> Iterator[tuple[int, bytes]]:
    sql = "SELECT block, body FROM blocks WHERE block > ? ORDER BY block LIMIT ?"
    return (page[0] for page in pages(query, sql, after=-1, size=1))


def _bounds(block: int) -> tuple[int, int]:
    """Return the first and the last ordinal of a block."""
    return block * BLOCK + 1, (block + 1) * BLOCK


def _compress(db: sqlite3.Connection, block: int) -> None:
    rows = fetch(
        db,
        "SELECT source, row, identity, attempts, seconds, outputs, metadata FROM inputs "
        "WHERE ordinal BETWEEN ? AND ? ORDER BY ordinal",
        _bounds(block),
    )
    source, row, identity, attempts, seconds, outputs, metadata = zip(*rows, strict=True)
    with reading("inputs"):
        # More digits than microseconds would be half of a block.
        shorter = [round(each, 6) for each in seconds]
        columns = [source, row, identity, attempts, shorter, outputs, metadata]
        _check_types(columns)
        text = json.dumps(columns, separators=(",", ":")).encode()
    if len(text) > LARGEST:
        return
    db.execute("INSERT INTO blocks VALUES(?, ?)", (block, zlib.compress(text, 1)))
    db.execute("DELETE FROM inputs WHERE ordinal BETWEEN ? AND ?", _bounds(block))


def _expand(db: sqlite3.Connection, block: int, body: bytes) -> None:
    db.executemany(
        _INSERT,
        (
            (
                each.ordinal,
                storable(each.source),
                storable_or_none(each.row),
                storable(each.identity),
                each.attempts,
                each.seconds,
                storable_or_none(each.outputs),
                storable_or_none(each.metadata),
            )
            for each in _rows(block, body)
        ),
    )
    db.execute("DELETE FROM blocks WHERE block = ?", (block,))


def _rows(block: int, body: bytes) -> list[InputRow]:
    """Return the rows of a compressed block.

    Raises:
        LedgerError: It is damaged.
    """
    with reading("a block of inputs"):
        if not 0 <= block < _LAST_BLOCK:
            raise ValueError(f"block {block}")
        columns = _columns(body)
        first, last = _bounds(block)
        source, row, identity, attempts, seconds, outputs, metadata = columns
        return [
            *map(
                InputRow,
                range(first, last + 1),
                source,
                row,
                identity,
                repeat(DONE),
                attempts,
                seconds,
                outputs,
                metadata,
                repeat(None),
            )
        ]


def _columns(body: bytes) -> list[list[Any]]:
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(body, LARGEST + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(text) > LARGEST or not inflate.eof:
        raise ValueError(f"more than {LARGEST:,} bytes, or truncated")
    columns: list[list[Any]] = json.loads(text)
    if [len(each) for each in columns] != [BLOCK] * len(_TYPES):
        raise ValueError("not the columns of 4,096 inputs")
    _check_types(columns)
    return columns


def _check_types(columns: Sequence[Sequence[Any]]) -> None:
    for each, types in zip(columns, _TYPES, strict=True):
        if not types >= {*map(type, each)}:
            raise TypeError("a value of another type")
