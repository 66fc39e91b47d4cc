"""Merge a listing into the ledger: which inputs are new, changed or gone, and their ordinals.

A listing equal to the ledger is only compared with it, and new inputs after the known ones are
appended, a page at a time, while earlier ones are worked on. From any other difference on, the
whole listing goes into temporary tables and SQLite does the joins, so memory does not grow with it:

    listing   position, source, row, identity       what was listed, unique by key
    places    old ordinal -> new ordinal; `what` is 0 same, 1 changed, 2 not listed
    lifted    the inputs that move or change, removed from `inputs` before they are inserted again
"""

from __future__ import annotations

import sqlite3
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import IO, Any, NamedTuple

from forebay.errors import InputError
from forebay.ledger.database import (
    change_counts,
    compress_all,
    count_in_blocks,
    expand_all,
    listed_keys,
    listed_rows,
    query_of,
    recount,
    storables,
)
from forebay.ledger.records import Input

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
    """

    first: int
    second: int
    more: int


class KeyHashes:
    """The hashes of all keys of a listing."""

    def __init__(self) -> None:
        self._parts = [array("q") for _ in range(_PARTS)]
        self._held = 0
        self._file: IO[bytes] | None = None
        self._spilled: list[list[tuple[int, int]]] = [[] for _ in range(_PARTS)]

    def add(self, keys: Sequence[str]) -> None:
        """Add keys."""
        parts = self._parts
        for number in map(hash, keys):
            parts[number % _PARTS].append(number)
        self._held += len(keys)
        if self._held >= _IN_MEMORY:
            self._spill()

    def repeated(self) -> set[int]:
        """Return hashes that were added more than once, at most about 10,000 of them."""
        found: set[int] = set()
        for part, spilled in zip(self._parts, self._spilled, strict=True):
            numbers = array("q", part)
            for offset, nbytes in spilled:
                assert self._file is not None, "parts are spilled only into the file"
                self._file.seek(offset)
                numbers.frombytes(self._file.read(nbytes))
            if len(set(numbers)) < len(numbers):
                found.update(each for each, count in Counter(numbers).items() if count > 1)
            if len(found) > _COUNTED:
                break
        return found

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        for at, part in enumerate(self._parts):
            body = part.tobytes()
            self._spilled[at].append((self._file.tell(), len(body)))
            self._file.write(body)
            self._parts[at] = array("q")
        self._held = 0


def find_duplicate(
    keys: Iterable[Sequence[str]], again: Iterable[tuple[int, str]]
) -> Duplicate | None:
    """Return the first key that is listed twice; None if there is none."""
    hashes = KeyHashes()
    try:
        for page in keys:
            hashes.add(page)
        suspected = hashes.repeated()
    finally:
        hashes.close()
    if not suspected:
        return None
    firsts: dict[str, int] = {}
    seconds: dict[int, int] = {}
    for ordinal, key in again:
        if hash(key) in suspected:
            first = firsts.setdefault(key, ordinal)
            if first != ordinal:
                seconds.setdefault(first, ordinal)
    if not seconds:
        return None  # different keys with one hash
    first = min(seconds)
    return Duplicate(first, seconds[first], len(seconds) - 1)


def listed_twice(value: str, is_row: bool, found: Duplicate, *, is_late: bool) -> InputError:
    """Return the error for an input that is listed twice."""
    shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
    what = "row" if is_row else "input"
    more = f" (and so {'is' if found.more == 1 else 'are'} {found.more:,} more)"
    kept = (
        "The listing was read while its first inputs were worked on. Completed work is kept."
        if is_late
        else "Nothing was started, and the ledger is unchanged."
    )
    way = (
        "Remove one of them, or add a column that tells them apart."
        if is_row
        else "List each input once."
    )
    return InputError(
        f"{what} {shown} is listed twice: at positions {found.first} and {found.second}"
        f"{more if found.more else ''}\n  {kept} {way}"
    )


# ---- enrolment -----------------------------------------------------------------------------------

_PAGE = 4096  # inputs in memory at once
_KEY = "coalesce({0}row, {0}source)"

_TABLES = f"""
CREATE TEMP TABLE listing(position INTEGER PRIMARY KEY, source TEXT, row TEXT, identity TEXT);
CREATE TEMP TABLE places(old INTEGER PRIMARY KEY, new INTEGER, what INTEGER, stays INTEGER);
CREATE TEMP TABLE unlisted(n INTEGER PRIMARY KEY, old INTEGER);
CREATE TEMP TABLE lifted AS SELECT * FROM inputs WHERE 0;
CREATE UNIQUE INDEX temp.listing_key ON listing({_KEY.format("")});
"""  # noqa: S608

# CROSS JOIN keeps the order: each input looks itself up in the listing's index.
_MATCH = f"""
INSERT INTO places
SELECT i.ordinal, l.position, l.identity != i.identity,
    i.ordinal = l.position AND l.identity = i.identity AND l.source = i.source
