"""Ray Data told to make few blocks, which is what many small rows want; a death costs a block."""

from __future__ import annotations

from benchmarks.ray.peers import data


def run(task: str, sources: list[str], folder: str) -> int:
    return data.run(task, sources, folder, blocks=8)
