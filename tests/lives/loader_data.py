"""Datasets, streams, samplers and collate functions of the loader lives, as users write them.

Each sample says who it is: its ID, what it drew, what `set_epoch` said, and which version of the
dataset made it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate, get_worker_info

import forebay

from .loader_draws import Draw
from .loader_held import number

COUNT = 23
# Samples of a global batch: any number of ranks up to three divides it.
TOGETHER = 6
# A sample that cannot be read, where the setup has one.
BROKEN = 9

_noted: set[tuple[int, str]] = set()


class BrokenSampleError(Exception):
    """A sample cannot be read."""


class Drawn(NamedTuple):
    """What a sample drew, and what it was told."""

    draw: float
    told: int
    version: int


class Record(NamedTuple):
    """What is known of a sample in a batch."""

    id: int
    draw: float
    told: int
    version: int


class Maker:
    """Makes a sample of a form; notes which processes do."""

    def __init__(self, form: str, draw: Draw, folder: str, *, breaks: bool = False) -> None:
        self.form, self.draw, self.folder, self.breaks = form, draw, folder, breaks
        self.version = 0

    def __call__(self, number: int, told: int = 0, version: int = 0) -> Any:
        self._note()
        if self.breaks and number == BROKEN:
            raise BrokenSampleError(f"sample {number} is broken")
        draw, version = self.draw(), version + self.version
        if self.form == "nested":
            drawn = Drawn(draw, told, version)
            return {
                "id": number,
                "drawn": drawn,
                "data": {"square": number**2, "name": f"n{number}"},
            }
        if self.form == "padded":
            data = torch.full((1 + number % 4,), number)
            return {"id": number, "draw": draw, "told": told, "version": version, "data": data}
        row = [number, draw, told, version, number**2]
        if self.form == "large":  # a batch that is not sent by a pipe
            data = torch.full((3000,), float(number), dtype=torch.float64)
            return {"row": torch.tensor(row, dtype=torch.float64), "data": data}
        if self.form == "arrays":
            return np.array(row, dtype=np.float64)
        return torch.tensor(row, dtype=torch.float64)

    def _note(self) -> None:
        """Leave this process's number in a folder, so that a life can kill it."""
        me = os.getpid(), self.folder
        if me not in _noted:
            _noted.add(me)
            Path(self.folder, str(me[0])).touch()


class Table(Dataset):
    """A map-style dataset."""

    def __init__(self, maker: Maker, version: int, count: int = COUNT, first: int = 0) -> None:
        self.maker, self.version, self.count, self.first = maker, version, count, first
        self.told = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.maker(self.first + int(index), self.told, self.version)


class Groups(Table):
    """One that is asked for all samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Epochal(Table):
    """One that has to be told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch


class Stream(IterableDataset):
    """A stream that each worker reads a part of."""

    def __init__(self, maker: Maker, version: int) -> None:
        self.maker, self.version = maker, version
        self.told = 0

    def _numbers(self) -> list[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return list(range(COUNT))[first::step]

    def __iter__(self) -> Iterator[Any]:
        for each in self._numbers():
            yield self.maker(each, self.told, self.version)


class Shuffled(Stream):
    """One that shuffles all samples with a generator of its own before it takes its part."""

    def __init__(self, maker: Maker, version: int) -> None:
        super().__init__(maker, version)
        self.rng = random.Random(4)

    def _numbers(self) -> list[int]:
        numbers = list(range(COUNT))
        self.rng.shuffle(numbers)
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return numbers[first::step]


class Stateful(Stream):
    """One that knows where it is, and begins anew when it has ended."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = self._numbers()
        while self.at < len(numbers):
            self.at += 1
            yield self.maker(numbers[self.at - 1], self.told, self.version)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class EpochStream(Stream):
    """One that has to be told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch


class StatefulEpochStream(Stateful):
    """One that knows where it is and has to be told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch


class Decode:
    """Makes a sample of what a shard has, and compares that with what was stored."""

    def __init__(self, maker: Maker, version: int, layout: str) -> None:
        self.maker, self.version, self.layout = maker, version, layout

    def __call__(self, stored: dict[str, Any]) -> Any:
        number = self._number(stored)
        if not self.maker.breaks:
            want = stored_sample(number, self.layout)
            found = {name: stored[name] for name in want}
            if _plain(found) != _plain(want):
                raise ValueError(f"a shard has {found} instead of {want}")
        return self.maker(number, 0, self.version)

    def _number(self, stored: dict[str, Any]) -> int:
        return int(stored["id"].decode()) if self.layout == "tar" else int(stored["id"])


def stored_sample(number: int, layout: str) -> dict[str, Any]:
    """Return a sample as it is stored."""
    if layout == "tar":
        return {"id": str(number).encode(), "bin": bytes([number % 256]) * (number % 5)}
    sample = {"id": number, "name": f"n{number}"}
    if layout == "nested":
        sample["inner"] = {"list": list(range(number % 3)), "deep": [{"x": number}]}
    return sample


def _plain(value: Any) -> Any:
    """Return tensors and arrays as lists."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


class Ordered(Sampler[int]):
    """A fixed order, another one in each pass: it knows how many there were, and where it is."""

    def __init__(self) -> None:
        self.passes, self.at = 0, 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        while self.at < COUNT:
            self.at += 1
            yield order_of(self.passes)[self.at - 1]
        self.passes, self.at = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.at = state["passes"], state["at"]


class Told(Sampler[int]):
    """An order that depends on `set_epoch`."""

    told = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self.told))

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch


