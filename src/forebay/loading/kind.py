"""What the parts of a loader ask it: a class for each kind of loader.

    LoaderKind         its arguments, and what they come to for every kind
    ├── PlanKind       the order is a plan: a function of seed and epoch
    ├── RangeKind      ranges of samples, in their order
    ├── SamplerKind    a seed or a buffer, for example, and a sampler of the user
    └── TorchKind      only torch's arguments
        └── IterableKind   an iterable dataset

A kind is made of the arguments as they are when an iteration begins, and follows the one before.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from torch.utils.data import BatchSampler, RandomSampler

from forebay.base.draw_detection import BatchSeeds
from forebay.buffer import MAX_BATCHES
from forebay.engine.limits import Limits
from forebay.loading.arguments import LoaderArguments
from forebay.loading.messages import BatchRequest, BatchSpec, WorkerState
from forebay.loading.position import KINDS, Checks, Position, is_count, is_size
from forebay.loading.samplers import (
    SamplerStates,
    asked_epoch,
    draw_seed,
    heed_epoch,
    holds_position,
    resized,
)
from forebay.loading.selections import (
    Generators,
    Reached,
    Reader,
    Rest,
    Start,
    length_of_batch,
    one,
)
from forebay.loading.worker_turns import WorkerTurns
from forebay.observe.measurements import Setup
from forebay.observe.record import Trace
from forebay.options import AutoWorkers, backend_name
from forebay.seeds import worker_seed_of

# How often a batch is tried again after its worker died or hung.
RETRIES = 1
# Work to send to a worker in one message if batches are quick; work that it holds with a buffer.
GROUP_S, AHEAD_S = 0.02, 1.0
MAX_IN_GROUP = 64


class LoaderKind(LoaderArguments, ABC):
    """A kind of loader, with the arguments of one.

    Attributes:
        batch_seed: The seed of all batches; None by torch's rules, and before it is drawn.
    """

    kind_name: ClassVar[str]
    MADE_WITH: ClassVar[Checks] = {
        "kind": (False, lambda value: value in KINDS),
        "global_batch_size": (True, is_size),
        "drop_last": (False, bool),
        "length": (True, is_count),
        "shuffle": (True, bool),
        "content": (True, lambda value: isinstance(value, str) and ":" in value),
    }
    STATE: ClassVar[Checks] = {
        "length": (True, is_size),
        "counts_samples": (False, bool),
        "dataset": (True, object),
    }
    keeps_pipeline: ClassVar[bool] = True  # from iteration to iteration
    torch_reads: ClassVar[bool] = False  # whether torch's iterator iterates the sampler
    is_arithmetic: ClassVar[bool] = False  # whether another thread may read it: no user's code runs

    def __post_init__(self) -> None:
        """Begin with the seed of the user."""
        super().__post_init__()
        self.batch_seed = self.seed

    def follow(self, before: LoaderKind) -> Self:
        """Continue what a kind of the same loader has begun, of any class; return this kind."""
        if self.batch_seed is None:
            self.batch_seed = before.batch_seed
        return self

    # ---- where batches are made ----------------------------------------------------------------

    @property
    def runs_in_caller(self) -> bool:
        """Return whether workers have enough requests if only a caller who waits sends them."""
        return False

    def spec(
        self, base_seed: int = 0, epoch: int = 0, states: tuple[WorkerState, ...] = ()
    ) -> BatchSpec:
        """Return how to make batches from an epoch on; see `BatchSpec`."""
        return BatchSpec(
            dataset=self.dataset,
            auto_collation=self.auto_collation,
            collate_fn=self.collate_fn,
            fetcher=self.fetcher,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            base_seed=base_seed,
            worker_init_fn=self.init_function,
            seed=self.sample_seed,
            seeds_owned=self.seed is not None,
            skip_errors=self.on_error == "skip",
            first_epoch=epoch,
            worker_states=states,
            keeps_workers=self.keeps_workers,
            concurrency=self.at_once_each,
        )

    # ---- how many ------------------------------------------------------------------------------

    def turns(self) -> WorkerTurns | None:
        """Return what gives each worker its turn; None if whichever is free makes a batch."""
        return None

    @functools.cached_property
    def setup(self) -> Setup:
        """What its arguments come to for its speed; `facts` adds what may change."""
        is_auto = isinstance(self.num_workers, AutoWorkers)
        return Setup(
            num_workers=self.num_workers,
            most_workers=int(self.num_workers) if is_auto else None,
            concurrency=self.at_once_each if self.num_workers and not self.one_at_a_time else None,
            backend=backend_name(self.backend),
            takes_turns=self.turns() is not None,
            in_order=self.returns_in_order,
            keeps_workers=self.keeps_workers,
            crosses_epochs=self.runs_ahead,
            buffer_bytes=None if self.buffer is None else self.buffer.nbytes,
            batch_size=self.batch_size,
            is_sliced=self.is_sliced,
            samples=self.length,
            **self._prefetching(),
        )

    def limits(self) -> Limits:
        """Return the limits for the engine."""
        setup, buffer = self.setup, self.buffer
        slots, low, ahead_s = setup.tiny_requests + self.num_workers, None, 0.0
        if setup.fills_by_itself:
            slots, low = setup.buffer_batches or MAX_BATCHES, setup.refill_below
            ahead_s = AHEAD_S if self.backend == "process" and self.at_once == 1 else 0.0
        return Limits(
            num_workers=self.num_workers,
            slots=slots,
            at_once=self.at_once,
            max_bytes=None if buffer is None else buffer.nbytes,
            refill_below=low,
            in_memory=buffer is None or buffer.directory is None,
            in_order=self.returns_in_order,
            retries=RETRIES,
            timeout_s=self.timeout or None,
            group_s=0.0 if self.at_once > 1 else GROUP_S,
            ahead_s=ahead_s,
            max_group=MAX_IN_GROUP,
            lookahead=0,
            all_workers=True,
        )

    @property
    def returns_in_order(self) -> bool:
        """Return whether batches are returned in the order of the sampler, or of workers' turns."""
        return True

    # ---- seeds ---------------------------------------------------------------------------------

    @property
    def sample_seed(self) -> int | None:
        """What samples are seeded with; None for a sequence of random numbers in each worker."""
        # Threads draw from the generators of the process, unless the user set a seed.
        return self.batch_seed if self.seed is not None or self.backend != "thread" else None

    def draw(self, begin: Callable[..., Any], position: Position, *, has_workers: bool) -> None:
        """Draw from the generators, and iterate the sampler, as torch's iterators do.

        Args:
            begin: Does that with a generator, and returns an iterator over the sampler.
            has_workers: Whether there are workers of an epoch before.
        """
        # torch draws a base seed once for workers that persist.
        draws = not (self.persistent_workers and has_workers)
        begin(self.drawn_from, draws=draws, resets=self._resets)
        if isinstance(self.sampler, RandomSampler) and self.sampler.generator is None:
            draw_seed(None)  # as torch does for the order: later draws are equal to torch's

    @property
    def _resets(self) -> bool:
        """Return whether torch resets a new iterator, too: that draws, and iterates, again."""
        # A sampler that keeps its position might lose it.
        return self.num_workers > 0 and not holds_position(self.index_sampler)

    def seeds(self, base_seed: int, shared_seed: int | None, epoch: int) -> tuple[int, int | None]:
        """Return the seeds of workers and of datapipes, from those that torch has drawn."""
        if self.batch_seed is None:
            self.batch_seed = base_seed
        own = base_seed if self.seed is None else worker_seed_of(self.seed, 0)
        return own, shared_seed

    def local_generators(self, spec: BatchSpec, seeds: BatchSeeds | None) -> Generators | None:
        """Return what the batches of this process are made in: generators of their own.

        Args:
            seeds: Seeds their samples; None if nothing in them is seeded.
        """
        # With a seed, the trainer's random numbers do not depend on the batches, nor they on it.
        return None if seeds is None else seeds.batch

    def worker_seed(self, epoch: int) -> int | None:
        """Return the base seed of workers in an epoch; None if they go on drawing."""
        return None

    # ---- selections ----------------------------------------------------------------------------

    @abstractmethod
    def open(self, start: Start, order: int | None) -> Reader:
        """Return a reader of one epoch.

        Args:
            order: The argument of the sampler's `set_epoch` for it; see `epoch_of`.
        """

    def order_key(self) -> Any:
        """Return what the selections of epochs that have not begun depend on, to be compared."""
        return None

    @functools.cached_property
    def count(self) -> Callable[[Any], int]:
        """What counts the samples of an index."""
        return length_of_batch if self.auto_collation else one

    def kept(self, request: BatchRequest) -> BatchRequest:
        """Return a request as it is kept until its batch is taken."""
        return request

    def samples_returned(self, start: Start, batches: int, samples: int) -> int:
        """Return how many samples of an epoch were returned, over all ranks."""
        return start.sample + samples

    def end_of(self, start: Start) -> int | None:
        """Return the number of samples of an epoch, over all ranks; None if it is not known."""
        return None

    def peeks_from(self) -> float:
        """Return after how many batches of an epoch it is read to see whether it ends."""
        return math.inf

    def reached(self, start: Start, batches: int) -> None:
        """Note that so many batches of an epoch and of those after it are made."""

    def prepare(self, trace: Trace) -> None:
        """Prepare for `reached`, before the first epoch."""

    def close(self) -> None:
        """Stop preparing what comes; `reached` begins again."""

    def leave(self, reader: Reader, batches: int) -> None:
        """End an epoch of which so many batches were read, and which the user has left early."""

    @property
    def foreseen_sampler(self) -> Any:
        """The sampler whose `set_epoch` may decide the order; None if no sampler does."""
        return self.index_sampler

    @property
    def follows(self) -> bool:
        """Return whether the state of a sampler has the position in an epoch."""
        return False

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

    def replaying(
        self, start: Start, begun: Start, planned: Start | None, states: SamplerStates | None
    ) -> tuple[LoaderKind, Start, int]:
        """Return what to open where, and how many batches to skip, for one batch of an epoch.

        Args:
            start: The epoch and the batch.
            begun: Where the current epoch has begun.
            planned: Where that epoch has begun or will begin; None if it is not planned.
            states: What the samplers kept then.
        """
        return self, start, 0

    def moved(self, position: Position, batches: int) -> Position:
        """Return a position after batches that a library skips, as it would skip torch's.

        It takes them from the iterator over the sampler that torch's class begins an epoch with.
        """
        samples = batches * (self.batch_size or 1)
        start = Start.of(position)
        return replace(
            position,
            batch=start.batch + batches,
            sample=self.samples_returned(start, batches, samples),
        )

    def as_asked(self, position: Position, last: int | None, *, late: str = "") -> Position:
        """Return a position, or the beginning of the epoch that `set_epoch` asks for instead.

        What was resumed stays if it is asked for as when it began. Lightning calls `set_epoch`
        after it has begun to iterate, then also for an epoch after the rest of one.

        Args:
            last: See `asked_epoch`.
            late: If the iteration has begun: "resumed", or "begun" by counting.
        """
        asked, before = asked_epoch(self.index_sampler, last)
        heed_epoch(self.index_sampler)
        if asked is None or (asked == position.epoch and not (position.batch and late)):
            return position
        same = position.epoch if before is None else before
        if (position.batch or late == "resumed") and asked == same:
            return position
        start, usual = Start.of(position), self.end_of(Start(asked)) or 0
        state: dict[str, Any] = {"origin": start.origin + (asked - start.epoch) * usual}
        if "mixture" in position.kind_state:
            state["mixture"] = position.kind_state["mixture"]
        return Position(epoch=asked, kind_state=state)

    # ---- a mixture -----------------------------------------------------------------------------

    def samples_by_source(self, names: Iterable[str], position: int) -> dict[str, Any]:
        """Return the samples of each source before a position; see `Statistics.sources`."""
        return {}

    def tokens_by_source(self, position: int) -> dict[str, tuple[int, float]]:
        """Return the tokens of each dataset of rows before a position; see `Statistics.tokens`."""
        return {}

    # ---- state ---------------------------------------------------------------------------------

    def made_with(self) -> dict[str, Any]:
        """Return what positions depend on, by name, in JSON: the fingerprint of a loader."""
        size = self.batch_size if self.auto_collation else 1
        if self.auto_collation and type(self.index_sampler) is not BatchSampler:
            size = None  # some libraries put a batch sampler of theirs there
        ranks = 1 if self.ranks is None else self.ranks.world_size
        # Of a DistributedSampler; ranks have one, too.
        replicas = getattr(self.sampler, "num_replicas", 1) if self.ranks is None else 1
        replicas = replicas if isinstance(replicas, int) else 1
        known = {
            "kind": self.kind_name,
            "global_batch_size": None if size is None else size * ranks * replicas,
            "drop_last": self.drop_last,
            "length": self.length if "length" in self.MADE_WITH else None,
            "shuffle": self.shuffle,
            "content": self.content if "content" in self.MADE_WITH else None,
        }
        return {name: value for name, value in known.items() if name in self.MADE_WITH}

    def state(self, reached: Reached) -> dict[str, Any]:
        """Return what a position of this kind of loader needs besides, in JSON."""
        start = reached.start
        found = {"length": start.length, "counts_samples": start.by_sample}
        return found | {"dataset": self.dataset_state()}

    def facts_of_ranks(self) -> dict[str, Any]:
        """Return what has to be the same on all ranks, by name; copies of files are."""
        made = self.made_with()
        return made | {"content": (made.get("content") or "").partition(":")[0]}

    def rest_of(self, position: Position) -> Rest:
        """Return how to begin at a position."""
        return Rest(Start.of(position))

    def begin_at(self, position: Position) -> None:
        """Take what this kind continues with from a position."""

    def first_worker_states(self, rest: Rest, known: Sequence[WorkerState]) -> list[WorkerState]:
        """Return the states that workers begin with, by those after the epoch before."""
        return []

    # Is a state whole, and does it fit this loader? See `restoring`.

    def may_have_returned(self, position: Position) -> bool:
        """Return whether so many batches may have so many samples."""
        made, batch, sample = position.made_with, position.batch, position.sample
        size = made["global_batch_size"]
        if position.kind_state["counts_samples"] or size is None or not batch:  # of several sizes
            return True
        # torch's own samplers yield one short batch at most, and there are none after it.
        least = batch * size if made["shuffle"] is not None else (batch - 1) * size + 1
        return bool(least <= sample <= batch * size)

    def may_have_seed(self, seed: int | None, *, has_begun: bool) -> bool:
        """Return whether a state may have this seed."""
        return seed is not None or not has_begun

    def contradictions(self, position: Position) -> Mapping[str, bool]:
        """Return what may contradict other values of a state, and whether it does."""
        return {}

    def check_same(self, position: Position) -> None:
        """Raise an error if this loader differs in what no resume can change."""

    def check_order(self, position: Position) -> None:
        """Raise an error if the rest of the epoch would have another order."""

    def fitted_state(self, position: Position, *, strict: bool) -> dict[str, Any]:
        """Return what is different in the kind's state of a position for this loader."""
        return {}

    @property
    def may_resize(self) -> bool:
        """Return whether an epoch may have another number of samples than the dataset."""
        return resized(self.index_sampler, 1) is not None

    @property
    def orders_by_draws(self) -> bool:
        """Return whether samples depend on the state of torch's generator when an epoch begins."""
        return False

    def has_already(self, state: Any) -> bool:
        """Return whether the dataset is known to have a state already, and must not load it."""
        return False
