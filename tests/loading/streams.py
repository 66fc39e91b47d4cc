"""Datasets, samplers and loaders for the tests of seeds, state and the buffer."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from datasets import PATIENCE_S, Squares
from same import assert_same
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from forebay import Buffer, DataLoader


class Noisy(Squares):
    """Samples that draw from all three generators, and a different number of times each."""

    def __getitem__(self, index: int) -> Any:
        for _ in range(index % 3):
            random.random()
        return index, torch.rand(2), random.random(), numpy.random.rand(), torch.randint(9, (1,))


class NoisyGroups(Noisy):
    """The same, asked for whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Asked(Squares):
    """A dataset that counts in shared memory how often each sample was asked for, by anybody."""

    made_once = True  # it counts, in memory that processes share

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.asked = mmap.mmap(-1, count)

    def __getitem__(self, index: int) -> int:
        self.asked[index] += 1
        return index

    def total(self) -> int:
        """Return how many samples were asked for."""
        return sum(self.asked[:])


class Lethal(Noisy):
    """A dataset of which one sample kills its worker, the first time."""

    def __init__(self, count: int, fatal: int, folder: Path) -> None:
        super().__init__(count)
        self.fatal = fatal
        self.trace = folder / "died"

    def __getitem__(self, index: int) -> Any:
        if index == self.fatal and get_worker_info() is not None:
            with suppress(FileExistsError):  # another worker may be at the same sample
                self.trace.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Epochal(Squares):
    """A dataset whose samples tell what `set_epoch` said."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.epoch


class DrawingSampler(Sampler[int]):
    """An order drawn step by step from the global generators."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        for _ in range(self.count):
            yield (
                random.randrange(self.count)
                + int(numpy.random.randint(self.count))
                + int(torch.randint(self.count, (1,)))
            ) % self.count

    def __len__(self) -> int:
        return self.count


class PositionSampler(Sampler[int]):
    """A sampler with a state as they are usually written: it holds its own position."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.passes = 0
        self.given = 0
        self.resume_at: int | None = None

    def __iter__(self) -> Any:
        self.given, self.resume_at = self.resume_at or 0, None
        self.passes += not self.given
        while self.given < self.count:
            self.given += 1
            yield (self.given * 7 + self.passes * 3) % self.count

    def __len__(self) -> int:
        return self.count

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.resume_at = state["passes"], state["given"]


def noisy_collate(samples: list[Any]) -> Any:
    """Draw from all three generators, too."""
    return samples, torch.rand(1), random.random(), numpy.random.rand()


def noisy_convert(sample: Any) -> Any:
    """Draw, where there are no batches."""
    return sample, torch.rand(1)


# How many samples the loaders have whose state is taken, and how many batches of 3 they make.
COUNT, BATCHES = 20, 7


def with_generator(replacement: bool) -> Callable[..., DataLoader]:
    """A loader whose sampler has a generator of its own."""

    def make(**way: Any) -> DataLoader:
        generator = torch.Generator().manual_seed(77)
        sampler = RandomSampler(range(COUNT), replacement=replacement, generator=generator)
        return DataLoader(Noisy(COUNT), batch_size=3, sampler=sampler, **way)

    return make


def with_position(**way: Any) -> DataLoader:
    """A loader whose sampler holds its own position."""
    return DataLoader(Noisy(COUNT), batch_size=3, sampler=PositionSampler(COUNT), **way)


def with_batches_of_positions(**way: Any) -> DataLoader:
    """A loader whose batch sampler is a plain one over such a sampler."""
    inner = BatchSampler(PositionSampler(COUNT), 3, drop_last=False)
    return DataLoader(Noisy(COUNT), batch_sampler=inner, **way)


def weighted(**way: Any) -> DataLoader:
    """A loader with a weighted sampler and its generator."""
    weights = torch.arange(COUNT) + 1.0
    sampler = WeightedRandomSampler(weights, COUNT, generator=torch.Generator().manual_seed(7))
    return DataLoader(Noisy(COUNT), batch_size=3, sampler=sampler, **way)


# Loaders that have something to carry from epoch to epoch, by what it is.
CARRYING: dict[str, Callable[..., DataLoader]] = {
    "generator": with_generator(False),
    "generator, drawn from step by step": with_generator(True),
    "weights": weighted,
    "position": with_position,
    "batch sampler": with_batches_of_positions,
}


# How the same batches may be made.
WAYS: dict[str, dict[str, Any]] = {
    "2 workers": {"num_workers": 2},
    "here": {},
    "1 worker": {"num_workers": 1},
    "3 workers": {"num_workers": 3, "prefetch_factor": 1},
    "7 workers": {"num_workers": 7},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "threads": {"num_workers": 3, "backend": "thread"},
    "bytes ahead": {"num_workers": 2, "buffer": "1MB"},
    "one byte ahead": {"num_workers": 2, "buffer": Buffer(max_bytes=1)},
    "threads ahead": {"num_workers": 2, "backend": "thread", "buffer": "1MB"},
}


def epochs_of(loader: DataLoader, count: int) -> list[list[Any]]:
    """Return the batches of some epochs; close the loader."""
    with loader:
        return [list(loader) for _ in range(count)]


def taken(loader: DataLoader, epochs: int, batches: int) -> tuple[Any, list[Any]]:
    """Iterate for so many epochs, and then so many batches; return the last iterator, too."""
    for _ in range(epochs):
        list(loader)
    iterator = iter(loader)
    return iterator, [next(iterator) for _ in range(batches)]


def rest_of(expected: list[Any], epochs: int, batches: int) -> list[Any]:
    """Return what is to come after so many epochs and batches; after a last batch, later epochs."""
    rest = [expected[epochs][batches:], *expected[epochs + 1 :]]
    return rest if rest[0] else rest[1:]


def resumed(state: dict[str, Any], make: Callable[[], DataLoader]) -> DataLoader:
    """Return a new loader that goes on from a state, which travels as JSON."""
    loader = make()
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def assert_same_epochs(epochs: list[list[Any]], others: list[list[Any]]) -> None:
    """Fail unless all batches of all epochs are equal, bit for bit."""
    assert list(map(len, epochs)) == list(map(len, others))
    for number, (epoch, other) in enumerate(zip(epochs, others, strict=True)):
        assert_same(epoch, other, f"epoch {number}")


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that is sure to come about."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)
