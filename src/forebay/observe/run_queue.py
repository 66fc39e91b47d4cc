"""Measure how long a thread was able to run but waited for a core."""

from __future__ import annotations

from forebay.proc_files import read_proc


def queued_s() -> float:
    """Return the seconds that this thread has waited for a core; 0 if the system does not say.

    Source: Linux, Documentation/scheduler/sched-stats.rst: the second field of
    /proc/<pid>/schedstat is the time spent waiting on a run queue, in nanoseconds.
    """
    try:
        return int(read_proc("/proc/thread-self/schedstat").split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without it
        return 0.0
