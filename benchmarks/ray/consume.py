"""One run of one loader of large batches, in a separate process; its last line is JSON.

As a program: `python -m benchmarks.ray.consume LOADER SECONDS ADDRESS`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.ray.cluster import STORE_BYTES, WORKERS, connect

BATCH, BUFFER = 64, "2GB"
# Batches that every loader makes before the clock starts: an object store allocates all of its
# memory once before it reuses any, and the first use of memory is slow.
WARM_BATCHES = STORE_BYTES // (BATCH * 3 * 224 * 224 * 4) + 8

Batches = Iterable[torch.Tensor]


def on_cluster() -> Batches:
    return _forebay("ray")


def local() -> Batches:
    return _forebay("process")


def data() -> Batches:
    """Ray Data over the same Dataset, as in its guide: a function of one sample."""
    import ray.data

    from benchmarks.loading.datasets import image

    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = image(Path())

    def make(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": dataset[row["id"]].numpy()}

    made = ray.data.range(2_000 * BATCH).map(make)
    return (batch["image"] for batch in made.iter_torch_batches(batch_size=BATCH))


def stacked() -> Batches:
    """The same by batches; each batch is a block, so that no block is split or combined."""
    import numpy as np
    import ray.data

    from benchmarks.loading.datasets import image

    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = image(Path())

    def make(rows: dict[str, Any]) -> dict[str, Any]:
        return {"image": np.stack([dataset[int(at)].numpy() for at in rows["id"]])}

    count = 2_000
    made = ray.data.range(count * BATCH, override_num_blocks=count).map_batches(
        make, batch_size=BATCH
    )
    return (batch["image"] for batch in made.iter_torch_batches(batch_size=BATCH))


LOADERS: dict[str, Callable[[], Batches]] = {
    each.__name__: each for each in (on_cluster, local, data, stacked)
}


def _forebay(backend: str) -> Batches:
    from benchmarks.loading.datasets import image
    from forebay import DataLoader

    arguments: dict[str, Any] = {"backend": backend, "buffer": BUFFER, "num_workers": WORKERS}
    return DataLoader(image(Path()), batch_size=BATCH, **arguments)


def main(loader: str, seconds: str, address: str) -> None:
    """Count batches for some seconds, from the arrival of one to the arrival of another."""
    connect(address)
    began = time.perf_counter()
    stream = iter(LOADERS[loader]())
    next(stream)
    first_s = time.perf_counter() - began
    for _ in range(WARM_BATCHES):
        next(stream)
    size, elapsed = 0, 0.0
    began = time.perf_counter()
    while elapsed < float(seconds):
        size += next(stream).nbytes
        elapsed = time.perf_counter() - began
    print()
    print(json.dumps({"rate": size / elapsed / 1e9, "first_s": first_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])
