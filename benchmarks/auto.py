"""`num_workers="auto"` beside the best fixed number of workers, before and after the load changes.

Each run is a process that trains on one load, changes the load, and trains on. Runs with fixed
numbers and with "auto" take turns. As a program: `python -m benchmarks.auto LOAD NUM_WORKERS FOLDER
SETTLE_S WINDOW_S`; its last line is what it found, as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

BATCH = 8
# Rates are counted over whole cycles: a pause, or two slow batches, belongs to each.
CYCLE = 20
SLOW_EVERY = 10
FIXED = (1, 2, 4, 8)
ROUNDS = 3
# How long a run with a fixed number trains before its rate counts, and the target for "auto".
SETTLE_S, QUICK_SETTLE_S, AUTO_SETTLE_S = 2.0, 1.0, 10.0
WINDOW_S, QUICK_WINDOW_S = 5.0, 2.0
TARGET = 0.95
# How often the number of workers is read.
LOOK_S = 0.25
LIMIT_S = 300.0
# Enough for a burst.
BUFFERED = 32


@dataclass(frozen=True, slots=True)
class Phase:
    """A load.

    Attributes:
        wait_s: How long a sample sleeps, in seconds.
        cpu_s: Processor time of a sample, in seconds.
        step_s: How long the trainer sleeps after a batch, in seconds.
        pause_s: How long it sleeps after each cycle besides, in seconds.
        slow: How many times longer one batch in `SLOW_EVERY` takes.
    """

    wait_s: float = 0.0
    cpu_s: float = 0.0
    step_s: float = 0.0
    pause_s: float = 0.0
    slow: float = 1.0


# By name, the load before and after the change.
LOADS = {
    "storage": (Phase(wait_s=0.005, step_s=0.01), Phase(wait_s=0.009, step_s=0.01)),
    "cpu": (
        Phase(cpu_s=0.002, step_s=0.004),
        Phase(cpu_s=0.001, wait_s=0.002, step_s=0.006),
    ),
    "bursts": (Phase(wait_s=0.005, pause_s=0.4), Phase(wait_s=0.005, pause_s=0.2)),
    "skewed": (
        Phase(wait_s=0.003, step_s=0.02, slow=10.0),
        Phase(wait_s=0.003, step_s=0.01, slow=10.0),
    ),
    "trivial": (Phase(), Phase(cpu_s=2e-5)),
}


class Samples:
    """Samples that sleep and compute; a file that appears means that the load has changed."""

    def __init__(self, phases: tuple[Phase, Phase], changed: str) -> None:
        self._phases, self._changed = phases, changed

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        phase = self._phases[os.path.exists(self._changed)]
        turn, place = divmod(index // BATCH, SLOW_EVERY)
        factor = phase.slow if place == turn * 7 % SLOW_EVERY else 1.0
        if phase.wait_s:
            time.sleep(phase.wait_s * factor)
        if phase.cpu_s:
            until = time.thread_time() + phase.cpu_s * factor
            while time.thread_time() < until:
                pass
        return index


def auto(ground: Ground, quick: bool) -> None:
    """Print the rates with fixed numbers of workers, and those with "auto" beside the best."""
    window_s = QUICK_WINDOW_S if quick else WINDOW_S
    settle_s = QUICK_SETTLE_S if quick else SETTLE_S
    rounds = 1 if quick else ROUNDS
    settles = dict.fromkeys(map(str, (0, *FIXED)), settle_s) | {"auto": AUTO_SETTLE_S}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for load in LOADS:
        runs = found[load] = {name: [] for name in settles}
        for _round in range(rounds):
            for name, settled_s in settles.items():
                runs[name].append(_once(load, name, ground, settled_s, window_s))
    _show_rates(found)
    print()
    _show_ratios(found)


def _show_rates(found: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    print("five loads, each before and after it changes: rate by the number of workers")
    rows = Rows()
    for load, runs in found.items():
        for changed, when in enumerate(("", ", changed")):
            rates = (f"{_rate(runs[name], changed):,.1f}" for name in runs)
            rows.append((load + when, *rates))
    numbers = next(iter(found.values()))
    units = (f"{name} workers, batches/s" if name != "auto" else name for name in numbers)
    show(("", *units), rows)
    runs = len(numbers["auto"])
    print("One run each." if runs == 1 else f"The median of {runs} runs.")
    print("Samples sleep, or use processor time; benchmarks/auto.py has the durations.")


def _show_ratios(found: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    print('num_workers="auto" 10 s after the start, and 10 s after the load changed')
    rows = Rows()
    for load, runs in found.items():
        numbers = _numbers(runs["auto"][-1]["numbers"])
        for changed, when in enumerate(("", ", changed")):
            rates = {name: _rate(runs[str(name)], changed) for name in FIXED}
            best = max(rates, key=lambda name: rates[name])
            ratio = _rate(runs["auto"], changed) / rates[best]
            reached = "yes" if ratio >= TARGET else "no"
            rows.append((load + when, f"{ratio:.2f}", reached, str(best), numbers[changed]))
    show(("", "x best fixed", f"at least {TARGET}", "best fixed", "workers over time"), rows)
    print("workers over time: those of the last run, with the second at which they changed.")
    for load, runs in found.items():
        for decision in runs["auto"][-1]["decisions"]:
            print(f"{load}: {decision}.")


def _rate(runs: list[dict[str, Any]], changed: int) -> float:
    return statistics.median(run["rates"][changed] for run in runs)


def _numbers(changes: list[list[tuple[float, int]]]) -> list[str]:
    """Return the numbers of workers of each phase in words."""
    return [", ".join(f"{number} ({at:.0f} s)" for at, number in phase) for phase in changes]


def _once(
    load: str, num_workers: str, ground: Ground, settle_s: float, window_s: float
) -> dict[str, Any]:
    arguments = (load, num_workers, str(ground.root), str(settle_s), str(window_s))
    with Call("benchmarks.auto", *arguments) as call:
        return dict(json.loads(call.answer(LIMIT_S)))


class Training:
    """A loader, and a trainer that sleeps.

    Args:
        loader: What to iterate.

    Attributes:
        numbers: When the number of workers was another one, in seconds of the phase, and which.
    """

    def __init__(self, loader: Any) -> None:
        self.numbers: list[tuple[float, int]] = []
        self._loader, self._batches = loader, iter(loader)

    def rate(self, phase: Phase, settle_s: float, window_s: float) -> float:
        """Train on a phase, and return the rate after it settled, in batches per second."""
        began = time.perf_counter()
        self.numbers = []
        for ended in self._cycles(phase, began):
            if ended - began >= settle_s:
                break
        since, cycles = ended, 0
        for ended in self._cycles(phase, began):
            cycles += 1
            if ended - since >= window_s:
                break
        return cycles * CYCLE / (ended - since)

    def _cycles(self, phase: Phase, began: float) -> Iterator[float]:
        """Train cycle by cycle; yield when each ended, in seconds of `time.perf_counter()`."""
        due = 0.0
        while True:
            for _batch in range(CYCLE):
                next(self._batches)
                if phase.step_s:
                    time.sleep(phase.step_s)
            if phase.pause_s:
                time.sleep(phase.pause_s)
            now = time.perf_counter()
            if now >= due:
                due = now + LOOK_S
                number = self._loader.statistics().num_workers
                if not self.numbers or self.numbers[-1][1] != number:
                    self.numbers.append((now - began, number))
            yield now


def main(load: str, num_workers: str, folder: str, settle_s: str, window_s: str) -> None:
    """Do one run and print what it found."""
    from forebay import Buffer, DataLoader

    phases = LOADS[load]
    changed = Path(tempfile.mkdtemp(dir=folder)) / "changed"
    number: Any = num_workers if num_workers == "auto" else int(num_workers)
    ahead = {"buffer": Buffer(max_batches=BUFFERED)} if number else {}
    samples: Any = Samples(phases, str(changed))
    rates, numbers = [], []
    with DataLoader(samples, BATCH, num_workers=number, seed=0, **ahead) as loader:
        training = Training(loader)
        for at, phase in enumerate(phases):
            if at:
                changed.touch()
            rates.append(training.rate(phase, float(settle_s), float(window_s)))
            numbers.append(training.numbers)
        decisions = loader.statistics().decisions
    print()
    print(json.dumps({"rates": rates, "numbers": numbers, "decisions": decisions}))


if __name__ == "__main__":
    main(*sys.argv[1:])
