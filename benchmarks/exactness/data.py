"""The samples that all loaders read: rows of six integers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from benchmarks.exactness.histories import SAMPLES, SECOND_SOURCE


def sample(number: int, own: np.random.Generator | None = None) -> np.ndarray:
    """Return an id, draws of `random`, NumPy, torch and a generator, and the process."""
    draws = (
        random.getrandbits(30),
        np.random.randint(1 << 30),
        int(torch.randint(1 << 30, ())),
        0 if own is None else int(own.integers(1 << 30)),
    )
    return np.array([number, *draws, os.getpid()], dtype=np.int64)


class Samples(Dataset[Any]):
    """A map-style dataset with a generator of its own, as many augmentations have."""

    def __init__(self, begin: int = 0) -> None:
        self.begin, self.own = begin, np.random.default_rng(5)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> np.ndarray:
        return sample(self.begin + int(index), self.own)


class Stream(IterableDataset[Any]):
    """A stream that each worker of each rank reads a share of, and that has a state."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.done, self._restored = rank, ranks, 0, False

    def __iter__(self) -> Iterator[np.ndarray]:
        info = get_worker_info()
        parts, part = (info.num_workers, info.id) if info else (1, 0)
        self.done, self._restored = self.done if self._restored else 0, False
        share = range(self.rank * parts + part, SAMPLES, self.ranks * parts)
        for number in share[self.done :]:
            self.done += 1
            yield sample(number)

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done, self._restored = state["done"], True


def second_source() -> Samples:
    """Return the other source of a mixture."""
    return Samples(SECOND_SOURCE)
