"""Accelerate around torch's DataLoader: `prepare`, `save_state`, and `skip_first_batches`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from benchmarks.exactness.data import Samples
from benchmarks.exactness.record import Task

TITLE = "Accelerate, torch DataLoader"
NEEDS = ("accelerate", "torch")
DOCS = "https://huggingface.co/docs/accelerate/usage_guides/checkpoint"
_RANKS = "a checkpoint is of one number of processes"
LACKS = {"stream": "see the libraries of streams", "mixture": "has no mixtures"}
UNCLAIMED = {
    "ranks-1-2": _RANKS,
    "ranks-2-3": _RANKS,
    "ranks-3-1": _RANKS,
    "random-workers": "seeds depend on the workers",
    "random-resumed": "generators of workers are not in the state",
}


class Loader:
    """Skips with `skip_first_batches`, as its guide says; `use_seedable_sampler` for the order."""

    STATEFUL = False

    def __init__(self, task: Task) -> None:
        self.task, self.epoch, self.step = task, 0, 0
        options = {"use_seedable_sampler": True, "use_stateful_dataloader": self.STATEFUL}
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(data_seed=task.seed, **options)
        )
        self.loader = self.accelerator.prepare(self.made())

    def made(self) -> Any:
        return DataLoader(Samples(), self.task.batch, shuffle=True, num_workers=self.task.workers)

    def batches(self) -> Iterator[Any]:
        for epoch in range(self.epoch, self.task.epochs):
            self.epoch = epoch
            if hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(self.epoch)
            loader = self.loader
            if self.step and not self.STATEFUL:
                loader = self.accelerator.skip_first_batches(loader, self.step)
            for batch in loader:
                self.step += 1
                yield batch
            self.step = 0

    def state(self) -> Any:
        folder = Path(self.task.record) / f"checkpoint-{self.epoch}-{self.step}"
        self.accelerator.save_state(str(folder))
        return {"epoch": self.epoch, "step": self.step, "folder": str(folder)}

    def load(self, states: list[Any]) -> None:
        self.epoch, self.step = states[0]["epoch"], states[0]["step"]
        self.accelerator.load_state(states[0]["folder"])
        if self.step == len(self.loader):  # as its examples reckon
            self.epoch, self.step = self.epoch + 1, 0
