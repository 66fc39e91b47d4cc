"""One run of preprocess: the engine works, and what it delivers is committed now and then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forebay.engine.engine import COLLECT_S, Engine, Outcome
from forebay.engine.events import ReportFailure, ReportRetry
from forebay.engine.limits import Limits
from forebay.engine.pools.base import Pool
from forebay.errors import FailuresError, OutputError, SampleTimeoutError, WorkerDiedError
from forebay.jobs.budget import FailureBudget
from forebay.jobs.commits import Commits
from forebay.jobs.ledger import Ledger
from forebay.jobs.places import OutputPlace
from forebay.jobs.records import Failed
from forebay.observe.progress import Progress
from forebay.options import PreprocessOptions

# Results that may exist without being committed, and the bytes of metadata in them.
SLOTS = 8192
MAX_BYTES = 256 * 2**20
# Work to send in one message, where inputs are short.
GROUP_S = 0.1
MAX_GROUP = 2048
LOOKAHEAD = 8192


def run(
    pool: Pool,
    todo: Iterator[tuple[int, Any]],
    ledger: Ledger,
    folder: OutputPlace,
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
        retries=options.further_tries,
        timeout_s=options.timeout,
        group_s=GROUP_S if options.workers else 0.0,
        max_group=MAX_GROUP,
        lookahead=LOOKAHEAD,
        max_suspects=1 if options.stops_at_first_failure else 64,
    )
    engine = Engine(pool, limits, todo)
    commits = Commits(ledger, folder)
    committed = 0
    try:
        while not engine.finished or commits.waiting:
            outcomes = engine.step(commits.due_in(), collect_s=COLLECT_S)
            for outcome in outcomes:
                commits.add(outcome)
            for outcome in outcomes:
                _stop_if_due(outcome, budget, options, ledger)
            commit = commits.go_on(at_once=engine.finished)
            if commit is not None:
                engine.release(commit.delivered)
                progress.update(commit.done, commit.failed)
                committed += len(commit.delivered) + commit.failed
                _stop_if_refused(commit.refused, budget, options)
    finally:
        # Whatever ends the run, Ctrl-C included: no worker stays, and what was delivered is kept.
        engine.close()
        try:
            committed += commits.close()
        finally:
            progress.close()
    return committed > 0


def _stop_if_due(
    outcome: Outcome, budget: FailureBudget, options: PreprocessOptions, ledger: Ledger
) -> None:
    """Raise what ends the run, if this outcome does."""
    if not isinstance(outcome, ReportRetry | ReportFailure):
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
            raise _as_exception(outcome, ledger.name_of(outcome.task))
        reason = budget.failed() or reason
    if reason is not None:
        raise FailuresError(
            f"stopped early: {reason}\n"
            f"  The last of them, {ledger.name_of(outcome.task)}: {cause.error}: {cause.message}\n"
            "  What was done is kept. See `forebay failures`, mend the cause, and make the same "
            f"call again.\n{cause.traceback}"
        )


def _stop_if_refused(
    refused: list[Failed], budget: FailureBudget, options: PreprocessOptions
) -> None:
    """Raise what ends the run, if inputs that were refused on their way out do."""
    for failed in refused:
        if options.stops_at_first_failure:
            raise OutputError(failed.message)
        reason = budget.failed()
        if reason is not None:
            raise FailuresError(
                f"stopped early: {reason}\n  The last of them: {failed.error}: {failed.message}\n"
                "  What was done is kept."
            )


def _as_exception(failure: ReportFailure, name: str) -> BaseException:
    """Return the failure as the exception to raise: the user's own where it came through."""
    cause = failure.cause
    error: BaseException
    if cause.exception is not None and isinstance(cause.exception, Exception):
        error = cause.exception
    elif cause.kind == "timeout":
        error = SampleTimeoutError(f"{name} {cause.message}")
    elif cause.kind == "crash":
        error = WorkerDiedError(f"{name} took its worker along: {cause.message}")
    else:
        error = FailuresError(f"{name} failed: {cause.error}: {cause.message}")
    if cause.traceback and error.__traceback__ is None:  # it was raised in another process
        error.add_note(f"In the worker:\n{cause.traceback.rstrip()}")
    error.add_note(
        f"forebay: the input was {name}, number {failure.task}, try {failure.attempt}; what was "
        "done is kept."
    )
    return error
