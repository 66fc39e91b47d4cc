"""Hugging Face datasets."""

from __future__ import annotations

import datasets

from benchmarks.peers import WORKERS
from benchmarks.work import Into

datasets.disable_progress_bars()
datasets.disable_caching()


class OnRow(Into):
    def __call__(self, row: dict[str, str]) -> dict[str, int]:
        return super().__call__(row["source"])


def run(task: str, sources: list[str], folder: str) -> int:
    table = datasets.Dataset.from_dict({"source": sources})
    return len(table.map(OnRow(task, folder), num_proc=WORKERS))
