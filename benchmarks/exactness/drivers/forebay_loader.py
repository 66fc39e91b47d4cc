"""forebay's DataLoader, with a seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import forebay
from benchmarks.exactness.data import Samples, Stream, second_source
from benchmarks.exactness.record import Task

TITLE = "forebay DataLoader"
NEEDS = ("forebay",)
DOCS = "docs/tutorial/train.md"
LACKS: dict[str, str] = {}
UNCLAIMED: dict[str, str] = {}


def made(task: Task, stream: type[Stream] = Stream, **options: Any) -> forebay.DataLoader[Any]:
    """Return a loader of what the task reads, which counts the epochs itself."""
    if task.kind == "stream":
        dataset: Any = stream(task.rank, task.ranks)
    elif task.kind == "mixture":
        dataset = forebay.mix({"a": (Samples(), 0.75), "b": (second_source(), 0.25)})
    else:
        dataset = Samples()
    if task.kind == "stream":  # of which each rank reads its own share
        options.pop("world_size", None)
    else:
        options["shuffle"] = True
    return forebay.DataLoader(
        dataset, task.batch, num_workers=task.workers, seed=task.seed, **options
    )


class Loader:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.loader = made(task, world_size="auto")

    def batches(self) -> Iterator[Any]:
        with self.loader:
            for _ in range(self.loader.epoch, self.task.epochs):
                yield from self.loader

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, states: list[Any]) -> None:
        self.loader.load_state_dict(states[0])
