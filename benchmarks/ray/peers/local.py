"""forebay without the cluster: the same number of local processes."""

from __future__ import annotations

from benchmarks.ray.peers import forebay


def run(task: str, sources: list[str], folder: str) -> int:
    return forebay.run(task, sources, folder, backend="process")
