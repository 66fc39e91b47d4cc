"""Run every loader through every history, two processes at a time, and print the cells."""

from __future__ import annotations

import platform
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from benchmarks.call import Call
from benchmarks.exactness import checker
from benchmarks.exactness.checker import Cell
from benchmarks.exactness.histories import HISTORIES, MEANINGS, History
from benchmarks.exactness.histories import quick as less
from benchmarks.exactness.lives import LONGEST_S, Lives
from benchmarks.exactness.measured import Measured, store
from benchmarks.exactness.page import cell_rows, compared_rows, groups, seen_rows, write
from benchmarks.machine import processor
from benchmarks.measure import Ground
from benchmarks.preprocess import show

DRIVERS = tuple(sorted(path.stem for path in (Path(__file__).parent / "drivers").glob("[!_]*.py")))


def exactness(ground: Ground, quick: bool) -> None:
    """Print what each loader gave in each history."""
    wanted = [each for each in HISTORIES if each.name in (ground.histories or MEANINGS)]
    histories = tuple(less(each) if quick else each for each in wanted)
    found = []
    modules = {name: _module(name) for name in ground.loaders or DRIVERS}
    with ThreadPoolExecutor(2) as pool:
        ready = [
            pool.submit(_loader, name, module, ground, histories)
            for name, module in modules.items()
        ]
        for future in as_completed(ready):
            found.append(future.result())
            _row(found[-1])
            if ground.page:
                store(found[-1:])
    found.sort(key=lambda each: each.driver)
    for group, chosen in groups(histories).items():
        print(f"\n{group}: what came, beside what should have")
        show(("", *(each.title for each in chosen)), cell_rows(found, chosen))
    print("\nwhat is behind the cells that are not exact")
    show(("", "history", "cell", "what was seen"), seen_rows(found, histories))
    print("\nwhat was compared")
    show(("", "versions", "measured on", "what it promises"), compared_rows(found))
    wrong = sum(cell.word in ("wrong", "hangs") for each in found for cell in each.cells.values())
    print(
        f"{sum(not each.missing for each in found)} loaders, {len(histories)} histories, {wrong} "
        "cells wrong or hanging.\n"
        "exact: each sample once in each epoch, in the order of an uninterrupted run. once each:\n"
        "in another order. refused: an error in words; crashed: one without. -: the library does\n"
        "not claim it, or has no such thing. Every life of a program is a process of its own."
    )
    if ground.page:
        write()


def _row(each: Measured) -> None:
    """Print what came of one loader as soon as it is measured."""
    words = [cell.word for cell in each.cells.values()]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    print(f"{each.title} ({each.seconds} s): {each.missing or counts}", flush=True)
    for name, cell in each.cells.items():
        if cell.word not in ("exact", "-"):
            print(f"    {name}: {cell}, {cell.detail}", flush=True)


def _module(name: str) -> ModuleType | str:
    """Return a driver, or why it cannot be imported."""
    try:
        return import_module(f"benchmarks.exactness.drivers.{name}")
    except ImportError as error:
        return f"not measured: {error}"


def _loader(
    name: str, module: ModuleType | str, ground: Ground, histories: tuple[History, ...]
) -> Measured:
    machine = f"{processor()}, Linux {platform.release()}, Python {platform.python_version()}"
    began, date = time.monotonic(), datetime.now(UTC).date().isoformat()
    if isinstance(module, str):
        return Measured(name, name, date, machine, missing=module)
    versions = ", ".join(f"{each} {version(each)}" for each in module.NEEDS)
    found = Measured(name, module.TITLE, date, machine, versions, module.DOCS)
    try:
        cells = _cells(name, module, ground, histories)
    except RuntimeError as error:  # its files could not be written
        return replace(found, missing=f"not measured: {str(error).strip().splitlines()[-1]}")
    return replace(found, cells=cells, seconds=round(time.monotonic() - began))


def _cells(
    name: str, module: ModuleType, ground: Ground, histories: tuple[History, ...]
) -> dict[str, Cell]:
    scratch = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=ground.root))
    if hasattr(module, "prepare"):
        with Call("benchmarks.exactness.life", name, "prepare", str(scratch)) as call:
            call.answer(LONGEST_S)
    with Lives(name, scratch) as lives:
        return {each.name: _cell(each, module, lives) for each in histories}


def _cell(history: History, module: ModuleType, lives: Lives) -> Cell:
    """Return a cell; what is wrong although it was not claimed is only said beside it."""
    cell = _measured(history, module, lives)
    reason = module.UNCLAIMED.get(history.name)
    if not reason or cell.word in ("exact", "once each", "-"):
        return cell
    if cell.word == "wrong":
        return Cell("-", f"{reason}; seen: {cell.detail}")
    return replace(cell, detail=f"{cell.detail} (not claimed: {reason})")


def _measured(history: History, module: ModuleType, lives: Lives) -> Cell:
    resumed = any(life.begin for trial in history.trials for life in trial)
    reason = module.LACKS.get(history.name) or (module.LACKS.get("resume") if resumed else None)
    if reason:
        return Cell("-", reason)
    trials = []
    for trial in history.trials:
        seen = []
        for count in range(1, len(trial) + 1):
            seen.append(lives.seen(history.kind, trial[:count]))
            if seen[-1].hangs or (seen[-1].error and trial[count - 1].last is None):
                break
        # Lives that an error or a hang left out: nothing came in them.
        seen += [replace(seen[-1], ids=())] * (len(trial) - len(seen))
        trials.append(seen)
    first = history.trials[0][0]
    whole = lives.seen(history.kind, (replace(first, last=None),)) if resumed else None
    return checker.judge(history, trials, whole)
