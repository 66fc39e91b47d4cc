"""Loaders that read a sampler: the user's, or torch's own."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any, ClassVar, Self

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from forebay.base.randomness import PrivateGenerators, seeded_generator
from forebay.base.torch_internals import is_unread
from forebay.errors import OptionError
from forebay.loading.kind import LoaderKind
from forebay.loading.position import (
    BEFORE_CHANGE,
    Checks,
    Position,
    is_epoch,
    is_list_of,
    is_sampler_state,
)
from forebay.loading.samplers import (
    SamplerStates,
    at_epoch,
    copied,
    draw_seed,
    holds_position,
    is_self_contained,
    length_of,
    planned_within,
    rank_of,
    resized,
    sampler_states,
    set_states,
)
from forebay.loading.selections import CHUNK, Drawn, Reached, Reader, Selection, Start, going_on
from forebay.loading.snapshots import Snapshots
from forebay.mixing import MixedDataset
from forebay.plan import Plan, repeated_by, share_of
from forebay.seeds import SAMPLER, seed_of

# Each rank of a DistributedSampler counts positions from `rank << RANK_BITS`: none occurs twice.
RANK_BITS = 40
# Indices of which batches are requested at most, of a sampler whose state takes long.
MOST_DRAWN = 1 << 16
# What the state of a sampler may take at the beginning of an epoch, in seconds.
BEGIN_S = 0.01


def batches_as_tensors(sampler: Any) -> Iterator[torch.Tensor] | None:
    """Return the batches of torch's samplers as tensors, drawn as they do; None for others."""
    inner: Any = getattr(sampler, "sampler", None)
    if type(sampler) is not BatchSampler or type(inner) not in (RandomSampler, SequentialSampler):
        return None
    length = len(inner.data_source)
    if type(inner) is RandomSampler and (inner.replacement or inner.num_samples != length):
        return None
    return _rows(inner, length, sampler.batch_size, sampler.drop_last)


def _rows(sampler: Any, length: int, size: int, drop_last: bool) -> Iterator[torch.Tensor]:
    if type(sampler) is SequentialSampler:
        order = torch.arange(length)
    else:
        generator = sampler.generator
        if generator is None:
            generator = seeded_generator(draw_seed(None), "cpu")
        order = torch.randperm(length, generator=generator)
    end = length - length % size if drop_last else length
    for start in range(0, end, size):
        yield order[start : min(start + size, end)]
    if type(sampler) is RandomSampler:
        torch.randperm(length, generator=generator)  # torch draws once more at the end


def has_position(states: Iterable[Mapping[str, Any] | None]) -> bool:
    """Return whether the states of samplers have that of one that may resume within an epoch."""
    return any("state" in (each or ()) for each in states)


class SamplerReading:
    """What is known of a sampler from reading it.

    Attributes:
        snapshots: When its state is taken.
        size: Samples of the last batch.
    """

    def __init__(self) -> None:
        self.snapshots, self.size = Snapshots(copy.deepcopy, time.perf_counter), 1


