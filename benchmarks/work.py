"""The work on one input, the same for every peer: read and write 10 bytes, return a dict."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Settings travel in the environment: it reaches the workers of every peer, forked or spawned.
SPINS = "BENCHMARK_SPINS"
LOG = "BENCHMARK_LOG"
# How many files a task writes for one input, unless it is one.
PIECES = {"split": 100}


def read(source: str, target: str = "") -> dict[str, int]:  # noqa: ARG001 - like the others
    """Read one small file and write none: the result is a row alone."""
    with open(source, "rb") as file:
        return {"n": len(file.read())}


def copy(source: str, target: str) -> dict[str, int]:
    """Copy one small file: so little work that the overhead of the peer is measured."""
    with open(source, "rb") as file:
        body = file.read()
    with open(target, "wb") as file:
        file.write(body)
    return {"n": len(body)}


def split(source: str, target: str) -> dict[str, int]:
    """Copy one small file to each of a hundred in a new folder, as if it were cut into pieces."""
    os.mkdir(target)
    return _pieces(source, lambda name: os.path.join(target, name))


def _pieces(source: str, path: Callable[[str], str | Path]) -> dict[str, int]:
    with open(source, "rb") as file:
        body = file.read()
    for number in range(PIECES["split"]):
        with open(path(str(number)), "wb") as file:
            file.write(body)
    return {"n": len(body)}


def burn(source: str, target: str) -> dict[str, int]:
    """Use 5 ms of CPU, then copy."""
    spin(int(os.environ[SPINS]))
    return copy(source, target)


def traced(source: str, target: str) -> dict[str, int]:
    """Record process, input and time in a log, then burn: the log shows how often an input ran."""
    line = f"{time.time():.6f} {os.getpid()} {os.path.basename(source)}\n"
    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(log, line.encode())  # one write with O_APPEND: lines stay whole
    finally:
        os.close(log)
    return burn(source, target)


TASKS = {"read": read, "copy": copy, "split": split, "burn": burn, "traced": traced}


class Into:
    """A task for peers that call `work(source)`: it holds the folder for the outputs."""

    def __init__(self, task: str, folder: str) -> None:
        self._task = TASKS[task]
        self._folder = folder

    def __call__(self, source: str) -> dict[str, int]:
        return self._task(source, os.path.join(self._folder, os.path.basename(source)))


class Staged:
    """A task as forebay calls it. It is in this file because workers may import it again."""

    def __init__(self, task: str) -> None:
        self._task = TASKS[task]
        self._writes = task != "read"

    def __call__(self, source: Path, out: Any) -> dict[str, int]:
        if self._task is split:
            return _pieces(os.fspath(source), lambda name: out.file(f"{source.name}/{name}"))
        target = out.file(source.name) if self._writes else ""
        return self._task(os.fspath(source), target)


def spin(times: int) -> int:
    """Keep one core busy."""
    value = 1
    for _ in range(times):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    return value


def spins_for(seconds: float) -> int:
    """Return how many spins take the given CPU time here, with nothing else running."""
    import statistics

    times, costs = 200_000, []
    for _ in range(9):
        began = time.process_time()
        spin(times)
        costs.append(time.process_time() - began)
    return round(times * seconds / statistics.median(costs))