class Fixed(Sampler[int]):
    """The same order in each epoch, until it is given another one."""

    def __init__(self, order: int = 1) -> None:
        self.order = order

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self.order))


class Drawing(Sampler[int]):
    """An order that is drawn from a generator that the sampler owns, with a seed."""

    def __init__(self, library: str) -> None:
        if library == "python":
            self.rng = random.Random(3)
        elif library == "numpy":
            self.rng = np.random.default_rng(3)
        else:
            self.rng = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(COUNT), key=lambda _: number(self.rng)))


class Batches(Sampler[list[int]]):
    """Batches of another sampler, all in one list if it is used again."""

    def __init__(self, sampler: Sampler[int], *, reuses: bool) -> None:
        self.inner, self.reuses = sampler, reuses

    def __len__(self) -> int:
        return len(range(0, COUNT, TOGETHER))

    def __iter__(self) -> Iterator[list[int]]:
        numbers, batch = list(self.inner), list[int]()
        for first in range(0, COUNT, TOGETHER):
            batch = batch if self.reuses else []
            batch[:] = numbers[first : first + TOGETHER]
            yield batch


def order_of(number: int) -> list[int]:
    """Return one of the orders of all samples."""
    return [(each * 7 + number * 3) % COUNT for each in range(COUNT)]


def distributed_order(epoch: int) -> list[int]:
    """Return the order of a DistributedSampler of one rank."""
    generator = torch.Generator().manual_seed(epoch)
    return torch.randperm(COUNT, generator=generator).tolist()


class Collate:
    """Makes a batch of a form, and draws, if its holder is the collate function."""

    def __init__(self, form: str, draw: Draw | None, *, rows: bool) -> None:
        self.form, self.draw, self.rows = form, draw, rows
        self.pad = forebay.collate.by_field(data=forebay.collate.pad())

    def __call__(self, samples: list[Any]) -> Any:
        if self.rows:
            samples = [each for row in samples for each in row]
        batch = self._batch(samples)
        return {"batch": batch, "drawn": self.draw()} if self.draw else batch

    def _batch(self, samples: list[Any]) -> Any:
        if self.form == "padded":
            return self.pad(samples)
        if self.form == "arrays":
            rows = np.stack(samples)
            return {"rows": rows, "names": [f"n{int(each)}" for each in rows[:, 0]]}
        batch = default_collate(samples)
        if self.form == "views":
            return {"all": batch, "ids": batch[:, 0], "again": batch}
        return batch


def records_of(batch: Any, form: str, *, is_raw: bool = False) -> list[Record]:
    """Return what a batch says of its samples.

    Raises:
        ValueError: Parts of a sample contradict each other.
    """
    drawn = None
    if isinstance(batch, dict) and "drawn" in batch and "batch" in batch:
        batch, drawn = batch["batch"], float(batch["drawn"])
    if isinstance(batch, dict) and "value" in batch:
        _same([each**2 for each in batch["id"].tolist()], batch["value"].tolist())
        _same([f"n{each}" for each in batch["id"].tolist()], list(batch["name"]))
        rows = [[each, 0.0, 0, 0] for each in batch["id"].tolist()]
    elif form == "nested":
        rows = _nested_rows(batch)
    elif form == "padded":
        _same_padded(batch["id"].tolist(), batch["data"].tolist())
        names = "id", "draw", "told", "version"
        rows = list(zip(*(batch[name].tolist() for name in names), strict=True))
    elif form == "large":
        rows = batch["row"].tolist()
        _same([[row[0]] * 2 for row in rows], [[each.min(), each.max()] for each in batch["data"]])
    elif form == "arrays" and not is_raw:
        rows = batch["rows"].tolist()
        _same([f"n{int(row[0])}" for row in rows], batch["names"])
    else:
        whole = batch["all"] if isinstance(batch, dict) else batch
        if isinstance(batch, dict):
            _same(batch["ids"].tolist(), whole[:, 0].tolist())
            _same_memory(batch)
        rows = [whole.tolist()] if is_raw else whole.tolist()
        _same([row[0] ** 2 for row in rows], [row[4] for row in rows])
    return [
        Record(int(row[0]), float(row[1]) if drawn is None else drawn, int(row[2]), int(row[3]))
        for row in rows
    ]


def _nested_rows(batch: Any) -> list[Any]:
    ids, data, drawn = batch["id"].tolist(), batch["data"], batch["drawn"]
    _same([each**2 for each in ids], data["square"].tolist())
    _same([f"n{each}" for each in ids], data["name"])
    if type(drawn) is not Drawn:
        raise ValueError(f"a NamedTuple came as a {type(drawn)}")
    return list(zip(ids, *(each.tolist() for each in drawn), strict=True))


def _same_padded(ids: list[int], data: list[list[int]]) -> None:
    size = max(1 + each % 4 for each in ids)
    _same([[each] * (1 + each % 4) + [0] * (size - 1 - each % 4) for each in ids], data)


def _same_memory(batch: dict[str, torch.Tensor]) -> None:
    """Compare what views of one tensor are for: a change of one is seen in the others."""
    before = float(batch["all"][0, 0])
    batch["all"][0, 0] = -1
    seen = float(batch["ids"][0]), float(batch["again"][0, 0])
    batch["all"][0, 0] = before
    _same([-1.0, -1.0], list(seen))


def _same(one: list[Any], other: list[Any]) -> None:
    if one != other:
        raise ValueError(f"parts of one batch contradict each other: {one} and {other}")
