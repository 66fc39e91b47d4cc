"""The ledger: the state of every input of an output folder, in one file with one writer.

    driver ── enrol(listing) ──> inputs: todo ── todo() ──> workers
       │                                                       │
       └─ file changes <── COMMIT: states, claims, file changes ── record(done, failed)

The commit is the only point at which an input becomes done. What has to happen in the folder
after it (renames out of the staging folder, removals) is recorded in the same commit, as file
changes, and a driver that finds file changes performs them again: each is safe to do twice.

The driver holds the folder's lock from `open` to `close`; other processes read through
`forebay.ledger.database`. A ledger belongs to the thread that opened it.
"""

from __future__ import annotations

import json
import sqlite3
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from forebay.base.output_names import table_name
from forebay.failures import Failure
from forebay.ledger.database import (
    DONE,
    IS_TODO,
    PAGE,
    UNLISTED,
    InputRow,
    check_outputs,
    chunks,
    counts_in,
    failures_in,
    files_of,
    in_words,
    input_name,
    last_ordinal,
    listed_rows,
    outputs_of,
    pages,
    put_meta,
    reading,
    select_in,
    storable,
)
from forebay.ledger.enrolment import Merged, ReadAhead, SeenKeys, check_distinct, extend, merge
from forebay.ledger.ledger_file import LedgerFile
from forebay.ledger.leftovers import GONE, LISTED_AND_FAILED, SEEN_AND_FAILED
from forebay.ledger.lock import FolderLock
from forebay.ledger.records import (
    Counts,
    Done,
    Enrolment,
    FailedInput,
    FileChange,
    Input,
    IsAway,
    SameContents,
    SecretInput,
    Todo,
    Unpublished,
    key_of,
)
from forebay.ledger.results import (
    Recorded,
    add_file_changes,
    drop,
    forget_results,
    mark_todo,
    record_results,
    take_back,
    too_large,
)

# The identity of inputs that a run has to do anew, and the key that is there until it ends.
_ANEW = "_anew"
# The keys of what a run that begins anew has to know: its own files, and the copies of the ledger.
_OF_FILES = "('tables', 'lineage', 'generation', '_counts')"
# The fingerprint of the manifest that was listed; none if its rows name files, which could change.
_MANIFEST = "_manifest"
# Whether inputs of the last listing had credentials.
_PRIVATE = "_private"
# How many inputs of a listing are read at once while earlier ones are worked on.
READ_ON = 4096
# What opens the inputs that have credentials: only this process has it. SQLite keeps it in memory,
# and what does not fit in a file without a name.
_OPENERS = "CREATE TEMP TABLE openers(key TEXT PRIMARY KEY, opens TEXT) WITHOUT ROWID"
_SELECT_TODO = "SELECT ordinal, source, row, NULL FROM inputs WHERE"
_SELECT_TODO_OPENED = (
    "SELECT ordinal, source, row, opens FROM inputs LEFT JOIN temp.openers "
    "ON key = coalesce(row, source) WHERE"
)
# Calls no Python code, as the class would.
_make_todo: Callable[[Iterable[Any]], Todo] = partial(tuple.__new__, Todo)
_TODO_PAGE = 1024  # rows that `todo` reads at once: few, since the workers wait for the first
_LAST = (1 << 63) - 1


