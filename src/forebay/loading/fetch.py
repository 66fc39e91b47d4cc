"""Fetch the samples of a batch: by index, one by one or several at once, or from an iterator.

    MapFetcher        a map-style dataset: by one call, one by one, or in `SampleThreads`
    IterableFetcher   this worker's part of an iterable dataset

With `concurrency`, samples of the next batches are fetched in the same threads, in their order, so
that threads have something to do while a batch has only its last samples left.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

from forebay.base.datasets import OwnedGenerators, getitems_of
from forebay.base.draw_detection import BatchSeeds, SeedsIfDrawn, ThreadTurns, seed_nothing
from forebay.base.randomness import SetSeed, seed_generators
from forebay.collating.rules import collated
from forebay.columns.slicing import slicing
from forebay.failures import Failure
from forebay.loading.messages import BatchRequest, BatchSpec, WorkerState
from forebay.loading.sample_threads import AHEAD, SampleThreads
from forebay.loading.samplers import copied, has_state
from forebay.observe.measurements import SlowSample
from forebay.seeds import COLLATE, SAMPLE, child_seed, seed_of

# If samples take less than `TIMED_S` on average, they are timed one by one only in one of
# `TIMED_BATCHES` batches.
TIMED_S = 0.0001
TIMED_BATCHES = 16
FEW_SAMPLES = 4

# Calls a function with one that seeds the generators; returns what it returns.
RunSeeded = Callable[[Callable[[SetSeed], Any]], Any]


class SampleError(Exception):
    """A sample raised; the user's exception is the `__cause__`."""

    def __init__(self, index: Any) -> None:
        """Store the sample's index."""
        super().__init__(index)
        self.index = index


class _Sliced(NamedTuple):
    """A whole batch, sliced from arrays instead of being collated from samples."""

    batch: Any


class _Fetched(NamedTuple):
    """What a thread fetched, the seconds that this took, and those of processor time."""

    sample: Any
    seconds: float
    cpu_s: float


class _Begun(NamedTuple):
    """A batch that threads fetch.

    Attributes:
        calls: One for each sample.
        process: Where the threads are.
    """

    request: BatchRequest
    calls: list[Future[_Fetched]]
    process: int


def _fetched(call: Callable[[], Any]) -> _Fetched:
    began, cpu_s = time.perf_counter(), time.thread_time()
    sample = call()
    return _Fetched(sample, time.perf_counter() - began, time.thread_time() - cpu_s)


