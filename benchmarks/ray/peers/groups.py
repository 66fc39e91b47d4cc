"""Ray tasks with 100 inputs each, as Ray advises for small ones; a failure fails all 100."""

from __future__ import annotations

from benchmarks.ray.peers import tasks


def run(task: str, sources: list[str], folder: str) -> int:
    return tasks.run(task, sources, folder, size=100)
