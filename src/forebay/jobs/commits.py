"""Commits: results on their way from the engine into the ledger and the output folder.

    collect ──> flush ──> record ──> publish
      loop      thread     loop       loop

A commit begins half a second after the last one, or sooner when many results wait, so a kill of
this process costs at most that much finished work, and a result costs little however small it is.
The flush is a wait for the disk and nothing else, so a thread does it while the loop goes on
feeding the workers. (Not so the renames: a thread of many short system calls waits for the
interpreter lock at each of them, and took three times as long.) One commit is under way at a time.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from forebay.engine.events import Command, DeliverResult, ReportFailure, ReportRetry
from forebay.errors import OutputError
from forebay.failures import Failure
from forebay.jobs.ledger import Ledger
from forebay.jobs.places import OutputPlace
from forebay.jobs.records import Done, FailedInput

# Seconds, and results, after which a commit is due.
COMMIT_S = 0.5
COMMIT_RESULTS = 1024
# While a commit is under way, how often the loop looks whether its thread is through.
LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class Commit:
    """What one commit did.

    Attributes:
        delivered: The inputs whose results it took in.
        done: How many more inputs are done, less those that were withdrawn.
        failed: How many more have failed.
        refused: Inputs that came through and failed all the same, for the names they chose.
    """

    delivered: list[int]
    done: int
    failed: int
    refused: list[FailedInput]


class Commits:
    """Collects results and commits them, stage by stage, as `go_on` is called."""

    def __init__(self, ledger: Ledger, folder: OutputPlace) -> None:
        """Commit into this ledger and this folder."""
        self._ledger = ledger
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "forebay-commits")
        self._done: list[Done] = []
        self._failed: dict[int, FailedInput] = {}
        self._retrying: dict[int, FailedInput] = {}
        self._flushing: Future[None] | None = None  # for the commit under way
        self._batch = 0  # how many of `_done` are in the commit under way
        self._last = time.monotonic()

    def add(self, outcome: Command) -> None:
        """Take in what the engine delivered."""
        match outcome:
            case DeliverResult():
                files, metadata = outcome.result
                done = Done(outcome.task, outcome.attempt, outcome.seconds, files, metadata)
                self._done.append(done)
                if self._retrying:
                    self._retrying.pop(outcome.task, None)
            case ReportFailure() if outcome.failure.kind != "environment":
                self._retrying.pop(outcome.task, None)
                self._failed[outcome.task] = _failed(outcome, outcome.seconds)
            case ReportRetry():
                self._retrying[outcome.task] = _failed(outcome, 0.0)
            case _:
                pass

    @property
    def waiting(self) -> bool:
        """Whether anything is not committed yet."""
        return bool(self._done or self._failed)

    def due_in(self) -> float | None:
        """Return the seconds until `go_on` has something to do; None if nothing waits."""
        if self._flushing is not None:
            return LOOK_S
        if not (self._done or self._failed):
            return None
        return max(self._last + COMMIT_S - time.monotonic(), 0.0)

    def go_on(self, at_once: bool = False) -> Commit | None:
        """Begin a commit if one is due, or end the one under way if it can be; return it then.

        Args:
            at_once: Commit everything now, and wait for it.

        Raises:
            OutputError: The disk is full or broken; nothing recorded is lost.
            LedgerError: The ledger cannot be written.
        """
        count = len(self._done) + len(self._failed)
        if not count:
            return None
        if self._flushing is None:
            if not (at_once or count >= COMMIT_RESULTS or self.due_in() == 0.0):
                return None
            self._flushing = self._thread.submit(self._folder.flush)
            self._batch = len(self._done)
        if not (at_once or self._flushing.done()):
            return None
        flushing, self._flushing = self._flushing, None
        try:
            flushing.result()
            if at_once and self._batch < len(self._done):
                return self.go_on(at_once)  # more came in since that flush began
            return self._commit()
        except OSError as error:
            raise OutputError(
                f"the outputs cannot be brought to their place: {error}\n"
                f"  Results not committed: {count:,}. The ledger knows what to do about them.\n"
                "  See to the disk's space and health, then make the same call again."
            ) from error

    def close(self) -> int:
        """Commit what is left, failures that were still to be tried again too; return how many."""
        try:
            self._failed |= self._retrying
            commit = self.go_on(at_once=True)
        finally:
            self._thread.shutdown()
        return 0 if commit is None else len(commit.delivered) + commit.failed

    def _commit(self) -> Commit:
        """Record and publish what was collected when the flush began; on an error, keep it."""
        delivered, failed = self._done[: self._batch], self._failed
        done, refused = self._acceptable(delivered)
        recorded = self._ledger.record(done, [*failed.values(), *refused])
        vanished = self._folder.perform(recorded.chores)
        if vanished:
            raise OutputError(
                f"{vanished[0]!r} vanished between being staged and being published\n"
                f"  Something else removes files below {str(self._folder.private)!r}. The same "
                "call again redoes what was lost."
            )
        self._done, self._failed = self._done[self._batch :], {}
        self._folder.keep(self._ledger)
        self._last = time.monotonic()
        late = recorded.failed[len(failed) :]
        ordinals = [done.ordinal for done in delivered]
        return Commit(ordinals, len(delivered) - len(late), len(recorded.failed), late)

    def _acceptable(self, delivered: list[Done]) -> tuple[list[Done], list[FailedInput]]:
        """Set aside the inputs whose outputs must not be published."""
        done, refused = [], []
        names: set[str] = set()
        folders: set[str] = set()
        for each in delivered:
            try:
                for file in each.outputs:
                    self._folder.admit(file.name)
                    if self._folder.nests and (
                        file.name in folders or not names.isdisjoint(_folders_of(file.name))
                    ):
                        raise OutputError(
                            f"{file.name!r} is a file for one input and a folder for another\n"
                            "  Only one of them was kept. Name one of the two differently."
                        )
                    if self._folder.holds(file.name) and not self._ledger.knows(file.name):
                        raise OutputError(
                            f"{file.name!r} exists already, and no input of forebay's made it\n"
                            "  It was left as it is. Name the output differently, or move it away."
                        )
            except OutputError as error:
                failure = Failure("output", "OutputError", str(error))
                failure = replace(failure, attempts=each.attempts, seconds=each.seconds)
                refused.append(FailedInput(each.ordinal, failure))
            else:
                done.append(each)
                for file in each.outputs:
                    names.add(file.name)
                    folders.update(_folders_of(file.name))
        return done, refused


def _folders_of(name: str) -> list[str]:
    """Return every folder that a name lies in: "a" and "a/b" for "a/b/c"."""
    return [name[:at] for at, character in enumerate(name) if character == "/"]


def _failed(outcome: ReportFailure | ReportRetry, seconds: float) -> FailedInput:
    failure = replace(outcome.failure, attempts=outcome.attempt, seconds=seconds, exception=None)
    return FailedInput(outcome.task, failure)
