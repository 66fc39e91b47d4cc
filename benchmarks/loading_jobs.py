"""Real pipelines with the libraries people use and their defaults: the DataLoader beside others.

As a program it is one run: `python -m benchmarks.loading_jobs PEER JOB FOLDER SECONDS`, which
prints the rate of one loader. Nothing about threads is set, except for the process alone, which
shows what one core can do.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.loading.peers import NAMES, WORKERS
from benchmarks.loading.pipelines import PIPELINES, write
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

BATCH = 8
ROUNDS, QUICK_ROUNDS = 3, 1
SECONDS, QUICK_SECONDS = 3.0, 1.0
# Batches before the clock starts: those that a loader may have made beforehand.
WARM = 5
# Grain may take a minute to end its workers, after it has been measured.
LIMIT_S = 180.0
PEERS = ("alone", "torch", "forebay", "spdl", "spdl-processes", "grain")
OTHERS = ("torch", "spdl", "spdl-processes", "grain")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")


# ---- the peers ---------------------------------------------------------------------------------


def _loader(peer: str, dataset: Any) -> Iterable[Any]:
    """Return a loader with two workers and its own defaults.

    Threads are the recommended form of SPDL; its form with processes is "spdl-processes".
    """
    arguments: dict[str, Any] = {"batch_size": BATCH, "num_workers": WORKERS}
    if peer == "grain":
        from benchmarks.loading.peers.grain import loader

        return loader(dataset, **arguments, worker_init_fn=None)
    if peer == "spdl-processes":
        from benchmarks.loading.peers.spdl import loader as spdl_loader

        return spdl_loader(dataset, **arguments, multiprocessing_context="forkserver")
    if peer == "spdl":
        from benchmarks.loading.peers.spdl import Threads

        return Threads(dataset, **arguments)
    if peer == "forebay":
        import forebay

        return forebay.DataLoader(dataset, **arguments)
    from torch.utils.data import DataLoader

    return DataLoader(dataset, **arguments | {"num_workers": 0 if peer == "alone" else WORKERS})


def _rate(batches: Iterator[Any], seconds: float) -> float:
    """Return samples per second, from the arrival of one batch to the arrival of another."""
    for _ in itertools.islice(batches, WARM - 1):
        pass
    count, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        next(batches)
        count += 1
    return BATCH * count / elapsed


# ---- the table ---------------------------------------------------------------------------------


def loading_jobs(ground: Ground, quick: bool) -> None:
    """Print samples per second of each pipeline and loader."""
    folder = ground.root / "pipelines"
    write(folder)
    print(f"three pipelines, batch {BATCH}; {WORKERS} workers; samples/s")
    rows = Rows()
    for job in PIPELINES:
        runs: dict[str, list[float]] = {peer: [] for peer in PEERS}
        for _turn in range(QUICK_ROUNDS if quick else ROUNDS):
            for peer in PEERS:
                rate = _run(peer, job, folder, QUICK_SECONDS if quick else SECONDS)
                if rate is not None:
                    runs[peer].append(rate)
        rates = {peer: statistics.median(found) for peer, found in runs.items() if found}
        rows.append((job, *_cells(rates)))
    names = ("one process", *(NAMES[peer][0] for peer in PEERS[1:4]), "SPDL, processes", "Grain")
    show(("samples/s", *names, "x torch", "x best peer", "of two cores"), rows)
    libraries = ("numpy", "scipy", "opencv-python-headless", "albumentations", "soundfile")
    print(
        f"Medians of {ROUNDS} runs in turns, after {WARM} batches; more is better. Each library\n"
        "with its defaults: no variable for threads is set. The first batch of each is compared\n"
        "with samples made in its main process. one process: no workers, one thread a library;\n"
        "of two cores: forebay's rate over twice that. -: not installed, or it failed. "
        + ", ".join(f"{each} {version(each)}" for each in libraries)
        + "."
    )


def _cells(rates: dict[str, float]) -> tuple[str, ...]:
    """Return the cells of a row."""
    if not rates.keys() >= {"alone", "torch", "forebay"}:
        return ("not installed",)
    ours = rates["forebay"]
    best = max(rates[peer] for peer in OTHERS if peer in rates)
    return (
        *(f"{rates[peer]:.0f}" if peer in rates else "-" for peer in PEERS),
        f"{ours / rates['torch']:.2f}",
        f"{ours / best:.2f}",
        f"{ours / rates['alone'] / 2:.2f}",
    )


def _run(peer: str, job: str, folder: Path, seconds: float) -> float | None:
    """Return the rate of a loader; None if its library, or the pipeline's, is missing."""
    settings = dict.fromkeys(THREADS, "1") if peer == "alone" else {}
    settings["NO_ALBUMENTATIONS_UPDATE"] = "1"  # otherwise it asks the network at each import
    arguments = (peer, job, str(folder), str(seconds))
    with Call("benchmarks.loading_jobs", *arguments, **settings) as call:
        try:
            return float(json.loads(call.answer(LIMIT_S))["rate"])
        except RuntimeError as error:
            print(f"{peer}, {job}: {str(error).splitlines()[-1][:100]}", file=sys.stderr)
            if peer == "forebay" and "ModuleNotFoundError" not in str(error):
                raise
            return None


def main(peer: str, job: str, folder: str, seconds: str) -> None:
    """Measure one loader and print its rate, as JSON."""
    import numpy as np

    if peer != "alone":
        for name in os.environ.keys() & set(THREADS):
            del os.environ[name]
    dataset = PIPELINES[job](Path(folder))
    batches = iter(_loader(peer, dataset))
    first = np.array(next(batches))
    rate = _rate(batches, float(seconds))
    # Only now, because threads that libraries start here would change what a fork inherits. BLAS
    # results depend on the number of threads.
    expected = np.stack([np.asarray(dataset[index]) for index in range(BATCH)])
    if not np.allclose(first, expected, rtol=1e-4, atol=1e-6):
        raise RuntimeError(f"{peer} loaded other samples")
    print()
    print(json.dumps({"rate": rate}))


if __name__ == "__main__":
    main(*sys.argv[1:])
