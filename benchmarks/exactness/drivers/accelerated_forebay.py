"""Accelerate around forebay's DataLoader, which it prepares; the position is in `save_state`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.exactness.drivers import accelerated, forebay_loader

TITLE = "Accelerate, forebay DataLoader"
NEEDS = ("accelerate", "forebay")
DOCS = "docs/how-to/frameworks.md#accelerate"
LACKS = {"stream": "a stream's share of each rank is its own"}
UNCLAIMED: dict[str, str] = {}


class Loader(accelerated.Loader):
    """The epoch is the loader's, which counts them."""

    def made(self) -> Any:
        return forebay_loader.made(self.task)

    def batches(self) -> Iterator[Any]:
        with self.loader:
            for _ in range(self.loader.epoch, self.task.epochs):
                for batch in self.loader:
                    self.step += 1
                    yield batch
