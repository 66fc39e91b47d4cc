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
    "drawing": Drawing,
    "sticky": Sticky,
    "sticky set_epoch": StickyEpochs,
    "sticky drawing": StickyDrawing,
    "global order": GlobalOrder,
    "onward": OnwardFrom,
    "forgetful": Forgetful,
    "seed_worker": SeededByTorch,
    "info.seed": SeededByInfo,
    "chain": lambda: ChainDataset([FirstHalf(), SecondHalf()]),
}
# Those whose samples, or order, need a seed to be the same again.
NEED_SEED = {
    *("drawing", "sticky drawing", "global order", "forgetful"),
    *("seed_worker", "info.seed"),
}


def set_epoch(dataset: Any, epoch: int) -> None:
    """Name an epoch, to a stream that wants it, or to the parts of a chain."""
    for each in getattr(dataset, "datasets", [dataset]):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
