"""No library: one process, one input after the other."""

from __future__ import annotations

from benchmarks.work import Into


def run(task: str, sources: list[str], folder: str) -> int:
    work = Into(task, folder)
    return len([work(source) for source in sources])
