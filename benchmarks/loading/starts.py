"""The time to the first batch."""

from __future__ import annotations

from benchmarks.loading.cases import CASES
from benchmarks.loading.turns import BASE, Turns
from benchmarks.measure import Ground

FIRST = {"torch": 5, "forebay": 5, "stateful": 3, "spdl": 3, "grain": 2}
SPAWN = {"torch": 3, "forebay": 3, "stateful": 2, "spdl": 2, "grain": 2}


def starts(ground: Ground, quick: bool) -> None:
    """Print both tables."""
    print(f"time to the first batch, from iter(); {CASES['big'].title}; 2 workers")
    _table(ground, "first", FIRST, quick)
    print("\nspawned workers, a dataset of 200 MB (arrays, a list): time to the first batch")
    _table(ground, "spawn", SPAWN, quick)
    print(
        "The whole way from making the loader. SPDL is in its form with processes here, and with\n"
        "threads above and in the other tables; Grain spawns its workers everywhere."
    )


def _table(ground: Ground, what: str, rounds: dict[str, int], quick: bool) -> None:
    turns = Turns(ground, "big", 0)
    turns.run(what, dict.fromkeys(rounds, 1) if quick else rounds)

    def cells(peer: str) -> tuple[str, ...]:
        seconds = turns.median(peer, "seconds")
        among = [found["seconds"] for found in turns.found[peer]]
        return (
            f"{seconds:.3f} s",
            f"{seconds / turns.median(BASE, 'seconds'):.2f}",
            f"{min(among):.3f}-{max(among):.3f}",
            str(len(among)),
        )

    columns = ("", "first batch", "of torch's", "fastest-slowest", "runs")
    turns.show(columns, rounds, cells)
