"""Ray Data: `map`, a random order in each epoch, and `iter_batches`; it has no position."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import ray.data

import ray
from benchmarks.exactness.data import sample
from benchmarks.exactness.histories import SAMPLES
from benchmarks.exactness.record import Task

TITLE = "Ray Data"
NEEDS = ("ray",)
DOCS = "https://docs.ray.io/en/latest/data/iterating-over-data.html"
_TRAIN = "ranks are Ray Train's"
LACKS = {
    "resume": "has no state of a position in an epoch",
    "epoch-0": "its tasks run in workers",
    "ranks": _TRAIN,
    "mixture": "`mix` has no promise of order",
    "stream": "reads its own blocks",
    "random-workers": "its tasks run in workers",
    "tree": "SIGTERM ends Ray's own processes",
}
UNCLAIMED: dict[str, str] = {}


class Loader:
    def __init__(self, task: Task) -> None:
        self.task = task
        ray.init(
            "local", num_cpus=max(task.workers, 1), include_dashboard=False, log_to_driver=False,
            _temp_dir=tempfile.gettempdir(),
        )  # fmt: skip
        ray.data.DataContext.get_current().execution_options.preserve_order = True
        self.rows = ray.data.range(SAMPLES, override_num_blocks=12)

    def batches(self) -> Iterator[Any]:
        for epoch in range(self.task.epochs):
            shuffled = self.rows.random_shuffle(seed=self.task.seed + epoch).map(_made)
            for batch in shuffled.iter_batches(batch_size=self.task.batch):
                yield batch["row"]
        ray.shutdown()

    def state(self) -> Any:
        raise NotImplementedError

    def load(self, states: list[Any]) -> None:
        raise NotImplementedError


def _made(row: dict[str, Any]) -> dict[str, Any]:
    return {"row": sample(int(row["id"]))}
