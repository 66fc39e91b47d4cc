"""transformers' Trainer with its own loader: a checkpoint after each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.exactness.data import Samples
from benchmarks.exactness.drivers import accelerated
from benchmarks.exactness.record import Record, Task

TITLE = "transformers Trainer"
NEEDS = ("transformers", "accelerate")
DOCS = "https://huggingface.co/docs/transformers/trainer"
LACKS = accelerated.LACKS
UNCLAIMED = accelerated.UNCLAIMED


class Model(torch.nn.Module):
    """One weight, and a record of what it is trained with."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.record = record

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        self.record.batch(rows)
        return {"loss": self.weight * rows[:, 0].float().mean() / 100}


class Saved(transformers.TrainerCallback):
    """Save a checkpoint after each step, and note where it is."""

    def __init__(self, task: Task, record: Record) -> None:
        self.task, self.record = task, record

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_save = self.record.saves

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.record.save(f"{args.output_dir}/checkpoint-{state.global_step}")


def run(task: Task, record: Record, change: Callable[..., None] = lambda *_: None) -> None:
    """Train with a Trainer, which `change` may change."""
    args = transformers.TrainingArguments(
        str(Path(task.record) / "checkpoints"),
        per_device_train_batch_size=task.batch, num_train_epochs=task.epochs, seed=task.seed,
        dataloader_num_workers=task.workers, save_strategy="no",
        use_cpu=True, report_to="none", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    made = transformers.Trainer(
        Model(record), args, train_dataset=Samples(), data_collator=_collated,
        callbacks=[Saved(task, record)],
    )  # fmt: skip
    change(made, task)
    made.train(resume_from_checkpoint=task.loaded()[0] if task.states else None)


def _collated(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {"rows": torch.stack([torch.from_numpy(row) for row in rows])}
