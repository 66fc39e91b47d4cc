"""What a run of `preprocess`, `predict` or `cache` did, and when: a record of bounded size.

progress ── ended ──> RunTrace ──> report, `forebay top`
  engine ── took ────────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.observe.bounded import DURATION_BINS, Slowest, Spans, duration_bin
from forebay.observe.publication import Publication

# Length of each span of a run to begin with.
FIRST_SPAN_S = 0.5
# Seconds after which a task that is still running is shown.
LONG_S = 5.0


@dataclass(slots=True)
class RunSpan:
    """What ended in one part of a run.

    Attributes:
        done: Inputs or samples that succeeded.
        failed: Those that failed.
    """

    done: int = 0
    failed: int = 0

    def add(self, later: RunSpan) -> None:
        """Merge the span that follows into this one."""
        self.done += later.done
        self.failed += later.failed

    def following(self) -> RunSpan:
        """Return the span that follows, in which nothing has ended yet."""
        return RunSpan()


class RunTrace:
    """Records what a run does, in bounded memory.

    Attributes:
        began_at: When it began, on the clock of `time.monotonic`.
        ended_at: When something ended last.
        done: Inputs or samples that succeeded in this run.
        failed: Those that failed.
        spans: What ended when, from `began_at` on.
        bins: How many tasks that succeeded took how long; see `DURATION_BINS`. A task is an input,
            or a range of samples.
        tasks: Tasks that succeeded or failed.
        busy_s: Seconds that workers spent on them.
        retries: Attempts that failed and were made again.
        num_workers: Workers at present; 0 if the run works in this process.
        publication: Shows the trace to `forebay top`.
        longest_task: Returns the task that has been running for longest, and when it began on the
            clock of `began_at`; None if none is.
        longest: What that returned at the last publication, if it has been running for `LONG_S`.
    """

    def __init__(self) -> None:
        self.began_at = self.ended_at = time.monotonic()
        self.done = self.failed = 0
        self.spans = Spans(self.began_at, FIRST_SPAN_S, RunSpan())
        self.bins = [0] * DURATION_BINS
        self.tasks, self.busy_s = 0, 0.0
        self.retries = 0
        self.num_workers = 0
        self._slowest = Slowest[int]()
        self.publication = Publication()
        self.longest_task: Callable[[], tuple[str, float] | None] = lambda: None
        self.longest: tuple[str, float] | None = None
        self._published: tuple[object, ...] = ()

    @property
    def slowest(self) -> list[tuple[float, int]]:
        """Seconds and number of the tasks that took longest, slowest first."""
        return list(self._slowest)

    def took(self, tasks: Sequence[tuple[int, float]]) -> None:
        """Record tasks that succeeded, and how many seconds each took."""
        bins, slowest = self.bins, self._slowest
        for task, seconds in tasks:
            self.busy_s += seconds
            bins[duration_bin(seconds)] += 1
            if seconds > slowest.least:
                slowest.add(seconds, task)
        self.tasks += len(tasks)

    def spent(self, seconds: float) -> None:
        """Record the seconds that a worker spent on a task that succeeded or failed."""
        self.tasks += 1
        self.busy_s += seconds

    def ended(self, done: int, failed: int) -> None:
        """Record inputs or samples that ended."""
        now = self.ended_at = time.monotonic()
        self.done += done
        self.failed += failed
        span = self.spans.at(now)
        span.done += done
        span.failed += failed
        self.publish(now)

    def publish(self, now: float) -> None:
        """Publish what changed since the last publication, if the next one is due.

        The loop of the run calls it while nothing ends: otherwise what ended just after a
        publication would not be seen until the next input ends.

        Args:
            now: On the clock of `began_at`.
        """
        if now >= self.publication.due:
            found = self.longest_task()
            self.longest = found if found is not None and now - found[1] >= LONG_S else None
            # While a task runs for long, the rate falls.
            state = (self.done, self.failed, self.num_workers, self.longest and now)
            if state != self._published:
                self._published = state
                self.publication.renew(self, now)
