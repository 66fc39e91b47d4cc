"""Kinds of streams and of what they own, for the tests of their epochs and resumes.

Each has 24 samples an epoch, divided among two workers, with what was drawn for a sample beside it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

COUNT = 24


def own_part(items: list[int]) -> list[int]:
    """Return a worker's part: every n-th."""
    info = get_worker_info()
    return items if info is None else items[info.id :: info.num_workers]


class Plain(IterableDataset):
    """Numbers in order, without a state."""

    count = COUNT

    def order(self) -> list[int]:
        """Return the order of an epoch."""
        return list(range(self.count))

    def drawn(self) -> float:
        """Return what is drawn for a sample."""
        return 0.0

    def __iter__(self) -> Any:
        for number in own_part(self.order()):
            yield torch.tensor([number, self.drawn()], dtype=torch.float64)


class Drawing(Plain):
    """Draws from all three generators of the process for each sample."""

    def drawn(self) -> float:
        return random.random() + numpy.random.rand() + torch.rand(1).item()


class OwnOrder(Plain):
    """Shuffles with a generator that it owns, equal in all workers."""

    def __init__(self, library: str) -> None:
        self.rng: Any = {
            "numpy": numpy.random.default_rng,
            "RandomState": numpy.random.RandomState,
            "random": random.Random,
            "torch": lambda seed: torch.Generator().manual_seed(seed),
        }[library](3)

    def order(self) -> list[int]:
        if isinstance(self.rng, torch.Generator):
            return torch.randperm(COUNT, generator=self.rng).tolist()
        items = list(range(COUNT))
        self.rng.shuffle(items)
        return items


class Epochs(Plain):
    """Has an order for each epoch that `set_epoch` names."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return numpy.random.default_rng([7, self.epoch]).permutation(COUNT).tolist()


class Stateful(Plain):
    """Continues from a state, once: its next epoch begins at the beginning."""

    at = 0
    loaded: int | None = None

    def __iter__(self) -> Any:
        items = own_part(self.order())
        self.at, self.loaded = self.loaded or 0, None
        while self.at < len(items):
            number, drawn = items[self.at], self.drawn()
            self.at += 1
            yield torch.tensor([number, drawn], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["at"]


class Sticky(Stateful):
    """Begins each epoch where the state that was loaded ends, as Hugging Face's streams do."""

    def __iter__(self) -> Any:
        loaded = self.loaded
        yield from super().__iter__()
        self.loaded = loaded


class StickyEpochs(Sticky, Epochs):
    """Heeds a state only in the epoch that it is of."""

    def __iter__(self) -> Any:
        loaded = self.loaded
        self.loaded = loaded[0] if loaded is not None and loaded[1] == self.epoch else None
        yield from Stateful.__iter__(self)
        self.loaded = loaded

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["at"], state["epoch"]


class StatefulDrawing(Stateful, Drawing):
    """Has a state, and draws for each sample."""


class StickyDrawing(Sticky, Drawing):
    """Keeps a state that was loaded, and draws for each sample."""


class GlobalOrder(Stateful, Drawing):
    """Shuffles its part with a generator of the process, and has a state."""

    def order(self) -> list[int]:
        items = list(range(COUNT))
        numpy.random.default_rng(5).shuffle(items)
        return items

    def __iter__(self) -> Any:
        items = own_part(self.order())
        random.shuffle(items)
        self.at, self.loaded = self.loaded or 0, None
        while self.at < len(items):
            number, drawn = items[self.at], self.drawn()
            self.at += 1
            yield torch.tensor([number, drawn], dtype=torch.float64)


class OnwardFrom(Plain):
    """Counts on from epoch to epoch, and has a state."""

    at = given = 0

    def __iter__(self) -> Any:
        count = len(own_part(list(range(COUNT))))
        while self.given < count:
            self.given += 1
            self.at += 1
            yield torch.tensor([self.at, 0.0], dtype=torch.float64)
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.given = state["at"], state["given"]


class OwnIterator(Plain):
    """Is its own iterator, begins anew in `__iter__`, and has a state."""

    at = 0

    def __iter__(self) -> Any:
        self.at, self.items = 0, own_part(self.order())
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.items):
            raise StopIteration
        self.at += 1
        return torch.tensor([self.items[self.at - 1], self.drawn()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Forgetful(Stateful):
    """Has a shuffle buffer that is not in its state."""

    def __iter__(self) -> Any:
        rng, held = random.Random(2), []
        for sample in super().__iter__():
            held.append(sample)
            if len(held) == 4:
                yield held.pop(rng.randrange(4))
        rng.shuffle(held)
        yield from held


class WithArguments(Plain):
    """Has a state with arguments, as LitData's and Mosaic's streams."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"n": num_samples, "from_beginning": from_beginning}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody asked for it")


class SeededByTorch(Plain):
    """Shuffles with numpy's generator of the process, which `seed_worker` seeds."""

    def order(self) -> list[int]:
        return numpy.random.default_rng(1).permutation(COUNT).tolist()

    def __iter__(self) -> Any:
        items = numpy.array(own_part(self.order()))
        numpy.random.shuffle(items)
        for number in items.tolist():
            yield torch.tensor([number, 0.0], dtype=torch.float64)


class SeededByInfo(Plain):
    """Shuffles by `get_worker_info().seed`."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        items = own_part(self.order())
        random.Random(0 if info is None else info.seed).shuffle(items)
        for number in items:
            yield torch.tensor([number, 0.0], dtype=torch.float64)


class FirstHalf(StickyEpochs):
    """The first half of the numbers, as a part of a chain."""

    count = COUNT // 2

    def order(self) -> list[int]:
        return numpy.random.default_rng([7, self.epoch]).permutation(self.count).tolist()


class SecondHalf(FirstHalf):
    """The others."""

    def order(self) -> list[int]:
        return [self.count + each for each in super().order()]


def seed_worker(_: int) -> None:
    """Seed the other libraries as torch's documentation does."""
    seed = torch.initial_seed() % 2**32
    numpy.random.seed(seed)
    random.seed(seed)


KINDS: dict[str, Any] = {
    "plain": Plain,
    "drawing": Drawing,
    "own numpy": lambda: OwnOrder("numpy"),
    "own RandomState": lambda: OwnOrder("RandomState"),
    "own random": lambda: OwnOrder("random"),
    "own torch": lambda: OwnOrder("torch"),
    "set_epoch": Epochs,
    "stateful": Stateful,
    "sticky": Sticky,
    "sticky set_epoch": StickyEpochs,
    "stateful drawing": StatefulDrawing,
    "sticky drawing": StickyDrawing,
    "global order": GlobalOrder,
    "onward": OnwardFrom,
    "own iterator": OwnIterator,
    "forgetful": Forgetful,
    "seed_worker": SeededByTorch,
    "info.seed": SeededByInfo,
    "chain": lambda: ChainDataset([FirstHalf(), SecondHalf()]),
}
# Those whose samples, or order, need a seed to be the same again.
NEED_SEED = {
    *("drawing", "stateful drawing", "sticky drawing", "global order", "forgetful"),
    *("seed_worker", "info.seed"),
}


def set_epoch(dataset: Any, epoch: int) -> None:
    """Name an epoch, to a stream that wants it, or to the parts of a chain."""
    for each in getattr(dataset, "datasets", [dataset]):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
