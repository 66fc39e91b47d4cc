"""When a run stops early, and the error that it raises then."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from forebay.base.formatting import counted
from forebay.engine.commands import ReportFailure
from forebay.errors import (
    FailuresError,
    ForebayError,
    InputError,
    OutputError,
    SampleTimeoutError,
    WorkerDiedError,
    shortened,
    shown_location,
)
from forebay.failures import Failure, shown_error
from forebay.outputs.places import snapshot_of
from forebay.pools.worker import SealedError
from forebay.runs.notes import unit_of


@contextmanager
def saying_what_stays(output: str | os.PathLike[str]) -> Iterator[None]:
    """Add to an InputError of the block what an earlier run has done: nothing was changed yet."""
    try:
        yield
    except InputError as error:
        done, noun = 0, "input"
        with suppress(ForebayError, OSError):
            found = snapshot_of(output)
            done, noun = found.counts.done, unit_of(found.meta.get("verb", ""))
        if not done:
            raise
        shown = shortened(shown_location(os.fspath(output)))
        raise InputError(
            f"{error}\n  What earlier runs made in {shown} stays as it is: {counted(done, noun)} "
            "done. If the inputs are only away, make the same call again when they are back."
        ) from error.__cause__


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


# If the first inputs all fail with the same error, that many are enough to stop.
ALIKE = 20
# Later, that many in a row: the cause is probably not in the inputs, but some may be beside others
# that are as damaged. Outputs that are refused have names that other inputs took, which a function
# does again and again.
ALIKE_LATER = 100
REFUSED = 20


class FailureBudget:
    """Counts failures against the number that the user allows.

    Args:
        max_failures: How many inputs may fail: a count, or a fraction of all (0 < x < 1);
            None for any number that are not in a row.
        known: The inputs that failed in earlier runs, in order: they are in no row.
        counts_rows: Whether many failures in a row are enough to stop.
    """

    def __init__(
        self,
        max_failures: int | float | None,
        total: int,
        watch: bool = True,
        unit: str = "input",
        known: Sequence[int] = (),
        counts_rows: bool = True,
    ) -> None:
        self._max_failures, self._unit, self._known = max_failures, unit, known
        # Whoever says how many may fail means the first ones and those in a row, too.
        self._has_limit = max_failures is not None
        self._counts_rows = counts_rows and not self._has_limit
        self.set_total(total)
        self._failed = 0
        self._tried: set[int] = set()  # the first inputs, until one of them differs
        self._alike: str | None = None
        self._watching = watch and not self._has_limit
        self._row, self._row_error, self._refused = 0, "", 0

    def set_total(self, total: int) -> None:
        """Set the number of inputs, once more of them are known."""
        allowed = self._max_failures
        self._limit = int(allowed * total) if isinstance(allowed, float) else allowed
        self._total = total

    def succeeded(self) -> None:
        """Begin a new row, and stop watching the first inputs: one of them succeeded."""
        self._watching, self._row = False, 0

    def attempt_failed(self, ordinal: int, error: str) -> str | None:
        """Return why to stop if the first inputs all failed with this `error`; else None."""
        if not self._watching:
            return None
        if self._alike not in (None, error):
            self._watching = False
            return None
        self._alike = error
        self._tried.add(ordinal)
        if len(self._tried) < ALIKE:
            return None
        return self._allowing(f"the first {ALIKE} {self._unit}s all failed alike, with {error}")

    def failed(self, error: str, ordinal: int = 0) -> str | None:
        """Count an input that failed for good; return why to stop, if it is one too many."""
        if reason := self._counted():
            return reason
        if self._is_known(ordinal):
            return None
        self._row = self._row + 1 if error == self._row_error else 1
        self._row_error = error
        if not self._counts_rows or self._row < ALIKE_LATER:
            return None
        return self._allowing(
            f"{ALIKE_LATER} {self._unit}s in a row all failed alike, with {error}"
        )

    def refused(self, published: Iterable[int], refused: Collection[int]) -> str | None:
        """Count inputs whose outputs were refused; return why to stop, if they are too many.

        Args:
            published: Inputs whose outputs were to be published, in the order in which they ended.
        """
        if not refused:  # the usual case
            self._refused = 0
            return None
        reasons = [self._counted() for _ in refused]
        for ordinal in published:
            if ordinal not in refused:
                self._refused = 0
            elif not self._is_known(ordinal):
                self._refused += 1
            if self._counts_rows and self._refused >= REFUSED:
                what = f"the outputs of {REFUSED} {self._unit}s in a row were refused"
                reasons.append(self._allowing(what))
        return next(filter(None, reasons), None)

    def _counted(self) -> str | None:
        self._failed += 1
        if self._limit is None or self._failed <= self._limit:
            return None
        return (
            f"{self._failed} input{'s' * (self._failed != 1)} failed, more than "
            f"max_failures allows ({self._limit} of {self._total})"
        )

    def _is_known(self, ordinal: int) -> bool:
        at = bisect_left(self._known, ordinal)
        return at < len(self._known) and self._known[at] == ordinal

    def _allowing(self, what: str) -> str:
        """Return a reason to stop, with the argument that allows more failures, if there is one."""
        if not self._counts_rows:
            return what
        return (
            f"{what}\n  If more of them may fail, say how many: max_failures=, or --max-failures."
        )
