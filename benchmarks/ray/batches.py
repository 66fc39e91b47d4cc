"""Large batches that workers of a cluster make and a loop here consumes.

Once with each worker on a separate node, so that each batch is copied from store to store, and once
on one node of two CPUs, as `ray.init(num_cpus=2)` starts it, where all processes share one store.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import show
from benchmarks.ray.cluster import ONE_NODE, STORE_BYTES, WORKERS, cluster

NAMES = {
    "on_cluster": "forebay.DataLoader(backend='ray', buffer='2GB')",
    "data": "ray.data … map(one sample) … iter_torch_batches(batch_size=64)",
    "stacked": "ray.data … map_batches(64 samples) … iter_torch_batches(batch_size=64)",
    "local": "forebay.DataLoader(buffer='2GB'), local processes",
}
SECONDS, QUICK_S, LIMIT_S = 3.0, 1.0, 120.0


def batches(ground: Ground, quick: bool) -> None:
    """Print both tables."""
    made = (
        f"38 MB float32 batches, 64 of 3x224x224, made beforehand, into a loop; {WORKERS} workers"
    )
    stores = f"object stores of {STORE_BYTES / 1e9:g} GB"
    print(f"{made}\non nodes of their own, {stores}")
    _table(cluster(ground).address, quick)
    print(f"\n{made}\non one node of two CPUs, {stores}")
    _table(ONE_NODE, quick)
    print("Target: 3 times ray.data.")


def _table(address: str, quick: bool) -> None:
    found: dict[str, list[dict[str, Any]]] = {loader: [] for loader in NAMES}
    for _ in range(1 if quick else 3):
        for loader in NAMES:
            seconds = QUICK_S if quick else SECONDS
            with Call("benchmarks.ray.consume", loader, str(seconds), address) as call:
                found[loader].append(json.loads(call.answer(LIMIT_S)))
    rates = {loader: [run["rate"] for run in runs] for loader, runs in found.items()}
    base = statistics.median(rates["data"])
    rows = [
        (
            name,
            f"{statistics.median(rates[loader]):.2f}",
            f"{statistics.median(rates[loader]) / base:.2f}",
            f"{min(rates[loader]):.2f}-{max(rates[loader]):.2f}",
            f"{statistics.median(run['first_s'] for run in found[loader]):.1f} s",
            str(len(rates[loader])),
        )
        for loader, name in NAMES.items()
    ]
    show(("", "GB/s", "x ray.data", "slowest-fastest", "first batch after", "runs"), rows)
