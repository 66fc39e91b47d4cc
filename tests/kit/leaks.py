"""`no_leaks`: check that a block leaves nothing behind that it started, opened or mapped.

What is checked, and how items of this process are recognized:

    processes     descendants; also orphans, which carry a mark of this process: in their
                  environment if they were started by `exec`, in their memory if they were forked
    threads       `threading.enumerate()`
    descriptors   /proc/self/fd, identified by number, device and inode
    /dev/shm      new names that one of these processes has mapped or open, or that contain its ID
    memfds        mappings of `memfd_create` files in /proc/self/maps

Other programs run on the same machine, start processes and are killed: what cannot be traced to
this process is not counted.

Some things are meant to exist as long as the process: multiprocessing's resource tracker and
forkserver, and the threads of fsspec's event loop. They do not count. What other
libraries keep from their first use on looks like a leak: use them once beforehand. Without /proc
only threads are compared.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import re
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.base.process import memory_file

_PROC = Path("/proc")
_SHM = Path("/dev/shm")
_MARK = "FOREBAY_NO_LEAKS"
# Unlike a process ID, which is used again, this means one process.
_TOKEN = secrets.token_hex(8)
# More than /proc/PID/stat has: 52 numbers and a short name.
_STAT_BYTES = 4096
# How the names of threads that libraries keep begin: those of fsspec's event loop.
_LIBRARY_THREADS = ("fsspecIO", "asyncio_")
_MAPPING = f"/memfd:no-leaks-{_TOKEN}"
# libffi keeps its trampolines in a memfd for as long as the process lives.
_LIBRARY_MEMFDS = ("/memfd:libffi", _MAPPING)


def _marked_memory() -> mmap.mmap:
    """Map a file named by the token: forked processes inherit it, started programs do not."""
    descriptor = memory_file(f"no-leaks-{_TOKEN}")
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return mmap.mmap(descriptor, mmap.PAGESIZE)
    finally:
        os.close(descriptor)


_MARKED_MEMORY = _marked_memory()


@dataclass(frozen=True, slots=True)
class _Process:
    """One process in /proc: its ID, parent and state."""

    pid: int
    parent: int
    state: str
    name: str

    def __str__(self) -> str:
        ended = ", ended but never waited for" if self.state == "Z" else ""
        try:
            words = (_PROC / str(self.pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            words = []
        command = b" ".join(words).decode(errors="replace") or self.name
        return f"process {self.pid} (parent {self.parent}{ended}): {command}"


@contextlib.contextmanager
def no_leaks(wait_s: float = 5.0) -> Iterator[None]:
    """Fail if the block leaves processes, threads, descriptors or shared memory behind.

    An error raised in the block passes through unchanged, and nothing is checked then.
    **Threads.** Other threads of this process must not start or open anything meanwhile.

    Args:
        wait_s: Seconds to wait for things that are still ending, at least 0.

    Yields:
        Nothing.

    Raises:
        AssertionError: Something is left; the message lists each thing.

    Example::

        with no_leaks():
            forebay.preprocess(work, inputs, output="pieces/")
    """
    with _marked_environment():
        before = everything()
        yield
        deadline = time.monotonic() + wait_s
        while left := left_since(before):
            # Objects without references are not leaks, but the garbage collector may not have run.
            gc.collect()
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
    if left:
        lines = "\n".join(f"  {line}" for line in left)
        raise AssertionError(f"{len(left)} left behind, {wait_s:g} s after the end:\n{lines}")


def let_go(error: BaseException | None) -> None:
    """Clear the frames of an error and of those that it is from: what they hold is no leak."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            for frame, _ in traceback.walk_tb(each.__traceback__):
                with contextlib.suppress(RuntimeError):  # one that runs stays
                    frame.clear()
                    _ = frame.f_locals  # a copy that a report was made of follows
            waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


@contextlib.contextmanager
def _marked_environment() -> Iterator[None]:
    """Mark programs that are started in the block by an environment variable."""
    earlier = os.environ.get(_MARK)
    os.environ[_MARK] = _TOKEN
    try:
        yield
    finally:
        if earlier is None:
            os.environ.pop(_MARK, None)
        else:
            os.environ[_MARK] = earlier


def everything() -> set[Hashable]:
    """Return everything that exists now, including all processes."""
    return {*threading.enumerate(), *_pids(), *_descriptors(), *_shm_names(), *_memfds()}


def left_since(before: set[Hashable]) -> list[str]:
    """Return a line for each thing of this process that exists now and did not before."""
    library_descriptors = _library_descriptors()
    lines = _left_processes(before)
    lines += [
        f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"
        for thread in threading.enumerate()
        if thread not in before and not thread.name.startswith(_LIBRARY_THREADS)
    ]
    lines += [
        f"descriptor {key[0]}: {target}"
        for key, target in _descriptors().items()
        if key not in before and key[0] not in library_descriptors
    ]
    lines += [
        f"shared memory /dev/shm/{key[1]}"
        for key in _shm_names()
        if key not in before and _is_own_memory(key[1])
    ]
    lines += [f"mapping of {line}" for key, line in _memfds().items() if key not in before]
    return lines


# ---- processes ----------------------------------------------------------------------------------


def _pids() -> set[int]:
    # A twentieth of the time that it takes to read when each process was started. That would tell
    # processes with one ID apart, but within a test no ID comes round again.
    return {int(name) for name in _names(_PROC) if name.isdigit()}


