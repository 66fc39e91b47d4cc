"""transformers' Trainer with forebay's loader, by one line."""

from __future__ import annotations

from typing import Any

import forebay
from benchmarks.exactness.drivers import trainer
from benchmarks.exactness.record import Record, Task

TITLE = "transformers Trainer, forebay.use"
NEEDS = ("transformers", "forebay")
DOCS = "docs/how-to/frameworks.md#transformers"
LACKS = trainer.LACKS
UNCLAIMED: dict[str, str] = {}


def run(task: Task, record: Record) -> None:
    """Train with a Trainer that has forebay's loader."""
    trainer.run(task, record, _changed)


def _changed(made: Any, task: Task) -> None:
    forebay.use(made, seed=task.seed)
