"""The inputs in the ledger, compressed while they do not change, and a listing's duplicates."""

from __future__ import annotations

import json
import sqlite3
import tempfile
import zlib
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from forebay.errors import InputError
from forebay.failures import Failure
from forebay.ledger.database import (
    DONE,
    FAILED,
    Query,
    failure_from,
    fetch,
    pages,
    query_in,
    query_of,
    reading,
    select_in,
    storables,
    write_counts,
)
from forebay.ledger.records import Counts

# ---- done blocks ---------------------------------------------------------------------------------
# Blocks of done inputs: the rows of 4,096 consecutive inputs in one compressed row.
#
#     inputs    one row for each input of a block in which anything is still to be done
#     blocks    one row for each block in which every input is done
#
# An input that is done rarely changes again. So a block is compressed by the transaction in which
# the last of its inputs becomes done, which takes about a tenth of the space, and expanded by the
# one in which one of its inputs changes. Everything else in the ledger works on rows of `inputs`.

# Inputs in a block. It is part of the format.
BLOCK = 4096
# A block with more bytes of JSON stays as rows; one that has more is damaged.
LARGEST = 64 << 20
_LAST_BLOCK = 1 << 50

_COLUMNS = "ordinal, source, row, identity, state, attempts, seconds, outputs, metadata, error"
_INSERT = (
    "INSERT INTO inputs VALUES(?, CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT), "
    "?, ?, ?, CAST(? AS TEXT), CAST(? AS TEXT), ?)"
)
_TEXTS = (1, 2, 3, 7, 8)  # the columns of strings
# The types of the columns that are compressed, in their order.
_TYPES: tuple[set[type], ...] = ({str}, {str, type(None)}, {str}, {int}, {int, float}, {str}, {str})


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
    def failure(self) -> Failure | None:
        """Why the input failed; None if it did not."""
        if self.state != FAILED:
            return None
        name = self.source or self.row or ""
        return failure_from(name, self.attempts, self.seconds, self.error or "")


# Calls no Python code, as the class would.
_make_row: Callable[[Iterable[Any]], InputRow] = partial(tuple.__new__, InputRow)


def block_of(ordinal: int) -> int:
    """Return the block of an input: 0 for the first 4,096."""
    return (ordinal - 1) // BLOCK


@contextmanager
def changing(db: sqlite3.Connection, ordinals: Collection[int]) -> Iterator[dict[int, int]]:
    """Make these inputs rows while they change, and yield their states before that."""
    with reading("inputs"):
        blocks = {*map(block_of, ordinals)}
    compressed = "SELECT block, body FROM blocks WHERE block IN ({})"
    for block, body in select_in(db, compressed, sorted(blocks)):
        _expand(db, block, body)
    yield dict(select_in(db, "SELECT ordinal, state FROM inputs WHERE ordinal IN ({})", ordinals))
    rows = "FROM inputs WHERE ordinal BETWEEN ? AND ?"
    for block in blocks:
        # From the end, where most blocks have an input that is not done yet.
        todo = f"SELECT 1 {rows} AND state != {DONE} ORDER BY ordinal DESC LIMIT 1"
        if db.execute(todo, _bounds(block)).fetchone() is None:
            (done,) = db.execute(f"SELECT count(*) {rows}", _bounds(block)).fetchone()
            if done == BLOCK:
                _compress(db, block)


@contextmanager
def changing_all(db: sqlite3.Connection) -> Iterator[None]:
    """Make all inputs rows while they change; compress and count them afterwards."""
    for block, body in _blocks(query_of(db)):
        _expand(db, block, body)
    yield
    sql = (
        f"SELECT (ordinal - 1) / {BLOCK} AS block FROM inputs WHERE ordinal > 0 "
        f"AND state = {DONE} GROUP BY block HAVING count(*) = {BLOCK}"
    )
    for (block,) in db.execute(sql).fetchall():
        _compress(db, block)
    states = dict(db.execute("SELECT state, count(*) FROM inputs WHERE ordinal > 0 GROUP BY state"))
    (blocks,) = db.execute("SELECT count(*) FROM blocks").fetchone()
    compressed = blocks * BLOCK
    total = compressed + sum(states.values())
    write_counts(db, Counts(total, compressed + states.get(DONE, 0), states.get(FAILED, 0)))


def last_ordinal(db: sqlite3.Connection) -> int:
    """Return the highest ordinal of all inputs; 0 if there are none."""
    (row,) = db.execute("SELECT coalesce(max(ordinal), 0) FROM inputs").fetchone()
    (block,) = db.execute("SELECT coalesce(max(block), -1) FROM blocks").fetchone()
    return max(int(row), (int(block) + 1) * BLOCK, 0)


def name_of(query: Query, ordinal: int) -> str:
    """Return an input's name for messages: its path, or its row; "" if there is none."""
    found = query("SELECT source, row FROM inputs WHERE ordinal = ?", (ordinal,))
    if not found:
        block = block_of(ordinal)
        bodies = query("SELECT body FROM blocks WHERE block = ?", (block,))
        found = [_rows(block, body)[(ordinal - 1) % BLOCK][1:3] for (body,) in bodies]
    source, row = found[0] if found else ("", None)
    return source or row or ""


