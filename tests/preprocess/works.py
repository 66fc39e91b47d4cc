"""Functions to preprocess with, importable by workers and named on command lines.

Each call of one that counts adds a line to the file `calls` beside the input folder.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def note_call(source: Path) -> None:
    """Add the input's name to the file `calls` beside its folder, in one write."""
    calls = os.open(source.parent.with_name("calls"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(calls, f"{source.name}\n".encode())
    os.close(calls)


def copy(source: Path, out: Any) -> dict[str, Any]:
    """Copy the input; the plainest work there is."""
    note_call(source)
    out.file(source.name).write_bytes(source.read_bytes())
    return {"bytes": source.stat().st_size}


def nothing(source: Any, out: Any) -> None:
    """Make nothing and say nothing."""


def row_alone(source: Path, out: Any) -> dict[str, int]:
    """Return a row, and write no file."""
    return {"bytes": len(source.read_bytes())}


def split(source: Path, out: Any) -> Iterator[dict[str, Any]]:
    """Write each line to a file in the input's own folder, as slowly as `WORK_PAUSE_S` says."""
    for number, line in enumerate(source.read_text().splitlines()):
        path = out.file(f"{source.stem}/{number}.txt")
        with path.open("w") as file:
            # In two writes with a pause between, so that a kill can tear it.
            file.write(line[:3])
            file.flush()
            time.sleep(float(os.environ.get("WORK_PAUSE_S", "0")))
            file.write(line[3:])
        yield {"destination": path, "number": number}


def split_unless_held(source: Path, out: Any) -> Iterator[dict[str, Any]]:
    """Split, but wait at input 20 and later while somebody has a lock on the file of calls."""
    if int(source.stem) >= 20:
        with source.parent.with_name("calls").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    yield from split(source, out)


def draw(source: Path, out: Any) -> dict[str, float]:
    """Return random numbers, from a library that only the function itself imports."""
    import numpy

    return {"python": random.random(), "numpy": float(numpy.random.rand())}


def fail_once(source: Path, out: Any) -> dict[str, int]:
    """Fail at the first try of each input."""
    note_call(source)
    tries = source.parent.with_name("calls").read_text().split().count(source.name)
    if tries == 1:
        raise ValueError(f"{source.name} fails at first")
    return {"tries": tries}


def fail_odd(source: Path, out: Any) -> None:
    """Fail for inputs with an odd number, differently each."""
    note_call(source)
    number = int(source.stem)
    if number % 2:
        raise (ValueError, KeyError, OSError)[number % 3](f"number {number} is odd")


def wait_at_gate(source: Path, out: Any) -> None:
    """Say who is at work, then wait until let through; each input only once."""
    folder = source.parent.parent
    once = folder / f"{source.name}.once"
    if "gate" in source.name and not once.exists():
        once.touch()
        here = os.open(folder / "here", os.O_WRONLY)
        os.write(here, f"{os.getpid()} {os.getppid()} {source.name}\n".encode())
        os.close(here)
        (folder / "go").read_text()
    out.file(source.name).write_text("done")


class Words:
    """A Dataset that does the work: sample k is a row about a word."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"word": ("one", "two", "three")[index], "length": (3, 3, 5)[index]}


words = Words()


def size_of_destination(row: dict[str, Any], out: Any) -> dict[str, int]:
    """Return the size of the file that an earlier step wrote, found by its table."""
    return {"size": Path(row["destination"]).stat().st_size}


class Letters:
    """A Dataset that knows its samples by name: sample k is a letter and a number."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[str, int]:
        return "abc"[index], index

    def source_of(self, index: int) -> str:
        """Return the name of a sample."""
        return f"letter {'abc'[index]}"


letters = Letters()


def save_letter(sample: tuple[str, int], out: Any) -> Iterator[dict[str, Any]]:
    """Write a file for each sample but those whose number is in the environment."""
    letter, number = sample
    if str(number) in os.environ.get("WORK_REFUSES", ""):
        raise ValueError(f"{letter} is refused")
    path = out.file(f"{out.source.replace(' ', '/')}.txt")
    path.write_text(letter * (number + 1))
    yield {"destination": path, "number": number}


def copy_to(source: Path, out: Any, suffix: str) -> None:
    """Take three arguments."""
