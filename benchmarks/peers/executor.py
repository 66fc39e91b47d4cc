"""concurrent.futures.ProcessPoolExecutor, with the chunksize it has by default (1)."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

from benchmarks.peers import WORKERS
from benchmarks.work import Into


def run(task: str, sources: list[str], folder: str) -> int:
    with ProcessPoolExecutor(WORKERS) as executor:
        return len(list(executor.map(Into(task, folder), sources)))
