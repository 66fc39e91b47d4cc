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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, NamedTuple

from forebay.errors import InputError
from forebay.jobs.ledger.database import change_counts, storables
from forebay.jobs.ledger.done_blocks import (
    compress_all,
    count_in_blocks,
    expand_all,
    listed_keys,
    listed_rows,
    query_of,
    recount,
)
from forebay.jobs.ledger.duplicates import Duplicate, find_duplicate, listed_twice
from forebay.jobs.ledger.records import Input

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
    """How a listing compared with the ledger.

    Attributes:
        new: Inputs the ledger did not know.
        same: Inputs it knew with the same identity, including those that were gone before.
        changed: Inputs it knew with another identity; they are to be done again.
        gone: Inputs it has that a complete listing no longer names, counted once.
        moved: Inputs of the same identity that have another ordinal now, or were gone before.
    """

    new: int
    same: int
    changed: int
    gone: int
    moved: int = 0


class Merged(NamedTuple):
    """The outcome of `merge`.

    Attributes:
        enrolment: How the listing compared, as far as it was read.
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
    name_of: Callable[[int], str] | None = None,
) -> Merged:
    """Merge a listing into the ledger within the caller's transaction.

    Args:
        db: The ledger.
        listing: The inputs.
        complete: Whether inputs that are not listed are gone.
        ahead: How many new inputs after the known ones are read; the rest is left to `append`.
        is_distinct: Whether no input can be listed twice.
        name_of: Returns the row at an ordinal, if the ledger has only its hash.

    Raises:
        InputError: An input is listed twice, as far as the listing was read to its end.
    """
    remaining = iter(listing)
    known, first, at_end = _skip_known(db, remaining)
    if first is None and not (complete and _count_after(db, known)):
        return Merged(Enrolment(0, known, 0, 0))
    if first is not None and at_end and not _has_gone(db):
        new, rest = append(db, known, chain((first,), remaining), ahead)
        if rest is None and not is_distinct:
            check_distinct(db, name_of, is_late=False)
        return Merged(Enrolment(new, known, 0, 0), rest)
    expand_all(db)
    _load(db, known, remaining if first is None else chain((first,), remaining), name_of)
    enrolment = _rearrange(db, known, complete)
    for table in ("listing", "places", "unlisted", "lifted"):
        db.execute(f"DROP TABLE temp.{table}")
    compress_all(db)
    recount(db)
    return Merged(enrolment)


def extend(
    db: sqlite3.Connection, known: int, more: Iterator[Input], ahead: int | None
) -> Merged | None:
    """Append the rest of a listing whose beginning is known to be that of the ledger.

    Args:
        db: The ledger.
        known: How many inputs it has.
        more: The inputs after them.
        ahead: How many of them to read.

    Returns:
        The outcome; None if inputs that are gone could be among them, so that `merge` has to look.
    """
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
        db: The ledger.
        known: How many inputs it has.
        listing: The new inputs.
        ahead: How many of them to read; None for all.

    Returns:
        How many were appended, and the others; None if there are none.
    """
    new = db.executemany(
        "INSERT INTO inputs(source, row, identity, ordinal) "
        "VALUES(CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT), ?)",
        _numbered(islice(listing, ahead), known),
    ).rowcount
    change_counts(db, total=new)
    following = next(listing, None)
    return new, None if following is None else chain((following,), listing)


def check_distinct(
    db: sqlite3.Connection, name_of: Callable[[int], str] | None, *, is_late: bool
) -> None:
    """Raise InputError if an input is listed twice.

    Args:
        db: A ledger to which the whole listing was appended.
        name_of: Returns the row at an ordinal, if the ledger has only its hash.
        is_late: Whether some inputs were worked on before.
    """

    def keys() -> Iterator[tuple[int, str]]:
        return ((one.ordinal, one.key) for one in listed_rows(query_of(db)))

    found = find_duplicate(listed_keys(query_of(db)), keys())
    if found is None:
        return
    if name_of is not None:
        value, is_row = name_of(found.first), True
        if value != name_of(found.second):
            return  # two rows with one hash
    else:
        rows = listed_rows(query_of(db))
        one = next(one for one in rows if one.ordinal == found.first)
        value, is_row = one.key, one.row is not None
    raise listed_twice(value, is_row, found, is_late=is_late)


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


def _load(
    db: sqlite3.Connection,
    known: int,
    remaining: Iterator[Input],
    name_of: Callable[[int], str] | None,
) -> None:
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
        raise _duplicate(db, name_of) from None


def _duplicate(db: sqlite3.Connection, name_of: Callable[[int], str] | None) -> InputError:
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
    value = source if row is None else row if name_of is None else name_of(first)
    return listed_twice(value, row is not None, found, is_late=False)


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
