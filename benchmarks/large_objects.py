"""Python objects of 8 GiB behind each start method: rate, time to the first batch and memory.

As a program it is one run: `python -m benchmarks.large_objects ROW RECORDS`. Spawned workers import
this file, so it imports nothing heavy by itself.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from benchmarks.call import Call, own_processes
from benchmarks.loading.memory import pss_mib
from benchmarks.measure import Ground
from benchmarks.preprocess import show
from benchmarks.watch import SPARE_MIB, EndedError, available_mib, cpu_s, kill_this_first, watched

# MiB of objects, and how often each row is measured. The smaller sizes fit in memory for every row,
# and show how much memory the larger ones need.
SIZES = {256: 3, 2048: 1, 8192: 1}
QUICK_SIZES = {64: 1, 256: 1}
WORKERS = 2
BATCH = 256
# The part of an epoch that is loaded. In a whole epoch with "fork" every worker copies all objects,
# which is 24 GiB with two workers.
PART = 4
LIMIT_S = 900.0
BASE = "torch-fork"


@dataclass(frozen=True, slots=True)
class Row:
    """One loader and its settings.

    Attributes:
        title: The row's name.
        peer: The file in `benchmarks/loading/peers`.
        packed: Keep the objects in a `forebay.PackedSequence`, not in a list.
        arguments: Arguments of the loader besides the common ones.
    """

    title: str
    peer: str
    packed: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


def _by(method: str) -> dict[str, Any]:
    return {"multiprocessing_context": method}


ROWS = {
    "alone": Row("torch DataLoader, no workers", "alone"),
    BASE: Row("torch DataLoader, fork", "torch", arguments=_by("fork")),
    "forebay-fork": Row("forebay.DataLoader, fork", "forebay", arguments=_by("fork")),
    "torch-spawn": Row("torch DataLoader, spawn", "torch", arguments=_by("spawn")),
    "forebay-spawn": Row("forebay.DataLoader, spawn", "forebay", arguments=_by("spawn")),
    "torch-forkserver": Row("torch DataLoader, forkserver", "torch", arguments=_by("forkserver")),
    "forebay-forkserver": Row(
        "forebay.DataLoader, forkserver", "forebay", arguments=_by("forkserver")
    ),
    "forebay-thread": Row(
        "forebay.DataLoader, backend='thread'", "forebay", arguments={"backend": "thread"}
    ),
    "torch-packed": Row("torch DataLoader, fork, PackedSequence", "torch", True, _by("fork")),
    "forebay-packed": Row("forebay.DataLoader, fork, PackedSequence", "forebay", True, _by("fork")),
}


def objects(_: Ground, quick: bool) -> None:
    """Print a table for each size."""
    peaks: dict[str, dict[int, float]] = {name: {} for name in ROWS}
    for mib, rounds in (QUICK_SIZES if quick else SIZES).items():
        print(
            f"{mib / 1024:g} GiB of dicts, strings, numbers and tuples in a list, shuffled; "
            f"batch {BATCH}; {WORKERS} workers; a quarter of an epoch"
        )
        _table(mib, rounds, peaks)
        print(flush=True)
    print(
        "first batch: from making the loader. batches/s: from the first batch on. CPU/batch: of\n"
        "all processes. before: PSS of the process with the objects. peak: the largest PSS of all\n"
        "processes together. Rates: higher is better; all else: lower is better. Medians where a\n"
        "row has several runs. fork is the default of both loaders on Linux up to Python 3.13."
    )


def _table(mib: int, rounds: int, peaks: dict[str, dict[int, float]]) -> None:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    words: dict[str, str] = {}
    for _turn in range(rounds):
        for name in ROWS:
            needed = needed_mib(peaks[name], mib)
            if needed > available_mib() - SPARE_MIB:
                words.setdefault(name, f"not run: needs about {needed / 1024:.0f} GiB")
            if name in words:
                continue
            try:
                runs[name].append(_run(name, mib))
            except EndedError as ended:
                words[name] = str(ended)

    def cells(name: str) -> tuple[str, ...]:
        if name in words:
            return (words[name],)
        found = {key: statistics.median(run[key] for run in runs[name]) for key in runs[name][0]}
        peaks[name][mib] = found["peak_mib"]
        ratio = "-"
        if runs[BASE]:
            ratio = f"{found['rate'] / statistics.median(run['rate'] for run in runs[BASE]):.2f}"
        return (
            f"{found['first_s']:,.2f} s",
            f"{found['rate']:,.0f}",
            ratio,
            f"{found['cpu_ms']:.2f} ms",
            f"{found['before_mib']:,.0f} MiB",
            f"{found['peak_mib']:,.0f} MiB",
        )

    columns = ("", "first batch", "batches/s", "x torch, fork", "CPU/batch", "before", "peak")
    show(columns, [(row.title, *cells(name)) for name, row in ROWS.items()])


def needed_mib(peaks: dict[int, float], mib: int) -> float:
    """Return the memory that a run probably needs, from the peaks of smaller runs.

    Args:
        peaks: Peak memory by the size of the objects, both in MiB.
        mib: The size of the objects of the run.
    """
    if not peaks:
        return 0.0
    *others, (size, peak) = sorted(peaks.items())
    if not others:
        return peak * mib / size
    smaller, lower = others[-1]
    return peak + (peak - lower) / (size - smaller) * (mib - size)


def _run(name: str, mib: int) -> dict[str, Any]:
    from benchmarks.loading.datasets import record_bytes

    count = mib * 2**20 // record_bytes()
    with Call("benchmarks.large_objects", name, str(count)) as call:
        return watched(call, LIMIT_S)


def main(name: str, records: str) -> None:
    """Load a part of an epoch and print the result, as JSON."""
    kill_this_first()
    row = ROWS[name]
    loader = importlib.import_module(f"benchmarks.loading.peers.{row.peer}").loader
    from benchmarks.loading.datasets import Records
    from forebay import PackedSequence

    dataset = Records(int(records), PackedSequence if row.packed else list)
    batches = len(dataset) // BATCH // PART
    before = pss_mib([os.getpid()])
    began = time.perf_counter()
    loading = loader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        collate_fn=sum,
        **row.arguments,
    )
    iterator = iter(loading)
    first = next(iterator)
    arrived = time.perf_counter()
    cpu_began = cpu_s(own_processes())
    began_rest = time.perf_counter()
    totals = {first, *islice(iterator, batches)}
    seconds = time.perf_counter() - began_rest
    found = {
        "first_s": arrived - began,
        "rate": batches / seconds,
        "cpu_ms": (cpu_s(own_processes()) - cpu_began) / batches * 1000,
        "before_mib": before,
        "peak_mib": pss_mib(own_processes()),
    }
    if totals != {BATCH * dataset[0]}:
        raise RuntimeError(f"{name} gave batches of other records: {sorted(totals)[:10]}")
    print()
    print(json.dumps(found))
    sys.stdout.flush()
    del iterator, loading  # ends the workers, some of which would keep running
    os._exit(0)  # freeing millions of objects takes long


if __name__ == "__main__":
    main(*sys.argv[1:])
