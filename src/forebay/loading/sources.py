"""The sources of batch indices: a plan, a sampler, or an iterable dataset.

    source.open(epoch) ──> reader ── read(count) ──> [Selection, …]

A source yields the selections of one epoch after another; `planner.py` turns them into requests.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import BatchSampler

from forebay.base.randomness import PrivateGenerators
from forebay.loading.messages import CHUNK
from forebay.loading.samplers import (
    SamplerStates,
    at_epoch,
    copied,
    holds_position,
    is_self_contained,
    length_of,
    planned_within,
    rank_of,
    resized,
    rows_of,
    set_states,
    states_of,
)
from forebay.loading.snapshots import Snapshots
from forebay.plan import Plan, share_of
from forebay.seeds import SAMPLER, seed_of

if TYPE_CHECKING:
    from forebay.loading.settings import Settings

# Each rank of a DistributedSampler counts positions from `rank << RANK_BITS`: none occurs twice.
RANK_BITS = 40
# Indices of which batches are requested at most, of a sampler whose state takes long.
MOST_DRAWN = 1 << 16


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

    def before(self, sampler: Any, iterator: Any) -> Any:
        """Return an iterable of these batches, and then those of a sampler.

        Args:
            iterator: An iterator over the sampler; None if there is none.
        """
        if type(sampler) is not BatchSampler:
            rest = () if self.is_all else iterator or sampler
            return itertools.chain(self.batches, rest)
        # The batch size may be another one now.
        rest = () if self.is_all else sampler.sampler
        indices = itertools.chain(itertools.chain.from_iterable(self.batches), rest)
        return BatchSampler(indices, sampler.batch_size, sampler.drop_last)


class Start(NamedTuple):
    """Where to begin in an epoch."""

    epoch: int
    batch: int = 0
    sample: int = 0
    length: int | None = None
    by_sample: bool = False
    origin: int = 0
    drawn: Drawn | None = None


class Reader:
    """Reads the selections of one epoch.

    Attributes:
        ahead: Selections that were read before they were asked for.
        is_drained: Whether there are no others.
    """

    def __init__(
        self,
        selections: Iterator[Selection],
        generators: Callable[[], AbstractContextManager[None]] = nullcontext,
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


class Source(ABC):
    """Selections, epoch after epoch."""

    kind: str
    follows = False  # whether the state of a sampler has the position in an epoch
    is_arithmetic = True  # whether another thread may read it: no code of the user's runs
    count: Callable[[Any], int] = staticmethod(len)

    @abstractmethod
    def open(self, start: Start, order: int | None) -> Reader:
        """Return a reader of one epoch.

        Args:
            order: The argument of the sampler's `set_epoch` for it; see `epoch_of`.
        """

    def samples_returned(self, start: Start, batches: int, samples: int) -> int:
        """Return how many samples of an epoch were returned, over all ranks."""
        return start.sample + samples

    def end_of(self, start: Start) -> int | None:
        """Return the number of samples of an epoch, over all ranks; None if it is not known."""
        return None

    def peeks_from(self) -> float:
        """Return after how many batches of an epoch the source is read to see whether it ends."""
        return math.inf

    def reached(self, start: Start, batches: int) -> None:  # noqa: B027 - nothing to prepare
        """Note that so many batches of an epoch and of those after it are made."""

    def close(self) -> None:  # noqa: B027 - nothing to close
        """Stop preparing what comes; `reached` begins again."""

    def may_have_ended(self, batches: int) -> bool:
        """Return whether a sampler may have been read to its end with so many batches."""
        return False

    def most_ahead(self) -> float:
        """Return how many batches may be requested and not taken, whatever a buffer holds."""
        return math.inf

    def sampler_states(self, *, if_cheap: bool = False) -> SamplerStates | None:
        """Return the states that samplers keep from epoch to epoch; None if they keep none.

        Args:
            if_cheap: Also return None if a sampler follows its position, and its state takes long.
        """
        return None

    def set_sampler_states(self, states: SamplerStates | None) -> None:  # noqa: B027 - no states
        """Restore the states that `sampler_states` returned."""


class PlanSource(Source):
    """Selections by a plan: no sampler is read, and memory does not grow with the dataset."""

    kind = "plan"

    def __init__(
        self, plan: Plan, auto_collation: bool, as_tensors: bool, lookahead: Any = None
    ) -> None:
        self.plan, self.lookahead = plan, lookahead
        self._orders: dict[int, int] = {}  # of epochs for which `set_epoch` was called
        self.auto_collation, self.as_tensors = auto_collation, as_tensors
        self.count = len if auto_collation else _one

    def open(self, start: Start, order: int | None) -> Reader:
        """See `Source`. If the sampler's `set_epoch` was called, its argument decides the order."""
        if order is not None:
            self._orders[start.epoch] = order
        return Reader(self._selections(self._plan_of(start), start, order))

    def reached(self, start: Start, batches: int) -> None:
        """See `Source`."""
        if self.lookahead is None:
            return
        epoch, sample = start.epoch, start.sample + batches * self.plan.global_batch_size
        end = self.end_of(start)
        while sample >= end > 0:
            epoch, sample, end = epoch + 1, max(sample - end, 0), self.plan.end()
        self.lookahead.reached(self.plan.seed, self._orders.get(epoch, epoch), sample)

    def close(self) -> None:
        """See `Source`."""
        if self.lookahead is not None:
            self.lookahead.close()

    def samples_returned(self, start: Start, batches: int, samples: int) -> int:
        """See `Source`."""
        return min(start.sample + batches * self.plan.global_batch_size, self.end_of(start))

    def end_of(self, start: Start) -> int:
        """See `Source`."""
        return self._plan_of(start).end(start.sample)

    def _plan_of(self, start: Start) -> Plan:
        return self.plan if start.length is None else replace(self.plan, length=start.length)

    def _selections(self, plan: Plan, start: Start, order: int | None) -> Iterator[Selection]:
        for block in plan.blocks(start.epoch, start.sample, order, start.origin):
            rows: Any = block.indices
            if self.as_tensors:
                rows = torch.from_numpy(rows)
            else:
                rows = rows.tolist() if self.auto_collation else rows[:, 0].tolist()
            for index, position in zip(rows, block.positions.tolist(), strict=True):
                yield Selection(index, position, block.repeated)


