"""Ray Train's TorchTrainer with torch's DataLoader, by `prepare_data_loader`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader
from torch.utils.data import DataLoader, DistributedSampler

import ray
from benchmarks.exactness.data import Samples
from benchmarks.exactness.life import seed, train
from benchmarks.exactness.record import Record, Task

TITLE = "Ray Train, torch DataLoader"
NEEDS = ("ray", "torch")
DOCS = "https://docs.ray.io/en/latest/train/user-guides/data-loading-preprocessing.html"
OWN_RANKS = True
TREE = "SIGTERM ends Ray's own processes"
LACKS = {
    "resume": "has no state of a position in an epoch",
    "mixture": "has no mixtures",
    "stream": "see the libraries of streams",
    "tree": TREE,
}
UNCLAIMED = {"random-workers": "seeds depend on the workers"}


class Loader:
    """Torch's loader; its sampler, which Ray adds on several ranks, is told the epoch."""

    def __init__(self, task: Task) -> None:
        self.task = task
        generator = torch.Generator().manual_seed(task.seed)
        self.loader = prepare_data_loader(
            DataLoader(
                Samples(), task.batch, shuffle=True, num_workers=task.workers, generator=generator
            )
        )

    def batches(self) -> Iterator[Any]:
        for epoch in range(self.task.epochs):
            if isinstance(self.loader.sampler, DistributedSampler):
                self.loader.sampler.set_epoch(epoch)
            yield from self.loader

    def state(self) -> Any:
        raise NotImplementedError

    def load(self, states: list[Any]) -> None:
        raise NotImplementedError


def run(task: Task, _record: Record, make: Any = Loader, saves: bool = False) -> None:
    """Train with a TorchTrainer, which the process of rank 0 starts with a worker for each rank."""
    if task.rank:
        return
    ray.init(
        "local", num_cpus=task.ranks, include_dashboard=False, log_to_driver=False,
        _temp_dir=tempfile.gettempdir(),
    )  # fmt: skip
    config = {"task": asdict(task), "make": make, "saves": saves}
    TorchTrainer(
        _train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=task.ranks),
        run_config=ray.train.RunConfig(name="run", storage_path=task.record),
    ).fit()


def _train(config: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    task = replace(Task(**config["task"]), rank=rank)
    seed(task)
    train(config["make"], task, Record(task), config["saves"])
