"""The loop of a training script that counts the epochs itself, as torch's own examples do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.exactness.record import Task


class EpochLoop:
    """A loader of one epoch at a time; the epoch is saved beside its state.

    Attributes:
        PER_RANK: Whether a state is of its rank; otherwise that of rank 0 is for all.
    """

    PER_RANK = False

    def __init__(self, task: Task, loader: Any = None) -> None:
        self.task, self.loader, self.epoch = task, loader, 0

    def begin(self, epoch: int) -> None:
        """Say which epoch comes, where a library has to be told."""

    def batches(self) -> Iterator[Any]:
        """Yield the batches of all epochs that are left."""
        for epoch in range(self.epoch, self.task.epochs):
            self.epoch = epoch
            self.begin(epoch)
            yield from self.loader

    def state(self) -> Any:
        """Return the epoch and the loader's state after the last batch."""
        return {"epoch": self.epoch, "loader": self.loader.state_dict()}

    def load(self, states: list[Any]) -> None:
        """Continue from the states of all ranks."""
        state = states[self.task.rank % len(states) if self.PER_RANK else 0]
        self.epoch = state["epoch"]
        self.begin(self.epoch)
        self.loader.load_state_dict(state["loader"])
