"""The last seconds of a loader: how busy each worker was, how long training waited."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from forebay.observe.trace import Trace

SECONDS = 30
# More workers than this are not shown one by one.
MAX_LANES = 64

# Seconds of work, or of waiting, by second of the clock.
Row = dict[int, float]


class RecentWork:
    """What a trace recorded in the last `SECONDS`, second by second.

    It is derived from totals, so that its cost does not depend on how many batches there are.
    """

    def __init__(self) -> None:
        self._waits: Row = {}
        self._lanes: dict[int, Row] = {}
        self._busy_before: dict[int, float] = {}
        self._totals: deque[tuple[float, int, float]] = deque(maxlen=SECONDS + 1)

    def update(self, trace: Trace, now: float) -> dict[str, Any]:
        """Return what a page shows of the last seconds.

        Args:
            trace: The record.
            now: The present time on its clock.
        """
        if not self._totals:
            self._totals.append((trace.began_at, 0, 0.0))
        before, _, waited_before = self._totals[-1]
        self._totals.append((now, trace.taken_count, trace.waited_s))
        oldest = int(now) - SECONDS
        spread(self._waits, trace.waited_s - waited_before, before, now, oldest)
        lanes = range(min(max(trace.num_workers, 1), MAX_LANES))
        for lane in lanes:
            busy, row = trace.busy_s.get(lane, 0.0), self._lanes.setdefault(lane, {})
            spread(row, busy - self._busy_before.get(lane, 0.0), before, now, oldest)
            self._busy_before[lane] = busy
        while len(self._totals) > 1 and self._totals[1][0] <= now - SECONDS:
            self._totals.popleft()  # one from before is kept: from there the seconds are counted
        began, taken, waited_s = self._totals[0]
        passed = max(now - began, 1e-9)
        # Without the present second, which is not over.
        last = range(max(oldest, int(trace.began_at)), int(now))
        return {
            "rate": (trace.taken_count - taken) / passed,
            "wait_share": min((trace.waited_s - waited_s) / passed, 1.0),
            "waits": _digits(self._waits, last),
            "lanes": [_digits(self._lanes[lane], last) for lane in lanes],
        }


def spread(row: Row, seconds: float, begin: float, end: float, oldest: int) -> None:
    """Add seconds of work, evenly to the time from `begin` to `end`.

    What does not fit there was begun earlier, and is added to the seconds before, where they have
    room. Seconds before `oldest` are forgotten.
    """
    excess, second, room = seconds - (end - begin), int(begin), begin - int(begin)
    while excess > 0 and second >= oldest:
        added = max(min(room - row.get(second, 0.0), excess), 0.0)
        row[second] = row.get(second, 0.0) + added
        excess, second, room = excess - added, second - 1, 1.0
    share = min(seconds / (end - begin), 1.0) if end > begin else 0.0
    for second in range(max(int(begin), oldest), int(end) + 1):
        overlap = min(end, second + 1) - max(begin, second)
        row[second] = row.get(second, 0.0) + overlap * share
    for second in [each for each in row if each < oldest]:
        del row[second]


def _digits(row: Row, seconds: Sequence[int]) -> str:
    return "".join(str(min(round(row.get(second, 0.0) * 9), 9)) for second in seconds)
