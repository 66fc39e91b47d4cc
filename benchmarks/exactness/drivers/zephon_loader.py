"""Zephon: JSON lines, a work source of all epochs, a map in processes, and batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

from benchmarks.exactness.data import sample
from benchmarks.exactness.histories import SAMPLES, SECOND_SOURCE, SHARED_BATCH
from benchmarks.exactness.record import Task

TITLE = "Zephon"
NEEDS = ("zephon",)
DOCS = "https://datologyai.github.io/zephon/pipelines/checkpointing_and_resuming.html"
_PURE = "a map has to be deterministic: it must not draw at random"
LACKS = {"stream": "reads its own shards"}
UNCLAIMED = {"random-workers": _PURE, "random-resumed": _PURE}
# Its "canonical replicas": all numbers of ranks divide them, and they the batch of a step.
LANES = 6


class Loader:
    """Each step takes as many small batches of each lane, as its guide to elasticity says."""

    def __init__(self, task: Task) -> None:
        self.task = task
        lanes = LANES if task.batch * task.ranks == SHARED_BATCH else 1
        small = task.batch * task.ranks // lanes
        self.steps = task.batch // small
        shares = {"first": 0.75, "second": 0.25} if task.kind == "mixture" else {"first": 1.0}
        source = StaticMixtureWorkSource(
            datasets=[Dataset.from_path(name, f"{task.folder}/{name}") for name in shares],
            mixture=shares, seed=task.seed, chunk_size=SAMPLES // lanes,
            shuffle_block_size="global", stop_after_passes=task.epochs,
        )  # fmt: skip
        pipeline = Pipeline(source).map_transform(_made, parallelism=max(task.workers, 1))
        self.pipeline = pipeline.batch(small, drop_last=False).options(
            runner="process" if task.workers else "threads", canonical_replicas=lanes,
            world_size=task.ranks, global_rank=task.rank, run_id="run",
            aggregate_dir=f"{task.record}/aggregate" if task.ranks > 1 else None,
        )  # fmt: skip

    def batches(self) -> Iterator[Any]:
        rows: list[Any] = []
        for batch in self.pipeline:
            rows.append(np.stack([each.payload["row"] for each in batch.records]))
            if len(rows) == self.steps:
                yield np.concatenate(rows)
                rows = []

    def state(self) -> Any:
        return self.pipeline.checkpoint()

    def load(self, states: list[Any]) -> None:
        self.pipeline.restore(states[0])


def prepare(folder: Path) -> None:
    """Write twelve files of four lines for each source."""
    for name, begin in (("first", 0), ("second", SECOND_SOURCE)):
        (folder / name).mkdir()
        for shard in range(12):
            lines = [json.dumps({"id": begin + 4 * shard + at}) + "\n" for at in range(4)]
            (folder / name / f"{shard:02}.jsonl").write_text("".join(lines))


def _made(row: Any) -> dict[str, Any]:
    return {"row": sample(int(row["id"]))}
