"""torch's DataLoader, with a generator or, on several ranks, a DistributedSampler."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.exactness.data import Samples, Stream
from benchmarks.exactness.epoch_loop import EpochLoop
from benchmarks.exactness.record import Task

TITLE = "torch DataLoader"
NEEDS = ("torch",)
DOCS = "https://docs.pytorch.org/docs/stable/data.html"
LACKS = {
    "resume": "has no state",
    "mixture": "has no mixtures",
}
UNCLAIMED = {"random-workers": "seeds depend on the workers"}


class Loader(EpochLoop):
    """As the notes on reproducibility say: seeds by `manual_seed`, and a generator."""

    CLASS: type[DataLoader[Any]] = DataLoader
    SAMPLER: type[DistributedSampler[Any]] = DistributedSampler

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.sampler = None
        options: dict[str, Any] = {"num_workers": task.workers}
        if task.kind == "stream":
            dataset: Any = Stream(task.rank, task.ranks)
        else:
            dataset = Samples()
            if task.ranks > 1:
                self.sampler = self.SAMPLER(dataset, seed=task.seed)
                options["sampler"] = self.sampler
            else:
                options |= {"shuffle": True, "generator": torch.Generator().manual_seed(task.seed)}
        self.loader = self.CLASS(dataset, task.batch, **options)

    def begin(self, epoch: int) -> None:
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)
