"""Ray Data's map over rows, consumed row by row."""

from __future__ import annotations

from typing import Any

import ray.data

from benchmarks.work import Into


def run(task: str, sources: list[str], folder: str, blocks: int | None = None) -> int:
    ray.data.DataContext.get_current().enable_progress_bars = False
    work = Into(task, folder)

    def each(row: dict[str, Any]) -> dict[str, int]:
        return work(row["source"])

    rows = [{"source": source} for source in sources]
    made = ray.data.from_items(rows, override_num_blocks=blocks).map(each)
    return sum(1 for _ in made.iter_rows())
