"""Lightning around forebay's DataLoader: nothing has to be said."""

from __future__ import annotations

from typing import Any

from benchmarks.exactness.data import Stream
from benchmarks.exactness.drivers import forebay_loader, lightning_torch
from benchmarks.exactness.record import Record, Task

TITLE = "Lightning, forebay DataLoader"
NEEDS = ("lightning", "forebay")
DOCS = "docs/how-to/frameworks.md#lightning"
OWN_RANKS = True
LACKS = {"tree": lightning_torch.TREE}
UNCLAIMED: dict[str, str] = {}


def run(task: Task, record: Record) -> None:
    """Train with a Trainer."""
    lightning_torch.run(task, record, _made)


def _made(task: Task) -> Any:
    return forebay_loader.made(task, Stream, world_size="auto")
