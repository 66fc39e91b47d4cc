"""Lightning around torch's DataLoader: a checkpoint after each step, and `ckpt_path`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from benchmarks.exactness.data import Samples
from benchmarks.exactness.record import Record, Task

TITLE = "Lightning, torch DataLoader"
NEEDS = ("lightning", "torch")
DOCS = "https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html"
OWN_RANKS = True
_STATE = "it warns that a loader without a state does not go on in the middle of an epoch"
TREE = "Lightning ends a training at SIGTERM itself"
LACKS = {"stream": "see the libraries of streams", "mixture": "has no mixtures", "tree": TREE}
UNCLAIMED = {
    **dict.fromkeys(("first", "middle", "twice", "killed", "workers-3", "workers-0"), _STATE),
    **dict.fromkeys(("ranks-1-2", "ranks-2-3", "ranks-3-1", "random-resumed"), _STATE),
    "random-workers": "seeds depend on the workers",
}


class Model(lightning.LightningModule):
    """One weight, and a record of what it is trained with."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.record = record

    def training_step(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        self.record.batch(rows)
        return self.weight * rows[:, 0].float().mean() / 100

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saved(lightning.Callback):
    """Save a checkpoint after each step, and one at the end of each epoch."""

    def __init__(self, task: Task, record: Record) -> None:
        self.task, self.record = task, record

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        self._save(trainer, "step")

    def on_train_epoch_end(self, trainer: Any, *others: Any) -> None:
        self._save(trainer, "epoch")

    def _save(self, trainer: Any, name: str) -> None:
        if self.record.saves:
            path = f"{self.task.record}/{name}-{trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            self.record.save(path)


def made(task: Task) -> Any:
    """Return torch's loader; Lightning gives it a DistributedSampler on several ranks."""
    generator = torch.Generator().manual_seed(task.seed)
    return DataLoader(
        Samples(), task.batch, shuffle=True, num_workers=task.workers, generator=generator
    )


def run(task: Task, record: Record, make: Callable[[Task], Any] = made) -> None:
    """Train with a Trainer of all ranks, which are started outside of it."""
    trainer = lightning.Trainer(
        accelerator="cpu", devices=task.ranks, strategy="ddp" if task.ranks > 1 else "auto",
        max_epochs=task.epochs, callbacks=[Saved(task, record)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=task.record,
    )  # fmt: skip
    loaded = task.loaded()[0] if task.states else None
    trainer.fit(Model(record), make(task), ckpt_path=loaded, weights_only=False)