class MapFetcher:
    """Fetches samples of a map-style dataset, by index.

    With a seed of the user, the generators that the dataset and `collate_fn` own are seeded like
    the global ones. Without workers they are unchanged after each batch.

    Args:
        turns: Runs the calls of threads, which share the random generators; None in a process.
        seeds: Runs the calls of a worker process, or of the trainer's thread; None elsewhere.
        threads: Fetches several samples at once; None for one at a time.
        later: With these threads, requests whose samples are to be fetched.

    Attributes:
        failures: The samples that were left out of the last batch.
        slowest: The slowest sample of the last batch; None if samples were not timed one by one.
        cpu_s: Processor time of the threads, in seconds.
    """

    def __init__(
        self,
        spec: BatchSpec,
        turns: ThreadTurns | None,
        seeds: SeedsIfDrawn | BatchSeeds | None,
        threads: SampleThreads | None,
        later: deque[BatchRequest],
    ) -> None:
        self.failures: list[Failure] = []
        self.slowest: SlowSample | None = None
        self.cpu_s = 0.0
        self._threads, self._later = threads, later
        self._beginning = threading.RLock()
        self._current: int | None = None  # the epoch
        self._begun: dict[int, _Begun] = {}  # by the ID of the request
        self._untimed = 0  # batches until the next one whose samples are timed
        self._spec = spec
        self._turns, self._seeds = turns, seeds
        self._owned, self._epoch = OwnedGenerators(), -1
        self._found: OwnedGenerators | None = None  # before the first batch of an epoch
        self._run_seeded: RunSeeded = (
            (lambda call: call(seed_generators)) if turns is None else turns.run
        )
        self._run_many_seeded = self._run_collation = self._run_seeded
        if isinstance(seeds, BatchSeeds):
            self._run_seeded = self._run_many_seeded = seeds.samples.run
            self._run_collation = seeds.collation.run
        elif seeds is not None:
            # For very few samples, seeding takes less time than to find whether they draw.
            self._run_many_seeded = seeds.run
        self._sliced = slicing(spec.dataset, spec.collate_fn) if spec.auto_collation else None
        self._is_seeded = spec.seed is not None and self._sliced is None  # a slice draws nothing
        self._getitems = getitems_of(spec.dataset)

    def fetch(self, request: BatchRequest) -> Any:
        """Return the samples of a batch, for `collate`."""
        self.failures, index = [], request.index
        if self._sliced is not None:
            try:
                return _Sliced(self._sliced(index))
            except Exception:  # fetching one by one finds the sample
                if not self._sliced.has_samples:
                    raise
            index = torch.as_tensor(index).tolist()
        if self._threads is not None:
            return self._fetched_at_once(request)
        if not self._spec.auto_collation:
            samples = self._one_by_one(request, [copied(index, is_batch=False)])
            return samples[0] if samples else samples
        if self._getitems is not None:
            try:
                # A copy: some empty the list that they are given.
                return self._call_seeded(
                    self._run_seeded, request, SAMPLE, lambda: self._getitems(copied(index))
                )
            except Exception:
                if not self._spec.skip_errors:
                    raise
        return self._one_by_one(request, index)

    def begin(self, request: BatchRequest) -> None:
        """Prepare for a batch; begin to fetch its samples and the next ones, if several at once."""
        self._find_owned(request.epoch)
        if self._threads is None:
            return
        with self._beginning:
            if any(each is request for each in self._later):
                while self._later.popleft() is not request:
                    pass
            self._begin(request)
            self._current = request.epoch
            self.begin_more()

    def _find_owned(self, epoch: int) -> None:
        """Find the generators that the dataset owns, before the first batch of an epoch."""
        if not self._is_seeded or not self._spec.seeds_owned or epoch == self._epoch:
            return
        self._epoch = epoch  # the user may have changed the dataset between epochs
        spec = self._spec
        self._own(OwnedGenerators(dataset=spec.dataset, collate_fn=spec.collate_fn))

    def finds_more(self) -> bool:
        """Return whether the batch made generators, and is to be made again now they are seeded.

        It looks for them after the first batch of each epoch.
        """
        found, self._found = self._found, None
        if found is None or (more := found.grown()) is None:
            return False
        with self._beginning:  # samples of later batches drew without a seed
            for begun in self._begun.values():
                for call in begun.calls:
                    call.cancel()
            self._begun.clear()
        self._own(more)
        self._found = None
        return True

    def _own(self, owned: OwnedGenerators) -> None:
        """Seed these generators for each sample from now on."""
        self._found = owned
        if self._turns is not None and self._turns.local is not None:
            if not self._turns.local.own(owned):
                self._turns.run_alone()
            return
        self._owned = owned
        if self._owned:
            # Whether they draw is not detected: it is most likely.
            if self._seeds is not None:
                self._seeds.always()
            if self._turns is not None:
                self._turns.run_alone()

    def kept_owned(self) -> AbstractContextManager[None]:
        """Restore the dataset's generators after a batch; in a worker, also a thread, do not."""
        is_worker = isinstance(self._seeds, SeedsIfDrawn) or self._turns is not None
        return nullcontext() if is_worker or not self._owned else self._owned.kept()

    def _one_by_one(self, request: BatchRequest, indices: Sequence[Any]) -> list[Any]:
        def fetched(set_seed: SetSeed) -> list[Any]:
            self.failures = []
            return self._fetched(request, indices, set_seed)

        if not self._is_seeded:
            return fetched(seed_nothing)
        is_few = len(indices) < FEW_SAMPLES
        samples: list[Any] = (self._run_seeded if is_few else self._run_many_seeded)(fetched)
        return samples

    def _fetched(
        self, request: BatchRequest, indices: Sequence[Any], set_seed: SetSeed
    ) -> list[Any]:
        spec, dataset, samples, seed = self._spec, self._spec.dataset, [], 0
        is_seeded = set_seed is not seed_nothing
        if is_seeded:
            assert spec.seed is not None
            set_seed = self._owned.beside(set_seed)
            seed = seed_of(spec.seed, SAMPLE, request.epoch)
        is_timed, slowest_s, slowest = not self._untimed, 0.0, None
        first = began = time.perf_counter() if is_timed else 0.0
        for position, index in zip(request.positions(len(indices)), indices, strict=True):
            try:
                if is_seeded:
                    set_seed(child_seed(seed, position))
                samples.append(dataset[index])
                if is_timed:
                    ended = time.perf_counter()
                    if ended - began > slowest_s:
                        slowest_s, slowest = ended - began, index
                    began = ended
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                self._leave_out(request, index, error)
        self.slowest = None
        if not is_timed:
            self._untimed -= 1
        elif began - first <= TIMED_S * len(indices):
            self._untimed = TIMED_BATCHES - 1
        if slowest_s > TIMED_S:
            self.slowest = SlowSample(slowest_s, slowest, request.epoch, request.batch)
        return samples

    def _leave_out(self, request: BatchRequest, index: Any, error: Exception) -> None:
        if not self._spec.skip_errors:
            raise SampleError(index) from error
        failure = Failure.of(error, source=index, epoch=request.epoch, batch=request.batch)
        self.failures.append(failure)

    def _call_seeded(
        self, run: RunSeeded, request: BatchRequest, purpose: int, call: Callable[[], Any]
    ) -> Any:
        """Make a call for the whole batch, with generators seeded for it if there is a seed."""
        if not self._is_seeded or self._spec.seed is None:
            return call()
        seed = seed_of(self._spec.seed, purpose, request.epoch, request.positions(1)[0])

        def seeded(set_seed: SetSeed) -> Any:
            if set_seed is not seed_nothing:
                self._owned.beside(set_seed)(seed)
            return call()

        return run(seeded)

    # ---- several at once -----------------------------------------------------------------------

    def begin_more(self) -> None:
        """Begin batches of the same epoch, until threads have enough to do."""
        later = self._later
        with self._beginning:
            while later and later[0].epoch == self._current:
                begun = sum(len(self._indices(each.request)) for each in self._begun.values())
                if begun >= AHEAD * self._spec.concurrency:
                    break
                self._begin(later.popleft())

    def _begin(self, request: BatchRequest) -> None:
        if id(request) not in self._begun:
            self._begun[id(request)] = self._submitted(request)

    def drop(self, request: BatchRequest) -> None:
        """Do not fetch the samples of a batch that are not begun."""
        begun = self._begun.pop(id(request), None)
        for each in () if begun is None else begun.calls:
            each.cancel()

    def _indices(self, request: BatchRequest) -> Sequence[Any]:
        return request.index if self._spec.auto_collation else [request.index]

    def _submitted(self, request: BatchRequest) -> _Begun:
        """Have threads fetch the samples of a batch."""
        assert self._threads is not None
        indices, submit = self._indices(request), self._threads.submit
        calls = [
            submit(partial(_fetched, partial(self._sample, request.epoch, position, index)))
            for position, index in zip(request.positions(len(indices)), indices, strict=True)
        ]
        return _Begun(request, calls, os.getpid())

    def _sample(self, epoch: int, position: int, index: Any) -> Any:
        spec = self._spec
        if spec.seed is None:
            return spec.dataset[index]
        seed = child_seed(seed_of(spec.seed, SAMPLE, epoch), position)

        def seeded(set_seed: SetSeed) -> Any:
            set_seed(seed)
            return spec.dataset[index]

        return self._run_seeded(seeded)

    def _fetched_at_once(self, request: BatchRequest) -> Any:
        """Return the samples of a batch when all are there."""
        with self._beginning:
            self._begin(request)
            begun = self._begun.pop(id(request))
            if begun.process != os.getpid():
                begun = self._submitted(request)
            self.begin_more()
        try:
            samples = self._gathered(request, begun.calls)
        except BaseException as error:
            self._begun[id(request)] = begun
            if not isinstance(error, KeyboardInterrupt):  # after that it may be asked for again
                self.drop(request)
            raise
        return samples if self._spec.auto_collation or not samples else samples[0]

    def _gathered(self, request: BatchRequest, calls: Sequence[Future[_Fetched]]) -> list[Any]:
        samples, slowest, slowest_s = [], None, 0.0
        for index, call in zip(self._indices(request), calls, strict=True):
            try:
                fetched = call.result()
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                self._leave_out(request, index, error)
                continue
            samples.append(fetched.sample)
            self.cpu_s += fetched.cpu_s
            if fetched.seconds > slowest_s:
                slowest_s, slowest = fetched.seconds, index
        self.slowest = SlowSample(slowest_s, slowest, request.epoch, request.batch)
        return samples

    def collate(self, request: BatchRequest, samples: Any) -> Any:
        """Make a batch from the samples that `fetch` returned."""
        if isinstance(samples, _Sliced):
            return samples.batch
        collate_fn = self._spec.collate_fn
        if collate_fn is default_collate:  # it draws no random numbers
            is_known = self._spec.auto_collation and not self.failures
            return collated(collate_fn, samples, request.index if is_known else ())
        run = self._run_collation
        return self._call_seeded(run, request, COLLATE, lambda: collated(collate_fn, samples))

    def state(self) -> WorkerState:
        """Return the state of the dataset."""
        return WorkerState(self._spec.dataset.state_dict(), None, "within")

    @property
    def has_state(self) -> bool:
        """Return whether the dataset has a state."""
        return has_state(self._spec.dataset)
