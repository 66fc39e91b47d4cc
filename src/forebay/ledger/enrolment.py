"""A listing, merged with the inputs in the ledger.

A listing equal to the ledger is only compared with it, and new inputs after the known ones are
appended, a page at a time, while earlier ones are worked on. From any other difference on, the
whole listing goes into temporary tables and SQLite does the joins, so memory does not grow with it:

    listing   position, source, row, identity       what was listed, unique by key
    places    old ordinal -> new ordinal; `what` is how the two compare, see `identity.py`
    lifted    the inputs that move or change, removed from `inputs` before they are inserted again

An input has one of four states against the ledger. As it was: its result stays. Not to be seen now:
all that the ledger has of it stays. Changed: it is to be done again, and its outputs stay until
then. No longer listed: it leaves the table, and its outputs stay until `forebay prune`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

from forebay.ledger.database import (
    DONE,
    PAGE,
    TODO,
    change_counts,
    last_ordinal,
    listed_rows,
    query_of,
    recount,
    storables,
)
from forebay.ledger.duplicates import find_duplicate, listed_twice
from forebay.ledger.identity import (
    CHANGED,
    RETIMED,
    SAME,
    UNSEEN,
    content_of,
    identity_change,
    merged_identity,
)
from forebay.ledger.records import Input

# How many of the inputs that cannot be seen are named.
NAMED = 1000

# Yields the numbers of those inputs whose files have the content of the hash beside them.
SameContents = Callable[[Iterable[tuple[int, Input, str]]], Iterator[int]]

# In `places`, besides what `identity_change` returns.
_UNLISTED = 4

_KEY = "coalesce({0}row, {0}source)"

_TABLES = f"""
CREATE TEMP TABLE listing(position INTEGER PRIMARY KEY, source TEXT, row TEXT, identity TEXT);
CREATE TEMP TABLE places(old INTEGER PRIMARY KEY, new INTEGER, what INTEGER, stays INTEGER);
CREATE TEMP TABLE unlisted(n INTEGER PRIMARY KEY, old INTEGER);
CREATE TEMP TABLE lifted AS SELECT * FROM inputs WHERE 0;
CREATE UNIQUE INDEX temp.listing_key ON listing({_KEY.format("")});
"""

# CROSS JOIN keeps the order: each input looks itself up in the listing's index.
_MATCH = f"""
INSERT INTO places
SELECT i.ordinal, l.position, identity_change(i.identity, l.identity),
    i.ordinal = l.position AND l.source = i.source AND l.row IS i.row
FROM inputs i CROSS JOIN listing l ON {_KEY.format("l.")} = {_KEY.format("i.")}
WHERE i.ordinal < 0 OR i.ordinal > :known
"""

_ONE_MATCH = """
DELETE FROM places WHERE new BETWEEN 1 AND :known OR (
    new IN (SELECT new FROM places GROUP BY new HAVING count(*) > 1)
    AND old NOT IN (SELECT max(old) FROM places GROUP BY new))
"""

# Of a changed input the outputs stay, to be replaced by those of its next result.
_LIFT = f"""
INSERT INTO lifted
SELECT p.new,
    CASE WHEN l.position IS NULL OR l.source = '' THEN i.source ELSE l.source END,
    CASE WHEN l.position IS NULL THEN i.row ELSE l.row END,
    CASE WHEN l.position IS NULL THEN i.identity
        WHEN p.what = {CHANGED} THEN l.identity ELSE merged_identity(i.identity, l.identity) END,
    CASE p.what WHEN {CHANGED} THEN {TODO} ELSE i.state END,
    CASE p.what WHEN {CHANGED} THEN 0 ELSE i.attempts END,
    CASE p.what WHEN {CHANGED} THEN 0 ELSE i.seconds END,
    i.outputs,
    CASE p.what WHEN {CHANGED} THEN NULL ELSE i.metadata END,
    CASE p.what WHEN {CHANGED} THEN NULL ELSE i.error END
