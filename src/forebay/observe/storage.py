"""What the system knows of storage: bytes that this thread read, limits, memory for files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from forebay.observe.machine import GROUPS, PROC, group_folders
from forebay.proc_files import read_proc

_STAT_BYTES = 1 << 16


def read_bytes() -> int:
    """Return the bytes that this thread had read from storage; 0 if the system does not say.

    Those that were in the page cache do not count, and neither do network file systems that do
    their own accounting (FUSE, for example). Source: proc_pid_io(5), `read_bytes`.
    """
    try:
        for line in read_proc("/proc/thread-self/io").splitlines():
            if line.startswith(b"read_bytes:"):
                return int(line[11:])
    except (OSError, ValueError):
        pass
    return 0


def cores_idle_s() -> float | None:
    """Return the seconds that the cores of this process were idle, on average, since the boot.

    A core that waits for a disk is idle, too. None if the system does not tell. Source:
    proc_stat(5), the fourth and the fifth number of each core, in clock ticks.
    """
    try:
        lines = read_proc("/proc/stat", _STAT_BYTES).splitlines()
        ours = os.sched_getaffinity(0)
        fields = [line[3:].split() for line in lines if line[:3] == b"cpu" and line[3:4] != b" "]
        idle = [int(each[4]) + int(each[5]) for each in fields if int(each[0]) in ours]
        return sum(idle) / len(idle) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError, ZeroDivisionError):
        return None


def read_limit(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return the lowest limit of the control groups for reading from a disk, in bytes per second.

    Sources: Linux, Documentation/admin-guide/cgroup-v2.rst, io.max; cgroup-v1/blkio-controller.rst,
    blkio.throttle.read_bps_device.

    Args:
        proc: Where the system describes processes.
        groups: Where it describes control groups, of version 1 or 2.
    """
    return min(_read_limits(proc, groups), default=None)


def _read_limits(proc: Path, groups: Path) -> Iterator[int]:
    for folder in group_folders(proc, groups, ("io", "blkio")):
        with suppress(OSError, ValueError, IndexError):
            for line in (folder / "io.max").read_text().splitlines():
                limit = line.partition("rbps=")[2].split()[0]
                if limit != "max":
                    yield int(limit)
        with suppress(OSError, ValueError, IndexError):
            text = (folder / "blkio.throttle.read_bps_device").read_text()
            yield from (int(line.split()[1]) for line in text.splitlines())


def memory_for_files(proc: Path = PROC) -> int | None:
    """Return the bytes of memory that files may occupy at present; None if it is not known.

    Source: proc_meminfo(5), MemAvailable.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
