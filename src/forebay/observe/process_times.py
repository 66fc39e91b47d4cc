"""Processor time of processes, and how long they waited for a core, as their parent sees it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from forebay.proc_files import read_proc


class ProcessTimes:
    """Sums over processes that come and go.

    What a process did before it was first seen does not count: that is its start.

    Attributes:
        cpu_s: Seconds of processor time, including that of subprocesses that have ended.
        queued_s: Seconds that main threads waited for a core; 0 if the system does not tell.
        threads_s: Seconds of processor time of other threads than the main ones; 0 likewise.
    """

    def __init__(self) -> None:
        self.cpu_s = self.queued_s = self.threads_s = 0.0
        self._seen: dict[int, tuple[float, float, float]] = {}

    def add(self, pids: Iterable[int]) -> None:
        """Add what the living processes did since the last call."""
        seen = {pid: times for pid in pids if (times := _times(pid)) is not None}
        for pid, (cpu_s, queued_s, threads_s) in seen.items():
            if (before := self._seen.get(pid)) is not None:
                self.cpu_s += cpu_s - before[0]
                self.queued_s += queued_s - before[1]
                self.threads_s += threads_s - before[2]
        self._seen = seen


def _times(pid: int) -> tuple[float, float, float] | None:
    """Return the seconds of a process; None if it has ended.

    Sources: proc_pid_stat(5), fields 14 to 17 in clock ticks, of all threads; Linux,
    Documentation/scheduler/sched-stats.rst: the first two fields of schedstat, in nanoseconds, of
    the main thread.
    """
    try:
        fields = read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split()  # of any name
        ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15]]
    except (OSError, ValueError):
        return None
    try:
        ran, queued = read_proc(f"/proc/{pid}/schedstat").split()[:2]
        return sum(ticks), int(queued) * 1e-9, sum(ticks[:2]) - int(ran) * 1e-9
    except (OSError, ValueError):
        return sum(ticks), 0.0, 0.0
