"""Limits of the system: what to say when it refuses processes, threads or files; full memory."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forebay.base.process import GROUPS, PROC, group_folders
from forebay.errors import WorkerDiedError


@contextmanager
def limits_in_words() -> Iterator[None]:
    """Raise WorkerDiedError, with what to do, if the system refuses to start processes."""
    try:
        yield
    except OSError as error:
        raise refused("worker processes", error) from error


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raise WorkerDiedError, with what to do, if the system refuses it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise refused("threads", error) from error


def refused(what: str, error: BaseException) -> WorkerDiedError:
    """Return the error for processes or threads that the system refuses, with what to do."""
    limits = [*dict.fromkeys(_process_limits()), _limit("open files", resource.RLIMIT_NOFILE, "-n")]
    return WorkerDiedError(
        f"{what} cannot be started: {error}\n"
        "  Nothing counts as failed because of it.\n"
        f"  A limit may be reached: {'; '.join(limits)}; of memory; or of space for temporary "
        "files (TMPDIR). Raise it, or lower num_workers."
    )


def _process_limits() -> Iterator[str]:
    """Yield the limits of processes and threads, those of control groups with their use.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, pids.max and pids.current.
    """
    for folder in group_folders(PROC, GROUPS, ("pids",)):
        with suppress(OSError, ValueError):
            most = int((folder / "pids.max").read_text())
            used = int((folder / "pids.current").read_text())
            yield (
                f"of processes and threads of the control group, {most:,}, of which {used:,} are "
                "in use (pids.max, --pids-limit)"
            )
    yield _limit("processes", resource.RLIMIT_NPROC, "-u")


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
