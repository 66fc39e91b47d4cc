"""The errors of runs that stop early."""

from __future__ import annotations

from forebay.engine.commands import ReportFailure
from forebay.errors import (
    FailuresError,
    OutputError,
    SampleTimeoutError,
    WorkerDiedError,
    shown_error,
)
from forebay.failures import Failure
from forebay.pools.worker import SealedError


def too_many(reason: str, name: str, failure: Failure) -> FailuresError:
    """Return the error that ends a run in which too many inputs fail."""
    return FailuresError(
        f"stopped early: {reason}\n"
        f"  The last of them, {name}: {failure.error}: {failure.message}\n"
        "  See `forebay failures`, fix the cause, and make the same call again.\n"
        f"{failure.traceback}"
    )


def no_more_space(failure: Failure) -> OutputError:
    """Return the error that ends a run whose outputs cannot be written."""
    return OutputError(
        f"the outputs can no longer be written: {failure.error}: {failure.message}\n"
        "  The run was stopped, and no input counts as failed.\n"
        "  Free some space (or make the folder writable), then make the same call again."
    )


def first_failure(outcome: ReportFailure, name: str) -> BaseException:
    """Return what ends a run at its first failure: the user's exception, if it could be sent."""
    failure = outcome.failure
    own = failure.exception
    if isinstance(own, SealedError):
        own = own.opened()
    error: BaseException
    if isinstance(own, Exception):
        error = shown_error(own)
    elif failure.kind == "timeout":
        error = SampleTimeoutError(f"{name} {failure.message}")
    elif failure.kind == "crash":
        error = WorkerDiedError(f"{name}: {failure.message}")
    else:
        error = FailuresError(f"{name} failed: {failure.error}: {failure.message}")
    if failure.traceback and error.__traceback__ is None:  # it was raised in another process
        error.add_note(f"In the worker:\n{failure.traceback.rstrip()}")
    error.add_note(
        f"forebay: the input was {name}, number {outcome.task}, attempt {outcome.attempt}."
    )
    return error
