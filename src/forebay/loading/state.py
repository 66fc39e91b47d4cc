"""What a loader's state is made of, as data for JSON: `state_dict` and `load_state_dict`.

    stream   epoch, batches handed out, what the sampler carries     (seed, buffer, …: stream.py)
    pass     the same, the generator it began with, the workers' datasets    (torch's arguments)

A stream needs no generator: its order is a matter of its seed. A pass is begun again from the
generator's state, and what was handed out is left out in the sampler, where no data is touched.

A sampler that has a `state_dict` holds its own position: it gives the rest of its epoch after
`load_state_dict`. One that holds a generator is set to what that was before the epoch, and read on.
"""

from __future__ import annotations

import base64
import copy
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from forebay.loading.recipe import Lane
from forebay.loading.shuffle import SeededShuffle


def state_of_generator(generator: torch.Generator) -> str:
    """Return the state of a generator as text."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")


def set_generator(generator: torch.Generator, text: str) -> None:
    """Set a generator to a state that `state_of_generator` gave."""
    state = np.frombuffer(base64.b64decode(text), dtype=np.uint8)
    generator.set_state(torch.from_numpy(state.copy()))


def has_state(thing: Any) -> bool:
    """Tell whether a sampler or a dataset has a state of its own."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


# ---- samplers ----------------------------------------------------------------------------------

Carried = list[dict[str, Any] | None]


def carried_by(sampler: Any) -> Carried | None:
    """Return what a sampler and the one within it carry; None if that is nothing.

    For each of them it is what its `state_dict` says, or else the state of a generator it holds.
    """
    carried = [_carried(part) for part in _parts(sampler)]
    return carried if any(each is not None for each in carried) else None


def give_back(sampler: Any, carried: Carried | None) -> None:
    """Set a sampler, and the one within it, to what `carried_by` returned."""
    for part, state in zip(_parts(sampler), carried or (), strict=False):
        if state is not None and "generator" in state:
            set_generator(part.generator, state["generator"])
        elif state is not None:
            part.load_state_dict(copy.deepcopy(state["state"]))


def holds_position(sampler: Any) -> bool:
    """Tell whether a sampler, or the one within it, holds its own position."""
    return any(map(has_state, _parts(sampler)))


def batches_of(sampler: Any, skip: int, *, is_whole: bool) -> Iterator[tuple[Any, Carried | None]]:
    """Yield each batch of a sampler, with what a sampler with a position carries after it.

    Args:
        sampler: The sampler.
        skip: How many batches to leave out.
        is_whole: Whether this is an epoch from its beginning. One that gives nothing then still
            stood at the end of the epoch before, as its state did, and is read again.
    """
    follows = holds_position(sampler)
    for _ in range(2 if follows and is_whole else 1):
        is_empty = True
        for number, index in enumerate(sampler):
            is_empty = False
            if number >= skip:
                yield index, carried_by(sampler) if follows else None
        if not is_empty:
            return


def _parts(sampler: Any) -> Iterator[Any]:
    yield sampler
    inner = getattr(sampler, "sampler", None)
    if inner is not None:
        yield inner


def _carried(part: Any) -> dict[str, Any] | None:
    if has_state(part):
        return {"state": copy.deepcopy(part.state_dict())}
    generator = getattr(part, "generator", None)
    if isinstance(generator, torch.Generator) and not isinstance(part, SeededShuffle):
        return {"generator": state_of_generator(generator)}
    return None


# ---- passes ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Place:
    """Where one pass stands; its iterator moves it on.

    Attributes:
        epoch: The number of the pass.
        generator: The state of the loader's generator, or torch's, before the pass began; None
            before it began, for what that will be.
        carried: What the sampler carried before the pass, or after the last batch handed out if it
            holds its own position.
        batch: Batches handed out.
        skip: How many of the sampler's batches are left out: they were handed out before a resume.
        is_over: Whether the pass came to its end.
        keeps_workers: Whether it went on with the workers of the pass before, for which torch draws
            no base seed.
        lanes: The workers of an iterable dataset that has states.
        next_lane: Whose turn it is.
    """

    epoch: int
    generator: str | None
    carried: Carried | None
    batch: int = 0
    skip: int = 0
    is_over: bool = False
    keeps_workers: bool = False
    lanes: list[Lane] = field(default_factory=list)
    next_lane: int = 0
    read: deque[Carried] = field(default_factory=deque)  # carried after batches under way

    def went(self) -> None:
        """Count a batch as handed out."""
        self.batch += 1
        if self.read:
            self.carried = self.read.popleft()

    def lane_went(self, lane: int, state: Lane | None) -> None:
        """Note where a worker's dataset stands after its batch."""
        if self.lanes:
            self.next_lane = (lane + 1) % len(self.lanes)
            self.lanes[lane] = state or self.lanes[lane]

    def lane_ended(self, lane: int) -> None:
        """Note that a worker has no more."""
        if self.lanes:
            self.lane_went(lane, self.lanes[lane]._replace(ended=True))

    def as_state(self) -> dict[str, Any]:
        """Return what is kept of it."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "generator": self.generator,
            "sampler": self.carried,
            "keeps_workers": self.keeps_workers,
            "lanes": [list(lane) for lane in self.lanes],
            "next_lane": self.next_lane,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], skip: int) -> Place:
        """Return the place that `as_state` described."""
        return cls(
            epoch=state["epoch"],
            generator=state["generator"],
            carried=state["sampler"],
            batch=state["batch"],
            skip=skip,
            keeps_workers=state["keeps_workers"],
            lanes=[Lane(*lane) for lane in state["lanes"]],
            next_lane=state["next_lane"],
        )


class Followed:
    """A sampler whose state is noted for each batch, and whose first batches may be left out.

    Args:
        sampler: The sampler.
        place: Of the pass.
        generator: What the sampler may draw from.
    """

    def __init__(self, sampler: Any, place: Place, generator: torch.Generator) -> None:
        """See the class."""
        self._sampler = sampler
        self._place = place
        self._generator = generator

    def __len__(self) -> int:
        """Return how many batches the whole pass has."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the pass."""
        place = self._place
        if place.skip and place.keeps_workers and place.generator is not None:
            set_generator(self._generator, place.generator)  # no base seed was drawn
        for index, carried in batches_of(self._sampler, place.skip, is_whole=not place.batch):
            if carried is not None:
                place.read.append(carried)
            yield index


def leave_out(iterator: Iterator[Any], count: int) -> None:
    """Take batches that were handed out before, and drop them; the errors among them as well."""
    for _ in range(count):
        try:
            next(iterator)
        except StopIteration:
            return
        except Exception:  # noqa: BLE001, S112 - it was raised when it was handed out
            continue


def begun(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator after its first item was read, and with it the random order."""
    return itertools.chain(list(itertools.islice(iterator, 1)), iterator)
