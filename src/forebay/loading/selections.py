"""What the planner makes requests of: indices of batches, so many ahead.

kind.open(start) ──> Reader ── read(count) ──> [Selection, …]      the indices of batches
kind.setup       ──> Depth ── missing(outstanding) ──> count       how many are requested now
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler

from forebay.loading.messages import BatchResult, Result, WorkerState
from forebay.loading.position import Position
from forebay.loading.samplers import SamplerStates
from forebay.loading.worker_turns import EpochTurns
from forebay.observe.measurements import Setup

# Outstanding requests beyond the batches made, so that a worker finds one when it is free.
LOOKAHEAD = 256
# The fewest to request at a time: each reading of a sampler saves and restores the generators.
CHUNK = 32
# Batches to release in one call, where releasing them earlier has no effect.
RELEASED_TOGETHER = 16
# Outstanding requests per worker for tiny batches, and how long a tiny batch takes at most.
TINY_DEPTH = 64
TINY_S = 0.001
# How long the trainer may wait while a sampler is read for an empty buffer. After that it is read a
# little further with each batch that is taken.
READ_S = 0.1

# Returns what user code runs in, with generators of its own.
Generators = Callable[[], AbstractContextManager[Any]]


class Selection(NamedTuple):
    """The indices of one batch.

    Attributes:
        position: Of its first sample in the epoch, which the others follow; or of each of them.
    """

    index: Any
    position: int | list[int] = 0
    repeated: int = 0
    sampler_states: SamplerStates | None = None


class Drawn(NamedTuple):
    """What a sampler had yielded in an epoch, and nobody had taken, when its state was taken.

    Attributes:
        batches: The indices of each batch.
        is_all: Whether the epoch ends after them.
    """

    batches: list[Any]
    is_all: bool = False

    @staticmethod
    def is_one(value: Any) -> bool:
        """Return whether a value can be from a saved state."""
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        return is_pair and isinstance(value[0], list) and isinstance(value[1], bool)

    def count(self, sampler: Any) -> int:
        """Return how many batches of a sampler have indices of these."""
        if type(sampler) is not BatchSampler:
            return len(self.batches)
        return math.ceil(sum(map(len, self.batches)) / sampler.batch_size)

    def before(self, sampler: Any, rest: Any) -> Any:
        """Return an iterable of these batches, and then the rest of those of a sampler."""
        if type(sampler) is not BatchSampler:
            return itertools.chain(self.batches, () if self.is_all else rest)
        # The batch size may be another one now.
        rest = () if self.is_all else sampler.sampler
        indices = itertools.chain(itertools.chain.from_iterable(self.batches), rest)
        return BatchSampler(indices, sampler.batch_size, sampler.drop_last)


@dataclass(frozen=True, slots=True)
class RangeSampler:
    """Yields the batches of ranges of samples, one range after the other.

    A batch never crosses the end of a range. The samples of a range ascend, and may have gaps.
    """

    ranges: Sequence[Sequence[int]]
    batch_size: int

    def __len__(self) -> int:
        return sum(-(-len(each) // self.batch_size) for each in self.ranges)

    def __iter__(self) -> Iterator[list[int]]:
        size = self.batch_size
        for each in self.ranges:
            yield from (list(each[at : at + size]) for at in range(0, len(each), size))


class Start(NamedTuple):
    """Where to begin in an epoch.

    Attributes:
        sample: Samples of the epoch that were returned before, over all ranks.
        length: Samples of the epoch, if it has another number than the dataset; else None.
        by_sample: Whether the epoch continues after these samples, whatever batches they were in.
        origin: Samples of all epochs before, over all ranks.
        drawn: What the sampler had yielded before and was not taken; None for nothing.
    """

    epoch: int
    batch: int = 0
    sample: int = 0
    length: int | None = None
    by_sample: bool = False
    origin: int = 0
    drawn: Drawn | None = None

    @classmethod
    def of(cls, position: Position) -> Start:
        """Return where to begin at a position."""
        own = position.kind_state
        by_sample = position.batch > 0 and own.get("counts_samples", False)
        drawn = None if own.get("drawn") is None else Drawn(*own["drawn"])
        known = position.epoch, position.batch, position.sample, own.get("length"), by_sample
        return cls(*known, own.get("origin", 0), drawn)


class Rest(NamedTuple):
    """How to begin an epoch, or the rest of one.

    Attributes:
        keeps_generators: Whether the generators of the process are left as they are.
        reads_ahead: Whether the sampler draws its order now.
        restores_workers: Whether workers continue from states of theirs.
    """

    start: Start
    next_worker: int = 0
    worker_states: tuple[WorkerState, ...] = ()
    keeps_generators: bool = False
    reads_ahead: bool = False
    restores_workers: bool = False


class Reached(NamedTuple):
    """How far an iteration has come, for the state.

    Attributes:
        start: In the epoch that is returned next.
        is_within: Whether that epoch has begun.
        is_over: Whether an epoch has just ended.
        order: The argument of the last `set_epoch` of the sampler; see `epoch_of`.
    """

    start: Start
    is_within: bool
    is_over: bool
    sampler_states: SamplerStates | None
    order: int | None
    worker_states: list[WorkerState]
    next_worker: int = 0


class Reader:
    """Reads the selections of one epoch.

    Attributes:
        ahead: Selections that were read before they were asked for.
        is_drained: Whether there are no others.
    """

    def __init__(
        self,
        selections: Iterator[Selection],
        generators: Generators = nullcontext,
    ) -> None:
        self.ahead: deque[Selection] = deque()
        self.is_drained = False
        self.error: Exception | None = None
        self.has_failed = False
        self._selections, self._generators = selections, generators

    @property
    def is_complete(self) -> bool:
        """Return whether all selections were returned, as far as they could be read."""
        return self.is_drained and not self.ahead

    def read(self, count: int) -> list[Selection]:
        """Return the next selections; fewer than `count` at the end of the epoch."""
        self.draw(count)
        return [self.ahead.popleft() for _ in range(min(count, len(self.ahead)))]

    def draw(self, count: int) -> None:
        """Read now what is missing for so many selections: a sampler then draws its order."""
        missing = count - len(self.ahead)
        if self.is_drained or missing <= 0:
            return
        found: list[Selection] = []
        with self._generators():
            try:
                found.extend(itertools.islice(self._selections, missing))
            except Exception as error:  # noqa: BLE001 - raised after the batches before it
                self.error, self.has_failed = error, True
            except BaseException:
                self.has_failed = True
                raise
        self.is_drained = len(found) < missing
        self.ahead.extend(found)


# ---- how many ------------------------------------------------------------------------------------


class Depth:
    """How many requests to have outstanding; it adapts to how long batches take."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self.now = setup, setup.first_requests

    def missing(self, outstanding: int, ready: int, room: int = 0) -> int:
        """Return how many batches to request now.

        Args:
            ready: Batches that are made and not taken.
            room: For how many more there is room.
        """
        setup, usual = self._setup, self._setup.requests
        if setup.fills_by_itself:
            short = max(LOOKAHEAD, room + CHUNK) - (outstanding - ready)
            return short if short >= CHUNK else 0
        if setup.refill_below is not None:
            return usual - outstanding if outstanding < setup.refill_below else 0
        short = max(self.now, usual) - outstanding
        # Request several at a time, unless only as many are outstanding as in torch.
        return short if short >= max((self.now - usual) // 4, 1) else 0

    def record(self, result: Result) -> None:
        """Adapt the number to how long a batch took."""
        usual, most = self._setup.requests, self._setup.tiny_requests
        if isinstance(result, BatchResult):
            timing = result.timing
            is_tiny = result.is_inline and (timing is None or timing.seconds < TINY_S)
            self.now = min(max(self.now, usual) * 2, most) if is_tiny else usual


# ---- an epoch ------------------------------------------------------------------------------------


@dataclass(slots=True)
class PlannedEpoch:
    """An epoch whose batches are being requested."""

    start: Start
    order: int | None
    first_task: int
    reader: Reader
    sampler_states: SamplerStates | None
    turns: EpochTurns | None
    worker_seed: int | None
    batch: int


def going_on(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return what an iterator yields, without `iter()`, which may begin some samplers anew."""
    with suppress(StopIteration):
        while True:
            yield iterator.__next__()


def one(_: Any) -> int:
    """Return 1: each index is one sample."""
    return 1


def length_of_batch(index: Any) -> int:
    """Return how many samples what a sampler yielded for a batch has."""
    if type(index) is list:  # nearly always
        return len(index)
    try:
        # `len` of a tensor takes a microsecond, and a batch may take no more than twenty.
        return index.size(0) if isinstance(index, torch.Tensor) else len(index)
    except (TypeError, IndexError):  # any object, for the dataset's `__getitems__`
        return 1
