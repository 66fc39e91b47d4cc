"""When to stop early: too many failures, or a bug that every input meets. PURE."""

from __future__ import annotations

from forebay.errors import OptionError

# If this many inputs were tried and every one failed alike, it is not the inputs.
ALIKE = 20


class FailureBudget:
    """Counts failures against what the user allowed.

    Args:
        max_failures: How many inputs may fail: a count, or a fraction of all (0 < x < 1);
            None for any number.
        total: How many inputs there are.
        watch: Look out for first inputs that all fail alike; not where others are done already.
    """

    def __init__(self, max_failures: int | float | None, total: int, watch: bool = True) -> None:
        """Check and remember the limit."""
        if max_failures is not None and (
            isinstance(max_failures, bool)
            or max_failures < 0
            or (isinstance(max_failures, float) and max_failures >= 1)
        ):
            raise OptionError(
                f"max_failures={max_failures!r} is neither a count (0, 1, 2, …) nor a fraction "
                "between 0 and 1"
            )
        self._limit = (
            max_failures
            if max_failures is None or isinstance(max_failures, int)
            else int(max_failures * total)
        )
        self._total = total
        self._failed = 0
        self._tried: set[int] = set()  # the first inputs only, until one differs
        self._alike: str | None = None
        self._watching = watch

    def succeeded(self) -> None:
        """An input came through: the failures, if any, are not all there is."""
        self._watching = False

    def attempt_failed(self, ordinal: int, error: str) -> str | None:
        """Return why to stop, if the first inputs all failed with this same `error`."""
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
        """Count an input that failed for good; return why to stop, if that is one too many."""
        self._failed += 1
        if self._limit is not None and self._failed > self._limit:
            return (
                f"{self._failed} input{'s' * (self._failed != 1)} failed, more than "
                f"max_failures allows ({self._limit} of {self._total})"
            )
        return None
