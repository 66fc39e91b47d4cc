"""The overhead of preprocess: tiny inputs and files, compared with peers; the use of cores at 5 ms.

Rates are without start-up: the slope between two sizes, (large - small) / (seconds for large -
seconds for small), from the medians, where the costs of a whole call, such as starting workers,
cancel out.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.measure import Ground, Missing
from benchmarks.peers import NAMES
from benchmarks.work import PIECES, SPINS, spins_for

BURN_S = 0.005


@dataclass(frozen=True, slots=True)
class Entry:
    """One peer in a table.

    Attributes:
        peer: Its file in `peers/`.
        sizes: Numbers of inputs; the table shows the first.
        rounds: How often each size is run.
    """

    peer: str
    sizes: tuple[int, ...]
    rounds: int


def tiny(ground: Ground, quick: bool) -> None:
    """Print the table of 10-byte inputs."""
    n = 1000 if quick else 4000
    fast, slow = (1, 1) if quick else (5, 3)
    entries = [
        Entry("pool", (n, 4 * n), fast),
        Entry("forebay", (n, 4 * n, 5 * n), fast),
        Entry("loop", (n, 4 * n), fast),
        Entry("joblib", (n, 4 * n), fast),
        Entry("executor", (n, 4 * n), fast),
        Entry("dataloader", (n, 4 * n), slow),
        Entry("datasets", (n, 4 * n), slow),
        Entry("litdata", (n, 4 * n), slow),
    ]
    print(
        f"{n:,} inputs: read a file of 10 bytes, write a file of 10 bytes, return a dict; 2 workers"
    )
    times = dict(_interleaved(ground, "copy", entries))
    columns = ("", "inputs/s", "x Pool", "slowest-fastest", "start-up left out", "x Pool", "runs")
    rows = Rows()
    pool = times["pool"]
    assert pool is not None
    pool_slope = _slope(pool, n)
    for entry in entries:
        name, runs = NAMES[entry.peer], times[entry.peer]
        if runs is None:
            rows.append((name, "not installed"))
            continue
        rate, among = n / _median(runs[n]), runs[n]
        whole = (_thousands(rate), f"{rate * _median(pool[n]) / n:.2f}")
        spread = f"{_thousands(n / max(among))}-{_thousands(n / min(among))}"
        slope = _slope(runs, n)
        bare = "noise" if slope is None else _thousands(slope)
        relative = f"{slope / pool_slope:.2f}" if slope and pool_slope else "-"
        rows.append((name, *whole, spread, bare, relative, str(len(among))))
    forebay = times["forebay"]
    assert forebay is not None
    many = 5 * n / _median(forebay[5 * n])
    rows.append((f"forebay.preprocess on {5 * n:,} inputs", _thousands(many)))
    show(columns, rows)
    print(
        "forebay keeps a ledger, stages each output and renames it into place when it is flushed\n"
        "to disk, and writes the table of metadata; no other here does any of it. litdata moves\n"
        "its outputs and drops the metadata. inputs/s: the whole call, start-up in, libraries\n"
        "imported beforehand (pandas too, which pyarrow loads where it is installed). Start-up\n"
        f"left out: the slope from {n:,} to {4 * n:,} inputs; noise where that is less than the\n"
        "smaller size varied by. Rates are medians. All outputs are kept until the end."
    )


def pieces(ground: Ground, quick: bool) -> None:
    """Print the table of inputs that are cut into many files."""
    n, rounds = (50, 1) if quick else (200, 5)
    peers = ("pool", "forebay", "loop", "executor")
    print(
        f"{n} inputs: read a file of 10 bytes, write {PIECES['split']} files of 10 bytes in a new\n"
        "folder, return a dict; 2 workers"
    )
    times = dict(_interleaved(ground, "split", [Entry(peer, (n,), rounds) for peer in peers]))
    pool = times["pool"]
    assert pool is not None
    rows = Rows()
    for peer in peers:
        runs = times[peer]
        assert runs is not None
        seconds, among = _median(runs[n]), runs[n]
        files = [n * PIECES["split"] / each for each in (seconds, max(among), min(among))]
        whole, slowest, fastest = map(_thousands, files)
        relative = f"{_median(pool[n]) / seconds:.2f}"
        rows.append((NAMES[peer], whole, relative, f"{slowest}-{fastest}", str(len(among))))
    show(("", "files/s", "x Pool", "slowest-fastest", "runs"), rows)
    print(
        "forebay publishes a new folder with one rename. files/s: the whole call, start-up in,\n"
        "libraries imported beforehand. Rates are medians. All outputs are kept until the end."
    )


def five_ms(ground: Ground, quick: bool) -> None:
    """Print the share of two cores that inputs of 5 ms use."""
    n = 400 if quick else 2000
    os.environ[SPINS] = str(spins_for(BURN_S))
    turns = 1 if quick else 5
    peers = ("halves", "forebay", "pool", "executor", "joblib")
    # The time of one input alone: the plain loop, in turn with the others.
    entries = [Entry("loop", (n // 2,), turns), *(Entry(peer, (n,), turns) for peer in peers)]
    print(f"{n:,} inputs of 5 ms CPU that also read and write 10 bytes; 2 workers")
    times = dict(_interleaved(ground, "burn", entries))
    loop = times["loop"]
    assert loop is not None
    ideal = loop[n // 2]  # a plain loop over half of the inputs: what each of two cores must do
    rows = Rows()
    for peer in peers:
        runs = times[peer]
        if runs is None:
            rows.append((NAMES[peer], "not installed"))
            continue
        used = [best / wall for best, wall in zip(ideal, runs[n], strict=True)]
        spread = f"{min(used):.3f}-{max(used):.3f}"
        rows.append((NAMES[peer], f"{_median(runs[n]):.2f} s", f"{_median(used):.3f}", spread))
    show(("", "whole call", "of two cores", "lowest-highest"), rows)
    print(
        f"One input alone takes {_median(ideal) / (n // 2) * 1e3:.2f} ms: a plain loop over\n"
        f"{n // 2:,} with nothing beside it, measured in every turn. Its time over the whole\n"
        "call's, start-up in, is the part of two cores that was used; medians of the turns.\n"
        "Above 1, the machine was slower while the loop ran. The two bare processes share nothing\n"
        "out, so the slower core decides: what they miss of 1 is the machine's unevenness."
    )


def _interleaved(
    ground: Ground, task: str, entries: Iterable[Entry]
) -> Iterator[tuple[str, dict[int, list[float]] | None]]:
    """Yield each peer's seconds by size, run in turns (A B C A B C); None if not installed."""
    left = list(entries)
    times: dict[str, dict[int, list[float]] | None] = {
        entry.peer: {size: [] for size in entry.sizes} for entry in left
    }
    for turn in range(max(entry.rounds for entry in left)):
        for entry in left:
            runs = times[entry.peer]
            if runs is None or turn >= entry.rounds:
                continue
            try:
                for size in entry.sizes:
                    runs[size].append(ground.seconds(entry.peer, task, size))
            except Missing:
                times[entry.peer] = None
    yield from times.items()


def _slope(runs: dict[int, list[float]], n: int) -> float | None:
    """Return inputs per second between two sizes, or None if the start-up is too noisy."""
    seconds = _median(runs[4 * n]) - _median(runs[n])
    return 3 * n / seconds if seconds > max(runs[n]) - min(runs[n]) else None


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _thousands(rate: float) -> str:
    return f"{rate / 1000:.2f} k"


class Rows(list[tuple[str, ...]]):
    """The rows of a table, each printed when it is measured, so that a stopped run shows them."""

    def append(self, row: tuple[str, ...], /) -> None:
        """Add a row, and print it."""
        super().append(row)
        print("measured:", ", ".join(filter(None, row)), flush=True)


def show(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table as Markdown, its columns aligned."""
    rows = [row + ("",) * (len(columns) - len(row)) for row in rows]
    widths = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]
    for at, row in enumerate([columns, tuple("-" * width for width in widths), *rows]):
        cells = [
            cell.ljust(width) if place == 0 or at == 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
