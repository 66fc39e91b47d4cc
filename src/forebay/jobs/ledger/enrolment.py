"""Merge a listing into the ledger: which inputs are new, changed or gone, and their ordinals.

A listing equal to the ledger is only compared with it. From the first difference on, it goes into
temporary tables and SQLite does the joins, so memory does not grow with the listing:

    listing   position, source, row, identity       what was listed, unique by key
    places    old ordinal -> new ordinal; `what` is 0 same, 1 changed, 2 not listed
    lifted    the inputs that move or change, removed from `inputs` before they are inserted again
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from forebay.errors import InputError
from forebay.jobs.ledger.database import storable, storable_or_none
from forebay.jobs.ledger.records import Input

_SHOWN = 80  # characters of a value in a message

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


def merge(db: sqlite3.Connection, listing: Iterable[Input], complete: bool) -> Enrolment:
    """Merge a listing into the ledger within the caller's transaction."""
    remaining = iter(listing)
    known, first = _skip_known(db, remaining)
    (left,) = db.execute("SELECT count(*) FROM inputs WHERE ordinal > ?", (known,)).fetchone()
    if first is None and not (complete and left):
        return Enrolment(0, known, 0, 0)
    _load(db, known, remaining if first is None else chain((first,), remaining))
    enrolment = _rearrange(db, known, complete)
    for table in ("listing", "places", "unlisted", "lifted"):
        db.execute(f"DROP TABLE temp.{table}")
    return enrolment


def _skip_known(db: sqlite3.Connection, listing: Iterator[Input]) -> tuple[int, Input | None]:
    """Read the listing beside the ledger; return how many are equal, and the first that is not."""
    known = 0
    rows = db.execute("SELECT source, row, identity FROM inputs WHERE ordinal > 0 ORDER BY ordinal")
    try:
        for one in listing:
            if next(rows, None) != (one.source, one.row, one.identity):
                return known, one
            known += 1
    finally:
        rows.close()
    return known, None


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
        "INSERT INTO listing VALUES(?, CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT))",
        (
            (place, storable(one.source), storable_or_none(one.row), storable(one.identity))
            for place, one in enumerate(remaining, known + 1)
        ),
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
    value = source if row is None else row
    shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
    what = "input" if row is None else "row"
    others = number - 1
    more = f" (and so {'is' if others == 1 else 'are'} {others:,} more)" if others else ""
    way = (
        "List each input once."
        if row is None
        else "Remove one of them, or add a column that tells them apart."
    )
    return InputError(
        f"{what} {shown} is listed twice: at positions {first} and {second}{more}\n"
        f"  Nothing was started, and the ledger is unchanged. {way}"
    )


def _rearrange(db: sqlite3.Connection, known: int, complete: bool) -> Enrolment:
    db.execute(_MATCH, {"known": known})
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