FROM places p JOIN inputs i ON i.ordinal = p.old LEFT JOIN listing l ON l.position = p.new
WHERE NOT (p.stays AND p.what IN ({SAME}, {UNSEEN}, {_UNLISTED})) ORDER BY p.new
"""

_LIFTED = f"SELECT old FROM places WHERE NOT (stays AND what IN ({SAME}, {UNSEEN}, {_UNLISTED}))"


@dataclass(frozen=True, slots=True)
class Enrolment:
    """How a listing compared with the ledger.

    Attributes:
        same: Inputs whose results stay as they are, `unseen` ones among them.
        changed: Done inputs that hold something else now, and are to be done again.
        retimed: How many of `changed` have the size that they had, and another time.
        kept: Files that have another time and the content that they had; they are in `same`.
        unseen: Done inputs that cannot be seen now.
        unseen_names: The names of the first of these.
    """

    new: int
    same: int
    changed: int
    gone: int
    moved: int = 0
    retimed: int = 0
    kept: int = 0
    unseen: int = 0
    unseen_names: tuple[str, ...] = ()


# How a listing compared, and its new inputs that are still to be appended; None without any.
Merged = tuple[Enrolment, Iterator[Input] | None]


def merge(
    db: sqlite3.Connection,
    listing: Iterable[Input],
    complete: bool,
    ahead: int | None = None,
    is_distinct: bool = False,
    same_contents: SameContents | None = None,
) -> Merged:
    """Merge a listing into the ledger within the caller's transaction."""
    remaining = iter(listing)
    known = _skip_known(db, remaining)
    if known.following is None and not (complete and last_ordinal(db) > known.count):
        return known.enrolment(), None
    rest = remaining if known.following is None else chain((known.following,), remaining)
    if known.following is not None and known.is_all and not _has_gone(db):
        new, more = append(db, known.count, rest, ahead)
        if more is None and not is_distinct:
            check_distinct(db, is_late=False)
        return known.enrolment(new), more
    db.create_function("identity_change", 2, identity_change, deterministic=True)
    db.create_function("merged_identity", 2, merged_identity, deterministic=True)
    _load(db, known.count, rest)
    enrolment = _rearrange(db, known, complete, same_contents)
    for table in ("listing", "places", "unlisted", "lifted"):
        db.execute(f"DROP TABLE temp.{table}")
    recount(db)
    return enrolment, None


def extend(
    db: sqlite3.Connection, known: int, more: Iterator[Input], ahead: int | None
) -> Merged | None:
    """Append the rest of a listing whose beginning is known to be that of the ledger."""
    first = next(more, None)
    if first is None:
        return Enrolment(0, known, 0, 0), None
    if _has_gone(db):
        return None
    new, rest = append(db, known, chain((first,), more), ahead)
    # Even if nothing is left: the whole listing is searched for duplicates at its end.
    return Enrolment(new, known, 0, 0), iter(()) if rest is None else rest


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
    found = find_duplicate(lambda: listed_rows(query_of(db)))
    if found is not None:
        raise listed_twice(found, is_late=is_late)


@dataclass(slots=True)
class _Known:
    """The beginning of a listing, as far as nothing in the ledger changes.

    Attributes:
        following: The first input after it; None at the listing's end.
        is_all: Whether the ledger ends before that one.
    """

    count: int = 0
    unseen: int = 0
    unseen_names: tuple[str, ...] = ()
    following: Input | None = None
    is_all: bool = False

    def enrolment(self, new: int = 0) -> Enrolment:
        """Return the enrolment of a listing that continues with new inputs only."""
        unseen = self.unseen, self.unseen_names
        return Enrolment(new, self.count, 0, 0, 0, 0, 0, *unseen)


def _skip_known(db: sqlite3.Connection, listing: Iterator[Input]) -> _Known:
    """Read a listing up to the first input that is not where the ledger has it, or changed."""
    known, names = _Known(), list[str]()
    rows = listed_rows(query_of(db))
    for one in listing:
        row = next(rows, None)
        if row is None or row[1:4] != one:
            found = CHANGED
            if row is not None and row[1:3] == one[:2]:
                found = identity_change(row.identity, one.identity)
            if found == UNSEEN and row is not None and row.state != DONE:
                found = CHANGED  # see `_rearrange`
            if found not in (SAME, UNSEEN):
                known.following, known.is_all = one, row is None
                break
            if found == UNSEEN:
                known.unseen += 1
                names += [one.source or one.row or ""] * (len(names) < NAMED)
        known.count += 1
    known.unseen_names = (*names,)
    return known


def _numbered(listing: Iterator[Input], known: int) -> Iterator[tuple[Any, ...]]:
    """Yield source, row, identity and ordinal in the form in which SQLite stores them."""
    ordinals = count(known + 1)
    while page := [*islice(listing, PAGE)]:
        columns = map(storables, zip(*page, strict=True))
        yield from zip(*columns, ordinals, strict=False)  # the ordinals have no end


