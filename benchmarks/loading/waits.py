"""The share of a training's time spent waiting, with each loader's largest prefetch."""

from __future__ import annotations

from benchmarks.loading.patterns import BATCH, PATTERNS, Pattern
from benchmarks.loading.peers import WORKERS
from benchmarks.loading.schedule import waiting_share
from benchmarks.loading.turns import BASE, Turns, once
from benchmarks.measure import Ground

STEPS_S, QUICK_STEPS_S = 16.0, 4.0
# The run of each: `deep` has a buffer larger than all batches together.
RUNS = {"torch": "wait", "tuned": "wait", "forebay": "deep"}


def waits(ground: Ground, quick: bool) -> None:
    """Print one table per pattern."""
    seconds = QUICK_STEPS_S if quick else STEPS_S
    for name, pattern in PATTERNS.items():
        print(f"{pattern.title}; batch {BATCH}; {WORKERS} workers; {seconds:g} s of steps")
        ideal = _ideal(once("costs", BASE, name, ground, 0)["costs"], pattern, seconds)
        turns = Turns(ground, name, seconds)
        for peer, what in RUNS.items():
            turns.add(what, peer)

        def cells(peer: str, turns: Turns = turns, ideal: float = ideal) -> tuple[str, ...]:
            share = turns.median(peer, "share")
            seconds = turns.median(peer, "seconds")
            return f"{share:.1%}", f"{(share - ideal) * 100:+.1f} points", f"{seconds:.1f} s"

        columns = ("", "waits", "beyond the ideal", "in all")
        turns.show(columns, RUNS, cells, above=[("ideal schedule", f"{ideal:.1%}")])
        print(flush=True)
    print(
        "waits: in iter() and next(), of all the time, starting workers included; one run each.\n"
        "Samples and steps sleep, so that two cores carry it all. The ideal schedule: the same\n"
        "batches at what one of each kind was measured to take alone, the same number of workers,\n"
        "no limit on what is made ahead, nothing for starting or handing over. tuned:\n"
        'persistent_workers=True, prefetch_factor=32. forebay has buffer="2GB", which holds all.'
    )


def _ideal(costs: dict[str, float], pattern: Pattern, seconds: float) -> float:
    cycles = pattern.cycles(seconds)
    batches = [costs[str(sample_s)] for sample_s in pattern.sample_costs(cycles)]
    return waiting_share(batches, pattern.steps(cycles), WORKERS)
