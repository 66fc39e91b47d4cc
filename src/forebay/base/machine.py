"""What the machine and its control groups give this process, and what the system measures.

Cores, memory, their limits; processor time, waits and reads; memory that ran out.
"""

from __future__ import annotations

import os
import resource
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

# ---- proc files ----------------------------------------------------------------------------------
# Read small files of /proc, also at times when Ctrl-C is likely to come. A container may have none:
# then measurements are missing.

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# More than nearly all of the files that are read have.
_MAX_BYTES = 4096


def read_proc(name: str, most: int | None = _MAX_BYTES) -> bytes:
    """Return the content of a file of /proc, or its first `most` bytes."""
    # Not open(): Ctrl-C between it and its `with` would be reported as an unclosed file.
    descriptor = os.open(f"{PROC}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if most is not None:
            return os.read(descriptor, most)
        # One call reads at most a page of a long file.
        return b"".join(iter(lambda: os.read(descriptor, _MAX_BYTES), b""))
    finally:
        os.close(descriptor)


def group_folders(proc: Path, groups: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, and of those around them."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            roots = [groups]
        elif shared := set(names) & set(controllers.split(",")):
            roots = [groups / controllers, *(groups / name for name in shared)]
        else:
            continue
        path = Path(group.lstrip("/"))
        # A container sees its own group as the root, whatever the path says.
        for root in roots:
            yield from {root / path, *(root / parent for parent in path.parents), root}


# ---- limits --------------------------------------------------------------------------------------
# How many cores and how much memory this process may use; how many processes there may be.


def usable_cores(proc: Path = PROC, groups: Path = GROUPS) -> float:
    """Return how many cores this process may use: by its affinity and its containers' quotas."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = float(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
    return min([cores, *filter(None, map(_quota, group_folders(proc, groups, ("cpu",))))])


def _quota(folder: Path) -> float | None:
    """Return the quota of a control group in cores; None if it has none."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        return None if limit <= 0 else limit / int((folder / "cpu.cfs_period_us").read_text())
    return None


def machine_memory() -> int | None:
    """Return the bytes of memory of this machine; None if unknown."""
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def usable_memory(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return the bytes of memory of this machine, or of its control groups; None if unknown.

    Sources: Linux, Documentation/admin-guide/cgroup-v2.rst, memory.max; cgroup-v1/memory.rst,
    memory.limit_in_bytes, which is 2^63 less a page where there is no limit.
    """
    memory = machine_memory()
    if memory is None:
        return None
    return min([memory, *(limit for _, limit in _memory_limits(proc, groups))])


def free_memory(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return the bytes of memory that this process may still use; None if unknown.

    Files that the system keeps in memory count as free, since it drops them, but for shared memory.
    """
    left = [limit - _occupied(folder) for folder, limit in _memory_limits(proc, groups)]
    machine = memory_for_files(proc)
    return min((max(each, 0) for each in (*left, machine) if each is not None), default=None)


def _memory_limits(proc: Path, groups: Path) -> Iterator[tuple[Path, int]]:
    """Yield the control groups of this process that limit its memory, with the limits in bytes."""
    for folder in group_folders(proc, groups, ("memory",)):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # also of "max"
                yield folder, int((folder / name).read_text())


def _occupied(folder: Path) -> int:
    """Return the bytes of a control group that the system cannot drop; 0 if it does not tell."""
    for used, dropped, shared in (
        ("memory.current", "file", "shmem"),
        ("memory.usage_in_bytes", "total_cache", "total_shmem"),
    ):
        with suppress(OSError, ValueError):
            lines = (folder / "memory.stat").read_text().splitlines()
            counts = {name: int(count) for name, count in map(str.split, lines)}
            files = counts.get(dropped, 0) - counts.get(shared, 0)
            return int((folder / used).read_text()) - files
    return 0


def memory_for_files(proc: Path = PROC) -> int | None:
    """Return the bytes of memory that files may occupy at present; None if it is not known.

    Source: proc_meminfo(5), MemAvailable.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def read_limit(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return the lowest limit of the control groups for reading from a disk, in bytes per second.

    Sources: Linux, Documentation/admin-guide/cgroup-v2.rst, io.max; cgroup-v1/blkio-controller.rst,
    blkio.throttle.read_bps_device.
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


def process_limits() -> Iterator[str]:
    """Yield the limits of processes, threads and files; that of the fullest control group, too.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, pids.max and pids.current.
    """
    groups = []
    for folder in group_folders(PROC, GROUPS, ("pids",)):
        with suppress(OSError, ValueError):
            most = int((folder / "pids.max").read_text())
            groups.append((most - int((folder / "pids.current").read_text()), most))
    if groups:
        left, most = min(groups)
        yield (
            f"of processes and threads of the control group, {most:,}, of which {most - left:,} "
            "are in use (pids.max, --pids-limit)"
        )
    yield _limit("processes", resource.RLIMIT_NPROC, "-u")
    yield _limit("open files", resource.RLIMIT_NOFILE, "-n")


def _limit(what: str, which: int, option: str) -> str:
    soft, _ = resource.getrlimit(which)
    shown = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    return f"of {what}, {shown} (ulimit {option})"


def memory_kills(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return how many processes were killed because memory ran out; None if that is not counted.

    Those of this process's control group; of the machine, where the group does not count them.
    Sources: Linux, Documentation/admin-guide/cgroup-v2.rst, oom_kill in memory.events;
    cgroup-v1/memory.rst, oom_kill in memory.oom_control; proc_vmstat(5), oom_kill.
    """
    folders = sorted(group_folders(proc, groups, ("memory",)), key=lambda each: -len(each.parts))
    files = [
        *(each / name for each in folders for name in ("memory.events", "memory.oom_control")),
        proc / "vmstat",
    ]
    for file in files:
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in file.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


# ---- measured ------------------------------------------------------------------------------------
# What processes of this machine used, and what they waited for.

_STAT_BYTES = 1 << 16


def pressure(proc: Path = PROC) -> dict[str, float]:
    """Return the share of the last 10 s in which some process waited for a core, or for a disk.

    Empty where the system does not measure it. It covers the whole machine, so it does not tell
    which process waited.
    """
    found = {}
    for name in ("cpu", "io"):
        with suppress(OSError, ValueError, IndexError):
            line = (proc / "pressure" / name).read_text().splitlines()[0]
            average = line.split("avg10=")[1].split()[0]
            found[f"pressure_{name}"] = float(average) / 100
    return found


class ProcessTimes:
    """Sums over processes that come and go.

    What a process did before it was first seen does not count: that is its start.
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
        fields = read_proc(f"{pid}/stat").rpartition(b")")[2].split()  # of any name
        ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15]]
    except (OSError, ValueError):
        return None
    try:
        ran, queued = read_proc(f"{pid}/schedstat").split()[:2]
        return sum(ticks), int(queued) * 1e-9, sum(ticks[:2]) - int(ran) * 1e-9
    except (OSError, ValueError):
        return sum(ticks), 0.0, 0.0


def queued_s() -> float:
    """Return the seconds that this thread has waited for a core; 0 if the system does not say.

    Source: Linux, Documentation/scheduler/sched-stats.rst: the second field of
    /proc/<pid>/schedstat is the time spent waiting on a run queue, in nanoseconds.
    """
    try:
        return int(read_proc("thread-self/schedstat").split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without it
        return 0.0


def read_bytes() -> int:
    """Return the bytes that this thread had read from storage; 0 if the system does not say.

    Those that were in the page cache do not count, and neither do network file systems that do
    their own accounting (FUSE, for example). Source: proc_pid_io(5), `read_bytes`.
    """
    try:
        for line in read_proc("thread-self/io").splitlines():
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
        lines = read_proc("stat", _STAT_BYTES).splitlines()
        ours = os.sched_getaffinity(0)
        fields = [line[3:].split() for line in lines if line[:3] == b"cpu" and line[3:4] != b" "]
        idle = [int(each[4]) + int(each[5]) for each in fields if int(each[0]) in ours]
        return sum(idle) / len(idle) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError, ZeroDivisionError):
        return None


# ---- private memory ------------------------------------------------------------------------------
# How much memory this process shares with no other: also what it has copied since its fork.

# When it is measured first, and how often at most, in seconds; and the share of the time that this
# may take. The system walks all pages: 14 ms for 700 MB.
MEMORY_EVERY_S, MEMORY_SHARE = 10.0, 0.0005
# Copied memory is new pages: with fewer than so many there is nothing to measure.
LEAST_NEW_PAGES = 1 << 13


class PrivateMemory:
    """Measures the memory of this process that no other shares, now and then."""

    def __init__(self, now: float) -> None:
        self._due, self._faults = now + MEMORY_EVERY_S, 0

    def measured(self, now: float, faults: int) -> int:
        """Return the bytes; 0 if it is too early, or the process has hardly any new pages.

        Args:
            faults: Page faults since the last call.
        """
        self._faults += faults
        if now < self._due or self._faults < LEAST_NEW_PAGES:
            return 0
        began, found = time.perf_counter(), private_bytes()
        took_s = time.perf_counter() - began
        self._due, self._faults = now + max(MEMORY_EVERY_S, took_s / MEMORY_SHARE), 0
        return found


def private_bytes() -> int:
    """Return the bytes of memory that only this process has; 0 if the system does not say.

    Source: Linux, Documentation/filesystems/proc.rst, Private_Dirty of smaps_rollup.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in read_proc("self/smaps_rollup").splitlines():
            if line.startswith(b"Private_Dirty:"):
                return int(line.split()[1]) * 1024
    return 0


# ---- private folder ------------------------------------------------------------------------------
# The folder of the pages that `forebay top` reads: one per user and machine.
#
# It is in the user's runtime folder, or in the temporary one where that is missing. A link, a
# folder of another user, or one that others may enter is not used.


def private_folders() -> list[str]:
    """Return where the folder may be, best first.

    A program and a later shell may differ in their variables, so a reader looks at all of them.
    """
    import tempfile  # not above: it imports `random`, and a user's module may have that name

    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    bases = [runtime] if os.path.isabs(runtime) else []
    if os.path.isdir(f"/run/user/{user}"):
        bases.append(f"/run/user/{user}")
    found = [os.path.join(base, "forebay") for base in bases]
    shared = (tempfile.gettempdir(), "/tmp")  # noqa: S108 - what is found there is checked
    found += [os.path.join(base, f"forebay-{user}") for base in shared]
    return list(dict.fromkeys(found))


def is_private(folder: str) -> bool:
    """Return whether a path is a folder of this user that nobody else may enter, and no link."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not status.st_mode & 0o077


def private_folder() -> str | None:
    """Return the folder to write to, created if missing; None if there cannot be one."""
    for folder in private_folders():
        with suppress(OSError):
            os.mkdir(folder, 0o700)
        if is_private(folder):
            return folder
    return None