FROM inputs i CROSS JOIN listing l ON {_KEY.format("l.")} = {_KEY.format("i.")}
WHERE i.ordinal < 0 OR i.ordinal > :known
"""  # noqa: S608

_ONE_MATCH = """
DELETE FROM places WHERE new BETWEEN 1 AND :known OR (
    new IN (SELECT new FROM places GROUP BY new HAVING count(*) > 1)
    AND old NOT IN (SELECT max(old) FROM places GROUP BY new))
"""

_LIFT = """
INSERT INTO lifted
SELECT p.new,
    CASE p.what WHEN 2 THEN i.source ELSE l.source END,
    CASE p.what WHEN 2 THEN i.row ELSE l.row END,
    CASE p.what WHEN 2 THEN i.identity ELSE l.identity END,
    CASE WHEN p.what = 1 THEN 0 WHEN p.new < 0 THEN 3 WHEN i.state < 3 THEN i.state
        WHEN i.outputs IS NOT NULL THEN 1 WHEN i.error IS NOT NULL THEN 2 ELSE 0 END,
    CASE p.what WHEN 1 THEN 0 ELSE i.attempts END,
    CASE p.what WHEN 1 THEN 0 ELSE i.seconds END,
    CASE p.what WHEN 1 THEN NULL ELSE i.outputs END,
    CASE p.what WHEN 1 THEN NULL ELSE i.metadata END,
    CASE p.what WHEN 1 THEN NULL ELSE i.error END
FROM places p JOIN inputs i ON i.ordinal = p.old LEFT JOIN listing l ON l.position = p.new
WHERE NOT p.stays ORDER BY p.new
"""


@dataclass(frozen=True, slots=True)
class Enrolment:
    """How a listing compared with the ledger."""

    new: int
    same: int
    changed: int
    gone: int
    moved: int = 0


class Merged(NamedTuple):
    """The outcome of `merge`.

    Attributes:
        rest: New inputs that are still to be appended; None if there are none.
    """

    enrolment: Enrolment
    rest: Iterator[Input] | None = None


def merge(
    db: sqlite3.Connection,
    listing: Iterable[Input],
    complete: bool,
    ahead: int | None = None,
    is_distinct: bool = False,
) -> Merged:
    """Merge a listing into the ledger within the caller's transaction."""
    remaining = iter(listing)
    known, first, at_end = _skip_known(db, remaining)
    if first is None and not (complete and _count_after(db, known)):
        return Merged(Enrolment(0, known, 0, 0))
    if first is not None and at_end and not _has_gone(db):
        new, rest = append(db, known, chain((first,), remaining), ahead)
        if rest is None and not is_distinct:
            check_distinct(db, is_late=False)
        return Merged(Enrolment(new, known, 0, 0), rest)
    expand_all(db)
    _load(db, known, remaining if first is None else chain((first,), remaining))
    enrolment = _rearrange(db, known, complete)
    for table in ("listing", "places", "unlisted", "lifted"):
        db.execute(f"DROP TABLE temp.{table}")
    compress_all(db)
    recount(db)
    return Merged(enrolment)


def extend(
    db: sqlite3.Connection, known: int, more: Iterator[Input], ahead: int | None
) -> Merged | None:
    """Append the rest of a listing whose beginning is known to be that of the ledger."""
    first = next(more, None)
    if first is None:
        return Merged(Enrolment(0, known, 0, 0))
    if _has_gone(db):
        return None
    new, rest = append(db, known, chain((first,), more), ahead)
    # Even if nothing is left: the whole listing is searched for duplicates at its end.
    return Merged(Enrolment(new, known, 0, 0), iter(()) if rest is None else rest)


def append(
    db: sqlite3.Connection, known: int, listing: Iterator[Input], ahead: int | None
) -> tuple[int, Iterator[Input] | None]:
    """Append new inputs after the known ones.

    Args:
        ahead: How many of them to read; None for all.
    """
    new = db.executemany(
        "INSERT INTO inputs(source, row, identity, ordinal) "
        "VALUES(CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT), ?)",
        _numbered(islice(listing, ahead), known),
    ).rowcount
    change_counts(db, total=new)
    following = next(listing, None)
    return new, None if following is None else chain((following,), listing)


def check_distinct(db: sqlite3.Connection, *, is_late: bool) -> None:
    """Raise InputError if an input is listed twice."""

    def keys() -> Iterator[tuple[int, str]]:
        return ((one.ordinal, one.key) for one in listed_rows(query_of(db)))

    found = find_duplicate(listed_keys(query_of(db)), keys())
    if found is None:
        return
    one = next(one for one in listed_rows(query_of(db)) if one.ordinal == found.first)
    raise listed_twice(one.key, one.row is not None, found, is_late=is_late)


def _skip_known(db: sqlite3.Connection, listing: Iterator[Input]) -> tuple[int, Input | None, bool]:
    """Return how many are equal, the first that is not, and whether the ledger ends before it."""
    known = 0
    rows = listed_rows(query_of(db))
    for one in listing:
        row = next(rows, None)
        if row is None or row[1:4] != one:
            return known, one, row is None
        known += 1
    return known, None, False


