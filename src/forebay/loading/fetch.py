"""Fetch the samples of a batch from a dataset, and report which of them raised."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from forebay.collating.rules import collated
from forebay.collating.slicing import slicing
from forebay.failures import Failure
from forebay.loading.messages import BatchRequest, BatchSpec, WorkerState
from forebay.loading.samplers import has_state
from forebay.observe.trace import SlowSample
from forebay.owned_generators import OwnedGenerators
from forebay.plan.seeds import COLLATE, SAMPLE, child_seed, seed_of
from forebay.randomness import (
    SeedsIfDrawn,
    SetSeed,
    ThreadTurns,
    seed_generators,
    seed_nothing,
)

# If samples take less than `TIMED_S` on average, they are timed one by one only in one of
# `TIMED_BATCHES` batches.
TIMED_S = 0.0001
TIMED_BATCHES = 16
FEW_SAMPLES = 4

# Calls a function with one that seeds the generators; returns what it returns.
RunSeeded = Callable[[Callable[[SetSeed], Any]], Any]


def run_seeded(call: Callable[[SetSeed], Any]) -> Any:
    """Call a function with `seed_generators`."""
    return call(seed_generators)


class EndOfDataset(Exception):  # noqa: N818 - not an error: the end of the data
    """The dataset's iterator is exhausted."""


class SampleError(Exception):
    """A sample raised; the user's exception is the `__cause__`.

    Attributes:
        index: The sample's index, from the sampler.
    """

    def __init__(self, index: Any) -> None:
        """Store the sample's index."""
        super().__init__(index)
        self.index = index


class _Sliced(NamedTuple):
    """A whole batch, sliced from arrays instead of being collated from samples."""

    batch: Any


class MapFetcher:
    """Fetches samples of a map-style dataset, by index.

    With a seed of the user, the generators that the dataset and `collate_fn` own are seeded like
    the global ones. Without workers they are unchanged after each batch.

    Args:
        spec: The dataset and how its batches are made.
        turns: Runs the calls of threads, which share the random generators; None in a process.
        seeds: Runs the calls of a worker process; None elsewhere.

    Attributes:
        slowest: The slowest sample of the last batch; None if samples were not timed one by one.
    """

    def __init__(
        self, spec: BatchSpec, turns: ThreadTurns | None = None, seeds: SeedsIfDrawn | None = None
    ) -> None:
        self.slowest: SlowSample | None = None
        self._untimed = 0  # batches until the next one whose samples are timed
        self._spec = spec
        self._turns, self._seeds = turns, seeds
        self._owned, self._epoch = OwnedGenerators(), -1
        self._run_seeded: RunSeeded = run_seeded if turns is None else turns.run
        # For very few samples, seeding takes less time than to find whether they draw.
        self._run_many_seeded: RunSeeded = self._run_seeded if seeds is None else seeds.run
        self._sliced = slicing(spec.dataset, spec.collate_fn) if spec.auto_collation else None
        self._getitems: Any = getattr(spec.dataset, "__getitems__", None)

    def fetch(self, request: BatchRequest, failures: list[Failure]) -> Any:
        """Return the samples of a batch, for `collate`.

        Args:
            request: The batch.
            failures: The samples that were skipped are appended to it.

        Raises:
            SampleError: A sample raised.
            Exception: `__getitems__` raised, which does not say for which sample.
        """
        index = request.index
        if self._sliced is not None:
            try:
                return _Sliced(self._sliced(index))
            except Exception:  # noqa: BLE001, S110 - fetching one by one finds the sample
                pass
        if not self._spec.auto_collation:
            samples = self._one_by_one(request, [index], failures)
            return samples[0] if samples else samples
        if self._getitems is not None:
            try:
                return self._call_seeded(request, SAMPLE, lambda: self._getitems(index))
            except Exception:
                if not self._spec.skip_errors:
                    raise
        return self._one_by_one(request, index, failures)

    def begin(self, epoch: int) -> None:
        """Find the generators that the dataset owns, before the first batch of an epoch."""
        spec = self._spec
        if spec.seed is None or not spec.seeds_owned or epoch == self._epoch:
            return
        self._epoch = epoch  # the user may have changed the dataset between epochs
        self._owned = OwnedGenerators(dataset=spec.dataset, collate_fn=spec.collate_fn)
        if self._owned:
            # Whether they draw is not detected: it is most likely.
            self._run_many_seeded = self._run_seeded
            if self._turns is not None:
                self._turns.run_alone()

    def owned_states(self) -> list[Any] | None:
        """Return the states to restore after a batch; None in a worker, also in a thread."""
        is_worker = self._seeds is not None or self._turns is not None
        return None if is_worker or not self._owned else self._owned.states()

    def restore_owned(self, states: list[Any]) -> None:
        """Undo what a batch did to the generators that the dataset owns."""
        self._owned.restore(states)

    def _one_by_one(
        self, request: BatchRequest, indices: Sequence[Any], failures: list[Failure]
    ) -> list[Any]:
        def fetched(set_seed: SetSeed) -> list[Any]:
            failures.clear()
            return self._fetched(request, indices, failures, set_seed)

        if self._spec.seed is None:
            return fetched(seed_nothing)
        is_few = len(indices) < FEW_SAMPLES
        samples: list[Any] = (self._run_seeded if is_few else self._run_many_seeded)(fetched)
        return samples

    def _fetched(
        self,
        request: BatchRequest,
        indices: Sequence[Any],
        failures: list[Failure],
        set_seed: SetSeed,
    ) -> list[Any]:
        spec, dataset, samples, seed = self._spec, self._spec.dataset, [], 0
        is_seeded = set_seed is not seed_nothing
        if is_seeded:
            assert spec.seed is not None
            set_seed = self._owned.beside(set_seed)
            seed = seed_of(spec.seed, SAMPLE, request.epoch)
        is_timed, slowest_s, slowest = not self._untimed, 0.0, None
        first = began = time.perf_counter() if is_timed else 0.0
        for position, index in enumerate(indices, request.position):
            try:
                if is_seeded:
                    set_seed(child_seed(seed, position))
                samples.append(dataset[index])
                if is_timed:
                    ended = time.perf_counter()
                    if ended - began > slowest_s:
                        slowest_s, slowest = ended - began, index
                    began = ended
            except Exception as error:
                if not spec.skip_errors:
                    raise SampleError(index) from error
                failures.append(
                    Failure.of(error, source=index, epoch=request.epoch, batch=request.batch)
                )
        self.slowest = None
        if not is_timed:
            self._untimed -= 1
        elif began - first <= TIMED_S * len(indices):
            self._untimed = TIMED_BATCHES - 1
        if slowest_s > TIMED_S:
            self.slowest = SlowSample(slowest_s, slowest, request.epoch, request.batch)
        return samples

    def _call_seeded(self, request: BatchRequest, purpose: int, call: Callable[[], Any]) -> Any:
        """Make a call for the whole batch, with generators seeded for it if there is a seed."""
        if self._spec.seed is None:
            return call()
        seed = seed_of(self._spec.seed, purpose, request.epoch, request.position)

        def seeded(set_seed: SetSeed) -> Any:
            if set_seed is not seed_nothing:
                self._owned.beside(set_seed)(seed)
            return call()

        return self._run_seeded(seeded)

    def collate(self, request: BatchRequest, samples: Any) -> Any:
        """Make a batch from the samples that `fetch` returned."""
        if isinstance(samples, _Sliced):
            return samples.batch
        collate_fn = self._spec.collate_fn
        if collate_fn is default_collate:  # it draws no random numbers
            return collated(collate_fn, samples)
        return self._call_seeded(request, COLLATE, lambda: collated(collate_fn, samples))

    def state(self) -> WorkerState:
        """Return the state of the dataset."""
        return WorkerState(self._spec.dataset.state_dict(), None, "within")


