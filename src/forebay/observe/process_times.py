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
    """

    def __init__(self) -> None:
        self.cpu_s = self.queued_s = 0.0
        self._seen: dict[int, tuple[float, float]] = {}

    def add(self, pids: Iterable[int]) -> None:
        """Add what the living processes did since the last call."""
        seen = {pid: times for pid in pids if (times := _times(pid)) is not None}
        for pid, (cpu_s, queued_s) in seen.items():
            if (before := self._seen.get(pid)) is not None:
                self.cpu_s += cpu_s - before[0]
                self.queued_s += queued_s - before[1]
        self._seen = seen


def _times(pid: int) -> tuple[float, float] | None:
    """Return processor time and waiting time in seconds; None if the process has ended.

    Sources: proc_pid_stat(5), fields 14 to 17 in clock ticks; Linux,
    Documentation/scheduler/sched-stats.rst: the second field of schedstat, in nanoseconds.
    """
    try:
        fields = read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split()  # of any name
        cpu_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    try:
        return cpu_s, int(read_proc(f"/proc/{pid}/schedstat").split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return cpu_s, 0.0
