"""A ledger read from outside, while its driver works: no lock is taken and nothing is written.

The driver holds the file exclusively, so a reader opens it as if it could not change
(`immutable`) and then makes sure that it did not, like a seqlock:

    version ─> journal empty? ─> read a page ─> journal empty? ─> the same version?

The driver's journal is not empty from before its first write to a page until after its last, and
every commit changes the version in the file's header. An inconsistent read is detected by one of
the two.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forebay.base.files import open_regular
from forebay.base.formatting import counted, duration
from forebay.errors import BusyError, LedgerError
from forebay.failures import Failure
from forebay.ledger.database import (
    JOURNAL,
    NAME,
    UNLISTED,
    InputRow,
    Query,
    check_tables,
    counts_in,
    failures_in,
    in_words,
    listed_rows,
    open_database,
    reading,
)
from forebay.ledger.lock import LOCK_NAME, Holder, find_holder
from forebay.ledger.records import Counts

# Never takes a lock, never writes, never rolls back a journal.
_READ_ONLY = "mode=ro&immutable=1"
# How long to try, and how long to wait between two attempts. A driver that commits all the time
# leaves the file at rest for some tenths of a millisecond between two commits.
_PATIENCE_S = 10.0
_PAUSE_S = 0.0003

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a ledger at one moment.

    Attributes:
        live: The driver that is running now, or None.
    """

    counts: Counts
    meta: dict[str, str]
    live: Holder | None
    unit: str = "input"
    is_listed: bool = True

    def text(self, now: float) -> str:
        """Describe the state of the run: counts, the process that runs it, the time left."""
        counts, total = self.counts, counted(self.counts.total, self.unit)
        done = f"{counts.done:,} of {total} done"
        if not self.is_listed:
            done = f"{counts.done:,} done of the {total} found so far"
        lines = [f"{done}, {counts.failed:,} failed, {counts.todo:,} to do"]
        if self.live is not None:
            with reading("the run"):
                run = json.loads(self.meta.get("run", "{}"))
                elapsed = max(now - float(run.get("began", now)), 1e-9)
                tried = int(run.get("failed", 0))  # which of them it tried again is not known
                newly_done = counts.done - int(run.get("done", 0))
                rate = max(newly_done + counts.failed - tried, newly_done, 0) / elapsed
                is_known = rate and self.is_listed and not tried
                left = duration(counts.todo / rate) if is_known else "unknown"
            lines.append(f"running: {self.live}")
            lines.append(f"{rate:,.1f} {self.unit}s/s, {left} left")
        elif counts.todo or not self.is_listed:
            lines.append("not running; the same call continues it")
        else:
            lines.append("finished")
        return "\n".join(lines)


def read_snapshot(folder: Path, live: Holder | None = None) -> Snapshot:
    """Read the counts in the ledger of `folder`, whether or not its driver is running."""
    meta, live_here = _read_consistently(
        folder, lambda db: dict(db.execute("SELECT key, value FROM meta"))
    )
    kept = {key: value for key, value in meta.items() if not key.startswith("_")}
    return Snapshot(counts_in(meta), kept, live or live_here, is_listed=UNLISTED not in meta)


def read_failures(folder: Path) -> Iterator[Failure]:
    """Yield the failures in input order, as `read_snapshot` reads: a page at a time."""
    return failures_in(query_in(folder))


def read_entries(folder: Path) -> Iterator[InputRow]:
    """Yield the listed inputs of a ledger that its driver may have open; see `read_snapshot`."""
    return listed_rows(query_in(folder))


def query_in(folder: Path) -> Query:
    """Return a function that reads rows as `read_snapshot` does, each time on its own."""

    def query(sql: str, parameters: Sequence[Any]) -> list[Any]:
        rows, _ = _read_consistently(folder, lambda db: db.execute(sql, parameters).fetchall())
        return rows

    return query


def _read_consistently(
    folder: Path, read: Callable[[sqlite3.Connection], _Found]
) -> tuple[_Found, Holder | None]:
    """Return what `read` finds while nothing changes, and the running driver."""
    path, output = folder / NAME, folder.parent
    try:
        if not path.is_file() or not path.stat().st_size:
            why = "it is not an output folder of forebay's"
            raise LedgerError(
                f"{folder} holds no ledger: {why if output.exists() else f'there is no {output}'}\n"
                "  Name the folder that was given as `output`."
            )
        deadline = time.monotonic() + _PATIENCE_S
        while (found := _try_read(folder, read)) is None:
            if time.monotonic() > deadline:
                raise BusyError(
                    f"the ledger in {folder} is busy: a commit was under way during each attempt "
                    f"to read it, for {duration(_PATIENCE_S)}\n  Try again. If the run was stopped "
                    "within a commit, for example by Ctrl-Z, continue it first."
                )
            time.sleep(_PAUSE_S)
        return found
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} cannot be read: {error.strerror}\n"
            "  Nothing was changed. Check its permissions and the disk."
        ) from error


def _try_read(
    folder: Path, read: Callable[[sqlite3.Connection], _Found]
) -> tuple[_Found, Holder | None] | None:
    """Read the ledger once; None if it was written to meanwhile."""
    path = folder / NAME
    live = find_holder(folder / LOCK_NAME)
    before, quiet = _version(path), _is_quiet(folder)
    if live is not None and not quiet:
        return None
    try:
        with in_words(path):
            found = _read(path, _READ_ONLY, read) if quiet else _read_copy(folder, read)
    except LedgerError:
        # Half-written pages look like damage; it is damage only if there was no write meanwhile.
        if _is_quiet(folder) == quiet and _version(path) == before:
            raise
        return None
    return (found, live) if _is_quiet(folder) == quiet and _version(path) == before else None


def _version(path: Path) -> tuple[bytes, int, int]:
    """Return what changes with a commit (the user version) or a rollback (size and time)."""
    with open_regular(path) as file:
        header, status = file.read(64), os.fstat(file.fileno())
    return header[60:], status.st_size, status.st_mtime_ns


def _is_quiet(folder: Path) -> bool:
    try:
        return (folder / JOURNAL).stat().st_size == 0
    except FileNotFoundError:
        return True


def _read_copy(folder: Path, read: Callable[[sqlite3.Connection], _Found]) -> _Found:
    """Read a ledger whose driver was killed within a commit, which only a copy can roll back."""
    nbytes = (folder / JOURNAL).stat().st_size
    if nbytes > 2 * (folder / NAME).stat().st_size + (1 << 20):  # it has each page once, at most
        raise sqlite3.DatabaseError(f"its journal has {nbytes:,} bytes")
    with tempfile.TemporaryDirectory() as copy:
        for name in (NAME, JOURNAL):
            shutil.copyfile(folder / name, Path(copy, name))
        return _read(Path(copy, NAME), "mode=rw", read)


def _read(path: Path, query: str, read: Callable[[sqlite3.Connection], _Found]) -> _Found:
    with closing(open_database(path, query)) as db:
        check_tables(db, path)
        return read(db)
