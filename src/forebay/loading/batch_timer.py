"""Measures the time that a worker spends on its batches, in its own thread."""

from __future__ import annotations

import math
import time

from forebay.observe.run_queue import queued_s
from forebay.observe.trace import FINEST_S, MEASURED_S, SAMPLED_S, SlowSample, Timing


class BatchTimer:
    """Adds up times until there is a `Timing` to send."""

    def __init__(self) -> None:
        self._timed_at = 0.0  # when the last timing was made
        self._began_at = self._idle_since = 0.0
        # Since the last timing:
        self._batches, self._busy_s, self._idle_s = 0, 0.0, 0.0
        self._fetch_s = self._collate_s = 0.0
        self._slowest: SlowSample | None = None
        self._measured_at = math.inf  # when the following were measured; inf for not yet
        self._cpu_s = self._queued_s = 0.0

    def measure(self) -> None:
        """Begin to measure the processor time of this thread."""
        self._cpu_s, self._queued_s = time.thread_time(), queued_s()
        self._measured_at = time.perf_counter()

    def wait(self) -> None:
        """Record that the worker has nothing to do from now on."""
        self._idle_since = time.perf_counter()

    def resume(self) -> None:
        """Record that the worker has something to do again."""
        self._idle_s += time.perf_counter() - self._idle_since

    def begin(self) -> None:
        """Record that a batch is begun."""
        self._began_at = time.perf_counter()

    def collated(self, fetched_at: float) -> None:
        """Record that the batch is collated, and when its samples were fetched."""
        self._fetch_s += fetched_at - self._began_at
        self._collate_s += time.perf_counter() - fetched_at

    def timing(self, worker_id: int, slowest: SlowSample | None) -> Timing | None:
        """Return the time spent on the batch that has just become ready; None if that is little.

        Args:
            worker_id: The worker.
            slowest: The slowest sample of the batch, if it is known.
        """
        now, cpu_s, queued = time.perf_counter(), 0.0, 0.0
        seconds = now - self._began_at
        self._batches += 1
        self._busy_s += seconds
        if slowest and (self._slowest is None or slowest.seconds > self._slowest.seconds):
            self._slowest = slowest
        if seconds < FINEST_S and now - self._timed_at < SAMPLED_S:
            return None
        if now - self._measured_at >= MEASURED_S:
            cpu_before, queued_before = self._cpu_s, self._queued_s
            self.measure()
            cpu_s, queued = self._cpu_s - cpu_before, self._queued_s - queued_before
        timing = Timing(
            worker_id=worker_id,
            ended_at=now,
            seconds=seconds,
            batches=self._batches,
            busy_s=self._busy_s,
            fetch_s=self._fetch_s,
            collate_s=self._collate_s,
            cpu_s=cpu_s,
            queued_s=queued,
            idle_s=self._idle_s,
            slowest=self._slowest,
        )
        self._timed_at, self._batches, self._slowest = now, 0, None
        self._busy_s = self._fetch_s = self._collate_s = self._idle_s = 0.0
        return timing
