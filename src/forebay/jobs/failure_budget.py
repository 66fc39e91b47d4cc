"""When to stop early: too many failures, or a bug that fails every input. PURE."""

from __future__ import annotations

# If the first inputs all fail with the same error, that many are enough to stop.
ALIKE = 20


class FailureBudget:
    """Counts failures against the number that the user allows.

    Args:
        max_failures: How many inputs may fail: a count, or a fraction of all (0 < x < 1);
            None for any number.
        total: Number of inputs.
        watch: Whether to stop if the first inputs all fail with the same error.
    """

    def __init__(self, max_failures: int | float | None, total: int, watch: bool = True) -> None:
        self._max_failures = max_failures
        self.set_total(total)
        self._failed = 0
        self._tried: set[int] = set()  # the first inputs, until one of them differs
        self._alike: str | None = None
        self._watching = watch

    def set_total(self, total: int) -> None:
        """Set the number of inputs, once more of them are known."""
        allowed = self._max_failures
        self._limit = int(allowed * total) if isinstance(allowed, float) else allowed
        self._total = total

    def succeeded(self) -> None:
        """Stop watching the first inputs: one of them succeeded."""
        self._watching = False

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
        return f"the first {ALIKE} inputs all failed alike, with {error}"

    def failed(self) -> str | None:
        """Count an input that failed for good; return why to stop if it is one too many."""
        self._failed += 1
        if self._limit is not None and self._failed > self._limit:
            return (
                f"{self._failed} input{'s' * (self._failed != 1)} failed, more than "
                f"max_failures allows ({self._limit} of {self._total})"
            )
        return None
