"""preprocess on the cluster: trivial inputs, and inputs of 20 ms.

Rates are without start-up, from the first tenth of the outputs to the last one. An output's time is
its ctime: when it appeared, or with forebay when its commit renamed it.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show
from benchmarks.ray.cluster import BURN_S, WORKERS, cluster
from benchmarks.ray.peers import NAMES

LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run: inputs per second between outputs, and seconds for the whole call."""

    rate: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Entry:
    """A peer in a table, its number of inputs (several seconds of work), and how often it runs."""

    peer: str
    count: int
    rounds: int = 3


def tiny(ground: Ground, quick: bool) -> None:
    """Print the table of 10-byte inputs."""
    few = 10 if quick else 1
    entries = [
        Entry("forebay", 20_000 // few),
        Entry("tasks", 4_000 // few),
        Entry("data", 1_500 // few),
        Entry("groups", 20_000 // few, 1),
        Entry("blocks", 20_000 // few, 1),
        Entry("local", 20_000 // few, 1),
    ]
    print(
        "read a file of 10 bytes, write a file of 10 bytes, return a dict; "
        f"{WORKERS} workers, each on a node of its own"
    )
    _table(ground, "copy", entries, quick)
    print(
        "Targets: 3 times Ray tasks one a call, and 8 times ray.data's map as it comes. forebay\n"
        "answers for each input: ledger, staging, flushes to disk, the table. With 100 inputs a\n"
        "call, or 8 blocks, one bad input takes its neighbours along."
    )


def slow(ground: Ground, quick: bool) -> None:
    """Print the table of 20 ms inputs."""
    count = 100 if quick else 400
    entries = [Entry("local", count), Entry("forebay", count), Entry("tasks", count, 1)]
    print(f"inputs of {BURN_S * 1e3:g} ms CPU; {WORKERS} workers, each on a node of its own")
    _table(ground, "burn", entries, quick)
    print("Target: 0.93 of the local processes.")


def _table(ground: Ground, task: str, entries: Sequence[Entry], quick: bool) -> None:
    """Run the peers in turns; the others are compared with the first."""
    address = cluster(ground).address
    found: dict[str, list[Run]] = {entry.peer: [] for entry in entries}
    for turn in range(1 if quick else max(entry.rounds for entry in entries)):
        for entry in entries:
            if turn < entry.rounds:
                found[entry.peer].append(_run(ground, task, entry, address))
    base = _rate(found[entries[0].peer])
    rows = Rows()
    for entry in entries:
        runs = found[entry.peer]
        rates = [run.rate for run in runs]
        rows.append(
            (
                NAMES[entry.peer],
                f"{entry.count:,}",
                f"{_rate(runs):,.0f}",
                f"{min(rates):,.0f}-{max(rates):,.0f}",
                f"{_rate(runs) / base:.3f}",
                f"{base / _rate(runs):.2f}",
                f"{statistics.median(run.seconds for run in runs):.1f} s",
                str(len(runs)),
            )
        )
    name = "forebay" if entries[0].peer == "forebay" else "local"
    columns = ("", "inputs", "inputs/s", "slowest-fastest", f"x {name}", f"{name} x it")
    show((*columns, "whole call", "runs"), rows)


def _run(ground: Ground, task: str, entry: Entry, address: str) -> Run:
    folder = ground.fresh()
    arguments = [entry.peer, task, str(entry.count), str(ground.sources), str(folder), address]
    with Call("benchmarks.ray.run", *arguments) as call:
        answer = json.loads(call.answer(LIMIT_S))
    times = _appeared(folder)
    if answer["results"] != entry.count or len(times) != entry.count:
        raise RuntimeError(f"{entry}: {answer['results']} results, {len(times)} files")
    begin = times[len(times) // 10]
    after = sum(time > begin for time in times)
    return Run(after / (times[-1] - begin), float(answer["seconds"]))


def _appeared(folder: Path) -> list[float]:
    """Return the times when complete outputs appeared, in order."""
    return sorted(
        entry.stat().st_ctime
        for entry in os.scandir(folder)
        if entry.name.isdecimal() and entry.stat().st_size == 10
    )


def _rate(runs: list[Run]) -> float:
    return statistics.median(run.rate for run in runs)
