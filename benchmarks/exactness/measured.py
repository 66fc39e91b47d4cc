"""What was measured of each loader, in a file, so that a single one can be measured again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.exactness.checker import Cell

FILE = Path("docs", "benchmarks", "exactness.json")


@dataclass(frozen=True, slots=True)
class Measured:
    """The cells of one loader.

    Attributes:
        driver: The name of its driver.
        title: What it is called in tables.
        date: The day it was measured on.
        machine: The machine and the interpreter it was measured with.
        versions: The versions of what it needs.
        docs: Where its documentation says what it promises.
        cells: The cells by the names of histories.
        missing: Why it was not measured; empty if it was.
        seconds: How long that took.
    """

    driver: str
    title: str
    date: str
    machine: str = ""
    versions: str = ""
    docs: str = ""
    cells: dict[str, Cell] = field(default_factory=dict)
    missing: str = ""
    seconds: int = 0


def stored(file: Path = FILE) -> list[Measured]:
    """Return what is in the file, in the order of its drivers' names."""
    if not file.exists():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    return [
        Measured(**each | {"cells": {name: Cell(*cell) for name, cell in each["cells"].items()}})
        for each in found
    ]


def store(measured: Iterable[Measured], file: Path = FILE) -> None:
    """Write what was measured into the file, in place of what it has of the same drivers."""
    found = {each.driver: each for each in [*stored(file), *measured]}
    lines = [
        asdict(each) | {"cells": {name: [c.word, c.detail] for name, c in each.cells.items()}}
        for _, each in sorted(found.items())
    ]
    file.write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
