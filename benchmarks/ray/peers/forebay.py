"""forebay on the cluster with default settings: retries, ledger, staging, flushes, table."""

from __future__ import annotations

import pyarrow.parquet  # noqa: F401 - imported beforehand: the table at the end needs it

import forebay
from benchmarks.ray.cluster import WORKERS
from benchmarks.work import Staged


def run(task: str, sources: list[str], folder: str, backend: str = "ray") -> int:
    report = forebay.preprocess(
        Staged(task), sources, folder, num_workers=WORKERS, backend=backend, progress=False
    )
    return report.done
