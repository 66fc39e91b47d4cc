"""A look at a ledger from outside, while its driver works: it takes no lock and writes nothing.

The driver holds the file exclusively, so a reader opens it as if it could not change
(`immutable`) and then makes sure that it did not, like a seqlock:

    version ─> journal empty? ─> read everything ─> journal empty? ─> the same version?

The driver's journal is not empty from before its first write to a page until after its last, and
every commit changes the version in the file's header. Whatever was torn shows in one of the two.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import BusyError, LedgerError
from forebay.failures import Failure
from forebay.jobs.claims import unpacked
from forebay.jobs.counters import counts_in
from forebay.jobs.database import NAME, check, connect, in_words
from forebay.jobs.holder import Holder
from forebay.jobs.lock import LOCK_NAME, find_holder
from forebay.jobs.records import Counts

_JOURNAL = NAME + "-journal"
# Never takes a lock, never writes, never rolls back a journal.
_LOOK = "mode=ro&immutable=1"
_TRIES = 100
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a ledger says at one moment.

    Attributes:
        counts: How many inputs are in which state.
        meta: What the driver keeps with `set_meta`.
        failures: The failures in input order; the `source` of each is the input's path, or its row.
        live: The driver at work now, or None.
    """

    counts: Counts
    meta: dict[str, str]
    failures: list[Failure]
    live: Holder | None


def read_snapshot(folder: Path) -> Snapshot:
    """Read the ledger in `folder` (the one given to `Ledger.open`), driver or no driver.

    Raises:
        BusyError: The driver wrote all the time; a moment later it may be free.
        LedgerError: There is no ledger, or it is damaged, foreign or too new.
    """
    path = folder / NAME
    if not path.is_file() or not path.stat().st_size:
        raise LedgerError(
            f"{folder} holds no ledger: it is not an output folder of forebay's\n"
            "  Name the folder that was given as `output`."
        )
    for _ in range(_TRIES):
        snapshot = _look(folder)
        if snapshot is not None:
            return snapshot
        time.sleep(_PAUSE_S)
    raise BusyError(
        f"the ledger in {folder} is busy: it changed at each of {_TRIES} looks\n"
        "  Nothing is wrong with the run. Try again."
    )


def _look(folder: Path) -> Snapshot | None:
    """Read the ledger once; None if somebody wrote meanwhile."""
    path = folder / NAME
    try:
        before = _version(path)
        live = find_holder(folder / LOCK_NAME)
        quiet = _is_quiet(folder)
        if live is not None and not quiet:
            return None
        try:
            with in_words(path):
                snapshot = _read(path, _LOOK, live) if quiet else _read_copy(folder)
        except LedgerError:
            # Torn pages look like damage; it is only if nobody wrote meanwhile.
            if _is_quiet(folder) == quiet and _version(path) == before:
                raise
            return None
        return snapshot if _is_quiet(folder) == quiet and _version(path) == before else None
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error.strerror}") from error


def _version(path: Path) -> tuple[bytes, int, int]:
    """What differs after a commit: the header's user version; size and time see a rollback too."""
    with path.open("rb") as file:
        header = file.read(64)
    status = path.stat()
    return header[60:], status.st_size, status.st_mtime_ns


def _is_quiet(folder: Path) -> bool:
    try:
        return (folder / _JOURNAL).stat().st_size == 0
    except FileNotFoundError:
        return True


def _read_copy(folder: Path) -> Snapshot:
    """Read a ledger whose driver was killed within a commit, which only a copy can roll back."""
    with tempfile.TemporaryDirectory() as copy:
        for name in (NAME, _JOURNAL):
            shutil.copyfile(folder / name, Path(copy, name))
        return _read(Path(copy, NAME), "mode=rw", None)


def _read(path: Path, query: str, live: Holder | None) -> Snapshot:
    db = connect(path, query)
    try:
        check(db, path)
        meta = dict(db.execute("SELECT key, value FROM meta"))
        failures = _failures(db)
    finally:
        db.close()
    kept = {key: value for key, value in meta.items() if not key.startswith("_")}
    return Snapshot(counts_in(meta), kept, failures, live)


def _failures(db: sqlite3.Connection) -> list[Failure]:
    rows = db.execute(
        "SELECT source, row, attempts, seconds, error FROM inputs WHERE state = 2 ORDER BY ordinal"
    )
    return [unpacked(source or row or "", *rest) for source, row, *rest in rows]
