"""Measure the time that a worker spends on its batches, in its own thread."""

from __future__ import annotations

import math
import operator
import resource
import time
from typing import NamedTuple

from forebay.base.machine import PrivateMemory, queued_s, read_bytes
from forebay.observe.measurements import SlowSample, Timing
from forebay.observe.record import FINEST_S, MEASURED_S, SAMPLED_S


class _Used(NamedTuple):
    """What a worker has used so far, or for a `Timing`."""

    cpu_s: float = 0.0
    queued_s: float = 0.0
    threads_s: float = 0.0
    system_s: float = 0.0
    faults: int = 0
    read_bytes: int = 0


class BatchTimer:
    """Adds up times until there is a `Timing` to send.

    Three readings of the clock for each batch: tiny ones take only some ten microseconds.
    """

    def __init__(self, *, is_worker: bool = False, is_process: bool = False) -> None:
        self.began_at = self.fetched_at = 0.0
        self.sample_cpu_s = 0.0  # of threads that fetch samples
        self._is_worker, self._is_process = is_worker, is_process
        self._due = 0.0  # when to make a timing of a tiny batch
        self._measured_at = math.inf  # when the following was measured; inf for not yet
        self._used = _Used()
        self._memory = PrivateMemory(time.perf_counter()) if is_process else None
        self._clear(time.perf_counter())

    def _clear(self, now: float) -> None:
        """Begin new sums: of all batches since the last timing."""
        self._since = now
        self._batches, self._busy_s, self._fetch_s, self._failed_s = 0, 0.0, 0.0, 0.0
        self._slowest: SlowSample | None = None

    def measure(self) -> None:
        """Begin to measure the processor time of this thread, and of those that fetch samples."""
        cpu_s = time.thread_time() + self.sample_cpu_s
        used = resource.getrusage(resource.RUSAGE_THREAD)
        threads_s = time.process_time() - cpu_s if self._is_process else 0.0
        self._used = _Used(
            cpu_s, queued_s(), threads_s, used.ru_stime, used.ru_minflt, read_bytes()
        )
        self._measured_at = time.perf_counter()

    def failed(self) -> None:
        """Leave the present batch out: it is not made, but the worker had something to do."""
        self._failed_s += time.perf_counter() - self.began_at

    def timing(self, worker_id: int, slowest: SlowSample | None) -> Timing | None:
        """Return the time spent on the batch that has just become ready; None if that is little."""
        now, began_at = time.perf_counter(), self.began_at
        seconds = now - began_at
        self._batches += 1
        self._busy_s += seconds
        self._fetch_s += self.fetched_at - began_at
        if slowest and (self._slowest is None or slowest.seconds > self._slowest.seconds):
            self._slowest = slowest
        if seconds < FINEST_S and now < self._due:
            return None
        used = _Used()
        if now - self._measured_at >= MEASURED_S:
            before = self._used
            self.measure()
            used = _Used(*map(operator.sub, self._used, before))
        idle_s = now - self._since - self._busy_s - self._failed_s if self._is_worker else 0.0
        timing = Timing(
            worker_id=worker_id,
            ended_at=now,
            seconds=seconds,
            batches=self._batches,
            busy_s=self._busy_s,
            fetch_s=self._fetch_s,
            collate_s=self._busy_s - self._fetch_s,
            idle_s=max(idle_s, 0.0),
            slowest=self._slowest,
            private_bytes=self._memory.measured(now, used.faults) if self._memory else 0,
            **used._replace(threads_s=max(used.threads_s, 0.0))._asdict(),
        )
        self._due = now + SAMPLED_S
        self._clear(now)
        return timing
