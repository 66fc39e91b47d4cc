"""joblib, with its own batching, which adapts to short inputs."""

from __future__ import annotations

from joblib import Parallel, delayed

from benchmarks.peers import WORKERS
from benchmarks.work import Into


def run(task: str, sources: list[str], folder: str) -> int:
    work = delayed(Into(task, folder))
    return len(Parallel(n_jobs=WORKERS)(work(source) for source in sources))