def listed_rows(query: Query, where: str = "1") -> Iterator[InputRow]:
    """Yield the rows of all listed inputs in order, compressed or not, a page at a time."""
    sql = f"SELECT {_COLUMNS} FROM inputs WHERE ordinal > ? AND {where} ORDER BY ordinal LIMIT ?"
    row_pages = ([*map(_make_row, page)] for page in pages(query, sql))
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
        yield from _rows(block, body)[max(last - first + 1, 0) :]
    while rows:
        yield from rows
        rows = next(row_pages, [])


def read_entries(folder: Path) -> Iterator[InputRow]:
    """Yield the listed inputs of a ledger that its driver may have open; see `read_snapshot`."""
    return listed_rows(query_in(folder))


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
    columns = enumerate(zip(*_rows(block, body), strict=True))
    stored = (storables(each) if at in _TEXTS else each for at, each in columns)
    db.executemany(_INSERT, zip(*stored, strict=True))
    db.execute("DELETE FROM blocks WHERE block = ?", (block,))


def _rows(block: int, body: bytes) -> list[InputRow]:
    """Return the rows of a compressed block."""
    with reading("a block of inputs"):
        if not 0 <= block < _LAST_BLOCK:
            raise ValueError(f"block {block}")
        columns = _columns(body)
        first, last = _bounds(block)
        before, after = columns[:3], columns[3:]
        ordinals = range(first, last + 1)
        values = zip(ordinals, *before, repeat(DONE), *after, repeat(None), strict=False)
        return [*map(_make_row, values)]


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


# ---- duplicates ----------------------------------------------------------------------------------
# Find the inputs that a listing names twice, in bounded memory, once the ledger has all of them.
#
# The hashes of the keys are divided into 256 parts, which go to a temporary file when there are
# many: each part is then small enough to be looked through in memory.

_PARTS = 256
# Hashes in memory, of 8 bytes each.
_IN_MEMORY = 1 << 21
# Keys that are counted, if very many are listed twice.
_COUNTED = 10_000
# Characters of a value in a message.
_SHOWN = 80


class Duplicate(NamedTuple):
    """An input that is listed twice.

    Attributes:
        second: Its second place.
        more: How many other inputs are.
    """

    first: int
    second: int
    more: int
    value: str
    is_row: bool


def _repeated(keys: Iterable[str]) -> set[int]:
    """Return the hashes of keys that are there more than once, at most about 10,000 of them."""
    found: set[int] = set()
    parts = [array("q") for _ in range(_PARTS)]
    spilled: list[list[tuple[int, int]]] = [[] for _ in range(_PARTS)]
    with tempfile.SpooledTemporaryFile(max_size=1) as file:
        for held, number in enumerate(map(hash, keys), 1):
            parts[number % _PARTS].append(number)
            if held % _IN_MEMORY == 0:
                for part, places in zip(parts, spilled, strict=True):
                    places.append((file.tell(), part.itemsize * len(part)))
                    file.write(part.tobytes())
                    del part[:]
        for part, places in zip(parts, spilled, strict=True):
            for offset, nbytes in places:
                file.seek(offset)
                part.frombytes(file.read(nbytes))
            if len(set(part)) < len(part):
                found.update(each for each, count in Counter(part).items() if count > 1)
            del part[:]
            if len(found) > _COUNTED:
                break
    return found


def find_duplicate(rows: Callable[[], Iterable[Sequence[Any]]]) -> Duplicate | None:
    """Return the first key that is listed twice; None if there is none.

    Args:
        rows: Returns the inputs from the first on: ordinal, source and row of each.
    """
    suspected = _repeated(each[1] if each[2] is None else each[2] for each in rows())
    if not suspected:
        return None
    firsts: dict[str, int] = {}
    seconds: dict[int, Duplicate] = {}
    for ordinal, source, row, *_ in rows():
        key = source if row is None else row
        if hash(key) in suspected and (first := firsts.setdefault(key, ordinal)) != ordinal:
            seconds.setdefault(first, Duplicate(first, ordinal, 0, key, row is not None))
    if not seconds:
        return None  # different keys with one hash
    return seconds[min(seconds)]._replace(more=len(seconds) - 1)


def listed_twice(found: Duplicate, *, is_late: bool) -> InputError:
    """Return the error for an input that is listed twice."""
    value, is_row = found.value, found.is_row
    shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
    what = "row" if is_row else "input"
    more = f" (and so {'is' if found.more == 1 else 'are'} {found.more:,} more)"
    way = "List each input once, as list(dict.fromkeys(paths)) does."
    if is_row:
        way = (
            "Remove one of them, as drop_duplicates() of pandas does, or add a column that tells "
            "them apart."
        )
    if "://" in value:
        way += " URLs that differ in their credentials alone are the same."
    kept = (
        "The listing was read while its first inputs were worked on."
        if is_late
        else "Nothing was started, and the ledger is unchanged."
    )
    return InputError(
        f"{what} {shown} is listed twice: at positions {found.first} and {found.second}"
        f"{more if found.more else ''}\n  {kept} {way}"
    )
