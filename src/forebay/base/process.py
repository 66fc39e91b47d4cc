"""This process and others: identity, processor time, cores, `sys.path`, waits that Ctrl-C ends."""

from __future__ import annotations

import gc
import os
import resource
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# ---- proc files ----------------------------------------------------------------------------------
# Read small files of /proc, also at times when Ctrl-C is likely to come. A container may have none:
# then measurements are missing.

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# More than nearly all of the files that are read have.
_MAX_BYTES = 4096
# Without /proc, higher ones are not looked for: the system gives the lowest that is free.
_MOST_DESCRIPTORS = 1 << 16


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


def descriptor_path(descriptor: int) -> str | None:
    """Return a path of what a descriptor of this process has open; None without /proc."""
    path = f"{PROC}/self/fd/{descriptor}"
    return path if os.path.exists(path) else None


def descriptors() -> Iterable[int]:
    """Return the descriptors that this process may have open: all of those, and perhaps others."""
    try:
        return map(int, os.listdir(f"{PROC}/self/fd"))
    except OSError:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return range(min(limit, _MOST_DESCRIPTORS))


# ---- process identity ----------------------------------------------------------------------------
# Tell a process from a later one with the same ID, and from one of another machine.


def kernel() -> str:
    """Return the running kernel and its namespace of process IDs; "" where that is not known."""
    try:
        boot = read_proc("sys/kernel/random/boot_id").decode().strip()
        return f"{boot} {os.readlink(f'{PROC}/self/ns/pid')}"
    except OSError:
        return ""


def state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state and when it started; both "" where that cannot be seen."""
    try:
        # The name in brackets may itself hold brackets and spaces.
        fields = read_proc(f"{pid}/stat").rpartition(b")")[2].decode().split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def is_alive(pid: int, process_start: str) -> bool:
    """Return whether a process of this machine is there, and not another with the same ID."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # another user's process
    state, start = state_and_start(pid)
    return state not in ("Z", "X") and start in ("", process_start)


# ---- waiting -------------------------------------------------------------------------------------
# Waits that may last: Ctrl-C ends each within a second, whenever it comes.
#
# Python looks for signals before a wait. One that arrives between that look and the wait does not
# interrupt a wait without a limit, and the program would ignore Ctrl-C until the wait ends by
# itself.

LONGEST_WAIT_S = 1.0


def wait_until(wait: Callable[[float], object]) -> None:
    """Call `wait(seconds)` until what it returns is true."""
    while not wait(LONGEST_WAIT_S):
        pass


def join_thread(thread: threading.Thread) -> None:
    """Wait until a thread has ended."""
    while thread.is_alive():
        thread.join(LONGEST_WAIT_S)


# ---- gc threshold --------------------------------------------------------------------------------
# How often Python's garbage collector looks for reference cycles during a run.

# New objects after which it looks for them during a run; Python's default is 700.
_COLLECT_EVERY = 10_000


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Let Python look for reference cycles less often, while no user code runs in this thread."""
    before = gc.get_threshold()
    is_ours = 0 < before[0] < _COLLECT_EVERY  # not if it is off, or another run has done this
    if is_ours:
        gc.set_threshold(_COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        if is_ours:
            gc.set_threshold(*before)


# ---- recursion limit -----------------------------------------------------------------------------


# ---- import path ---------------------------------------------------------------------------------
# `sys.path`: the standard library comes before every folder that forebay adds.
#
# The working folder often holds data. A file `json.py` in it must not replace Python's own module.

_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def add_folder(folder: str) -> None:
    """Have modules of a folder found: before installed packages, after the standard library."""
    if folder not in sys.path:
        last = max((at for at, each in enumerate(sys.path) if _is_standard(each)), default=-1)
        sys.path.insert(last + 1, folder)


def standard_library_first() -> list[str]:
    """Return `sys.path` with the standard library's own folders moved to its front."""
    return sorted(sys.path, key=lambda folder: not _is_standard(folder))


def _is_standard(folder: str) -> bool:
    return folder == _STANDARD_LIBRARY or os.path.basename(folder) == "lib-dynload"


# Descriptors that workers need beside their own: what is sent to them names these by number.
descriptors_for_workers: set[int] = set()


# ---- machine -------------------------------------------------------------------------------------
# How many cores this process may use, and how long processes of its machine wait for resources.


def usable_cores(proc: Path = PROC, groups: Path = GROUPS) -> float:
    """Return how many cores this process may use: by its affinity and its containers' quotas."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = float(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
    return min([cores, *filter(None, map(_quota, group_folders(proc, groups, ("cpu",))))])


def usable_memory(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return the bytes of memory of this machine, or of its control groups; None if unknown.

    Sources: Linux, Documentation/admin-guide/cgroup-v2.rst, memory.max; cgroup-v1/memory.rst,
    memory.limit_in_bytes, which is 2^63 less a page where there is no limit.
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
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


def _quota(folder: Path) -> float | None:
    """Return the quota of a control group in cores; None if it has none."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        return None if limit <= 0 else limit / int((folder / "cpu.cfs_period_us").read_text())
    return None


# ---- process times -------------------------------------------------------------------------------
# Processor time of processes, and how long they waited for a core, as their parent sees it.


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


# ---- run queue -----------------------------------------------------------------------------------
# Measure how long a thread was able to run but waited for a core.


def queued_s() -> float:
    """Return the seconds that this thread has waited for a core; 0 if the system does not say.

    Source: Linux, Documentation/scheduler/sched-stats.rst: the second field of
    /proc/<pid>/schedstat is the time spent waiting on a run queue, in nanoseconds.
    """
    try:
        return int(read_proc("thread-self/schedstat").split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without it
        return 0.0


# ---- storage -------------------------------------------------------------------------------------
# What the system knows of storage: bytes that this thread read, limits, memory for files.

_STAT_BYTES = 1 << 16


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


def memory_for_files(proc: Path = PROC) -> int | None:
    """Return the bytes of memory that files may occupy at present; None if it is not known.

    Source: proc_meminfo(5), MemAvailable.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


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
