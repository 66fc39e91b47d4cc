"""Lightning around torchdata's StatefulDataLoader, whose state is in its checkpoints."""

from __future__ import annotations

from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.exactness.data import Samples
from benchmarks.exactness.drivers import lightning_torch, stateful
from benchmarks.exactness.record import Record, Task

TITLE = "Lightning, StatefulDataLoader"
NEEDS = ("lightning", "torchdata")
DOCS = lightning_torch.DOCS
OWN_RANKS = True
LACKS = lightning_torch.LACKS
UNCLAIMED = stateful.UNCLAIMED


def run(task: Task, record: Record) -> None:
    """Train with a Trainer."""
    lightning_torch.run(task, record, _made)


def _made(task: Task) -> Any:
    return StatefulDataLoader(Samples(), task.batch, shuffle=True, num_workers=task.workers)
