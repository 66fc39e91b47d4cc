"""The last seconds of a loader: how busy each worker was, how long training waited."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from forebay.observe.trace import Trace

SECONDS = 30
# More workers than this are not shown one by one.
MAX_LANES = 64


class RecentWork:
    """What a trace recorded in the last `SECONDS`, second by second.

    `update` reads only what is new, so that it can be called every second.
    """

    def __init__(self) -> None:
        self._busy: dict[int, dict[int, float]] = {}  # by second, by worker
        self._waited: dict[int, float] = {}  # by second
        self._made = self._taken = 0
        self._totals: deque[tuple[float, int, float]] = deque(maxlen=SECONDS + 1)

    def update(self, trace: Trace, now: float) -> dict[str, Any]:
        """Return what a page shows of the last seconds.

        Args:
            trace: The record.
            now: The present time on its clock.
        """
        oldest = int(now) - SECONDS
        batches, steps = list(trace.batches), list(trace.steps)
        for earlier, batch in _new(batches, self._made, attrgetter("made")):
            # Of batches that follow each other fast, one stands for some.
            count = 1 if earlier is None else batch.made - earlier.made
            for second, part in _seconds(batch.ended_at, batch.seconds * count, oldest):
                busy = self._busy.setdefault(second, {})
                busy[batch.worker_id] = busy.get(batch.worker_id, 0.0) + part
        for earlier, step in _new(steps, self._taken, attrgetter("taken")):
            before = 0.0 if earlier is None else earlier.total_waited_s
            for second, part in _seconds(step.got_at, step.total_waited_s - before, oldest):
                self._waited[second] = self._waited.get(second, 0.0) + part
        self._made = batches[-1].made if batches else 0
        self._taken = steps[-1].taken if steps else 0
        for rows in (self._busy, self._waited):
            for second in [each for each in rows if each < oldest]:
                del rows[second]
        if not self._totals:
            self._totals.append((trace.began_at, 0, 0.0))
        self._totals.append((now, trace.taken_count, trace.waited_s))
        began, taken, waited_s = self._totals[0]
        passed = now - began
        # Without the present second, which is not over.
        last = range(max(oldest, int(trace.began_at)), int(now))
        lanes = range(min(trace.num_workers, MAX_LANES)) if trace.num_workers else (0,)
        return {
            "rate": (trace.taken_count - taken) / passed if passed > 0 else 0.0,
            "wait_share": min((trace.waited_s - waited_s) / passed, 1.0) if passed > 0 else 0.0,
            "waits": "".join(_digit(self._waited.get(second, 0.0)) for second in last),
            "lanes": [
                "".join(_digit(self._busy.get(second, {}).get(lane, 0.0)) for second in last)
                for lane in lanes
            ],
        }


def _new(
    records: list[Any], before: int, number: Callable[[Any], int]
) -> Iterator[tuple[Any, Any]]:
    """Yield the records after number `before`, latest first, each with the one before it."""
    for place in range(len(records) - 1, -1, -1):
        if number(records[place]) <= before:
            return
        yield records[place - 1] if place else None, records[place]


def _seconds(ended_at: float, seconds: float, oldest: int) -> list[tuple[int, float]]:
    """Return how much of a stretch of time is in each second, from `oldest` on."""
    began_at = max(ended_at - seconds, float(oldest))
    return [
        (second, min(ended_at, second + 1) - max(began_at, second))
        for second in range(int(began_at), int(ended_at) + 1)
    ]


def _digit(share: float) -> str:
    return str(min(round(share * 9), 9))
