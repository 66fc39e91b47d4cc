"""The shuffled order of a billion samples: time and memory until the first batch.

As a program it is one run: `python -m benchmarks.large_order PEER SAMPLES WORKERS PLACE`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.call import Call, own_processes
from benchmarks.loading.memory import peak_resident_mib, pss_mib
from benchmarks.measure import Ground
from benchmarks.preprocess import show
from benchmarks.watch import SPARE_MIB, EndedError, available_mib, kill_this_first, watched

if TYPE_CHECKING:
    from benchmarks.loading.datasets import Indices

SAMPLES, QUICK_SAMPLES = 1_000_000_000, 10_000_000
BATCH, SEED = 1024, 0
WORKERS = (0, 2)
# The resumed runs continue in the middle of the third epoch.
RESUMED_EPOCH = 2
PLACES = ("start", "middle")
LIMIT_S = 900.0
ROUNDS, LONG_S = 3, 60.0

# By peer: its name in the table, and the bytes of memory that a sample of the order takes.
# A Python integer takes 32 bytes, and a list 8 more for the reference to it.
PEERS = {
    "forebay": ("forebay.DataLoader(seed=0)", 0),
    "plain": ("forebay.DataLoader, torch's arguments alone", 48),
    "numpy": ("torch DataLoader, sampler over numpy.random.permutation", 8),
    "torch": ("torch DataLoader, RandomSampler", 48),
}
# Lists do not fit at the full size, so they are measured at a tenth of it, too.
LISTS, SMALLER = ("plain", "torch"), 10


def order(_: Ground, quick: bool) -> None:
    """Print the table."""
    samples, rounds = (QUICK_SAMPLES, 1) if quick else (SAMPLES, ROUNDS)
    print(f"{samples:,} samples, shuffled, batch {BATCH}: time to the first batch and memory")
    runs = [(peer, samples) for peer in PEERS]
    runs += [(peer, samples // SMALLER) for peer in LISTS]
    rows = [
        (PEERS[peer][0], f"{count:,}", str(workers), *_cells(peer, count, workers, rounds))
        for peer, count in runs
        for workers in WORKERS
    ]
    columns = ("", "samples", "workers", "first batch", "CPU", "peak")
    show((*columns, "resumed", "CPU", "peak"), rows)
    print(
        f"Lower is better. Medians of up to {ROUNDS} runs, each in a new process, from making the\n"
        "loader; libraries are imported before. resumed: the first batch after the middle of the\n"
        "third epoch. forebay loads a state; numpy's order is drawn again from the seed of its\n"
        "epoch, and cut; torch's sampler cannot begin in the middle. CPU: of the main process,\n"
        "which makes the order. peak: the largest PSS of all processes together, with libraries."
    )


def _cells(peer: str, samples: int, workers: int, rounds: int) -> tuple[str, ...]:
    needed = PEERS[peer][1] * samples / 2**20
    if needed > available_mib() - SPARE_MIB:
        return (f"not run: needs {needed / 1024:.0f} GiB", *[""] * 5)
    cells: tuple[str, ...] = ()
    for place in PLACES:
        if peer == "torch" and place == "middle":
            return (*cells, "not possible", "", "")
        runs: list[dict[str, Any]] = []
        try:
            # Runs that take minutes are measured once: noise does not matter there.
            while len(runs) < (1 if runs and runs[0]["seconds"] > LONG_S else rounds):
                runs.append(_run(peer, samples, workers, place))
        except EndedError as ended:
            cells += (str(ended), "", "")
            continue
        found = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        cells += (
            f"{found['seconds']:,.3f} s",
            f"{found['cpu_s']:,.3f} s",
            f"{found['peak_mib']:,.0f} MiB",
        )
    return cells


def _run(peer: str, samples: int, workers: int, place: str) -> dict[str, Any]:
    with Call("benchmarks.large_order", peer, str(samples), str(workers), place) as call:
        return watched(call, LIMIT_S)


# ---- one run -----------------------------------------------------------------------------------


def forebay_plain(dataset: Indices, batch: int, num_workers: int, **named: Any) -> Iterator[Any]:
    """Iterate forebay's loader, from the start or from a batch of the third epoch."""
    from forebay import DataLoader

    loader = DataLoader(dataset, shuffle=True, batch_size=BATCH, num_workers=num_workers, **named)
    if batch:
        # The dict that state_dict() returns there, without the hours of loading up to it.
        place = {"epoch": RESUMED_EPOCH, "batch": batch, "sample": batch * BATCH}
        loader.load_state_dict(loader.state_dict() | place)
    return iter(loader)


def forebay_seeded(dataset: Indices, batch: int, num_workers: int) -> Iterator[Any]:
    """Iterate forebay's loader with a seed."""
    return forebay_plain(dataset, batch, num_workers, seed=SEED)


def numpy_permutation(dataset: Indices, batch: int, num_workers: int) -> Iterator[Any]:
    """Iterate torch's loader over a NumPy permutation drawn from the epoch's seed."""
    import numpy as np
    from torch.utils.data import DataLoader, Sampler

    class Permuted(Sampler[int]):
        def __len__(self) -> int:
            return len(dataset)

        def __iter__(self) -> Iterator[int]:
            np.random.seed(SEED + (RESUMED_EPOCH if batch else 0))
            order = np.random.permutation(len(dataset))
            for start in range(batch * BATCH, len(order), BATCH):
                yield from order[start : start + BATCH].tolist()

    return iter(DataLoader(dataset, sampler=Permuted(), batch_size=BATCH, num_workers=num_workers))


def random_sampler(dataset: Indices, _: int, num_workers: int) -> Iterator[Any]:
    """Iterate torch's loader with its own random order."""
    from torch.utils.data import DataLoader

    return iter(DataLoader(dataset, shuffle=True, batch_size=BATCH, num_workers=num_workers))


RUNS: dict[str, Callable[[Indices, int, int], Iterator[Any]]] = {
    "forebay": forebay_seeded,
    "plain": forebay_plain,
    "numpy": numpy_permutation,
    "torch": random_sampler,
}


def main(peer: str, samples: str, workers: str, place: str) -> None:
    """Time one first batch and print the result, as JSON."""
    kill_this_first()
    # Libraries are imported before the clock starts.
    import numpy  # noqa: F401
    import torch.utils.data  # noqa: F401

    from benchmarks.loading.datasets import Indices
    from forebay import DataLoader  # noqa: F401

    count = int(samples)
    middle = count // BATCH // 2 if place == "middle" else 0
    began, cpu_began = time.perf_counter(), time.process_time()
    batches = RUNS[peer](Indices(count), middle, int(workers))
    first = next(batches)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    peak = max(peak_resident_mib(), pss_mib(own_processes()))
    values = first.tolist()
    if len(set(values)) != BATCH or not 0 <= min(values) <= max(values) < count:
        raise RuntimeError(f"{peer} gave no batch of a shuffled epoch: {values[:10]}")
    print()
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "peak_mib": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
