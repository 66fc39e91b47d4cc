"""Measures the time that a worker spends on its batches, in its own thread."""

from __future__ import annotations

import math
import resource
import time

from forebay.observe.run_queue import queued_s
from forebay.observe.storage import read_bytes
from forebay.observe.trace import FINEST_S, MEASURED_S, SAMPLED_S, SlowSample, Timing


class BatchTimer:
    """Adds up times until there is a `Timing` to send.

    Its user stores two moments of each batch, and calls `timing` when the batch is ready: three
    readings of the clock, because tiny batches take only some ten microseconds.

    Args:
        is_worker: Whether time without a batch counts as idle; in the trainer's own thread it is
            the training step.
        is_process: Whether the worker is a process of its own, whose other threads count, too.

    Attributes:
        began_at: When the present batch was begun.
        fetched_at: When its samples were fetched.
    """

    def __init__(self, *, is_worker: bool = False, is_process: bool = False) -> None:
        self.began_at = self.fetched_at = 0.0
        self._is_worker, self._is_process = is_worker, is_process
        self._due = 0.0  # when to make a timing of a tiny batch
        self._measured_at = math.inf  # when the following were measured; inf for not yet
        self._cpu_s = self._queued_s = self._threads_s = 0.0
        self._system_s, self._faults = 0.0, 0
        self._read_bytes = 0
        self._clear(time.perf_counter())

    def _clear(self, now: float) -> None:
        """Begin new sums: of all batches since the last timing."""
        self._since = now
        self._batches, self._busy_s, self._fetch_s, self._failed_s = 0, 0.0, 0.0, 0.0
        self._slowest: SlowSample | None = None

    def measure(self) -> None:
        """Begin to measure the processor time of this thread."""
        self._cpu_s, self._queued_s = time.thread_time(), queued_s()
        used = resource.getrusage(resource.RUSAGE_THREAD)
        self._system_s, self._faults = used.ru_stime, used.ru_minflt
        if self._is_process:
            self._threads_s = time.process_time() - self._cpu_s
        self._read_bytes = read_bytes()
        self._measured_at = time.perf_counter()

    def failed(self) -> None:
        """Leave the present batch out: it is not made, but the worker had something to do."""
        self._failed_s += time.perf_counter() - self.began_at

    def timing(self, worker_id: int, slowest: SlowSample | None) -> Timing | None:
        """Return the time spent on the batch that has just become ready; None if that is little.

        Args:
            worker_id: The worker.
            slowest: The slowest sample of the batch, if it is known.
        """
        now, began_at = time.perf_counter(), self.began_at
        seconds = now - began_at
        self._batches += 1
        self._busy_s += seconds
        self._fetch_s += self.fetched_at - began_at
        if slowest and (self._slowest is None or slowest.seconds > self._slowest.seconds):
            self._slowest = slowest
        if seconds < FINEST_S and now < self._due:
            return None
        cpu_s, queued, threads_s, read = 0.0, 0.0, 0.0, 0
        system_s, faults = 0.0, 0
        if now - self._measured_at >= MEASURED_S:
            cpu_before, queued_before, read_before = self._cpu_s, self._queued_s, self._read_bytes
            threads_before = self._threads_s
            system_before, faults_before = self._system_s, self._faults
            self.measure()
            cpu_s, queued = self._cpu_s - cpu_before, self._queued_s - queued_before
            threads_s = max(self._threads_s - threads_before, 0.0)
            system_s = self._system_s - system_before
            faults = self._faults - faults_before
            read = self._read_bytes - read_before
        idle_s = now - self._since - self._busy_s - self._failed_s if self._is_worker else 0.0
        timing = Timing(
            worker_id=worker_id,
            ended_at=now,
            seconds=seconds,
            batches=self._batches,
            busy_s=self._busy_s,
            fetch_s=self._fetch_s,
            collate_s=self._busy_s - self._fetch_s,
            cpu_s=cpu_s,
            queued_s=queued,
            idle_s=max(idle_s, 0.0),
            slowest=self._slowest,
            read_bytes=read,
            threads_s=threads_s,
            system_s=system_s,
            faults=faults,
        )
        self._due = now + SAMPLED_S
        self._clear(now)
        return timing
