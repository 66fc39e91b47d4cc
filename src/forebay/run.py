"""One run of preprocess: the engine works, and what it delivers is committed now and then.

A commit is: flush the staged files to disk, record them in the ledger, publish them. It comes
every half second, or sooner when many results wait, so a kill of this process costs at most that
much finished work, and is cheap however small the inputs are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from forebay.engine.engine import Engine, Outcome, pool_for
from forebay.engine.events import Cause, DeliverResult, ReportFailure, ReportRetry
from forebay.engine.job import Job
from forebay.engine.limits import Limits
from forebay.errors import FailuresError, OutputError, SampleTimeoutError, WorkerDiedError
from forebay.jobs.budget import FailureBudget
from forebay.jobs.ledger import Ledger
from forebay.jobs.outputs import OutputFolder
from forebay.jobs.records import Done, Failed
from forebay.observe.progress import Progress
from forebay.options import PreprocessOptions

# Seconds, and results, between two commits.
COMMIT_S = 0.5
COMMIT_RESULTS = 1024
# Results that may exist without being committed, and the bytes of metadata in them.
SLOTS = 8 * COMMIT_RESULTS
MAX_BYTES = 256 * 2**20
# Work to send in one message, where inputs are short.
GROUP_S = 0.05
MAX_GROUP = 1024
LOOKAHEAD = 4096


def run(
    job: Job,
    todo: Iterator[tuple[int, Any]],
    ledger: Ledger,
    folder: OutputFolder,
    options: PreprocessOptions,
    budget: FailureBudget,
    progress: Progress,
) -> bool:
    """Work on all that is to be done; return whether anything was.

    Raises:
        FailuresError: The budget is spent.
        OutputError: The output's disk is full or became read-only.
        Exception: With `on_error="raise"`, what the function raised, with notes.
    """
    limits = Limits(
        num_workers=max(options.workers, 1),
        slots=SLOTS,
        max_bytes=MAX_BYTES,
        retries=options.retries,
        timeout_s=options.timeout,
        group_s=GROUP_S if options.workers else 0.0,
        max_group=MAX_GROUP,
        lookahead=LOOKAHEAD,
        max_suspects=1 if options.stops_at_first_failure else 64,
    )
    engine = Engine(pool_for(options.backend, options.workers, job), limits, todo)
    batch = _Batch(engine, ledger, folder, progress)
    try:
        engine.want(1 << 62)
        while not engine.finished:
            for outcome in engine.step(batch.due_in()):
                batch.add(outcome)
                _stop_if_due(outcome, budget, options)
            if batch.is_due():
                batch.commit()
    finally:
        # Whatever ends the run, Ctrl-C included: no worker stays, no finished work is lost.
        engine.close()
        try:
            batch.commit()
        finally:
            progress.close()
    return batch.committed > 0


class _Batch:
    """Results on their way into the ledger."""

    def __init__(
        self, engine: Engine, ledger: Ledger, folder: OutputFolder, progress: Progress
    ) -> None:
        self.committed = 0
        self._engine = engine
        self._ledger = ledger
        self._folder = folder
        self._progress = progress
        self._done: list[Done] = []
        self._failed: dict[int, Failed] = {}
        self._retrying: dict[int, Failed] = {}
        self._unflushed = False
        self._last = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        match outcome:
            case DeliverResult():
                files, metadata = outcome.result
                done = Done(outcome.task, outcome.attempt, outcome.seconds, files, metadata)
                self._done.append(done)
                if self._retrying:
                    self._retrying.pop(outcome.task, None)
            case ReportFailure() if outcome.cause.kind != "environment":
                self._retrying.pop(outcome.task, None)
                self._failed[outcome.task] = _failed(outcome, outcome.cause, outcome.seconds)
            case ReportRetry():
                self._retrying[outcome.task] = _failed(outcome, outcome.cause, 0.0)
            case _:
                pass

    def due_in(self) -> float | None:
        """Return the seconds until the next commit; None if there is nothing to commit."""
        if not (self._done or self._failed):
            return None
        return max(self._last + COMMIT_S - time.monotonic(), 0.0)

    def is_due(self) -> bool:
        waiting = len(self._done) + len(self._failed)
        return waiting >= COMMIT_RESULTS or (waiting > 0 and self.due_in() == 0.0)

    def commit(self) -> None:
        """Make everything that has been delivered durable, known and visible."""
        self._last = time.monotonic()
        if self._engine.stopped:
            self._failed |= self._retrying  # their last try will not come; they did fail
            self._retrying = {}
        if not (self._done or self._failed):
            return
        # Before recording: what was staged since, and what the last commit published.
        if self._unflushed or any(done.outputs for done in self._done):
            self._folder.flush()
        delivered = [done.ordinal for done in self._done]
        done, refused = self._acceptable()
        recorded = self._ledger.record(done, [*self._failed.values(), *refused])
        self._unflushed = bool(recorded.chores)
        self._folder.perform(recorded.chores)
        self._engine.release(delivered)
        self.committed += len(delivered) + len(self._failed)
        good = len(delivered) - (len(recorded.failed) - len(self._failed))
        self._progress.update(good, len(recorded.failed))
        self._done, self._failed = [], {}
        self._last = time.monotonic()

    def _acceptable(self) -> tuple[list[Done], list[Failed]]:
        """Set aside the inputs whose outputs must not be published."""
        done, refused = [], []
        for each in self._done:
            try:
                for file in each.outputs:
                    self._folder.admit(file.name)
                    if self._folder.holds(file.name) and not self._ledger.knows(file.name):
                        raise OutputError(
                            f"{file.name!r} exists already, and no input of forebay's made it\n"
                            "  It was left as it is. Name the output differently, or move it away."
                        )
            except OutputError as error:
                seconds, attempts = each.seconds, each.attempts
                refused.append(
                    Failed(each.ordinal, attempts, seconds, "output", "OutputError", str(error))
                )
            else:
                done.append(each)
        return done, refused


def _failed(outcome: ReportFailure | ReportRetry, cause: Cause, seconds: float) -> Failed:
    return Failed(
        outcome.task,
        outcome.attempt,
        seconds,
        cause.kind,
        cause.error,
        cause.message,
        cause.traceback,
    )


def _stop_if_due(outcome: Outcome, budget: FailureBudget, options: PreprocessOptions) -> None:
    """Raise what ends the run, if this outcome does."""
    if isinstance(outcome, DeliverResult):
        budget.succeeded()
        return
    cause = outcome.cause
    if cause.kind == "environment":
        raise OutputError(
            f"the outputs cannot be written any more: {cause.error}: {cause.message}\n"
            "  The run was stopped; what was done before is kept, and no input is blamed.\n"
            "  Make room (or make the folder writable), then make the same call again."
        ) from cause.exception
    reason = budget.attempt_failed(outcome.task, cause.error)
    if isinstance(outcome, ReportFailure):
        if options.stops_at_first_failure:
            raise _as_exception(outcome)
        reason = budget.failed() or reason
    if reason is not None:
        raise FailuresError(
            f"stopped early: {reason}\n  The last of them: {cause.error}: {cause.message}\n"
            "  What was done is kept. See `forebay failures`, mend the cause, and make the same "
            f"call again.\n{cause.traceback}"
        )


def _as_exception(failure: ReportFailure) -> BaseException:
    """Return the failure as the exception to raise: the user's own where it came through."""
    cause = failure.cause
    error: BaseException
    if cause.exception is not None and isinstance(cause.exception, Exception):
        error = cause.exception
    elif cause.kind == "timeout":
        error = SampleTimeoutError(f"an input {cause.message}\n{cause.traceback}")
    elif cause.kind == "crash":
        error = WorkerDiedError(f"an input took its worker along: {cause.message}\n{cause.traceback}")
    else:
        error = FailuresError(f"an input failed: {cause.error}: {cause.message}\n{cause.traceback}")
    error.add_note(f"forebay: input {failure.task}, try {failure.attempt}; what was done is kept.")
    return error
