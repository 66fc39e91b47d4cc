"""forebay.preprocess with `out.pack` instead of `out.file`: the same outputs in tar files."""

from __future__ import annotations

import benchmarks.peers.forebay  # noqa: F401 - it imports what the table needs beforehand
from benchmarks.peers import WORKERS
from benchmarks.work import packed
from forebay import preprocess


def run(task: str, sources: list[str], folder: str) -> int:
    if task != "copy":
        raise ValueError(f"packed outputs are measured with 'copy', not {task!r}")
    report = preprocess(packed, sources, output=folder, num_workers=WORKERS, progress=False)
    return report.done