def _has_gone(db: sqlite3.Connection) -> bool:
    """Return whether there are inputs that are gone: a listing could name some of them again."""
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
        rows = "SELECT position, source, row FROM listing ORDER BY position"
        found = find_duplicate(lambda: db.execute(rows))
        assert found is not None, "the index found one"
        raise listed_twice(found, is_late=False) from None


def _rearrange(
    db: sqlite3.Connection, known: _Known, complete: bool, same_contents: SameContents | None
) -> Enrolment:
    db.execute(_MATCH, {"known": known.count})
    # A listing that is read while it is worked on may have named an input twice.
    db.execute(_ONE_MATCH, {"known": known.count})
    # Without a result that could stay, an input has the identity with which it is tried now.
    db.execute(f"UPDATE places SET what = {CHANGED} WHERE what = {UNSEEN} AND NOT {_IS_DONE}")
    retimed = _number(db, f"what = {RETIMED} AND {_IS_DONE}")
    kept = _keep_contents(db, same_contents)
    changed = _number(db, f"what = {CHANGED} AND {_IS_DONE}")
    matched = _number(db, f"what != {CHANGED} OR NOT {_IS_DONE}")
    unseen, names = _unseen(db)
    unlisted = _place_unlisted(db, known.count, complete)
    moved = _number(db, f"old != new AND new > 0 AND what != {CHANGED}")
    db.execute(_LIFT)
    db.execute(f"DELETE FROM inputs WHERE ordinal IN ({_LIFTED})")
    db.execute("INSERT INTO inputs SELECT * FROM lifted ORDER BY ordinal")
    # A position that is already taken belongs to an input that the ledger had before.
    new = db.execute(
        "INSERT OR IGNORE INTO inputs(ordinal, source, row, identity) "
        "SELECT position, source, row, identity FROM listing WHERE position > ? ORDER BY position",
        (known.count,),
    ).rowcount
    if db.execute("SELECT 1 FROM places WHERE old != new LIMIT 1").fetchone():
        db.execute(
            "UPDATE outputs SET ordinal = (SELECT new FROM places WHERE old = ordinal) "
            "WHERE ordinal IN (SELECT old FROM places WHERE old != new)"
        )
    return Enrolment(
        new=new,
        same=known.count + matched,
        changed=changed,
        gone=unlisted if complete else 0,
        moved=moved,
        retimed=retimed - kept,
        kept=kept,
        unseen=known.unseen + unseen,
        unseen_names=(*known.unseen_names, *names)[:NAMED],
    )


_IS_DONE = f"(SELECT state FROM inputs WHERE ordinal = old) = {DONE}"


def _number(db: sqlite3.Connection, where: str) -> int:
    """Return the number of places for which this holds."""
    (found,) = db.execute(f"SELECT count(*) FROM places WHERE {where}").fetchone()
    return int(found)


def _keep_contents(db: sqlite3.Connection, same_contents: SameContents | None) -> int:
    """Make RETIMED inputs CHANGED, except done ones whose content is the same; count those."""
    db.execute("CREATE TEMP TABLE kept(old INTEGER PRIMARY KEY)")
    rows = db.execute(
        "SELECT old, l.source, l.row, l.identity, i.identity "
        "FROM places JOIN inputs i ON i.ordinal = old JOIN listing l ON l.position = new "
        f"WHERE what = {RETIMED} AND state = {DONE}"
    )
    hashed = (
        (old, Input(*listed), content)
        for old, *listed, recorded in rows
        if (content := content_of(recorded))
    )
    same = () if same_contents is None else same_contents(hashed)
    number = db.executemany("INSERT INTO kept VALUES(?)", ((old,) for old in same)).rowcount
    db.execute(
        f"UPDATE places SET what = {CHANGED} "
        f"WHERE what = {RETIMED} AND old NOT IN (SELECT old FROM kept)"
    )
    db.execute("DROP TABLE temp.kept")
    return max(number, 0)


def _unseen(db: sqlite3.Connection) -> tuple[int, list[str]]:
    """Return how many done inputs cannot be seen, and the names of the first."""
    where = f"what = {UNSEEN}"
    names = (
        "SELECT coalesce(nullif(source, ''), row, '') FROM places JOIN listing ON position = new "
        f"WHERE {where} ORDER BY new LIMIT {NAMED}"
    )
    return _number(db, where), [name for (name,) in db.execute(names)]


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
        f"INSERT INTO places SELECT old, {place}, {_UNLISTED}, old = {place} FROM unlisted",
        (start, start),
    )
    return int(number)