class ReadsSampler(LoaderKind):
    """Loaders that read a sampler, which only the trainer's thread does."""

    STATE: ClassVar[Checks] = {
        **LoaderKind.STATE,
        "sampler": (True, lambda value: is_list_of(value, is_sampler_state)),
        "drawn": (True, Drawn.is_one),
        "set_epoch": (True, is_epoch),
    }

    def __post_init__(self) -> None:
        """Begin without having read the sampler."""
        super().__post_init__()
        self._reading, self._moved = SamplerReading(), 0

    def follow(self, before: LoaderKind) -> Self:
        """See `LoaderKind`: what is known of the sampler stays known."""
        if isinstance(before, ReadsSampler):
            self._reading = before._reading
        return super().follow(before)

    @property
    def follows(self) -> bool:
        """See `LoaderKind`."""
        return self._follows

    @functools.cached_property
    def _follows(self) -> bool:
        is_shared = self.shared is not None and self.shared.world_size > 1
        return holds_position(self.index_sampler) and not is_shared

    def refused_combinations(self) -> list[tuple[bool, str]]:
        """See `LoaderKind`."""
        words = (
            "a mixture decides the order of its samples, so it takes no sampler\n"
            "  Nothing was started. Leave sampler and batch_sampler out."
        )
        return [(isinstance(self.dataset, MixedDataset), words)]

    def _selections(self, sampler: Any, start: Start, iterator: Any = None) -> Iterator[Selection]:
        """Yield what a sampler does, from a start on.

        Args:
            iterator: An iterator over the sampler that was begun; None to begin one.
        """
        if start.length is not None:
            sampler, iterator = resized(sampler, start.length), None
        if self.shared is not None and self.shared.world_size > 1:
            yield from self._of_rank(sampler, start, self.shared)
            return
        follows, (rank, ranks), reading = self.follows, rank_of(sampler), self._reading
        position, skip, count = rank << RANK_BITS, self._to_skip(start), self.count
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
            # A library may have read the iterator, or put another one in its place.
            as_rows = self.is_sliced and (iterator is None or is_unread(iterator))
            rows = batches_as_tensors(sampler) if as_rows else None
            rest = sampler if iterator is None else going_on(iterator)
            every = drawn.before(sampler, rest) if drawn else rows or rest
            for number, index in enumerate(every):
                is_empty = False
                index = copied(index, is_batch=self.auto_collation)
                reading.size = size = count(index)  # replay() reads at the same time
                if number >= skip:
                    states = self._states() if follows and number >= known else None
                    yield Selection(index, position, 0, states)
                position += size
            iterator = drawn = None
            if not is_empty:
                return

    def _to_skip(self, start: Start) -> int:
        """Return how many selections the sampler yields that were returned before."""
        return self._moved if self.follows else start.batch

    def moved(self, position: Position, batches: int) -> Position:
        """See `LoaderKind`."""
        self._moved = batches
        return super().moved(position, batches)

    def _states(self, *, begins: bool = False) -> SamplerStates | None:
        """Return the states after a selection; None if they are asked for only when needed.

        Args:
            begins: Whether an epoch begins, where they may take longer.
        """
        snapshots = self._reading.snapshots
        is_short = begins and (snapshots.schedule.cost_s or math.inf) <= BEGIN_S
        if not (is_short or snapshots.schedule.is_cheap):
            return None
        found: SamplerStates | None = snapshots.take(
            lambda: sampler_states(self.index_sampler, keep=lambda state: state), must=is_short
        )
        return found

    def sampler_states(self, *, if_cheap: bool = False) -> SamplerStates | None:
        """See `LoaderKind`."""
        if if_cheap and self.follows:
            return self._states(begins=True)
        return sampler_states(self.index_sampler)

    def may_have_ended(self, batches: int) -> bool:
        """See `LoaderKind`. A short batch shows the end of a sampler, which may then start over."""
        sampler = self.index_sampler
        length, size = length_of(sampler), getattr(sampler, "batch_size", None)
        is_short = isinstance(size, int) and self._reading.size < size
        return is_short or (length is not None and batches >= length)

    def most_ahead(self) -> float:
        """See `LoaderKind`. A state includes what was drawn since, if the sampler's takes long."""
        if not self.follows or self._reading.snapshots.schedule.is_cheap:
            return math.inf
        return max(MOST_DRAWN // max(self._reading.size, 1), 2 * CHUNK)

    def _of_rank(self, sampler: Any, start: Start, plan: Plan) -> Iterator[Selection]:
        """Yield this rank's part of the batches that all ranks make together."""
        size, position, every = plan.global_batch_size, start.sample, iter(sampler.sampler)
        first = list(itertools.islice(every, size))
        indices = itertools.islice(itertools.chain(first, every), position, None)
        while together := list(itertools.islice(indices, size)):
            if len(together) < size and plan.drop_last:
                return
            share = share_of(len(together), plan)
            own = together[share.first : share.first + share.samples]
            again = repeated_by(len(together), plan)
            own += [first[each % len(first)] for each in again]
            if own:
                yield Selection(own, position + share.first, share.repeated)
            position += len(together)

    def samples_returned(self, start: Start, batches: int, samples: int) -> int:
        """See `LoaderKind`."""
        sampler: Any = self.index_sampler
        if self.shared is None:
            return start.sample + samples * rank_of(sampler)[1]
        sample = start.sample + batches * self.shared.global_batch_size
        return min(sample, start.length or len(sampler.sampler))

    def state(self, reached: Reached) -> dict[str, Any]:
        """See `LoaderKind`."""
        drawn = reached.start.drawn
        return {
            **super().state(reached),
            "sampler": reached.sampler_states,
            "drawn": None if drawn is None else [*drawn],
            "set_epoch": reached.order,
        }

    def contradictions(self, position: Position) -> Mapping[str, bool]:
        """See `LoaderKind`. Only a sampler with a state has what it drew in the loader's."""
        drawn, is_wrong = Start.of(position).drawn, False
        if drawn is not None:
            states = position.kind_state["sampler"] or ()
            is_of_lists = all(isinstance(each, list) and each for each in drawn.batches)
            is_wrong = not has_position(states) or not (
                is_of_lists or type(self.index_sampler) is not BatchSampler
            )
        return {**super().contradictions(position), "what a sampler drew": is_wrong}


class SamplerKind(ReadsSampler):
    """Loaders with a seed, a buffer or another argument of forebay, and a sampler of the user."""

    kind_name = "sampler"
    STATE: ClassVar[Checks] = {
        **ReadsSampler.STATE,
        "follows": (False, bool),
    }

    def open(self, start: Start, order: int | None) -> Reader:
        """See `LoaderKind`. The sampler draws from generators of its own."""
        assert self.batch_seed is not None
        if (planned := planned_within(self.index_sampler)) is not None:
            # Its order must not depend on how often, or how far ahead, it was read.
            planned.begin(start.epoch)
        seed = seed_of(self.batch_seed, SAMPLER, start.epoch)
        is_alone = is_self_contained(self.index_sampler)
        generators = nullcontext if is_alone else PrivateGenerators(seed)
        sampler = at_epoch(self.index_sampler, order)
        reader = Reader(self._selections(sampler, start), generators)
        # Many samplers read their epoch when iteration starts.
        reader.draw(max(start.drawn.count(self.index_sampler) if start.drawn else 0, 1))
        return reader

    def replaying(
        self, start: Start, begun: Start, planned: Start | None, states: SamplerStates | None
    ) -> tuple[LoaderKind, Start, int]:
        """See `LoaderKind`. It is read as for the epoch, from where that was begun or resumed.

        A sampler with a state is copied, because the iteration reads the original.
        """
        known = begun if planned is None else planned
        is_within = known.epoch == start.epoch
        if is_within and known.batch <= start.batch:
            begins = known
        elif is_within and known.by_sample:
            raise OptionError(BEFORE_CHANGE.format(start.epoch, start.batch))
        else:
            begins = Start(start.epoch)
        skip, sampler = start.batch - begins.batch, self.index_sampler
        if sampler_states(sampler) is None:
            return self, begins, skip
        is_lost = self.follows and (states is None or begins is not planned)
        if planned is None or is_lost:
            raise OptionError(
                f"the sampler has a state, and its state before epoch {start.epoch}, batch "
                f"{start.batch} is not known, or so large that it is not kept\n"
                "  Load a state that was taken in this epoch and start iterating, or use "
                "shuffle=True, whose order is a function of seed and epoch."
            )
        other = copy.copy(self)
        other.index_sampler = copy.deepcopy(sampler, {id(self.dataset): self.dataset})
        set_states(other.index_sampler, states)
        return other, begins, skip

    def peeks_from(self) -> float:
        """Return 0: whether an epoch is over is known with its last batch."""
        return 0

    def leave(self, reader: Reader, batches: int) -> None:
        """Read a sampler with a state to its end, so that it does not depend on requests."""
        with suppress(TypeError):  # a sampler without a length may be endless
            reader.read(max(len(self.index_sampler) - batches, 0) + 1)

    def state(self, reached: Reached) -> dict[str, Any]:
        """See `LoaderKind`."""
        return {**super().state(reached), "follows": self.follows}

    def check_same(self, position: Position) -> None:
        """See `LoaderKind`. Ranks that share batches have the state from before the epoch."""
        was, states = position.kind_state["follows"], position.kind_state["sampler"] or ()
        if not position.batch or was == self.follows or not has_position(states):
            return
        ranks = "one rank", "several ranks"
        raise OptionError(
            f"the state was saved by {ranks[not was]}, the loader is of {ranks[was]}\n"
            f"  It was taken in epoch {position.epoch} after {position.batches_shown}. Nothing was "
            "changed: one rank keeps where its sampler is in the epoch, and several keep where it "
            "was before, so samples would be lost or repeated.\n"
            f"  Use {ranks[not was]} until the epoch's end, or load a state of an epoch's end."
        )
