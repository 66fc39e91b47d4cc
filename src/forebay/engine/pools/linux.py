"""Linux calls that tie processes together, and files without a name that they share."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from contextlib import suppress

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CREDENTIALS = struct.Struct("3i")  # of a socket's maker: process, user, group


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def continue_when_driver_ends(control: int) -> None:
    """Have the kernel continue this process, should it be stopped, when the driver is gone.

    A stopped process does not notice that its socket was closed. The kernel also sends SIGCONT with
    each order, and when the thread that started this process ends; a running process ignores it.

    Args:
        control: The socket; only the driver has its other end.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # also if a fork of the driver lives on
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)


def adopt_orphans() -> None:
    """Become the parent of every descendant of this process whose own parent has died."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_first_when_memory_runs_out() -> None:
    """Make the kernel's out-of-memory killer choose this process, never the driver."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def watch_maker_of(control: socket.socket) -> list[int]:
    """Return a descriptor that is ready to read when the process that made the socket has ended.

    The socket itself stays open while a fork of that process lives, which has a copy. The list is
    empty if the kernel or this Python has no such descriptors, or the process has already ended.
    """
    credentials = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    with suppress(AttributeError, OSError):
        return [os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])]
    return []


def kill_descendants(ancestor: int) -> int:
    """Kill every process that descends from another, whatever its session or process group.

    Returns:
        How many were killed; processes of other users are left out. 0 without /proc.
    """
    killed = 0
    for pid in _descendants(ancestor):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    with suppress(FileNotFoundError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name in brackets may itself hold brackets and spaces.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in b"ZX":  # those have ended
                    children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    generation = children.get(ancestor, [])
    while generation:
        found += generation
        generation = [child for pid in generation for child in children.get(pid, ())]
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def scratch_file() -> int:
    """Return the descriptor of an unnamed file: in memory if possible, else on disk.

    Raises:
        OSError: There is no room for it.
    """
    with suppress(AttributeError, OSError):  # this Python lacks it, or it is not permitted
        return os.memfd_create("forebay")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
