"""Lightning around forebay's DataLoader: nothing has to be said."""

from __future__ import annotations

from typing import Any

from benchmarks.exactness.data import Stream
from benchmarks.exactness.drivers import forebay_loader, lightning_torch
from benchmarks.exactness.histories import SAMPLES
from benchmarks.exactness.record import Record, Task

TITLE = "Lightning, forebay DataLoader"
NEEDS = ("lightning", "forebay")
DOCS = "docs/how-to/frameworks.md#lightning"
OWN_RANKS = True
LACKS = {"tree": lightning_torch.TREE}
UNCLAIMED: dict[str, str] = {}


class Sized(Stream):
    """With a length; without one, Lightning takes a batch ahead, as that page says."""

    def __len__(self) -> int:
        return SAMPLES // self.ranks


def run(task: Task, record: Record) -> None:
    """Train with a Trainer."""
    lightning_torch.run(task, record, _made)


def _made(task: Task) -> Any:
    return forebay_loader.made(task, Sized, world_size="auto")
