"""Several ranks in one process: a loader for each, and their batches put together again."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from forebay import DataLoader

Make = Callable[..., DataLoader]
Samples = Callable[[DataLoader, Any], list[Any]]


def samples_of(loader: DataLoader, batch: Any) -> list[bytes]:
    """Return the samples of the last batch that count, each as bytes that equal only its own."""
    columns = [column if isinstance(column, torch.Tensor) else list(column) for column in batch]
    rows = [tuple(_plain(column[at]) for column in columns) for at in range(len(columns[0]))]
    counts = loader.mask.tolist()
    assert len(counts) == len(rows)
    return [pickle.dumps(row) for row, is_counted in zip(rows, counts, strict=True) if is_counted]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


class World:
    """The loaders of all ranks, stepped side by side.

    Args:
        make: Makes a loader of `batch_size`, `world_size` and `rank`.
        world: How many ranks there are.
        together: Samples of a global batch.
        state: Where to begin, on every rank.
        samples: Returns the samples of a loader's last batch that count.
    """

    def __init__(
        self,
        make: Make,
        world: int,
        together: int,
        state: Any = None,
        samples: Samples = samples_of,
    ) -> None:
        self._samples = samples
        with ExitStack() as stack:
            self.loaders = [
                stack.enter_context(make(batch_size=together // world, world_size=world, rank=rank))
                for rank in range(world)
            ]
            for loader in self.loaders:
                if state is not None:
                    loader.load_state_dict(state)
            self._stack = stack.pop_all()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def batches(self) -> Iterator[list[Any]]:
        """Yield the samples of each global batch of the next epoch, in the order of the ranks."""
        nothing = object()
        for step in itertools.zip_longest(*map(iter, self.loaders), fillvalue=nothing):
            pairs = zip(self.loaders, step, strict=True)
            yield [
                sample
                for loader, batch in pairs
                if batch is not nothing
                for sample in self._samples(loader, batch)
            ]

    def state(self) -> dict[str, Any]:
        """Return the state, which is that of every rank."""
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return states[0]


def digest(batches: list[list[bytes]]) -> str:
    """Return what two runs have in common if all their batches are the same, bit for bit."""
    return hashlib.sha256(pickle.dumps(batches)).hexdigest()[:16]
