"""Results: on their way from the engine into the ledger and the output folder, and their table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from forebay.base.files import atomic_file
from forebay.base.output_names import path_elsewhere, table_name
from forebay.base.process import wait_until
from forebay.base.table_formats import FORMATS, GROUP_ROWS, NULL, Row, final_kind, widen_rows
from forebay.engine.commands import DeliverResult, Outcome, ReportFailure, ReportRetry
from forebay.errors import FailuresError, OutputError
from forebay.ledger.database import reading
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import Done, FailedInput, FileChange, OutputFile
from forebay.outputs.folder import OutputFolder

# ---- commits -------------------------------------------------------------------------------------
#     collect ──> flush ──> record ──> publish
#       loop      thread     loop       loop, some files at a time
#
# A commit begins half a second after the last one, or sooner when many results wait, so a kill of
# this process costs at most that much finished work, and a result costs little however small it is.
# The flush only waits for the disk, so a thread does it while the loop continues to send tasks. The
# renames are in the loop, which sends tasks between them: a thread of many short system calls waits
# for the interpreter lock at each of them, and took three times as long. One commit is under way at
# a time.

# Seconds, and results, after which a commit is due.
COMMIT_S = 0.5
COMMIT_RESULTS = 1024
# While a commit is in progress, how often the loop checks whether its thread has finished.
CHECK_S = 0.02

# Kinds of failures that end a run, and leave the input to be done by the next one.
NO_FAILURES = ("environment", "stop")

# Records tasks, and the seconds that each took.
Took = Callable[[Sequence[tuple[int, float]]], None]


@dataclass(frozen=True, slots=True)
class Commit:
    """The outcome of one commit."""

    delivered: list[int]
    done: int
    failed: int
    metadata: list[str]
    refused: list[FailedInput]


class Commits:
    """Collects results and commits them, stage by stage, as `advance` is called."""

    def __init__(self, ledger: Ledger, folder: OutputFolder) -> None:
        """Commit into this ledger and this folder."""
        self._ledger = ledger
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "forebay-commits")
        self._done: list[Done] = []
        self._failed: dict[int, FailedInput] = {}
        # Attempts that failed, and are not recorded: a kill during the next attempt must not have
        # the following run begin with this input again.
        self._retrying: dict[int, FailedInput] = {}
        self._flushing: Future[None] | None = None  # for the commit under way
        self._batch = 0  # how many of `_done` are in the commit under way
        self._has_changed = False  # the last commit changed files, which are not flushed yet
        # The rest of the commit under way, once it is recorded. If publishing fails, this stays as
        # an exhausted iterator, so that nothing is recorded: the next `record` would delete file
        # changes that were not performed.
        self._publishing: Iterator[Commit | None] | None = None
        self._last = time.monotonic()
        self.flush_s = 0.0
        # How many outputs the function wrote by itself, and the name of one; None for none.
        self.unstaged: tuple[int, str] | None = None

    def add(self, outcomes: Sequence[Outcome], took: Took) -> list[Outcome]:
        """Add outcomes of the engine to the next commit; return those that are not results.

        Args:
            took: Called with the task and the seconds of each result.
        """
        before, others = len(self._done), []
        for outcome in outcomes:
            if type(outcome) is not DeliverResult:
                others.append(outcome)
                if not isinstance(outcome, ReportRetry | ReportFailure):
                    continue
                if outcome.failure.kind in NO_FAILURES:
                    continue
                if isinstance(outcome, ReportRetry):
                    self._retrying[outcome.task] = _failed(outcome, 0.0)
                else:
                    self._retrying.pop(outcome.task, None)
                    self._failed[outcome.task] = _failed(outcome, outcome.seconds)
                continue
            task, attempt, seconds, _, (written, metadata, content) = outcome
            files = (*map(OutputFile._make, written),) if written else ()
            self._done.append(Done(task, attempt, seconds, files, metadata, content))
            if written and not written[-1][2]:
                self._count_unstaged(files)
            if self._retrying:
                self._retrying.pop(task, None)
        took([(one.ordinal, one.seconds) for one in self._done[before:]])
        return others

    def _count_unstaged(self, files: Sequence[OutputFile]) -> None:
        """Count the outputs that the function wrote by itself; those in a bucket are uploaded."""
        for name, _, staged in reversed(files):
            if staged or not (self._folder.is_local or path_elsewhere(name)):
                return
            count, first = self.unstaged or (0, name)
            self.unstaged = count + 1, first

    @property
    def waiting(self) -> bool:
        """Return whether anything is not committed yet."""
        return bool(self._done or self._failed or self._retrying or self._publishing)

    def due_in(self) -> float | None:
        """Return the seconds until `advance` has something to do; None if nothing waits."""
        if self._publishing is not None:
            return 0.0
        if self._flushing is not None:
            return CHECK_S
        if not self.waiting:
            return None
        return max(self._last + COMMIT_S - time.monotonic(), 0.0)

    def advance(self, at_once: bool = False) -> Commit | None:
        """Begin a commit if one is due, or continue the one under way; return it at its end."""
        try:
            if self._publishing is None:
                if not self._is_flushed(at_once):
                    return None
                self._record()
            for commit in self._publishing or ():
                if commit is not None:
                    self._publishing = None
                    return commit
                if not at_once:
                    break
        except OSError as error:
            raise _unable(error) from error
        return None

    def _is_flushed(self, at_once: bool) -> bool:
        """Begin to flush a batch if a commit is due; tell whether its files are on the disk."""
        count = len(self._done) + len(self._failed) + len(self._retrying)
        if not count:
            return False
        if self._flushing is None:
            if not (at_once or count >= COMMIT_RESULTS or self.due_in() == 0.0):
                return False
            self._batch = len(self._done)
            if self._has_changed or any(one.outputs for one in self._done):
                self._flushing = self._thread.submit(self._flush)
        if not (at_once or self._flushing is None or self._flushing.done()):
            return False
        flushing, self._flushing = self._flushing, None
        if flushing is not None:  # it is None if no input wrote a file
            wait_until(lambda seconds: wait([flushing], seconds).done)
            flushing.result()
        if at_once and self._batch < len(self._done):
            return self._is_flushed(at_once)  # there are more results since that flush began
        return True

    def close(self) -> int:
        """Commit the rest; return the number.

        Nothing is committed after a commit that could not be published: the next run does that.
        """
        committed = 0
        try:
            while (commit := self.advance(at_once=True)) is not None:
                committed += len(commit.delivered) + commit.failed
        finally:
            self._thread.shutdown()
        return committed

    def finish(self) -> None:
        """Flush the files of the last commit, and have the ledger forget their renames.

        Call it after `close`, if nothing was raised. Otherwise the next run does it, which tries
        each of the renames again.
        """
        if not self._has_changed:
            return
        try:
            self._folder.copy_ledger(self._ledger, now=True)
            self._flush()
        except OSError as error:
            raise _unable(error) from error
        self._ledger.clear_file_changes()

    def _flush(self) -> None:
        began = time.monotonic()
        try:
            self._folder.flush()
        finally:
            self.flush_s += time.monotonic() - began

    def _record(self) -> None:
        """Record what was collected when the flush began."""
        delivered, failed = self._done[: self._batch], [*self._failed.values()]
        retrying = [*self._retrying.values()]
        recorded = self._ledger.record(delivered, [*failed, *retrying])
        late = recorded.failed[len(failed) + len(retrying) :]
        self._publishing = self._publish(delivered, len(failed), late, recorded.file_changes)
        self._done, self._failed, self._retrying = self._done[self._batch :], {}, {}

    def _publish(
        self,
        delivered: Sequence[Done],
        failed: int,
        late: Sequence[FailedInput],
        file_changes: Sequence[FileChange],
    ) -> Iterator[Commit | None]:
        """Publish what was recorded; yield None after each part, and the commit at the end."""
        self._has_changed = bool(file_changes)
        while file_changes:
            unpublished = []
            for part in self._folder.perform(file_changes):
                unpublished += part
                yield None
            if not unpublished:
                break
            taken_back = self._ledger.take_back(unpublished)
            late, file_changes = [*late, *taken_back.failed], taken_back.file_changes
        self._folder.copy_ledger(self._ledger)
        self._last = time.monotonic()
        ordinals = [done.ordinal for done in delivered]
        metadata = [done.metadata for done in delivered]
        lost = len(late)
        yield Commit(ordinals, len(delivered) - lost, failed + lost, metadata, [*late])


def perform_pending(ledger: Ledger, folder: OutputFolder) -> list[str]:
    """Perform the file changes that the ledger has pending.

    If a file cannot be given its name, its input is recorded as failed.
    """
    names: list[str] = []
    try:
        while file_changes := ledger.file_changes():
            # Otherwise an older copy would list outputs that no longer exist.
            folder.copy_ledger(ledger, now=True)
            unpublished = [one for part in folder.perform(file_changes) for one in part]
            folder.flush()
            if unpublished:
                ledger.take_back(unpublished)
                names += [one.name for one in unpublished]
            else:
                ledger.clear_file_changes()
    except OSError as error:
        raise _unable(error) from error
    folder.clean()
    return names


def _unable(error: OSError) -> OutputError:
    return OutputError(
        f"the outputs cannot be moved into place: {error}\n"
        "  Nothing is lost: the ledger records which files must still be renamed or removed.\n"
        "  Check the disk's space and health, then make the same call again."
    )


def _failed(outcome: ReportFailure | ReportRetry, seconds: float) -> FailedInput:
    failure, error = outcome.failure, outcome.failure.exception
    record = error.record if isinstance(error, FailuresError) else None
    metadata = None if record is None else json.dumps([record])
    failure = failure._replace(attempts=outcome.attempt, seconds=seconds, exception=None)
    return FailedInput(outcome.task, failure, metadata)


# ---- metadata table ------------------------------------------------------------------------------
# The rows of each input, in input order; identical bytes in every run.
#
#     pass 1   read every row, find the columns and their kinds
#     pass 2   write every row: the same ones of a short table, others after reading them again
#
# The columns are the manifest's, `source`, `destination`, then the user's keys as they first
# appear. If the manifest is the table of an earlier step, this step's `source` is that step's
# `destination`; that step's `source` is kept in the column `origin`, which later steps leave as it
# is.
# Nothing in the file depends on when, how often or by how many workers the inputs were done. The
# rows are read in groups of 65,536, so memory does not grow with the table.
#
# JSONL keeps each value as the function returned it; CSV and Parquet have one kind per column, as
# `base/table_formats.py` finds it. NaN and the infinities are kept as floats, but JSON has no such
# number, so they are null in JSONL and in all strings that hold JSON. A string that is not Unicode,
# such as the bytes of a foreign file name, is written with backslash escapes (`\udcff`).

Record = tuple[str | int, str | None, str]

# Records that are parsed at once, and the characters of metadata after which there are fewer.
PAGE_ROWS = 1024
_PAGE_CHARACTERS = 1 << 20


def write_metadata(
    path: Path, form: str, columns: tuple[str, ...], records: Callable[[], Iterable[Record]]
) -> None:
    """Write the table in one step, replacing an earlier one.

    Args:
        records: Returns source, the manifest's row as a JSON object or None, and metadata as a JSON
            list of objects, of each input; the same ones each time. A key of the metadata that is
            also a column replaces the column's value.
    """
    front = [name for name in columns if name not in ("source", "destination")]
    own = ["origin", "source"] if _adds_origin(columns) else ["source"]
    kinds = dict.fromkeys([*front, *own, "destination"], NULL)
    rows, kept, count = _rows(records(), columns), list[Row](), 0
    try:
        while page := list(islice(rows, PAGE_ROWS)):
            widen_rows(kinds, page)
            count += len(page)
            kept = [*kept, *page] if count <= GROUP_ROWS else []
        final = {name: final_kind(kind) for name, kind in kinds.items()}
        with atomic_file(path) as file:
            FORMATS[form].write(file, final, iter(kept or _rows(records(), columns)))
    except (OSError, MemoryError) as error:
        raise OutputError(
            f"the metadata table {path} cannot be written: "
            f"{getattr(error, 'strerror', None) or str(error) or 'there is not enough memory'}\n"
            "  The inputs are done and in the ledger; an earlier table is unchanged.\n"
            "  Free some space or memory, or fix the permissions, and run again to write it."
        ) from error


def _rows(records: Iterable[Record], columns: tuple[str, ...]) -> Iterator[Row]:
    keeps_origin, wanted = _adds_origin(columns), dict.fromkeys(columns).keys()
    with reading("metadata"):
        for page in _pages(records):
            listed_rows = _parsed(["{}" if text is None else text for _, text, _ in page])
            rows_of_each = _parsed([metadata for _, _, metadata in page])
            for (source, _, _), listed, rows in zip(page, listed_rows, rows_of_each, strict=True):
                row = listed  # in the order of the columns, unless some are missing
                if row.keys() != wanted:
                    row = {name: listed.get(name) for name in columns}
                if keeps_origin:
                    row["origin"] = row["source"]
                # A manifest's `destination` is this step's source, if anything.
                row["destination"] = None
                if source != "":  # the manifest has a path column
                    row["source"] = source
                for given in rows:
                    yield {**row, **given}


def _pages(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield the records in lists of a bounded size, to be parsed at once."""
    page: list[Record] = []
    characters = 0
    for record in records:
        page.append(record)
        characters += len(record[2])
        if len(page) == PAGE_ROWS or characters > _PAGE_CHARACTERS:
            yield page
            page, characters = [], 0
    if page:
        yield page


