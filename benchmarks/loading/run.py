"""One run of one loader in a separate process; its last line is the result, as JSON.

As a program: `python -m benchmarks.loading.run WHAT PEER NAME FOLDER AMOUNT`. Spawned workers
import this file, so it imports nothing heavy by itself.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.loading.cases import CASES
from benchmarks.loading.memory import pss_mib
from benchmarks.loading.patterns import BATCH, PATTERNS
from benchmarks.loading.peers import WORKERS

# Batches that every loader makes before the clock starts, to start workers and use memory once.
WARM_BATCHES, WARM_S = 10, 0.3

Loader = Callable[..., Iterable[Any]]
Found = dict[str, Any]


def rate(loader: Loader, name: str, folder: Path, seconds: float) -> Found:
    """Count batches for some seconds, from the arrival of one to the arrival of another."""
    stream = _endless(_load(loader, name, folder))
    batch = next(stream)
    numbers = None if CASES[name].random else _sum(batch)
    began = time.perf_counter()
    warmed = 1
    while warmed < WARM_BATCHES or time.perf_counter() - began < WARM_S:
        next(stream)
        warmed += 1
    batches = size = 0
    elapsed = 0.0
    began = time.perf_counter()
    while elapsed < seconds:
        size += _nbytes(next(stream))
        batches += 1
        elapsed = time.perf_counter() - began
    return {"seconds": elapsed, "batches": batches, "bytes": size, "first": numbers}


def first(loader: Loader, name: str, folder: Path, _: float) -> Found:
    """Time the first batch, from `iter`."""
    loading = _load(loader, name, folder)
    began = time.perf_counter()
    batches = iter(loading)  # kept, so that ending the workers is not timed
    batch = next(batches)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "batches": 1, "bytes": _nbytes(batch), "first": _sum(batch)}


def spawn(loader: Loader, _: str, __: Path, ___: float) -> Found:
    """Time the first batch from workers that are spawned and sent a large dataset."""
    from benchmarks.loading.datasets import Large

    dataset = Large()
    # Some send the dataset when they are made, others when they are iterated.
    began = time.perf_counter()
    loading = loader(
        dataset, batch_size=BATCH, num_workers=WORKERS, multiprocessing_context="spawn"
    )
    batches = iter(loading)
    batch = next(batches)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "batches": 1, "bytes": _nbytes(batch), "first": _sum(batch)}


def wait(loader: Loader, name: str, _: Path, seconds: float, **arguments: Any) -> Found:
    """Train with sleeping steps, and measure how much of the time the loop waited for batches."""
    from benchmarks.loading.datasets import Sleeper

    pattern = PATTERNS[name]
    cycles = pattern.cycles(seconds)
    epochs = cycles if pattern.epochs else 1
    costs = pattern.sample_costs(cycles // epochs)
    steps = iter(pattern.steps(cycles))
    loading = loader(Sleeper(costs, BATCH), batch_size=BATCH, num_workers=WORKERS, **arguments)
    waited = 0.0
    batches = size = 0
    done: list[tuple[float, float]] = []  # when each step began and ended
    began = time.perf_counter()
    for _epoch in range(epochs):
        asked = time.perf_counter()
        for batch in loading:
            handed = time.perf_counter()
            waited += handed - asked
            size += _nbytes(batch)
            batches += 1
            time.sleep(next(steps))
            asked = time.perf_counter()
            done.append((handed - began, asked - began))
        waited += time.perf_counter() - asked
    elapsed = time.perf_counter() - began
    return {
        "seconds": elapsed,
        "batches": batches,
        "bytes": size,
        "first": None,
        "share": waited / elapsed,
        "steps": done,
    }


def deep(loader: Loader, name: str, folder: Path, seconds: float) -> Found:
    """Train with a buffer that is larger than all batches together."""
    return wait(loader, name, folder, seconds, buffer="2GB")


def draw(_: Loader, __: str, folder: Path, count: float) -> Found:
    """Write the JPEGs, without a loader."""
    from benchmarks.loading.datasets import draw_jpegs

    draw_jpegs(folder, int(count))
    return {}


def costs(_: Loader, name: str, __: Path, ___: float) -> Found:
    """Measure how long sleeping and collating take, one batch of each kind at a time."""
    from statistics import median

    from torch.utils.data import default_collate

    from benchmarks.loading.datasets import Sleeper

    pattern = PATTERNS[name]
    kinds = {}
    for sample_s in sorted({pattern.sample_s, pattern.sample_s * pattern.slow}):
        dataset = Sleeper([sample_s], BATCH)
        took = []
        for _turn in range(5):
            began = time.perf_counter()
            default_collate([dataset[index] for index in range(BATCH)])
            took.append(time.perf_counter() - began)
        kinds[str(sample_s)] = median(took)
    return {"costs": kinds}


def memory(loader: Loader, _: str, __: Path, count: float) -> Found:
    """Load an epoch of many small objects, while the parent process measures the memory."""
    return _one_epoch(loader, int(count), list)


def packed(loader: Loader, _: str, __: Path, count: float) -> Found:
    """Load the same epoch from a `forebay.PackedSequence`."""
    from forebay import PackedSequence

    return _one_epoch(loader, int(count), PackedSequence)


def _one_epoch(loader: Loader, count: int, kept_in: Callable[..., Any]) -> Found:
    from benchmarks.loading.datasets import Names

    dataset = Names(count, kept_in)
    before = pss_mib([os.getpid()])
    loading = loader(dataset, batch_size=1000, shuffle=True, num_workers=WORKERS, collate_fn=sum)
    began = time.perf_counter()
    batches = total = 0
    for batch in loading:
        batches += 1
        total += batch
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "batches": batches,
        "bytes": total,
        "first": None,
        "before_mib": before,
    }


WHATS = {
    each.__name__: each for each in (rate, first, spawn, wait, deep, draw, costs, memory, packed)
}


def _load(loader: Loader, name: str, folder: Path) -> Iterable[Any]:
    from benchmarks.loading import datasets

    case = CASES[name]
    arguments = dict(case.arguments)
    if case.collate:
        arguments["collate_fn"] = getattr(datasets, case.collate)
    dataset = getattr(datasets, case.dataset)(folder)
    return loader(dataset, num_workers=WORKERS, **arguments)


def _endless(loading: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loading


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, dict):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        yield batch
        return
    for part in batch:
        yield from _leaves(part)


def _nbytes(batch: Any) -> int:
    return sum(leaf.nbytes for leaf in _leaves(batch))


def _sum(batch: Any) -> float:
    """Return the sum of all numbers in a batch, equal for every kind of array."""
    import numpy as np

    return float(sum(np.asarray(leaf).sum(dtype=np.float64) for leaf in _leaves(batch)))


def main(what: str, peer: str, name: str, folder: str, amount: str) -> None:
    """Do one run and print its result."""
    try:
        loader = importlib.import_module(f"benchmarks.loading.peers.{peer}").loader
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("forebay", "torch", "benchmarks"):
            raise
        print(json.dumps({"missing": error.name}))
        return
    importlib.import_module("benchmarks.loading.datasets")  # so that no time includes an import
    found = WHATS[what](loader, name, Path(folder), float(amount))
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
