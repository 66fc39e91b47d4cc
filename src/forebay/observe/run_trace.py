"""What a run of `preprocess`, `predict` or `cache` did, and when: a record of bounded size.

progress ── ended ──> RunTrace ──> report, `forebay top`
  engine ── took ────────┘
"""

from __future__ import annotations

import heapq
import math
import time

from forebay.observe.publication import Publication

# Spans of the whole run; when there are more, each two become one.
MAX_SPANS = 512
FIRST_SPAN_S = 0.5
KEPT_SLOWEST = 20
# Bin `k` of the histogram counts tasks that took from 2**k to 2**(k+1) microseconds.
DURATION_BINS = 44


class RunTrace:
    """Records what a run does, in bounded memory.

    Attributes:
        began_at: When it began, on the clock of `time.monotonic`.
        ended_at: When something ended last.
        done: Inputs or samples that succeeded in this run.
        failed: Those that failed.
        spans: By span, how many succeeded and how many failed.
        span_s: Length of each span in seconds.
        bins: How many tasks that succeeded took how long; see `DURATION_BINS`. A task is an input,
            or a range of samples.
        tasks: Tasks that succeeded or failed.
        busy_s: Seconds that workers spent on them.
        retries: Attempts that failed and were made again.
        publication: Shows the trace to `forebay top`.
    """

    def __init__(self) -> None:
        self.began_at = self.ended_at = time.monotonic()
        self.done = self.failed = 0
        self.spans: list[tuple[int, int]] = []
        self.span_s = FIRST_SPAN_S
        self.bins = [0] * DURATION_BINS
        self.tasks, self.busy_s = 0, 0.0
        self.retries = 0
        self._slowest: list[tuple[float, int]] = []  # a heap, the fastest of them first
        self.publication = Publication()

    @property
    def slowest(self) -> list[tuple[float, int]]:
        """Seconds and number of the tasks that took longest, slowest first."""
        return sorted(self._slowest, reverse=True)

    def took(self, task: int, seconds: float) -> None:
        """Record how long a task took that succeeded."""
        self.spent(seconds)
        place = int(math.log2(seconds * 1e6)) if seconds > 2e-6 else 0
        self.bins[min(place, DURATION_BINS - 1)] += 1
        heap = self._slowest
        if len(heap) < KEPT_SLOWEST:
            heapq.heappush(heap, (seconds, task))
        elif seconds > heap[0][0]:
            heapq.heapreplace(heap, (seconds, task))

    def spent(self, seconds: float) -> None:
        """Record the seconds that a worker spent on a task that succeeded or failed."""
        self.tasks += 1
        self.busy_s += seconds

    def ended(self, done: int, failed: int) -> None:
        """Record inputs or samples that ended."""
        now = self.ended_at = time.monotonic()
        self.done += done
        self.failed += failed
        place = int((now - self.began_at) / self.span_s)
        while place >= MAX_SPANS:
            pairs = [*self.spans, (0, 0)]
            self.spans = [
                (one[0] + next_one[0], one[1] + next_one[1])
                for one, next_one in zip(pairs[:-1:2], pairs[1::2], strict=False)
            ]
            self.span_s *= 2
            place = int((now - self.began_at) / self.span_s)
        self.spans += [(0, 0)] * (place + 1 - len(self.spans))
        before = self.spans[place]
        self.spans[place] = before[0] + done, before[1] + failed
        if now >= self.publication.due:
            self.publication.renew(self, now)