def _stats() -> dict[int, bytes]:
    """Return /proc/PID/stat of all processes; those that go meanwhile are left out."""
    found = {}
    for pid in _pids():
        # Not by `Path` or a file object, which are slow.
        with contextlib.suppress(OSError):
            descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
            try:
                found[pid] = os.read(descriptor, _STAT_BYTES)
            finally:
                os.close(descriptor)
    return found


def _process(pid: int, stat: bytes) -> _Process:
    head, _, tail = stat.rpartition(b")")
    state, parent, *_ = tail.split()
    return _Process(
        pid=pid,
        parent=int(parent),
        state=state.decode(),
        name=head.partition(b"(")[2].decode(errors="replace"),
    )


def _processes(stats: dict[int, bytes]) -> dict[int, _Process]:
    return {pid: _process(pid, stat) for pid, stat in stats.items()}


def _left_processes(before: set[Hashable]) -> list[str]:
    new = _pids() - before - _library("_pid", "_forkserver_pid")
    if not new:
        return []
    everyone = _processes(_stats())
    return [str(everyone[pid]) for pid in new & everyone.keys() if _is_own(everyone[pid], everyone)]


def _is_own(process: _Process, everyone: dict[int, _Process]) -> bool:
    """Return whether a process is of this one: a descendant, or an orphan that has a mark."""
    return _descends(process, os.getpid(), everyone) or _is_marked(process.pid)


def _descends(process: _Process, ancestor: int, everyone: dict[int, _Process]) -> bool:
    seen: set[int] = set()
    at: _Process | None = process
    while at is not None and at.pid not in seen:
        if at.parent == ancestor:
            return True
        seen.add(at.pid)
        at = everyone.get(at.parent)
    return False


def _is_marked(pid: int) -> bool:
    """Return whether a process was forked or started by this one or by one that was."""
    folder = _PROC / str(pid)
    try:
        environment = (folder / "environ").read_bytes().split(b"\0")
        return f"{_MARK}={_TOKEN}".encode() in environment or _MAPPING in _maps(folder)
    except OSError:
        return False


def _library(tracker_key: str, forkserver_key: str) -> set[int | None]:
    """Return a number of each helper that multiprocessing starts once and keeps."""
    kept: set[int | None] = set()
    if (tracker := sys.modules.get("multiprocessing.resource_tracker")) is not None:
        kept.add(getattr(tracker._resource_tracker, tracker_key, None))
    if (forkserver := sys.modules.get("multiprocessing.forkserver")) is not None:
        kept.add(getattr(forkserver._forkserver, forkserver_key, None))
    return kept


# ---- descriptors and memory ---------------------------------------------------------------------


def _descriptors() -> dict[tuple[int, int, int], str]:
    """Return open descriptors: (number, device, inode) and what each leads to."""
    found = {}
    for name in _names(_PROC / "self" / "fd"):
        # The descriptor of the listing is already closed, and other threads may close theirs.
        with contextlib.suppress(OSError):
            stat = os.fstat(int(name))
            found[int(name), stat.st_dev, stat.st_ino] = os.readlink(_PROC / "self" / "fd" / name)
    return found


def _library_descriptors() -> set[int | None]:
    """The descriptors of the helpers that libraries keep."""
    kept = _library("_fd", "_forkserver_alive_fd")
    if (asyn := sys.modules.get("fsspec.asyn")) is not None and (loop := asyn.loop[0]) is not None:
        kept.update(end.fileno() for end in (loop._selector, loop._ssock, loop._csock))
    return kept


def _shm_names() -> set[tuple[str, str]]:
    # Only names given by torch, multiprocessing or forebay: an abandoned file of another program
    # (joblib leaves some behind) would look like one of this process.
    names = [name for name in _names(_SHM) if name.startswith(("forebay-", "psm_", "torch_"))]
    return {("/dev/shm", name) for name in names}


def _is_own_memory(name: str) -> bool:
    """Return whether a file of /dev/shm is traced to this process or to one that it started.

    Either such a process has it open or mapped, or its ID is in the name, as in those by torch.
    """
    path, everyone = f"{_SHM}/{name}", _processes(_stats())
    named_after = re.split("[_-]", name)[1]
    for process in everyone.values():
        if process.pid != os.getpid() and not _is_own(process, everyone):
            continue
        folder = _PROC / str(process.pid)
        with contextlib.suppress(OSError):
            if named_after == str(process.pid) or path in _maps(folder):
                return True
            if any(_link(folder / "fd" / number) == path for number in _names(folder / "fd")):
                return True
    return False


def _maps(folder: Path) -> str:
    return (folder / "maps").read_text(errors="replace")


def _link(path: Path) -> str | None:
    """Return where a descriptor leads; None if it was closed meanwhile."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def _memfds() -> dict[tuple[str, str], str]:
    """Return this process's mappings of memfds: (inode, address) and a line for the message."""
    try:
        maps = (_PROC / "self" / "maps").read_bytes()
    except OSError:
        return {}
    if b"/memfd:" not in maps:
        return {}
    lines = os.fsdecode(maps).splitlines()
    fields = [line.split(maxsplit=5) for line in lines if "/memfd:" in line]
    return {
        (inode, addresses): f"{name} at {addresses}"
        for addresses, _, _, _, inode, name in fields
        if not name.startswith(_LIBRARY_MEMFDS)
    }


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
