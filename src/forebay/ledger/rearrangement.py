"""A listing that differs from the ledger: all of it goes into temporary tables, and SQLite joins.

    listing   position, source, row, identity       what was listed, unique by key
    places    old ordinal -> new ordinal; `what` is how the two compare, see `identity.py`
    lifted    the inputs that move or change, removed from `inputs` before they are inserted again

So memory does not grow with it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from forebay.ledger.database import DONE, TODO, numbered_columns, recount
from forebay.ledger.identity import (
    CHANGED,
    NOT_SEEN,
    RETIMED,
    SAME,
    UNSEEN,
    content_of,
    identity_change,
    merged_identity,
)
from forebay.ledger.records import NAMED, Enrolment, Input, IsAway, SameContents

# In `places`, besides what `identity_change` returns.
_UNLISTED = 4

_KEY = "coalesce({0}row, {0}source)"

# The listing, read again to find an input that is there twice.
LISTED = "SELECT position, source, row FROM listing ORDER BY position"
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


def load_listing(db: sqlite3.Connection, known: int, remaining: Iterator[Input]) -> bool:
    """Put the whole listing into its temporary table: from the ledger what equals it, then new.

    Returns:
        Whether each input is listed once.
    """
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
        numbered_columns(remaining, known),
    )
    try:
        # Built last, by one external sort, which is far faster than sorting at each insertion.
        db.execute(index)
    except sqlite3.IntegrityError:
        return False
    return True


def list_away(db: sqlite3.Connection, known: int, is_away: IsAway) -> None:
    """Add the done files whose folder is away to the loaded listing, in the order of the paths.

    A folder is not away if it was renamed: all of its files are elsewhere, as they were.
    """
    db.create_function("file_name", 1, lambda path: path.rpartition("/")[2], deterministic=True)
    db.execute("CREATE TEMP TABLE away(source TEXT)")
    db.execute("CREATE INDEX temp.listing_identity ON listing(identity)")
    unlisted = db.execute(
        f"SELECT source FROM inputs i WHERE ordinal > ? AND row IS NULL AND state = {DONE} "
        f"AND NOT EXISTS (SELECT 1 FROM listing l WHERE {_KEY.format('l.')} = i.source) "
        "AND NOT EXISTS (SELECT 1 FROM listing l WHERE "
        "l.identity = substr(i.identity, 1, instr(i.identity || '#', '#') - 1) "
        "AND file_name(l.source) = file_name(i.source))",
        (known,),
    )
    gone = (row for row in unlisted if is_away(row[0]))
    if db.executemany("INSERT INTO away VALUES(?)", gone).rowcount > 0:
        db.execute(
            "CREATE TEMP TABLE merged AS SELECT source, row, identity FROM listing "
            "WHERE position > ? UNION ALL SELECT source, NULL, ? FROM away ORDER BY source",
            (known, NOT_SEEN),
        )
        db.execute("DELETE FROM listing WHERE position > ?", (known,))
        db.execute(
            "INSERT INTO listing SELECT ? + rowid, source, row, identity FROM merged", (known,)
        )
        db.execute("DROP TABLE temp.merged")
    db.execute("DROP TABLE temp.away")


def rearrange(
    db: sqlite3.Connection, known: Enrolment, complete: bool, same_contents: SameContents | None
) -> Enrolment:
    """Give each input of the ledger and of the loaded listing its place; drop the listing.

    Args:
        known: The beginning of the listing, which is that of the ledger.
    """
    db.create_function("identity_change", 2, identity_change, deterministic=True)
    db.create_function("merged_identity", 2, merged_identity, deterministic=True)
    db.execute(_MATCH, {"known": known.same})
    # A listing that is read while it is worked on may have named an input twice.
    db.execute(_ONE_MATCH, {"known": known.same})
    # Without a result that could stay, an input has the identity with which it is tried now.
    db.execute(f"UPDATE places SET what = {CHANGED} WHERE what = {UNSEEN} AND NOT {_IS_DONE}")
    retimed = _number(db, f"what = {RETIMED} AND {_IS_DONE}")
    kept = _keep_contents(db, same_contents)
    changed = _number(db, f"what = {CHANGED} AND {_IS_DONE}")
    matched = _number(db, f"what != {CHANGED} OR NOT {_IS_DONE}")
    unseen = _unseen(db)
    unlisted = _place_unlisted(db, known.same, complete)
    moved = _number(db, f"old != new AND new > 0 AND what != {CHANGED}")
    db.execute(_LIFT)
    db.execute(f"DELETE FROM inputs WHERE ordinal IN ({_LIFTED})")
    db.execute("INSERT INTO inputs SELECT * FROM lifted ORDER BY ordinal")
    # A position that is already taken belongs to an input that the ledger had before.
    new = db.execute(
        "INSERT OR IGNORE INTO inputs(ordinal, source, row, identity) "
        "SELECT position, source, row, identity FROM listing WHERE position > ? ORDER BY position",
        (known.same,),
    ).rowcount
    if db.execute("SELECT 1 FROM places WHERE old != new LIMIT 1").fetchone():
        db.execute(
            "UPDATE outputs SET ordinal = (SELECT new FROM places WHERE old = ordinal) "
            "WHERE ordinal IN (SELECT old FROM places WHERE old != new)"
        )
    for table in ("listing", "places", "unlisted", "lifted"):
        db.execute(f"DROP TABLE temp.{table}")
    recount(db)
    return Enrolment(
        new=new,
        same=known.same + matched,
        changed=changed,
        gone=unlisted if complete else 0,
        moved=moved,
        retimed=retimed - kept,
        kept=kept,
        unseen=known.unseen + tuple(at for at, _ in unseen),
        unseen_names=(*known.unseen_names, *(name for _, name in unseen))[:NAMED],
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


def _unseen(db: sqlite3.Connection) -> list[tuple[int, str]]:
    """Return the places of done inputs that cannot be seen, with the names of the first."""
    rows = db.execute(
        f"SELECT new, CASE WHEN row_number() OVER (ORDER BY new) <= {NAMED} "
        "THEN coalesce(nullif(source, ''), row, '') ELSE '' END "
        f"FROM places JOIN listing ON position = new WHERE what = {UNSEEN} ORDER BY new"
    )
    return [*rows]


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