class SamplerSource(Source):
    """Selections by a sampler, which only the trainer's thread reads.

    Args:
        seed: The seed of separate generators for the sampler; None: it draws from the generators
            of the process, as in torch.

    Attributes:
        iterator: The iterator over the sampler that torch created, for the next `open`; else None.
    """

    def __init__(self, sampler: Any, seed: int | None, settings: Settings) -> None:
        self.kind, self.is_arithmetic = "torch" if seed is None else "sampler", False
        self.count = _length if settings.auto_collation else _one
        self.sampler = sampler
        self.iterator: Iterator[Any] | None = None
        self._seed = seed
        # How ranks share each batch; None if the sampler yields only this rank's batches.
        self._plan, self.as_tensors = settings.shared, settings.is_sliced
        is_shared = self._plan is not None and self._plan.world_size > 1
        self.follows = holds_position(sampler) and not is_shared
        self._snapshots, self._size = Snapshots(copy.deepcopy, time.perf_counter), 1

    def open(self, start: Start, order: int | None) -> Reader:
        """See `Source`."""
        if self._seed is None:
            iterator, self.iterator = self.iterator, None
            reader = Reader(self._selections(self.sampler, start, iterator))
            reader.draw(start.drawn.count(self.sampler) if start.drawn else 0)
            return reader
        if (planned := planned_within(self.sampler)) is not None:
            # Its order must not depend on how often, or how far ahead, it was read.
            planned.begin(start.epoch)
        seed = seed_of(self._seed, SAMPLER, start.epoch)
        generators = nullcontext if is_self_contained(self.sampler) else PrivateGenerators(seed)
        reader = Reader(self._selections(at_epoch(self.sampler, order), start), generators)
        # Many samplers read their epoch when iteration starts.
        reader.draw(max(start.drawn.count(self.sampler) if start.drawn else 0, 1))
        return reader

    def _selections(self, sampler: Any, start: Start, iterator: Any = None) -> Iterator[Selection]:
        if start.length is not None:
            sampler, iterator = resized(sampler, start.length), None
        if self._plan is not None and self._plan.world_size > 1:
            yield from self._shared(sampler, start, self._plan)
            return
        follows, (rank, ranks) = self.follows, rank_of(sampler)
        position, skip = rank << RANK_BITS, 0 if follows else start.batch
        if start.by_sample and not follows and type(sampler) is BatchSampler:
            rest: Any = itertools.islice(sampler.sampler, start.sample // ranks, None)
            sampler, skip = BatchSampler(rest, sampler.batch_size, sampler.drop_last), 0
            iterator = None
        if not skip:
            position += start.sample // ranks
        # A sampler that yields nothing was restored to the end of the epoch before: this iteration
        # only ended that epoch, so it is iterated again.
        drawn = start.drawn if follows else None
        known = drawn.count(sampler) if drawn else 0
        for _ in range(2 if follows and not start.batch else 1):
            is_empty = True
            rows = rows_of(sampler) if self.as_tensors else None
            every = drawn.before(sampler, iterator) if drawn else rows or iterator or sampler
            for number, index in enumerate(every):
                is_empty = False
                index = copied(index, is_batch=self.count is not _one)
                self._size = self.count(index)
                if number >= skip:
                    states = self._states() if follows and number >= known else None
                    yield Selection(index, position, 0, states)
                position += self._size
            iterator = drawn = None
            if not is_empty:
                return

    def _states(self) -> SamplerStates | None:
        """Return the states after a selection; None if they are asked for only when needed."""
        if not self._snapshots.schedule.is_cheap:
            return None
        found: SamplerStates | None = self._snapshots.take(
            lambda: states_of(self.sampler, keep=_same)
        )
        return found

    def may_have_ended(self, batches: int) -> bool:
        """See `Source`. A short batch is read until a sampler ends, which may then start over."""
        length, size = length_of(self.sampler), getattr(self.sampler, "batch_size", None)
        is_short = isinstance(size, int) and self._size < size
        return is_short or (length is not None and batches >= length)

    def most_ahead(self) -> float:
        """See `Source`. A state includes what was drawn since, if the sampler's takes long."""
        if not self.follows or self._snapshots.schedule.is_cheap:
            return math.inf
        return max(MOST_DRAWN // max(self._size, 1), 2 * CHUNK)

    def _shared(self, sampler: Any, start: Start, plan: Plan) -> Iterator[Selection]:
        """Yield this rank's part of the batches that all ranks make together."""
        size, position = plan.global_batch_size, start.sample
        indices = itertools.islice(iter(sampler.sampler), position, None)
        while together := list(itertools.islice(indices, size)):
            if len(together) < size and plan.drop_last:
                return
            share = share_of(len(together), plan)
            own = together[share.first : share.first + share.samples]
            own += [together[plan.rank % len(together)]] * share.repeated
            if own:
                yield Selection(own, position + share.first, share.repeated)
            position += len(together)

    def samples_returned(self, start: Start, batches: int, samples: int) -> int:
        """See `Source`."""
        sampler: Any = self.sampler
        if self._plan is None:
            return start.sample + samples * rank_of(sampler)[1]
        sample = start.sample + batches * self._plan.global_batch_size
        return min(sample, start.length or len(sampler.sampler))

    def peeks_from(self) -> float:
        """See `Source`. By torch's rules a sampler is not read earlier than torch would."""
        length = length_of(self.sampler)
        return 0 if self._seed is not None else math.inf if length is None else length

    def sampler_states(self, *, if_cheap: bool = False) -> SamplerStates | None:
        """See `Source`."""
        return self._states() if if_cheap and self.follows else states_of(self.sampler)

    def set_sampler_states(self, states: SamplerStates | None) -> None:
        """See `Source`."""
        set_states(self.sampler, states)


class IterableSource(Source):
    """Selections of an iterable dataset: only the number of samples, without indices.

    Args:
        batch_size: Samples of a batch; None for single samples.
    """

    kind = "iterable"

    def __init__(self, batch_size: int | None) -> None:
        self._index = None if batch_size is None else [None] * batch_size
        self.count = _one if batch_size is None else len

    def open(self, start: Start, order: int | None) -> Reader:
        """See `Source`. The selections never end; the workers report the end of the data."""
        return Reader(itertools.repeat(Selection(self._index)))


def _one(_: Any) -> int:
    return 1


def _same(state: Any) -> Any:
    return state


def _length(index: Any) -> int:
    try:
        # `len` of a tensor takes a microsecond, and a batch may take no more than twenty.
        return index.size(0) if isinstance(index, torch.Tensor) else len(index)
    except (TypeError, IndexError):  # any object, for the dataset's `__getitems__`
        return 1
