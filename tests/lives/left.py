"""What a process has open, and which processes descend from one: read from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def descriptors() -> dict[int, str]:
    """Return what each descriptor of this process refers to."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # that of the listing itself
    return found


def parents() -> dict[int, int]:
    """Return the parent of each process that is not a zombie."""
    found = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            try:
                stat = (_PROC / entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(entry)] = int(parent)
    return found


def descendants(ancestor: int) -> list[int]:
    """Return the processes that descend from one, parents before children."""
    children: dict[int, list[int]] = {}
    for process, parent in parents().items():
        children.setdefault(parent, []).append(process)
    found = list(children.get(ancestor, []))
    for process in found:
        found += children.get(process, [])
    return found


def command(process: int) -> str:
    """Return how a process was started; empty if it has gone."""
    try:
        return (_PROC / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir("/dev/shm"))