def _numbered(listing: Iterator[Input], known: int) -> Iterator[tuple[Any, ...]]:
    """Yield source, row, identity and ordinal in the form in which SQLite stores them."""
    ordinals = count(known + 1)
    while page := [*islice(listing, _PAGE)]:
        columns = map(storables, zip(*page, strict=True))
        yield from zip(*columns, ordinals, strict=False)  # the ordinals have no end


def _count_after(db: sqlite3.Connection, ordinal: int) -> int:
    (rows,) = db.execute("SELECT count(*) FROM inputs WHERE ordinal > ?", (ordinal,)).fetchone()
    return int(rows) + count_in_blocks(db, ordinal)


def _has_gone(db: sqlite3.Connection) -> bool:
    """Tell whether there are inputs that are gone: a listing could name some of them again."""
    return db.execute("SELECT 1 FROM inputs WHERE ordinal < 0 LIMIT 1").fetchone() is not None


def _load(db: sqlite3.Connection, known: int, remaining: Iterator[Input]) -> None:
    """Put the whole listing into its temporary table: from the ledger what equals it, then new."""
    *tables, index, _ = _TABLES.split(";\n")
    for statement in tables:
        db.execute(statement)
    db.execute(
        "INSERT INTO listing SELECT ordinal, source, row, identity FROM inputs "
        "WHERE ordinal BETWEEN 1 AND ?",
        (known,),
    )
    db.executemany(
        "INSERT INTO listing(source, row, identity, position) "
        "VALUES(CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT), ?)",
        _numbered(remaining, known),
    )
    try:
        # Built last, by one external sort, which is far faster than sorting at each insertion.
        db.execute(index)
    except sqlite3.IntegrityError:
        raise _duplicate(db) from None


def _duplicate(db: sqlite3.Connection) -> InputError:
    key = _KEY.format("")
    groups = f"SELECT min(position) AS first FROM listing GROUP BY {key} HAVING count(*) > 1"  # noqa: S608
    number, first = db.execute(f"SELECT count(*), min(first) FROM ({groups})").fetchone()  # noqa: S608
    source, row = db.execute(
        "SELECT source, row FROM listing WHERE position = ?", (first,)
    ).fetchone()
    (second,) = db.execute(
        f"SELECT min(position) FROM listing WHERE position > :first AND {key} = "  # noqa: S608
        f"(SELECT {key} FROM listing WHERE position = :first)",
        {"first": first},
    ).fetchone()
    found = Duplicate(first, second, number - 1)
    return listed_twice(source if row is None else row, row is not None, found, is_late=False)


def _rearrange(db: sqlite3.Connection, known: int, complete: bool) -> Enrolment:
    db.execute(_MATCH, {"known": known})
    # A listing that is read while it is worked on may have named an input twice.
    db.execute(_ONE_MATCH, {"known": known})
    (changed,) = db.execute("SELECT count(*) FROM places WHERE what = 1").fetchone()
    (matched,) = db.execute("SELECT count(*) FROM places").fetchone()
    unlisted = _place_unlisted(db, known, complete)
    (moved,) = db.execute(
        "SELECT count(*) FROM places WHERE old != new AND new > 0 AND what != 1"
    ).fetchone()
    if changed:
        stale = "FROM outputs WHERE ordinal IN (SELECT old FROM places WHERE what = 1)"
        db.execute(f"INSERT INTO file_changes SELECT name, NULL {stale}")
        db.execute(f"DELETE {stale}")
    db.execute(_LIFT)
    db.execute("DELETE FROM inputs WHERE ordinal IN (SELECT old FROM places WHERE NOT stays)")
    db.execute("INSERT INTO inputs SELECT * FROM lifted ORDER BY ordinal")
    # A position that is already taken belongs to an input that the ledger had before.
    new = db.execute(
        "INSERT OR IGNORE INTO inputs(ordinal, source, row, identity) "
        "SELECT position, source, row, identity FROM listing WHERE position > ? ORDER BY position",
        (known,),
    ).rowcount
    if db.execute("SELECT 1 FROM places WHERE old != new LIMIT 1").fetchone():
        db.execute(
            "UPDATE outputs SET ordinal = (SELECT new FROM places WHERE old = ordinal) "
            "WHERE ordinal IN (SELECT old FROM places WHERE old != new)"
        )
    gone = unlisted if complete else 0
    return Enrolment(new, known + matched - changed, changed, gone, moved)


def _place_unlisted(db: sqlite3.Connection, known: int, complete: bool) -> int:
    """Give ordinals to unlisted inputs: negative if gone, else after the listed ones."""
    number = db.execute(
        "INSERT INTO unlisted(old) SELECT ordinal FROM inputs WHERE ordinal > ? "
        "AND ordinal NOT IN (SELECT old FROM places) ORDER BY ordinal",
        (known,),
    ).rowcount
    if complete:
        (lowest,) = db.execute("SELECT min(0, coalesce(min(ordinal), 0)) FROM inputs").fetchone()
        place, start = "? - n", lowest
    else:
        (listed,) = db.execute("SELECT coalesce(max(position), 0) FROM listing").fetchone()
        place, start = "? + n", listed
    db.execute(
        f"INSERT INTO places SELECT old, {place}, 2, old = {place} FROM unlisted",  # noqa: S608
        (start, start),
    )
    return int(number)