class Ledger(LedgerFile):
    """The ledger of one output folder; made by `open`, by one driver at a time.

    Every method that changes it is one transaction: on an error, nothing has changed.
    """

    def __init__(self, lock: FolderLock, path: Path, *, is_of_run: bool = False) -> None:
        self._ahead = ReadAhead()  # of a listing that is not read to its end
        self._seen: SeenKeys | None = None  # None if no input can be listed twice
        self._fingerprint = ""
        self.away = frozenset[int]()  # the ordinals of done inputs that cannot be seen
        self.rewritten: tuple[int, str] | None = None  # inputs that changed in their calls
        self._has_openers = False  # whether any input of this listing needs one
        super().__init__(lock, path, is_of_run=is_of_run)

    def _prepare(self) -> None:
        super()._prepare()
        self._connection.execute(_OPENERS)

    def enrol(
        self,
        listing_inputs: Iterable[Input],
        columns: Sequence[str],
        complete: bool,
        *,
        ahead: int | None = None,
        is_distinct: bool = False,
        fingerprint: str = "",
        read_on: Callable[[int], Iterator[Input]] | None = None,
        same_contents: SameContents | None = None,
        is_away: IsAway | None = None,
        anew: bool = False,
    ) -> Enrolment:
        """Merge a listing, which determines the inputs and their order.

        Args:
            ahead: How many new inputs to read after those that the ledger has; `todo` reads the
                rest as it is needed. None to read the listing to its end.
            fingerprint: If it is that of the last listing, the inputs that the ledger has are not
                compared. "" to compare them.
            read_on: Returns the rest of a listing with a fingerprint, from an ordinal on.
            same_contents: Finds the files whose time alone differs; None to have each done again.
            is_away: Tells whether the folder of a file that is not listed is away: then what was
                made of it stays. None for inputs that are named one by one.
            anew: Forget the earlier run: every input that can be seen is to be done again. Its
                outputs stay until `drop_replaced`.
        """
        self._fingerprint = fingerprint if complete else ""
        self._has_openers, self._ahead = False, ReadAhead()
        self._seen = None if is_distinct else SeenKeys()
        with self.transaction(is_held=True) as db:
            db.execute("DELETE FROM temp.openers")
            merged: Merged | None = None
            if read_on and self._fingerprint and self.get_meta(_MANIFEST) == fingerprint:
                known = last_ordinal(db)
                more = self._watched(read_on(known + 1))
                merged = extend(db, known, more, ahead, self._seen)
            if merged is None:
                listing = self._watched(listing_inputs)
                contents = None if anew else same_contents
                merged = merge(db, listing, complete, ahead, self._seen, contents, is_away)
            enrolment, rest = merged
            self.away = frozenset(enrolment.unseen)
            if anew:
                self._begin_anew(db, enrolment.unseen)
            put_meta(db, "columns", json.dumps(list(columns)))
            self._ahead.rest = rest
            self._describe_listing(db, is_whole=rest is None)
        return enrolment

    def _watched(self, listing: Iterable[Input]) -> Iterator[Input]:
        """Yield the inputs; keep what opens them.

        A file that one names may change although the fingerprint does not, and credentials are
        nowhere but in the listing.
        """
        for one in listing:
            if one.identity:
                self._fingerprint = ""
            if isinstance(one, SecretInput):
                self._fingerprint = ""
                self._has_openers = True
                row = key_of(one.source, one.row), one.opens
                self._connection.execute("INSERT OR REPLACE INTO temp.openers VALUES(?, ?)", row)
            yield one

    @property
    def needs_listing(self) -> bool:
        """Return whether inputs have credentials, which only a new listing has."""
        return not self._has_openers and self.get_meta(_PRIVATE) == "1"

    @property
    def is_listed(self) -> bool:
        """Return whether the listing was read to its end."""
        return self._ahead.rest is None

    def _describe_listing(self, db: sqlite3.Connection, *, is_whole: bool) -> None:
        """Record what is known of the listing, and whether the ledger has the whole of it."""
        if is_whole:
            db.execute("DELETE FROM meta WHERE key = ?", (UNLISTED,))
        else:
            put_meta(db, UNLISTED, "1")
        put_meta(db, _MANIFEST, self._fingerprint)
        put_meta(db, _PRIVATE, "1" if self._has_openers else "0")

    def _read_on(self) -> list[Todo]:
        """Read the next page of the listing; at its end, write all that was read."""
        if self._ahead.rest is None:
            return []
        todo, is_whole = self._ahead.read(last_ordinal(self._connection), READ_ON, self._seen)
        if is_whole:
            with self.transaction() as db:
                self._write_ahead(db, self._ahead.last, is_whole=True)
                if self._seen is not None:
                    check_distinct(db, self._seen, is_late=True)
        return todo

    def _write_ahead(
        self,
        db: sqlite3.Connection,
        last: int,
        done: Sequence[Done] = (),
        *,
        is_whole: bool = False,
    ) -> range:
        """Write inputs that were read ahead, up to an ordinal; return their ordinals."""
        self._lock.check()
        if (new := self._ahead.write(db, last, done)) or is_whole:
            self._describe_listing(db, is_whole=is_whole)
        return new

    def write_ahead(self) -> None:
        """Write the inputs that were read ahead, when a run ends before them."""
        if self._ahead.last > last_ordinal(self._connection):
            with self.transaction() as db:
                self._write_ahead(db, self._ahead.last)

    def free_contested(self) -> None:
        """Free the names that several inputs claimed, because all of those are tried again."""
        if self.get_meta("_contested") is not None:
            with self.transaction() as db:
                db.execute("DELETE FROM outputs WHERE ordinal IS NULL")
                db.execute("DELETE FROM meta WHERE key = '_contested'")

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that are no output's."""
        listed, sql = [*names], "SELECT name FROM outputs WHERE name IN ({})"
        with in_words(self._path):
            known = {name for (name,) in select_in(self._connection, sql, listed)}
        return [name for name in listed if name not in known]

    def _begin_anew(self, db: sqlite3.Connection, unseen: Sequence[int]) -> None:
        """Have every input done again, whatever it holds, and forget all else but what is there.

        Args:
            unseen: The ordinals of those whose results stay until they can be seen.
        """
        forget_results(db, _ANEW, unseen)
        put_meta(db, "tables", json.dumps(dict.fromkeys(self.tables(), False)))
        db.execute(f"DELETE FROM meta WHERE key NOT IN {_OF_FILES}")
        put_meta(db, _ANEW, "1")

    @property
    def begins_anew(self) -> bool:
        """Return whether a run that began anew has not come to its end."""
        return self.get_meta(_ANEW) is not None

    def drop_replaced(self) -> None:
        """Record the removal of what a run that began anew has not replaced."""
        with self.transaction() as db:
            rest = f"SELECT ordinal FROM inputs WHERE {GONE} AND {IS_TODO} AND identity = ?"
            drop(db, [ordinal for (ordinal,) in db.execute(rest, (_ANEW,))])
            tables = self.tables()
            stale = [form for form, is_current in tables.items() if not is_current]
            add_file_changes(db, map(FileChange, map(table_name, stale)))
            put_meta(db, "tables", json.dumps({f: True for f in tables if f not in stale}))
            db.execute("DELETE FROM meta WHERE key = ?", (_ANEW,))

    def prune(self, *, failed_too: bool = True, also: Sequence[int] = ()) -> None:
        """Forget inputs that are no longer listed; record the removal of what is left of them.

        Args:
            failed_too: Also of those of changed inputs that failed.
            also: Listed inputs whose results are to be removed, too.
        """
        with self.transaction() as db:
            mark_todo(db, also)
            drop(db, also)
            for where in (GONE, SEEN_AND_FAILED) if failed_too else (GONE,):
                rest = db.execute(f"SELECT ordinal FROM inputs WHERE {where}").fetchall()
                drop(db, [ordinal for (ordinal,) in rest])

    def counts(self) -> Counts:
        """Return how many inputs are in which state, gone ones aside, in constant time."""
        found = counts_in(dict(self.rows("SELECT key, value FROM meta")))
        ahead = max(self._ahead.last - last_ordinal(self._connection), 0)
        return found._replace(total=found.total + ahead)

    def todo(
        self, last: int | None = None, *, failed_only: bool = False, has_failed: bool = True
    ) -> Iterator[Todo]:
        """Yield the inputs to be tried, up to ordinal `last`; None for all.

        Untried ones come first, then those that failed before this call; each group in order. So a
        job that is killed again and again by the time it has tried the failed ones still advances.
        Failed inputs stay failed until another result is recorded.
        """
        end, after = _LAST if last is None else last, 0
        # Now: those that fail from now on are not tried again.
        failed = self.failed_ordinals() if has_failed else array("q")
        while not failed_only:
            page = self._todo_page(
                f"ordinal > ? AND ordinal <= ? AND {IS_TODO} ORDER BY ordinal LIMIT ?",
                (after, end, _TODO_PAGE),
            )
            if not page and max(last_ordinal(self._connection), self._ahead.last) < end:
                page = self._read_on()
            if not page:
                break
            for each in page:
                after = each.ordinal
                yield each
        for some, marks in chunks(failed[: bisect_right(failed, end)]):
            yield from self._todo_page(f"ordinal IN ({marks}) ORDER BY ordinal", some)

    def failed_ordinals(self) -> array[int]:
        """Return the ordinals of the failed inputs, in order."""
        sql = f"SELECT ordinal FROM inputs WHERE {LISTED_AND_FAILED} ORDER BY ordinal"
        with in_words(self._path):
            return array("q", (ordinal for (ordinal,) in self._connection.execute(sql)))

    def _todo_page(self, where: str, parameters: Sequence[int]) -> list[Todo]:
        select = _SELECT_TODO_OPENED if self._has_openers else _SELECT_TODO
        return [*map(_make_todo, self.rows(f"{select} {where}", parameters))]

    def name_of(self, ordinal: int) -> str:
        """Return an input's name for messages: its path, or its row."""
        one = self._ahead.get(ordinal)
        return input_name(self.rows, ordinal) if one is None else one.source or one.row or ""

    def record(
        self, done: Sequence[Done], failed: Sequence[FailedInput], *, is_held: bool = False
    ) -> Recorded:
        """Commit the results of a batch of inputs that `todo` returned.

        The caller must have done all earlier file changes and made them durable: they are forgotten
        here. Every name may have one claimant; if there are two, in this batch or before, both
        fail, whichever finished first, and their files in the folder are to be removed.

        Args:
            is_held: Leave the commit to the next transaction, see `transaction`: of results whose
                work is done again in no time, and that changed no files.
        """
        large = too_large(self._connection, done)
        if large:
            done = [one for one in done if one not in large]
        with self.transaction(is_held=is_held) as db:
            db.execute("DELETE FROM file_changes")
            ordinals = [*(one.ordinal for one in done), *(one.ordinal for one in failed)]
            last = max([*ordinals, *(one.ordinal for one in large)], default=0)
            new = self._write_ahead(db, last, done)
            recorded = record_results(db, done, failed, new, self.away, large)
            if recorded.rewritten:
                count, name = self.rewritten or (0, self.name_of(recorded.rewritten[0]))
                self.rewritten = count + len(recorded.rewritten), name
            return recorded

    def take_back(self, unpublished: Sequence[Unpublished]) -> Recorded:
        """Mark the inputs as failed whose files could not be given their names.

        Their other files, if published, are to be removed. Other file changes stay.
        """
        with self.transaction() as db:
            return take_back(db, unpublished)

    def file_changes(self) -> list[FileChange]:
        """Return the file changes that are not known to be done, in the order to perform them."""
        return [
            FileChange(*row)
            for row in self.rows("SELECT name, staged FROM file_changes ORDER BY rowid")
        ]

    def clear_file_changes(self) -> None:
        """Forget the file changes; call it once they are done and durable."""
        with self.transaction() as db:
            db.execute("DELETE FROM file_changes")

    def failures(self, limit: int | None = None) -> Iterator[Failure]:
        """Yield the first failures in input order; `source` is the input's path, or its row."""
        return islice(failures_in(self.rows), limit)

    def results(self) -> Iterator[InputRow]:
        """Yield the done inputs in order; each call starts again."""
        with reading("outputs"):
            for each in listed_rows(self.rows, "state = 1"):
                check_outputs(each.outputs)
                yield each

    def metadata(self) -> Iterator[tuple[str, str | None, str]]:
        """Yield source, row and metadata of the done inputs in order; each call starts again."""
        sql = (
            "SELECT ordinal, outputs, source, row, metadata FROM inputs "
            f"WHERE ordinal > ? AND state = {DONE} ORDER BY ordinal LIMIT ?"
        )
        with reading("outputs"):
            for page in pages(self.rows, sql):
                for _, outputs, source, row, metadata in page:
                    if outputs != "[]":
                        check_outputs(outputs)
                    yield source, row, metadata

    def listed(self) -> Iterator[InputRow]:
        """Yield the listed inputs in order, whatever their state."""
        return listed_rows(self.rows)

    def done_outputs(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, size in bytes and ordinal of the outputs of every done input."""
        for each in self.results():
            for name, size in files_of(each.outputs):
                yield name, size, each.ordinal

    def outputs(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, size in bytes and ordinal of every recorded output, also of earlier results.

        Those are of inputs that are no longer listed, or to be done again.
        """
        with reading("outputs"):
            for ordinal, outputs in outputs_of(self.rows, "1"):
                yield from ((name, size, ordinal) for name, size in files_of(outputs))

    def mark_todo(self, ordinals: Iterable[int]) -> int:
        """Make done inputs todo again, whose outputs stay for now; return how many were done."""
        with self.transaction() as db:
            return mark_todo(db, ordinals)

    def listed_outputs(self) -> Iterator[tuple[str, int]]:
        """Yield name and ordinal of every output of a listed input, in the order of the names."""
        sql = (
            "SELECT name, ordinal FROM outputs WHERE name > CAST(? AS TEXT) AND ordinal > 0 "
            "ORDER BY name LIMIT ?"
        )
        after = ""
        while page := self.rows(sql, (storable(after), PAGE)):
            yield from page
            after = page[-1][0]
