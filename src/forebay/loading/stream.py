"""The stream of batches of a map-style dataset: epoch after epoch, each batch with its own seeds.

    sampler ──> plan (the trainer's thread) ──> feed ──> batches, in the order of the plan

A batch is a function of (seed, epoch, number), whoever makes it and when. With a buffer the plan
runs ahead of the trainer, into epochs that have not begun. Samplers are read in the trainer's
thread alone: they are the user's code, and draw from the generators of the trainer.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from forebay.engine.engine import NewTask
from forebay.loading.epochs import Watch, expected
from forebay.loading.feed import Feed, Taken
from forebay.loading.job import holder_of_epoch
from forebay.loading.recipe import Order
from forebay.loading.seeding import PrivateGenerators
from forebay.loading.shuffle import SeededShuffle
from forebay.plan.seeds import SAMPLER, seed_of

# Orders to have planned beyond those made, so that workers go on while the trainer is away.
LOOKAHEAD = 256
# Batches to read from a sampler at a time: each reading changes the generators and back.
CHUNK = 32
# Samplers whose code draws from no generator of the process.
_SELF_CONTAINED = (SeededShuffle, SequentialSampler, DistributedSampler)


@dataclass(frozen=True, slots=True)
class Said:
    """What `set_epoch` was, or is expected to be, called with before an epoch."""

    sampler: int | None
    dataset: int | None


@dataclass(slots=True)
class Epoch:
    """One epoch of the plan.

    Attributes:
        number: From 0.
        said: What its order rests on.
        first_task: The number of its first task.
        batches: How many were planned so far.
        is_whole: Whether the sampler came to its end.
        state: What a sampler with a state of its own said before the epoch was read.
    """

    number: int
    said: Said
    first_task: int
    batches: int = 0
    is_whole: bool = False
    state: Any = None


class Stream:
    """The plan and the feed of one loader.

    Args:
        sampler: Gives the index, or the list of indices, of each batch; read anew every epoch.
        dataset: The dataset.
        seed: Of everything.
        ahead: Whether to plan epochs before they begin.
        depth: Orders to have out at a time where nothing is planned ahead.
    """

    def __init__(self, sampler: Any, dataset: Any, seed: int, *, ahead: bool, depth: int) -> None:
        """Plan nothing yet."""
        self.seed = seed
        self.epoch = -1
        self.batch = 0
        self.orders: deque[tuple[int, Order]] = deque()
        self._sampler = sampler
        self._inner = getattr(sampler, "sampler", sampler)
        self._sampler_watch = Watch.on(self._inner) or Watch.on(sampler)
        self._dataset_watch = Watch.on(holder_of_epoch(dataset))
        self._ahead = ahead
        self._depth = depth
        self._feed: Feed | None = None
        self._next_task = 0
        self._epochs: deque[Epoch] = deque()
        self._indices: Iterator[Any] = iter(())
        self._generators: AbstractContextManager[Any] = nullcontext()  # the sampler's own

    # ---- epochs --------------------------------------------------------------------------------

    def begin(self, feed: Feed, epoch: int, skip: int = 0) -> None:
        """Begin an epoch, keeping what was made for it already.

        Args:
            feed: Where orders go; what another one made is lost.
            epoch: Its number.
            skip: Leave out so many batches: they were handed out before a resume.
        """
        if feed is not self._feed:
            self._feed = feed
            self._forget_plan()
        while self._epochs and self._epochs[0].number < epoch:
            self._epochs.popleft()
        said = self._said()
        if self._epochs and self._epochs[0].said == said and not skip:
            first = self._epochs[0].first_task
        else:
            first = self._next_task
            self._forget_plan()
        feed.forget(first)
        self.orders = deque(each for each in self.orders if each[0] >= first)
        self.epoch, self.batch = epoch, skip
        if not self._epochs:
            self._open(epoch, said, skip)
        self.plan()

    def take(self) -> tuple[Taken, Order] | None:
        """Return the next result of this epoch and its order; None at the epoch's end."""
        if not self.orders or self.orders[0][1].epoch != self.epoch:
            return None
        assert self._feed is not None, "begin comes first"
        taken = self._feed.take()
        assert taken is not None
        task, order = self.orders.popleft()
        assert task == taken.task, "results come in the order of the plan"
        self.batch += 1
        self.plan()
        return taken, order

    def state_of_sampler(self) -> Any:
        """Return what the sampler said of itself before this epoch was read."""
        return next((each.state for each in self._epochs if each.number == self.epoch), None)

    # ---- the plan ------------------------------------------------------------------------------

    def plan(self) -> None:
        """Read on in the sampler until enough is planned, and hand that to the feed."""
        assert self._feed is not None
        tasks: list[NewTask] = []
        while self._is_short():
            chunk = self._read()
            tasks += chunk
            if not chunk and not self._open_next():
                break
        if tasks:
            self._feed.put(tasks)

    def _is_short(self) -> bool:
        assert self._feed is not None
        if self._ahead:
            return len(self.orders) - self._feed.ready() < LOOKAHEAD
        return len(self.orders) < self._depth

    def _read(self) -> list[NewTask]:
        epoch = self._epochs[-1]
        if epoch.is_whole:
            return []
        count = CHUNK if self._ahead else 1
        with self._generators:
            indices = list(itertools.islice(self._indices, count))
        epoch.is_whole = len(indices) < count
        tasks = []
        for index in indices:
            order = Order(index, epoch.number, epoch.batches, epoch.said.dataset)
            tasks.append(NewTask(self._next_task, order))
            self.orders.append((self._next_task, order))
            self._next_task += 1
            epoch.batches += 1
        return tasks

    def _open_next(self) -> bool:
        """Begin to plan the epoch after the last; return False if that is not to be done."""
        last = self._epochs[-1]
        if not (self._ahead and last.is_whole and last.batches):
            return False
        said = Said(expected(last.said.sampler, 1), expected(last.said.dataset, 1))
        self._open(last.number + 1, said, 0)
        return True

    def _open(self, number: int, said: Said, skip: int) -> None:
        epoch = Epoch(number, said, self._next_task, skip)
        self._epochs.append(epoch)
        watch = self._sampler_watch
        if isinstance(self._inner, SeededShuffle):
            self._inner.epoch = number if said.sampler is None else said.sampler
        elif watch is not None and said.sampler is not None:
            watch.apply(said.sampler)
        if hasattr(self._sampler, "state_dict"):
            epoch.state = self._sampler.state_dict()
        pure = type(self._inner) in _SELF_CONTAINED and type(self._sampler) in (
            BatchSampler,
            type(self._inner),
        )
        seed = seed_of(self.seed, SAMPLER, number)
        self._generators = nullcontext() if pure else PrivateGenerators(seed)
        with self._generators:
            self._indices = iter(self._sampler)
            for _ in range(skip):
                next(self._indices, None)

    def _said(self) -> Said:
        sampler, dataset = self._sampler_watch, self._dataset_watch
        return Said(
            None if sampler is None else sampler.value, None if dataset is None else dataset.value
        )

    def _forget_plan(self) -> None:
        self._epochs.clear()
        self.orders.clear()
        self._indices = iter(())


def order_of(sampler: Any, dataset: Any, seed: int, epoch: int, batch: int) -> Order:
    """Return the order of one batch, planned anew.

    Raises:
        IndexError: The epoch has no such batch.
    """
    stream = Stream(sampler, dataset, seed, ahead=False, depth=1)
    stream._open(epoch, stream._said(), batch)
    found = stream._read()
    if not found:
        raise IndexError(f"epoch {epoch} has no batch {batch}")
    order: Order = found[0].payload
    return order
