"""Tie the processes of one program together: one ends, or continues, when another has ended.

These are calls of Linux. Here, too, is which of them the kernel kills first.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path

# Values for /proc/PID/oom_score_adj: which process of this program the kernel kills first.
OOM_FIRST, OOM_AFTER_WORKERS = 1000, 999


def die_when_memory_runs_out(score: int = OOM_FIRST) -> None:
    """Make the kernel's out-of-memory killer choose this process before the program that began it.

    Args:
        score: OOM_FIRST for a worker, OOM_AFTER_WORKERS for a process that workers need.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


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
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # also if a fork of the driver lives on
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)


def watch_maker_of(control: socket.socket) -> list[int]:
    """Return a descriptor that is ready to read when the process that made the socket has ended.

    The socket itself stays open while a fork of that process lives, which has a copy. The list is
    empty if the kernel or this Python has no such descriptors, or the process has already ended.
    """
    credentials = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    with suppress(AttributeError, OSError):
        return [os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])]
    return []


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
