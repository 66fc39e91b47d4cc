"""forebay without the cluster: the same number of processes of this machine."""

from __future__ import annotations

from benchmarks.ray.peers import forebay


def run(task: str, sources: list[str], folder: str) -> int:
    return forebay.run(task, sources, folder, backend="process")
