"""Measure how long a thread was able to run but waited for a core."""

from __future__ import annotations


def queued_s() -> float:
    """Return the seconds that this thread has waited for a core; 0 if the system does not say.

    Source: Linux, Documentation/scheduler/sched-stats.rst: the second field of
    /proc/<pid>/schedstat is the time spent waiting on a run queue, in nanoseconds.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read(128).split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without it
        return 0.0