def _parsed(texts: list[str]) -> list[Any]:
    """Return what several strings of JSON hold; one call for all of them is much faster."""
    values: list[Any] = json.loads(f"[{','.join(texts)}]")
    return values if len(values) == len(texts) else [json.loads(text) for text in texts]


def _adds_origin(columns: tuple[str, ...]) -> bool:
    """Return whether a manifest is the table of a first step, whose sources are the origins."""
    return {"source", "destination"} <= set(columns) and "origin" not in columns


# ---- ledger table --------------------------------------------------------------------------------
# The metadata table of a run, from its ledger.


class LedgerTable:
    """The table in an output folder, in each of the formats in which runs wrote it.

    The ledger records these formats, and whether each is up to date. A run records first that none
    is, so a run that is killed leaves no table that counts as up to date.
    """

    def __init__(self, ledger: Ledger, folder: OutputFolder) -> None:
        self._ledger, self._folder = ledger, folder
        self._formats, self._without_rows = ledger.tables(), 0
        if any(self._formats.values()):
            ledger.set_tables(dict.fromkeys(self._formats, False))

    def check(self, form: str) -> None:
        """Raise OutputError if a table of this format would replace a file that no run wrote."""
        if form not in self._formats and self._folder.size(table_name(form)) is not None:
            raise self._foreign(form)

    def update(self, form: str, kind: str, *, is_stale: bool) -> None:
        """Write the table, unless it is up to date."""
        stale = dict.fromkeys(self._formats, False)
        current, written = stale if is_stale else self._formats, dict[str, str]()
        if not current.get(form) or self._folder.size(table_name(form)) is None:
            # Recorded first: otherwise, after a kill, the table would look like a foreign file.
            self._ledger.set_tables({**stale, form: False})
            self._folder.copy_ledger(self._ledger, now=form not in self._formats)
            self._write(form, kind, stale)
            written["without_rows"] = str(self._without_rows)
        self._ledger.set_tables({**current, form: True}, **written)

    def _write(self, form: str, kind: str, stale: Mapping[str, bool]) -> None:
        """Write and publish the table; if that fails, record that no run wrote this format."""
        name = table_name(form)

        def write(path: Path) -> None:
            write_metadata(path, form, self._columns(), partial(self._records, kind))

        try:
            self._folder.write_table(name, write, replaces=form in self._formats)
        except FileExistsError:
            self._ledger.set_tables(stale)
            raise self._foreign(form) from None
        except (OSError, OutputError) as error:
            if self._folder.size(name) is None:  # it is there if only the flush failed
                self._ledger.set_tables(stale)
            if isinstance(error, OutputError):
                raise
            raise OutputError(
                f"the metadata table {name} cannot be moved into place: {error}\n"
                "  The inputs are done and in the ledger. Check the disk's space and health, then "
                "make the same call again."
            ) from error

    def _columns(self) -> tuple[str, ...]:
        """Return the columns of the manifest."""
        with reading("columns"):
            return tuple(map(str, json.loads(self._ledger.get_meta("columns") or "[]")))

    @property
    def without_rows(self) -> int:
        """How many done inputs had no row when the table was last written."""
        with reading("the table"):
            return int(self._ledger.get_meta("without_rows") or 0)

    def _records(self, kind: str) -> Iterator[Record]:
        self._without_rows = 0
        for _, source, row, *_, metadata, _ in self._ledger.results():
            self._without_rows += metadata == "[]"
            if kind != "indices":
                yield source, row, metadata
            else:  # without a row, a sample is known by its number, perhaps there again: "7#2"
                yield source if row else int(source.partition("#")[0]), None, metadata

    def _foreign(self, form: str) -> OutputError:
        path = str(self._folder.locate(table_name(form)))
        return OutputError(
            f"{path!r} exists, but no run recorded in this output folder wrote it\n"
            "  It was left as it is, and no table was written. Move it away, write the table in "
            "another format (metadata=), or choose another output folder; then make the same call "
            "again."
        )
