"""PURE: the shortest possible waits of a consumer, given the time that each batch takes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


def waiting_share(costs: Sequence[float], steps: Iterable[float], workers: int) -> float:
    """Return the share of the time that the consumer waits, with an unlimited buffer.

    Every worker takes the next batch as soon as it is free, none pauses, batches are returned in
    order, and neither starting workers nor passing on a batch takes any time.

    Args:
        costs: Seconds that each batch takes one worker.
        steps: Seconds that the consumer spends after each batch.
        workers: Number of workers.
    """
    free = [0.0] * workers
    now = waited = 0.0
    for cost, step in zip(costs, steps, strict=True):
        ready = heapq.heappop(free) + cost
        heapq.heappush(free, ready)
        waited += max(0.0, ready - now)
        now = max(now, ready) + step
    return waited / now if now else 0.0
