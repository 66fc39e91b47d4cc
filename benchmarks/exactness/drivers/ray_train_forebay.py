"""Ray Train's TorchTrainer with forebay's DataLoader, by `prepare_data_loader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ray.train.torch import prepare_data_loader

from benchmarks.exactness.drivers import forebay_loader, ray_train_torch
from benchmarks.exactness.record import Record, Task

TITLE = "Ray Train, forebay DataLoader"
NEEDS = ("ray", "forebay")
DOCS = "docs/how-to/frameworks.md#ray-train"
OWN_RANKS = True
LACKS = {"tree": ray_train_torch.TREE}
UNCLAIMED: dict[str, str] = {}


class Loader(forebay_loader.Loader):
    """The state is the loader's own, and its epoch."""

    def __init__(self, task: Task) -> None:
        self.task, self.loader = task, forebay_loader.made(task, world_size="auto")
        self.prepared = prepare_data_loader(self.loader)

    def batches(self) -> Iterator[Any]:
        with self.loader:
            for _ in range(self.loader.epoch, self.task.epochs):
                yield from self.prepared


def run(task: Task, record: Record) -> None:
    """Train with a TorchTrainer."""
    ray_train_torch.run(task, record, Loader, saves=True)
