"""Tell a process from a later one with the same ID, and from one of another machine."""

from __future__ import annotations

import os

from forebay.proc_files import read_proc


def kernel() -> str:
    """Return the running kernel and its namespace of process IDs; "" where that is not known."""
    try:
        boot = read_proc("/proc/sys/kernel/random/boot_id").decode().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state and when it started; both "" where that cannot be seen."""
    try:
        # The name in brackets may itself hold brackets and spaces.
        fields = read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def is_alive(pid: int, process_start: str) -> bool:
    """Tell whether a process of this machine is there, and not another with the same ID.

    Args:
        pid: Its ID.
        process_start: When it started, as `state_and_start` tells; "" if that is not known.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # another user's process
    state, start = state_and_start(pid)
    return state not in ("Z", "X") and start in ("", process_start)
