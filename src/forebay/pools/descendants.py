"""The processes that descend from one."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def kill_descendants(ancestor: int) -> int:
    """Kill every process that descends from another, whatever its session or process group."""
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
