"""Run every loader through every history, two processes at a time, and print the cells."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from benchmarks.call import Call
from benchmarks.exactness import checker
from benchmarks.exactness.checker import Cell, Seen
from benchmarks.exactness.histories import HISTORIES, History, Life
from benchmarks.exactness.histories import quick as less
from benchmarks.exactness.record import Task
from benchmarks.measure import Ground
from benchmarks.preprocess import show

LIMIT_S = 90.0
DRIVERS = tuple(sorted(path.stem for path in (Path(__file__).parent / "drivers").glob("[!_]*.py")))


def exactness(ground: Ground, quick: bool) -> None:
    """Print what each loader gave in each history."""
    names = ground.loaders or DRIVERS
    cells: dict[str, dict[str, Cell]] = {}
    modules = {name: _module(name) for name in names}
    histories = tuple(less(each) for each in HISTORIES) if quick else HISTORIES
    with ThreadPoolExecutor(2) as pool:
        ready = {
            name: pool.submit(_cells, name, module, ground, histories)
            for name, module in modules.items()
            if isinstance(module, ModuleType)
        }
        for name, future in ready.items():
            cells[name] = future.result()
            print(f"measured: {name}", flush=True)
    groups = dict.fromkeys(each.group for each in histories)
    for group in groups:
        chosen = [each for each in histories if each.group == group]
        print(f"\n{group}: what came, beside what should have")
        show(
            ("", *(each.title for each in chosen)),
            [
                (modules[name].TITLE, *(str(found[each.name]) for each in chosen))
                for name, found in cells.items()
            ],
        )
    _explain(modules, cells, histories)


def _explain(
    modules: dict[str, ModuleType | str],
    cells: dict[str, dict[str, Cell]],
    histories: tuple[History, ...],
) -> None:
    print("\nthe words and numbers behind the cells that are not exact")
    rows = [
        (
            modules[name].TITLE,
            each.title,
            str(found[each.name]),
            found[each.name].detail.replace("|", "/"),
        )
        for name, found in cells.items()
        for each in histories
        if found[each.name].word != "exact"
    ]
    show(("", "history", "cell", "what was seen"), rows)
    print("\nwhat was compared")
    show(
        ("", "versions", "what it promises"),
        [
            (module.TITLE, _versions(module), module.DOCS)
            if isinstance(module, ModuleType)
            else (name, "", module)
            for name, module in modules.items()
        ],
    )
    wrong = sum(
        cell.word in ("wrong", "hangs") for found in cells.values() for cell in found.values()
    )
    print(
        f"{len(cells)} loaders, {len(histories)} histories, {wrong} cells wrong or hanging.\n"
        "exact: each sample once in each epoch, in the order of an uninterrupted run. once each:\n"
        "in another order. refused: an error in words; crashed: one without. -: the library does\n"
        "not claim it, or has no such thing. Every life of a program is a process of its own."
    )


def _module(name: str) -> ModuleType | str:
    """Return a driver, or why it cannot run here."""
    module = import_module(f"benchmarks.exactness.drivers.{name}")
    for needed in module.NEEDS:
        try:
            version(needed)
        except PackageNotFoundError:
            return f"not measured: {needed} is not installed"
    return module


def _versions(module: ModuleType) -> str:
    return ", ".join(f"{each} {version(each)}" for each in module.NEEDS)


def _cells(
    name: str, module: ModuleType, ground: Ground, histories: tuple[History, ...]
) -> dict[str, Cell]:
    scratch = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=ground.root))
    lives = Lives(name, scratch)
    if hasattr(module, "prepare"):
        with Call("benchmarks.exactness.life", name, "prepare", str(scratch)) as call:
            call.answer(LIMIT_S)
    return {each.name: _cell(each, module, lives) for each in histories}


def _cell(history: History, module: ModuleType, lives: Lives) -> Cell:
    """Return a cell; what is wrong although it was not claimed is only said beside it."""
    cell = _measured(history, module, lives)
    reason = module.UNCLAIMED.get(history.name)
    if reason and cell.word == "wrong":
        return Cell("-", f"{reason}; seen: {cell.detail}")
    return cell


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


class Lives:
    """The lives of one loader's trainings; those that histories share are run once."""

    def __init__(self, driver: str, scratch: Path) -> None:
        self._driver, self._scratch, self._lock = driver, scratch, threading.Lock()
        self._records: dict[tuple[str, tuple[Life, ...]], tuple[Path, Seen]] = {}

    def seen(self, kind: str, lives: tuple[Life, ...]) -> Seen:
        """Return what the last of these lives noted."""
        return self._run(kind, lives)[1]

    def _run(self, kind: str, lives: tuple[Life, ...]) -> tuple[Path, Seen]:
        if (kind, lives) not in self._records:
            life, record = lives[-1], Path(tempfile.mkdtemp(dir=self._scratch))
            states: list[str] = []
            if life.begin is not None:
                before, _ = self._run(kind, lives[:-1])
                states = [
                    str(before / f"state-{life.begin}.{rank}") for rank in range(lives[-2].ranks)
                ]
            task = Task(
                kind, str(self._scratch), str(record), life.workers, 0, life.ranks,
                life.batch // life.ranks, life.epochs, tuple(states), life.last, life.fault,
            )  # fmt: skip
            self._records[kind, lives] = record, _live(self._driver, task)
        return self._records[kind, lives]


def _live(driver: str, task: Task) -> Seen:
    """Run all ranks of a life, and return what they noted."""
    until = time.monotonic() + LIMIT_S
    ranks = {
        "WORLD_SIZE": str(task.ranks),
        "LOCAL_WORLD_SIZE": str(task.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    error, hangs = "", False
    with contextlib.ExitStack() as stack:
        given = json.dumps(asdict(task))
        calls = []
        for rank in range(task.ranks):
            own = ranks | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if task.ranks > 1 else {}
            arguments = ("benchmarks.exactness.life", driver, str(rank), given)
            calls.append(stack.enter_context(Call(*arguments, TMPDIR=task.record, **own)))
        for call in calls:
            try:
                call.process.wait(max(until - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                hangs = True
                break
            printed, errors = call.printed()
            if call.process.returncode and not error:
                lines = (printed or errors).strip().splitlines() or ["no word"]
                error = (
                    lines[-1]
                    if call.process.returncode > 0
                    else f"ended by signal {-call.process.returncode}: {lines[-1]}"
                )
    return _read(Path(task.record), task.ranks, error, hangs)


def _read(record: Path, ranks: int, error: str, hangs: bool) -> Seen:
    ids, bits, handlers, end = [], [], set(), ""
    for rank in range(ranks):
        path = record / f"rank-{rank}"
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        batches = [line for line in lines if "ids" in line]
        ids.append(tuple(tuple(line["ids"]) for line in batches))
        bits.append(tuple(tuple(map(tuple, line["bits"])) for line in batches))
        handlers |= {line["handler"] for line in lines if "handler" in line}
        end = next((line["end"] for line in lines if "end" in line), end)
    return Seen(tuple(ids), tuple(bits), error, hangs, len(handlers), end)


def _free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])
