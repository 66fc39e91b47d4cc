"""What was measured of each loader, in a file, so that a single one can be measured again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
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


def _beside(known: Measured, new: Measured) -> Measured:
    """Return new cells with those of other histories that are known of the same versions."""
    rest = {name: cell for name, cell in known.cells.items() if name not in new.cells}
    if not rest or new.missing:
        return new
    if known.versions != new.versions:
        raise ValueError(
            f"{new.title} was measured with {known.versions} and is {new.versions} now: measure "
            "all of its histories"
        )
    cells, date = known.cells | new.cells, min(known.date, new.date)
    return replace(new, cells=cells, date=date, seconds=known.seconds)


def store(measured: Iterable[Measured], file: Path = FILE) -> None:
    """Write what was measured into the file, in place of what it has of the same drivers.

    Cells of histories that were not measured now stay.
    """
    found = {each.driver: each for each in stored(file)}
    for each in measured:
        found[each.driver] = _beside(found[each.driver], each) if each.driver in found else each
    lines = [
        asdict(each) | {"cells": {name: [c.word, c.detail] for name, c in each.cells.items()}}
        for _, each in sorted(found.items())
    ]
    file.write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