class IterableFetcher:
    """Fetches samples of this worker's part of an iterable dataset, in its order.

    Args:
        spec: The dataset and how its batches are made.
        seed: 64 bits for the generators that the dataset owns; None to leave them as they are.
        state: The state to continue from; None to start at the beginning.

    Attributes:
        ended: Whether the end of the data was reached.
    """

    def __init__(
        self, spec: BatchSpec, seed: int | None = None, state: WorkerState | None = None
    ) -> None:
        """Create the dataset's iterator.

        The dataset's state is restored before its iterator is created, the iterator's state after
        that: a dataset that is its own iterator may start over in `__iter__`.
        """
        self._spec = spec
        self.ended = False
        dataset = spec.dataset
        if seed is not None:
            OwnedGenerators(dataset=dataset, collate_fn=spec.collate_fn).seed(seed)
        if state is not None and state.dataset is not None:
            dataset.load_state_dict(state.dataset)
        self._samples: Iterator[Any] = iter(dataset)
        if state is not None and state.iterator is not None:
            self._samples.load_state_dict(state.iterator)  # type: ignore[attr-defined]
            if state.phase != "within":  # the state is from before this epoch
                self._samples = iter(dataset)

    def state(self) -> WorkerState:
        """Return the states of the dataset and its iterator."""
        dataset, samples = self._spec.dataset, self._samples
        iterator = samples.state_dict() if has_state(samples) else None  # type: ignore[attr-defined]
        is_own = samples is dataset
        state = None if is_own or not has_state(dataset) else dataset.state_dict()
        return WorkerState(state, iterator, "ended" if self.ended else "within")

    def fetch(self, request: BatchRequest, _: list[Failure]) -> Any:
        """Return the next samples as a list, or the next sample; no sample is ever skipped.

        Raises:
            EndOfDataset: No samples are left, or with `drop_last` too few for a batch.
        """
        if self.ended:
            raise EndOfDataset
        if not self._spec.auto_collation:
            try:
                return next(self._samples)
            except StopIteration:
                self.ended = True
                raise EndOfDataset from None
        samples = []
        for _ in request.index:
            try:
                samples.append(next(self._samples))
            except StopIteration:
                self.ended = True
                break
        if not samples or (self._spec.drop_last and len(samples) < len(request.index)):
            self.ended = True
            raise EndOfDataset
        return samples

    def collate(self, _: BatchRequest, samples: Any) -> Any:
        """Make a batch from samples; random numbers continue the worker's sequence."""
        return collated(self._spec.collate_fn, samples)
