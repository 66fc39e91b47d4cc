"""Ray Data with few blocks, as suits many small rows; a worker's death loses a block."""

from __future__ import annotations

from benchmarks.ray.peers import data


def run(task: str, sources: list[str], folder: str) -> int:
    return data.run(task, sources, folder, blocks=8)
