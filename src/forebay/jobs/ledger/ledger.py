"""The ledger: the state of every input of an output folder, in one file with one writer.

    driver ── enrol(listing) ──> inputs: todo ── pending() ──> workers
       │                                                          │
       └─ file changes <── COMMIT: states, claims, file changes ── record(done, failed)

The commit is the only point at which an input becomes done. What has to happen in the folder
after it (renames out of the staging folder, removals) is recorded in the same commit, as file
changes, and a driver that finds file changes performs them again: each is safe to do twice.

The driver holds the folder's lock from `open` to `close`; other processes read through
`forebay.jobs.ledger.snapshot`. A ledger belongs to the thread that opened it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from forebay.errors import LedgerError
from forebay.failures import Failure
from forebay.jobs.ledger.database import (
    FAILED,
    GONE,
    NAME,
    TODO,
    Database,
    chunks,
    counts_in,
    put_meta,
    read_counts,
    reading,
    recount,
    storable,
    write_counts,
)
from forebay.jobs.ledger.enrolment import Enrolment, merge
from forebay.jobs.ledger.lock import LOCK_NAME, FolderLock
from forebay.jobs.ledger.name_conflicts import (
    Recorded,
    add_file_changes,
    files_of,
    release,
    settle,
    take_back,
    unpacked,
)
from forebay.jobs.ledger.records import (
    Counts,
    Done,
    FailedInput,
    FileChange,
    Input,
    Todo,
    Unpublished,
)
from forebay.jobs.outputs.output_names import table_name
from forebay.options import TABLE_FORMATS

_PAGE = 4096  # rows a query brings into memory at once
_TODO_PAGE = 1024  # fewer, since the workers wait for the first
_FIRST = -(1 << 63)  # the lowest ordinal there can be


@dataclass(frozen=True, slots=True)
class Result:
    """What the ledger holds of a done input.

    Attributes:
        ordinal: Its place in the listing, from 1.
        source: As in `Input`.
        row: As in `Input`.
        outputs: Name and size in bytes of each file, in the order the function asked for them.
        metadata: A JSON list of objects.
    """

    ordinal: int
    source: str
    row: str | None
    outputs: list[tuple[str, int]]
    metadata: str


class Ledger:
    """The ledger of one output folder; made by `open`, by one driver at a time.

    Every method that changes it is one transaction: on an error, nothing has changed.
    """

    def __init__(self, lock: FolderLock, database: Database) -> None:
        self._lock = lock
        self._database = database

    @classmethod
    def open(cls, folder: Path, command: str = "") -> Self:
        """Open the ledger in `folder`, creating both if missing, and take the folder's lock.

        Args:
            folder: The folder that holds the ledger and the lock and nothing else.
            command: This run's command, for the message to a second driver.

        Raises:
            BusyError: Another driver has it.
            LedgerError: It is damaged, not forebay's, of a newer forebay, or cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(
                f"the folder {folder} cannot be created: {error.strerror}\n"
                "  Nothing was started. Choose an output folder that you can write to."
            ) from error
        lock = FolderLock(folder / LOCK_NAME, command)
        try:
            return cls(lock, Database(folder / NAME, locks=lock.native))
        except BaseException:
            lock.close()
            raise

    def keep_alive(self) -> None:
        """Start a thread that shows other machines that this driver is alive."""
        self._lock.keep_alive()

    def close(self) -> None:
        """Close the file and release the folder; a second call does nothing."""
        try:
            self._database.close()
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_meta(self, key: str) -> str | None:
        """Return the value stored under `key`, or None."""
        rows = self._database.rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def set_meta(self, key: str, value: str) -> None:
        """Store a string under `key`; keys of the ledger itself begin with "_"."""
        with self._database.transaction() as db:
            put_meta(db, key, value)

    def tables(self) -> dict[str, bool]:
        """Return the formats in which a table was written, and whether it is up to date."""
        with reading("tables"):
            found = json.loads(self.get_meta("tables") or "{}")
            return {form: bool(found[form]) for form in TABLE_FORMATS if form in found}

    def set_tables(self, tables: Mapping[str, bool]) -> None:
        """Store what `tables` returns; a table in another format was not written by a run."""
        self.set_meta("tables", json.dumps(dict(tables)))

    def backup(self, path: Path) -> None:
        """Write a copy of everything to a file, replacing it."""
        self._database.backup(path)

    def load(self, path: Path) -> None:
        """Replace the content by that of a copy made by `backup`.

        Raises:
            LedgerError: The copy cannot be used; nothing has changed.
        """
        self._database.load(path)

    def enrol(
        self, listing_inputs: Iterable[Input], columns: Sequence[str], complete: bool
    ) -> Enrolment:
        """Merge a listing, which determines the inputs and their order.

        Args:
            listing_inputs: Read once, to its end. If it raises, nothing has changed.
            columns: The manifest's columns, kept as the JSON list `get_meta("columns")`.
            complete: True if inputs that are not listed are gone; False if the listing was cut
                short, so that they stay, behind those listed.

        Raises:
            InputError: An input is listed twice.
        """
        with self._database.transaction() as db:
            before = db.total_changes
            enrolment = merge(db, listing_inputs, complete)
            if db.total_changes > before:
                recount(db)
            put_meta(db, "columns", json.dumps(list(columns)))
        return enrolment

    def free_contested(self) -> None:
        """Free the names that several inputs claimed, because all of those are tried again."""
        with self._database.transaction() as db:
            if db.execute("SELECT 1 FROM meta WHERE key = '_contested'").fetchone():
                db.execute("DELETE FROM outputs WHERE ordinal IS NULL")
                db.execute("DELETE FROM meta WHERE key = '_contested'")

    def restart(self) -> None:
        """Forget everything; record that the outputs and tables are to be removed."""
        tables = [FileChange(table_name(form)) for form in self.tables()]
        with self._database.transaction() as db:
            add_file_changes(db, tables)
            db.execute(
                "INSERT INTO file_changes SELECT name, NULL FROM outputs WHERE ordinal IS NOT NULL"
            )
            for table in ("outputs", "inputs", "meta"):
                db.execute(f"DELETE FROM {table}")  # noqa: S608

    def counts(self) -> Counts:
        """Return how many inputs are in which state, gone ones aside, in constant time."""
        return counts_in(dict(self._database.rows("SELECT key, value FROM meta")))

    def pending(self, after: int, limit: int) -> list[Todo]:
        """Return the next inputs that have no result, behind ordinal `after` (0: the first)."""
        return self._in_states((TODO, TODO), after, limit)

    def todo(self, last: int, *, failed_only: bool = False) -> Iterator[Todo]:
        """Yield the inputs to be tried in order, up to ordinal `last`.

        Those that failed are among them; they stay failed until another result is recorded.
        """
        after = 0
        states = (FAILED, FAILED) if failed_only else (TODO, FAILED)
        while page := self._in_states(states, after, _TODO_PAGE):
            for each in page:
                after = each.ordinal
                if after > last:
                    return
                yield each

    def _in_states(self, states: tuple[int, int], after: int, limit: int) -> list[Todo]:
        rows = self._database.rows(
            "SELECT ordinal, source, row FROM inputs WHERE ordinal > max(?, 0) "
            "AND state IN (?, ?) ORDER BY ordinal LIMIT ?",
            (after, *states, limit),
        )
        return [Todo(*row) for row in rows]

    def name_of(self, ordinal: int) -> str:
        """Return an input's name for messages: its path, or its row."""
        rows = self._database.rows("SELECT source, row FROM inputs WHERE ordinal = ?", (ordinal,))
        return next((source or row for source, row in rows), "")

    def record(self, done: Sequence[Done], failed: Sequence[FailedInput]) -> Recorded:
        """Commit the results of a batch of inputs that `pending` returned.

        The caller must have done all earlier file changes and made them durable: they are forgotten
        here. Every name may have one claimant; if there are two, in this batch or before, both
        fail, whichever finished first, and their files in the folder are to be removed.

        Raises:
            BusyError: A driver on another machine took the folder over; nothing has changed.
        """
        self._lock.check()
        with self._database.transaction() as db:
            db.execute("DELETE FROM file_changes")
            recorded, more_done, more_failed = settle(db, done, failed)
            counts = read_counts(db)
            now_done, now_failed = counts.done + more_done, counts.failed + more_failed
            write_counts(db, replace(counts, done=now_done, failed=now_failed))
        return recorded

    def take_back(self, unpublished: Sequence[Unpublished]) -> Recorded:
        """Mark the inputs as failed whose files could not be given their names.

        Their other files, if published, are to be removed. Other file changes stay.
        """
        with self._database.transaction() as db:
            recorded = take_back(db, unpublished)
            counts, number = read_counts(db), recorded.withdrawn
            changed = replace(counts, done=counts.done - number, failed=counts.failed + number)
            write_counts(db, changed)
        return recorded

    def file_changes(self) -> list[FileChange]:
        """Return the file changes that are not known to be done, in the order to perform them."""
        return [
            FileChange(*row)
            for row in self._database.rows("SELECT name, staged FROM file_changes ORDER BY rowid")
        ]

    def clear_file_changes(self) -> None:
        """Forget the file changes; call it once they are done and durable."""
        with self._database.transaction() as db:
            db.execute("DELETE FROM file_changes")

    def failures(self, limit: int | None = None) -> Iterator[Failure]:
        """Yield the failures in input order; `source` is the input's path, or its row."""
        sql = (
            "SELECT ordinal, source, row, attempts, seconds, error FROM inputs "
            "WHERE ordinal > ? AND state = 2 ORDER BY ordinal LIMIT ?"
        )
        left = limit
        for _, source, row, attempts, seconds, error in self._paged(sql):
            if left is not None:
                if left <= 0:
                    return
                left -= 1
            yield unpacked(source or row or "", attempts, seconds, error)

    def results(self) -> Iterator[Result]:
        """Yield the done inputs in order; each call starts again."""
        sql = (
            "SELECT ordinal, source, row, outputs, metadata FROM inputs "
            "WHERE ordinal > max(?, 0) AND state = 1 ORDER BY ordinal LIMIT ?"
        )
        with reading("outputs"):
            for ordinal, source, row, outputs, metadata in self._paged(sql):
                yield Result(ordinal, source, row, files_of(outputs), metadata)

    def outputs(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, size in bytes and ordinal of every recorded output, gone inputs' too."""
        sql = (
            "SELECT ordinal, outputs FROM inputs "
            "WHERE ordinal > ? AND outputs IS NOT NULL ORDER BY ordinal LIMIT ?"
        )
        with reading("outputs"):
            for ordinal, outputs in self._paged(sql):
                for name, size in files_of(outputs):
                    yield name, size, ordinal

    def knows(self, name: str) -> bool:
        """Tell whether an input, of this listing or gone, claimed this output name."""
        sql = "SELECT 1 FROM outputs WHERE name = CAST(? AS TEXT)"
        return bool(self._database.rows(sql, (storable(name),)))

    def mark_todo(self, ordinals: Iterable[int]) -> None:
        """Make inputs todo again; free their names and record the removal of their outputs."""
        wanted = list(ordinals)
        with self._database.transaction() as db:
            add_file_changes(db, [FileChange(name) for name in release(db, wanted)])
            for part, marks in chunks(wanted):
                db.execute(
                    f"UPDATE inputs SET state = CASE state WHEN {GONE} THEN {GONE} ELSE 0 END, "  # noqa: S608
                    "attempts = 0, seconds = 0, outputs = NULL, metadata = NULL, error = NULL "
                    f"WHERE ordinal IN ({marks})",
                    part,
                )
            recount(db)

    def _paged(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query by ordinal; no query is open while the caller uses a row."""
        after = _FIRST
        while rows := self._database.rows(sql, (after, _PAGE)):
            yield from rows
            after = rows[-1][0]
