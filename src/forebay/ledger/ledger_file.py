"""The file of a ledger as its one writer has it: locked, open, changed in transactions, copied."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from forebay.base.output_names import TABLE_FORMATS, table_name
from forebay.errors import LedgerError
from forebay.ledger.database import (
    APPLICATION_ID,
    COMMITS,
    FORMAT,
    NAME,
    STATEMENTS,
    check_tables,
    fetch,
    in_words,
    open_database,
    put_meta,
    reading,
    version_in,
)
from forebay.ledger.lock import LOCK_NAME, FolderLock


class LedgerFile:
    """The SQLite file of one output folder's ledger, and strings in it by key.

    Every method that changes it is one transaction: on an error, nothing has changed.
    """

    def __init__(self, lock: FolderLock, path: Path, *, is_of_run: bool = False) -> None:
        self._lock, self._path, self._is_of_run = lock, path, is_of_run
        self._commits, self._is_held = 0, False
        with in_words(path):
            self._connection = open_database(
                path, "mode=rwc" if lock.native else "mode=rwc&nolock=1"
            )
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self) -> None:
        db = self._connection
        # Needs no shared memory maps (NFS, Lustre); keeps other processes out between commits.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        fresh = check_tables(db, self._path)
        db.execute("PRAGMA journal_mode = TRUNCATE")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA cache_size = -65536")
        db.execute("PRAGMA temp.cache_size = -65536")
        self._commits = version_in(db) % COMMITS
        if fresh:
            with self.transaction(is_held=True):
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                for statement in STATEMENTS:
                    db.execute(statement)

    @classmethod
    def open(cls, folder: Path, command: str = "", call: str = "") -> Self:
        """Open the ledger in `folder`, creating both if missing, and take the folder's lock.

        Args:
            command: This run's command, for the message to a second driver.
            call: Which call it makes, for a second driver that makes the same.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(
                f"the folder {folder} cannot be created: {error.strerror}\n"
                "  Nothing was started. Choose an output folder that you can write to."
            ) from error
        lock = FolderLock(folder / LOCK_NAME, command, call)
        try:
            return cls(lock, folder / NAME, is_of_run=bool(call))
        except BaseException:
            lock.close()
            raise

    def keep_alive(self) -> None:
        """Start a thread that shows other machines that this driver is alive."""
        self._lock.keep_alive()

    def close(self) -> None:
        """Close the file and release the folder; a second call does nothing."""
        try:
            try:
                self.settle()
            finally:
                self._connection.close()
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self, *, is_held: bool = False) -> Iterator[sqlite3.Connection]:
        """Commit what the block does; if it raises, roll it back.

        Args:
            is_held: In a run, leave the commit to the next transaction, or to `settle`: each waits
                for the disk four times. Only for what may be lost if the process is killed before.
        """
        db, was_held = self._connection, self._is_held
        self._is_held = False  # whatever interrupts the block, half of it is never committed
        with in_words(self._path):
            try:
                if not was_held:
                    if db.in_transaction:  # Ctrl-C came before it could be rolled back
                        db.execute("ROLLBACK")
                    db.execute("BEGIN IMMEDIATE")
                db.execute("SAVEPOINT block")
                yield db
                if is_held and self._is_of_run:
                    db.execute("RELEASE block")
                    self._is_held = True
                    return
                self._commits = (self._commits + 1) % COMMITS
                db.execute(f"PRAGMA user_version = {FORMAT * COMMITS + self._commits}")
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # SQLite itself rolls back when a disk is full
                    db.execute("ROLLBACK TO block" if was_held else "ROLLBACK")
                    self._is_held = was_held
                raise

    def settle(self) -> None:
        """Commit what a transaction has left to the next one."""
        if self._is_held:
            with self.transaction():
                pass

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Return all rows of a query; the caller bounds their number with LIMIT."""
        with in_words(self._path):
            return fetch(self._connection, sql, parameters)

    def backup(self, path: Path) -> None:
        """Copy everything as of the last commit to a file, replacing an earlier copy."""
        self.settle()
        path.unlink(missing_ok=True)
        with in_words(path), closing(open_database(path, "mode=rwc")) as copy:
            copy.execute("PRAGMA synchronous = OFF")
            self._connection.backup(copy)

    def load(self, path: Path) -> None:
        """Replace the content by that of a `backup`; if that is unusable, change nothing."""
        self.settle()
        with in_words(path), closing(open_database(path, "mode=ro")) as copy:
            if check_tables(copy, path) or copy.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("the copy is incomplete")
            copy.backup(self._connection)
            self._commits = version_in(self._connection) % COMMITS

    def get_meta(self, key: str) -> str | None:
        """Return the value stored under `key`, or None."""
        rows = self.rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def set_meta(self, key: str, value: str, **others: str) -> None:
        """Store strings under `key` and other keys; the ledger's own keys begin with "_"."""
        with self.transaction() as db:
            for name, text in {key: value, **others}.items():
                put_meta(db, name, text)

    def tables(self) -> dict[str, bool]:
        """Return the formats in which a table was written, and whether it is up to date."""
        with reading("tables"):
            found = json.loads(self.get_meta("tables") or "{}")
            return {form: bool(found[form]) for form in TABLE_FORMATS if form in found}

    def set_tables(self, tables: Mapping[str, bool], **others: str) -> None:
        """Store what `tables` returns, and strings under other keys.

        A table in another format was not written by a run.
        """
        self.set_meta("tables", json.dumps(dict(tables)), **others)

    def mark_tables_stale(self) -> None:
        """Record that no table is up to date, before a run changes anything."""
        with self.transaction(is_held=True) as db:
            put_meta(db, "tables", json.dumps(dict.fromkeys(self.tables(), False)))

    def own_files(self) -> list[str]:
        """Return the names of the files that belong to no input: the tables."""
        return [*map(table_name, self.tables())]

    def forget(self) -> None:
        """Forget everything, of outputs that are no longer there."""
        with self.transaction() as db:
            for table in ("outputs", "inputs", "file_changes", "meta"):
                db.execute(f"DELETE FROM {table}")
