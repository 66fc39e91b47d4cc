"""Commits: results on their way from the engine into the ledger and the output folder.

    collect ──> flush ──> record ──> publish
      loop      thread     loop       loop, some files at a time

A commit begins half a second after the last one, or sooner when many results wait, so a kill of
this process costs at most that much finished work, and a result costs little however small it is.
The last results of a run that took no longer, if no file is among them, are committed with the
table.
The flush only waits for the disk, so a thread does it while the loop continues to send tasks. The
renames are in the loop, which sends tasks between them: a thread of many short system calls waits
for the interpreter lock at each of them, and took three times as long. One commit is under way at
a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from forebay.base.output_names import path_elsewhere
from forebay.base.process import wait_until
from forebay.engine.commands import DeliverResult, Outcome, ReportFailure, ReportRetry
from forebay.errors import FailuresError, OutputError
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import Done, FailedInput, FileChange, OutputFile
from forebay.outputs.folder import OutputFolder

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

# Seconds, and results, after which a commit is due.
COMMIT_S = 0.5
COMMIT_RESULTS = 8192
# While a commit is in progress, how often the loop checks whether its thread has finished.
CHECK_S = 0.02

# Kinds of failures that end a run, and leave the input to be done by the next one.
NO_FAILURES = ("environment", "stop")

# Records tasks, and the seconds that each took.
Took = Callable[[Sequence[tuple[int, float]]], None]


class Commit(NamedTuple):
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
        self._thread: ThreadPoolExecutor | None = None  # there is none before the first flush
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
        self._began = self._last = time.monotonic()
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
            fields = task, attempt, seconds, files, metadata, content
            self._done.append(tuple.__new__(Done, fields))  # calls no Python code
            if written and not written[-1][2]:
                self._count_unstaged(files)
            if self._retrying:
                self._retrying.pop(task, None)
        took([(each[0], each[2]) for each in self._done[before:]])
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

    def advance(self, at_once: bool = False, *, is_last: bool = False) -> Commit | None:
        """Begin a commit if one is due, or continue the one under way; return it at its end.

        Args:
            is_last: Whether no more results can come, so that the table is written next.
        """
        try:
            if self._publishing is None:
                if not self._is_flushed(at_once):
                    return None
                self._record(is_last=is_last)
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
                if self._thread is None:
                    from concurrent.futures import ThreadPoolExecutor

                    self._thread = ThreadPoolExecutor(1, "forebay-commits")
                self._flushing = self._thread.submit(self._flush)
        if not (at_once or self._flushing is None or self._flushing.done()):
            return False
        flushing, self._flushing = self._flushing, None
        if flushing is not None:  # it is None if no input wrote a file
            from concurrent.futures import wait

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
            self._ledger.write_ahead()
        finally:
            if self._thread is not None:
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

    def _record(self, *, is_last: bool) -> None:
        """Record what was collected when the flush began."""
        delivered, failed = self._done[: self._batch], [*self._failed.values()]
        retrying = [*self._retrying.values()]
        # Of a run that has just begun, one commit is enough: that of the table.
        is_held = is_last and time.monotonic() < self._began + COMMIT_S
        is_held &= not self._has_changed and not any(one.outputs for one in delivered)
        recorded = self._ledger.record(delivered, [*failed, *retrying], is_held=is_held)
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
