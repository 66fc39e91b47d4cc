"""Datasets and functions that tests share, importable by workers that were spawned."""

from __future__ import annotations

import multiprocessing
import os
import random
import traceback
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

# Longest wait for something that is sure to happen, on a loaded machine.
PATIENCE_S = 180.0


class Squares(Dataset[Any]):
    """A number and its square, as tensors."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index), torch.tensor(float(index) ** 2)


class Draws(Squares):
    """Random numbers from each of the three generators that torch seeds."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), random.random(), float(numpy.random.rand())


class WhoAmI(Squares):
    """What a worker knows of itself when it is asked for a sample."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return index, None, os.getpid()
        assert info.dataset is self
        known = (info.id, info.num_workers, info.seed, torch.initial_seed())
        return index, known, os.getpid()


class Counting(Squares):
    """How often this copy of the dataset has been asked, this time included."""

    asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.asked


class Marked(Squares):
    """Whatever the attribute `mark` is at the time."""

    mark: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.mark


class Large(Squares):
    """A megabyte of the sample's own number."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256, 1024), float(index))


class Gate:
    """What processes wait for until it is opened; after that it stays open.

    An Event would do if nobody who waits were ever killed: its next set() waits for them.
    """

    def __init__(self) -> None:
        self.inside, self.outside = multiprocessing.Pipe(duplex=False)

    def open(self) -> None:
        """Let everybody through."""
        self.outside.send_bytes(b"open")

    def wait(self) -> None:
        """Wait for the gate to open."""
        assert self.inside.poll(PATIENCE_S)

    def close(self) -> None:
        """Let everybody through and give the descriptors back."""
        self.open()
        self.outside.close()
        self.inside.close()


class Gated(Squares):
    """Samples of which one waits until a gate opens."""

    def __init__(self, count: int, slow: int, gate: Gate) -> None:
        super().__init__(count)
        self.slow = slow
        self.gate = gate

    def __getitem__(self, index: int) -> int:
        if index == self.slow:
            self.gate.wait()
        return index


class Failing(Squares):
    """Samples of which some cannot be had, for the reason given."""

    def __init__(self, count: int, error: BaseException, failing: tuple[int, ...]) -> None:
        super().__init__(count)
        self.error = error
        self.failing = failing

    def __getitem__(self, index: int) -> int:
        if index in self.failing:
            raise self.error
        return index


class AskedInGroups(Squares):
    """A dataset with `__getitems__`, which shows what it was called with."""

    def __getitems__(self, indices: Any) -> list[Any]:
        return [(index, str(indices), type(indices).__name__) for index in indices]


class Stream(IterableDataset[Any]):
    """The same numbers in every worker."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))


class SizedStream(Stream):
    """A stream that says how long it is, rightly or wrongly."""

    def __init__(self, count: int, said: int) -> None:
        super().__init__(count)
        self.said = said

    def __len__(self) -> int:
        return self.said


class Shards(IterableDataset[Any]):
    """A stream of which worker w gives `sizes[w]` numbers, from 100 w on; all, without workers."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = range(len(self.sizes)) if info is None else [info.id]
        for number in mine:
            yield from range(100 * number, 100 * number + self.sizes[number])


class CountingStream(Stream):
    """A stream of which each item says how often this copy has been started."""

    started = 0

    def __iter__(self) -> Iterator[Any]:
        self.started += 1
        return iter([self.started] * self.count)


class StreamThatFails(Stream):
    """A stream that raises when it is started, or after two items."""

    def __init__(self, count: int, when: str) -> None:
        super().__init__(count)
        self.when = when

    def __iter__(self) -> Iterator[Any]:
        if self.when == "at once":
            raise ValueError("no stream today")
        return self._items()

    def _items(self) -> Iterator[Any]:
        yield from range(2)
        raise ValueError("no more of it")


def as_it_is(samples: Any) -> Any:
    """Collate nothing."""
    return samples


def mark_copy(worker: int) -> None:
    """Tell the worker's own copy of the dataset who it is, and that it was seeded before."""
    info = get_worker_info()
    assert info is not None
    info.dataset.mark = (worker, info.id, torch.initial_seed() == info.seed, random.random())


def fail_in_second(worker: int) -> None:
    """Fail to set up worker 1."""
    if worker == 1:
        raise ValueError("worker 1 will not start")


def numbers(batches: Any) -> list[list[int]]:
    """Return batches of numbers as lists."""
    return [batch.tolist() for batch in batches]


def error_of_next(iterator: Any) -> tuple[type[BaseException], str]:
    """Ask for a batch that cannot be had; return the error's type and words.

    torch raises it from a variable, so that the error, its traceback and the iterator hold each
    other; and torch's iterators end badly, after seconds of waiting, when it is the garbage
    collector that finds them. So the frames are emptied here.
    """
    try:
        batch = next(iterator)
    except BaseException as error:  # noqa: BLE001 - which error it is, is what a test looks at
        traceback.clear_frames(error.__traceback__)
        return type(error), str(error)
    raise AssertionError(f"expected an error, got {batch}")
