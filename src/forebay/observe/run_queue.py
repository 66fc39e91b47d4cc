"""Measure how long a thread was able to run but waited for a core."""

from __future__ import annotations

import os


def queued_s() -> float:
    """Return the seconds that this thread has waited for a core; 0 if the system does not say.

    Source: Linux, Documentation/scheduler/sched-stats.rst: the second field of
    /proc/<pid>/schedstat is the time spent waiting on a run queue, in nanoseconds.
    """
    try:
        # Not open(): Ctrl-C between it and its `with` would be reported as an unclosed file.
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(file, 128).split()[1]) * 1e-9
        finally:
            os.close(file)
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without it
        return 0.0
