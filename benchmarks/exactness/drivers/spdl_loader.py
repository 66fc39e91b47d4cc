"""SPDL's loader in processes, in the order of its sampler; it has no state."""

from __future__ import annotations

from typing import Any

import torch
from spdl.dataloader import get_pytorch_dataloader
from torch.utils.data import DistributedSampler

from benchmarks.exactness.data import Samples
from benchmarks.exactness.epoch_loop import EpochLoop
from benchmarks.exactness.record import Task

TITLE = "SPDL"
NEEDS = ("spdl-core", "torch")
DOCS = "https://facebookresearch.github.io/spdl/main/"
LACKS = {
    "epoch-0": "always has workers",
    "resume": "has no state",
    "mixture": "has no mixtures",
    "stream": "is for map-style datasets",
    "random-workers": "0 workers there are not",
}
_DROPS = "drops what fails: `max_failures` is -1 unless a pipeline sets it"
UNCLAIMED = {"worker": _DROPS, "tree": _DROPS}


class Loader(EpochLoop):
    """As torch's, with a DistributedSampler."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        ranks = {"num_replicas": task.ranks, "rank": task.rank}
        self.sampler = DistributedSampler(Samples(), seed=task.seed, **ranks)
        self.loader = get_pytorch_dataloader(
            Samples(), task.batch, sampler=self.sampler, num_workers=task.workers, in_order=True,
            collate_fn=_stacked, multiprocessing_context="forkserver",
        )  # fmt: skip

    def begin(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


def _stacked(rows: list[Any]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(row) for row in rows])
