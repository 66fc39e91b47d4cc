"""Loaders with only torch's arguments: batches, order and random numbers are torch's."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Self

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from forebay.base.draw_detection import BatchSeeds
from forebay.base.formatting import counted
from forebay.engine.limits import Limits
from forebay.errors import OptionError
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import BatchRequest, BatchSpec, WorkerState
from forebay.loading.position import Checks, Position, is_count, is_list_of
from forebay.loading.sampler_kind import ReadsSampler
from forebay.loading.samplers import (
    SamplerStates,
    is_self_contained,
    length_of,
    sampler_states,
)
from forebay.loading.selections import (
    RELEASED_TOGETHER,
    Generators,
    Reached,
    Reader,
    Rest,
    Start,
)
from forebay.loading.user_states import has_state, set_generator, state_of_generator
from forebay.loading.worker_turns import WorkerTurns

_TORCHS_OWN = (
    *(RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler),
    DistributedSampler,
)


def _is_worker_state(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != len(WorkerState._fields):
        return False
    state = WorkerState(*value)
    is_since = is_count(state.since) or isinstance(state.since, list)
    is_digest = state.digest is None or is_count(state.digest)
    is_phase = state.phase in ("before", "within", "ended")
    is_owned = state.generators is None or isinstance(state.generators, dict)
    return is_phase and is_since and is_count(state.read) and is_digest and is_owned


class TorchKind(ReadsSampler):
    """Loaders by torch's rules: workers take turns, and draw from generators of their own."""

    kind_name = "torch"
    keeps_pipeline = False
    torch_reads = True
    MADE_WITH: ClassVar[Checks] = {**ReadsSampler.MADE_WITH, "num_workers": (False, is_count)}
    STATE: ClassVar[Checks] = {
        **ReadsSampler.STATE,
        "generator": (True, str),
        "draws_base_seed": (False, bool),
        "worker_states": (False, lambda value: is_list_of(value, _is_worker_state)),
        "next_worker": (False, is_count),
    }

    def __post_init__(self) -> None:
        """Begin with nothing drawn."""
        super().__post_init__()
        self._generator_before: str | None = None
        self._drew_base_seed = True
        self._iterator: Any = None  # over the sampler, which torch has begun, for the next `open`
        self._states_before: SamplerStates | None = None  # some draw when that is made

    def follow(self, before: LoaderKind) -> Self:
        """See `LoaderKind`: what was drawn when the epoch began is part of the state."""
        assert isinstance(before, TorchKind)
        self._generator_before = before._generator_before
        self._drew_base_seed = before._drew_base_seed
        return super().follow(before)

    # ---- where batches are made, and how many --------------------------------------------------

    @property
    def runs_in_caller(self) -> bool:
        """Return whether there is no buffer: every worker has its requests in advance."""
        return self.buffer is None

    @property
    def may_stop_workers(self) -> bool:
        """Return False: others have states of their own, which would be lost with them."""
        return False

    @property
    def keeps_tasks(self) -> bool:
        """Return True: each request is for one worker."""
        return True

    @property
    def keeps_iterator(self) -> bool:
        """See `LoaderKind`."""
        return self.num_workers > 0 and self.keeps_workers

    @property
    def renews_workers(self) -> bool:
        """See `LoaderKind`. By torch's rules alone they keep their copies."""
        return self.buffer is not None and super().renews_workers

    @property
    def returns_in_order(self) -> bool:
        """See `LoaderKind`."""
        return self.in_order or self.is_local or self.num_workers == 1

    @property
    def _may_grow(self) -> bool:
        is_plain = self.batch_sampler is None or type(self.batch_sampler) is BatchSampler
        return type(self.sampler) in _TORCHS_OWN and is_plain

    def turns(self) -> WorkerTurns | None:
        """See `LoaderKind`."""
        return None if self.is_local else self._turns(failure_ends=False)

    def _turns(self, *, failure_ends: bool) -> WorkerTurns:
        count, name = max(self.num_workers, 1), type(self.dataset).__name__
        return WorkerTurns(
            count,
            name,
            failure_ends=failure_ends,
            read_since=self.read_since if self._gets_states else None,
            is_checked=self.is_checked,
        )

    def limits(self) -> Limits:
        """See `LoaderKind`. The planner limits the requests: no worker waits for another's slot."""
        limits, setup = super().limits(), self.setup
        most = setup.tiny_requests
        if not setup.fills_by_itself:
            limits = replace(limits, slots=most * 2 + RELEASED_TOGETHER)
        return replace(limits, group_s=0.0, ahead_s=0.0, max_group=max(most, 1))

    def spec(
        self, base_seed: int = 0, epoch: int = 0, states: tuple[WorkerState, ...] = ()
    ) -> BatchSpec:
        """See `LoaderKind`."""
        return replace(super().spec(base_seed, epoch, states), tracks_state=self._gets_states)

    @property
    def is_checked(self) -> bool:
        """Return whether a resume compares what is read again; see `WorkerTurns`."""
        return False

    @property
    def _gets_states(self) -> bool:
        """Return whether results have the states of workers."""
        return self.tracks_state and (not self.is_local or self.is_checked)

    def check_timeout(self) -> None:
        """Refuse nothing: torch checks it."""

    # ---- seeds ---------------------------------------------------------------------------------

    @property
    def sample_seed(self) -> int | None:
        """Return None: each worker has a sequence of random numbers."""
        return None

    def draw(self, begin: Callable[..., Any], position: Position, *, has_workers: bool) -> None:
        """See `LoaderKind`."""
        own, generator = position.kind_state, self.drawn_from
        if (state := own.get("generator")) is not None:
            set_generator(generator, state)
        self._generator_before = state_of_generator(generator)
        self._states_before = None if self.follows else sampler_states(self.index_sampler)
        is_kept = self.persistent_workers and has_workers
        self._drew_base_seed = own.get("draws_base_seed", True) and not is_kept
        # Of workers that persist, torch resets its iterator: the sampler is iterated once.
        resets = self._drew_base_seed or isinstance(self.dataset, IterDataPipe)
        self._iterator = begin(
            generator, draws=self._drew_base_seed, resets=resets and self._resets
        )

    def seeds(self, base_seed: int, shared_seed: int | None, epoch: int) -> tuple[int, int | None]:
        """See `LoaderKind`."""
        return base_seed, shared_seed

    def local_generators(self, spec: BatchSpec, seeds: BatchSeeds | None) -> Generators | None:
        """Return None: they draw from those of the process."""
        return None

    # ---- selections ----------------------------------------------------------------------------

    def open(self, start: Start, order: int | None) -> Reader:
        """See `LoaderKind`. The sampler draws from the generators of the process."""
        iterator, self._iterator = self._iterator, None
        reader = Reader(self._selections(self.index_sampler, start, iterator))
        reader.draw(start.drawn.count(self.index_sampler) if start.drawn else 0)
        return reader

    def _to_skip(self, start: Start) -> int:
        """See `ReadsSampler`. What a library has moved is the iterator over the sampler itself."""
        return 0 if self.follows else start.batch - self._moved

    def peeks_from(self) -> float:
        """See `LoaderKind`. A sampler is not read earlier than torch would."""
        length = length_of(self.index_sampler)
        return float("inf") if length is None else length

    # ---- state ---------------------------------------------------------------------------------

    def sampler_states(self, *, if_cheap: bool = False) -> SamplerStates | None:
        """See `LoaderKind`. Those before an epoch are those before it was begun."""
        if if_cheap and not self.follows:
            return self._states_before
        return super().sampler_states(if_cheap=if_cheap)

    @property
    def tracks_state(self) -> bool:
        """Return whether the position includes the state of each worker's copy of the dataset."""
        return not self.is_local and has_state(self.dataset)

    @property
    def orders_by_draws(self) -> bool:
        """See `LoaderKind`."""
        return not is_self_contained(self.index_sampler)

    @property
    def _draws(self) -> bool:
        """Return whether batches depend on the state of torch's generator when an epoch begins."""
        return self.orders_by_draws or not self.is_local

    def made_with(self) -> dict[str, Any]:
        """See `LoaderKind`."""
        return {**super().made_with(), "num_workers": self.num_workers}

    def state(self, reached: Reached) -> dict[str, Any]:
        """See `LoaderKind`."""
        generator, states = None, reached.worker_states
        if self._draws and reached.is_within:
            generator = self._generator_before
        elif self._draws and self.generator is not None:
            generator = state_of_generator(self.generator)
        if not reached.is_within:
            is_kept = self.keeps_workers and not self.renews_workers
            lives_on = reached.is_over and (is_kept or self.is_local)
            states = [each.before_epoch() for each in states if lives_on]
        drew = self._drew_base_seed
        known = {
            **super().state(reached),
            "generator": generator,
            "draws_base_seed": not (reached.is_over and self.persistent_workers),
            "worker_states": [list(each.copied()) for each in states],
            "next_worker": reached.next_worker if reached.is_within else 0,
        }
        return known | ({"draws_base_seed": drew} if reached.is_within else {})

    def rest_of(self, position: Position) -> Rest:
        """See `LoaderKind`. On a resume, restoring the global generator is up to the user."""
        own, is_rest = position.kind_state, position.batch > 0
        states = tuple(WorkerState(*each) for each in own.get("worker_states", ()))
        return Rest(
            Start.of(position),
            own.get("next_worker", 0),
            states,
            keeps_generators=is_rest and self.generator is None,
            reads_ahead=is_rest,
            restores_workers=any(each.is_known for each in states),
        )

    def first_worker_states(self, rest: Rest, known: Sequence[WorkerState]) -> list[WorkerState]:
        """See `LoaderKind`."""
        if not self.tracks_state:
            return []
        if rest.worker_states:
            return copy.deepcopy(list(rest.worker_states))
        return [each.before_epoch() for each in known] or [WorkerState()] * self._copies

    @property
    def _copies(self) -> int:
        """How many copies of the dataset are read."""
        return 1 if self.is_local else self.num_workers

    def may_have_seed(self, seed: int | None, *, has_begun: bool) -> bool:
        """See `LoaderKind`."""
        return seed is None

    def contradictions(self, position: Position) -> Mapping[str, bool]:
        """See `LoaderKind`."""
        own, workers = position.kind_state, max(position.made_with["num_workers"], 1)
        draws, states, following = own["draws_base_seed"], own["worker_states"], own["next_worker"]
        return {
            **super().contradictions(position),
            f"draws_base_seed {draws}": not (draws or position.epoch > 0),
            f"worker_states of {counted(len(states), 'worker')}": len(states) not in (0, workers),
            "what workers read since": not all(self.may_have_read(each[3]) for each in states),
            f"next_worker {following} of {workers}": following >= workers,
        }

    def may_have_read(self, since: int | list[Any]) -> bool:
        """Return whether a worker may have read this since its state was taken."""
        return isinstance(since, list) or not since

    def read_since(self, state: WorkerState, request: BatchRequest) -> WorkerState:
        """Return a worker's state after a batch without one: it was read since the last."""
        since, index = state.since if isinstance(state.since, list) else [], request.index
        if type(index) is list:  # as a list it takes five times the memory
            with suppress(TypeError, OverflowError):  # not of numbers
                index = array("q", index)
        since.append(index)
        return state._replace(since=since)

    def check_same(self, position: Position) -> None:
        """See `LoaderKind`."""
        was, now = position.made_with["num_workers"], self.num_workers
        if was != now and position.batch and self._is_split(position):
            raise OptionError(
                f"the state has num_workers={was}, the loader has num_workers={now}\n"
                "  Nothing was changed. Each worker has its own part, or copy, of the dataset, so "
                "their number has to stay the same within an epoch."
            )

    def _is_split(self, position: Position) -> bool:
        """Return whether each worker has a part, or a state, of its own."""
        return self.rest_of(position).restores_workers

    def fitted_state(self, position: Position, *, strict: bool) -> dict[str, Any]:
        """See `LoaderKind`. With other workers, it may be the turn of one that does not exist."""
        if position.made_with["num_workers"] != self.num_workers:
            return {"next_worker": 0, "worker_states": []}
        states = (WorkerState(*each) for each in position.kind_state["worker_states"])
        return (
            {} if strict else {"worker_states": [[*each._replace(digest=None)] for each in states]}
        )
