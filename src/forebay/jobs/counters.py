"""How many inputs are in which state: kept in the ledger, so that no one has to count them."""

from __future__ import annotations

import json
import sqlite3

from forebay.jobs.database import DONE, FAILED, put_meta, reading
from forebay.jobs.records import Counts

_KEY = "_counts"


def counts_in(meta: dict[str, str]) -> Counts:
    """Return the counts that the ledger's meta table holds."""
    with reading("counts"):
        total, done, failed = map(int, json.loads(meta.get(_KEY, "[0, 0, 0]")))
        return Counts(total, done, failed)


def read_counts(db: sqlite3.Connection) -> Counts:
    """Return the counts as they are."""
    return counts_in(dict(db.execute("SELECT key, value FROM meta WHERE key = ?", (_KEY,))))


def write_counts(db: sqlite3.Connection, counts: Counts) -> None:
    """Keep the counts; the same transaction changes the states."""
    put_meta(db, _KEY, json.dumps([counts.total, counts.done, counts.failed]))


def recount(db: sqlite3.Connection) -> None:
    """Count once more, where a change went through too many inputs to follow."""
    states = dict(db.execute("SELECT state, count(*) FROM inputs WHERE ordinal > 0 GROUP BY state"))
    total = sum(states.values())
    write_counts(db, Counts(total, states.get(DONE, 0), states.get(FAILED, 0)))
