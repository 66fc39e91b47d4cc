"""Batches per second: every loader has two workers and the same arguments."""

from __future__ import annotations

from importlib.metadata import version

from benchmarks.loading.cases import CASES
from benchmarks.loading.turns import BASE, Turns, once
from benchmarks.measure import Ground

# By peer, how often it is run.
ROUNDS = {"torch": 3, "forebay": 3, "stateful": 2, "spdl": 2, "grain": 2}
QUICK_S = 0.4
JPEGS, QUICK_JPEGS = 200, 40


def rates(name: str, ground: Ground, quick: bool) -> None:
    """Print the table of one case."""
    case = CASES[name]
    rounds = dict.fromkeys(ROUNDS, 1) if quick else dict(ROUNDS)
    if case.of_cores:
        once("draw", BASE, name, ground, QUICK_JPEGS if quick else JPEGS)
        # The limit of the processor: run in turn with the others.
        rounds["alone"] = rounds[BASE]
    print(f"{case.title}; 2 workers")
    turns = Turns(ground, name, QUICK_S if quick else case.seconds)
    turns.run("rate", rounds)
    for runs in turns.found.values():
        for found in runs:
            found["rate"] = found["batches"] / found["seconds"] * case.per_batch

    def cells(peer: str) -> tuple[str, ...]:
        rate, among = turns.median(peer, "rate"), [found["rate"] for found in turns.found[peer]]
        spread = f"{_figure(min(among))}-{_figure(max(among))}"
        row = (_figure(rate), f"{rate / turns.median(BASE, 'rate'):.2f}", spread, str(len(among)))
        return (*row, f"{rate / 2 / turns.median('alone', 'rate'):.2f}") if case.of_cores else row

    columns = ("", case.unit, "x torch", "slowest-fastest", "runs")
    turns.show(columns + ("of two cores",) * case.of_cores, rounds, cells)
    if case.of_cores:
        print(
            "of two cores: the rate over twice that of one process alone. Decoded by Pillow "
            f"{version('pillow')}."
        )


def _figure(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2f}"
