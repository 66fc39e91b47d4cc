"""Fetch the samples of a batch by their indices, and collate them.

BatchFetcher            what a worker needs of a dataset; a kind of loader says which one it has
├── MapFetcher          a map-style dataset: samples one by one, or by one call
│   └── ThreadedFetcher    several at once, for `concurrency`; see `sample_threads.py`
└── StreamFetcher       a worker's part of an iterable dataset; see `stream_fetch.py`
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import default_collate, default_convert

from forebay.base.batch_digests import digested, shown_leaves
from forebay.base.datasets import getitems_of
from forebay.base.draw_detection import BatchSeeds, SeedsIfDrawn, ThreadTurns, seed_nothing
from forebay.base.generators import OwnedGenerators
from forebay.base.process import is_worker
from forebay.base.randomness import SetSeed, seed_generators
from forebay.collating.rules import collated
from forebay.columns.slicing import slicing
from forebay.failures import Failure
from forebay.loading.messages import AuditedSample, BatchRequest, BatchSpec, WorkerState
from forebay.loading.samplers import copied
from forebay.loading.snapshots import unpickled
from forebay.loading.user_states import has_state, saved_state
from forebay.observe.measurements import SlowSample
from forebay.seeds import COLLATE, SAMPLE, child_seed, seed_of

# If samples take less than `TIMED_S` on average, they are timed one by one only in one of
# `TIMED_BATCHES` batches.
TIMED_S = 0.0001
TIMED_BATCHES = 16
FEW_SAMPLES = 4

NONE_OWNED, NOTHING_KEPT = OwnedGenerators(), nullcontext()
# Calls a function with one that seeds the generators; returns what it returns.
RunSeeded = Callable[[Callable[[SetSeed], Any]], Any]


class EndOfDataset(Exception):  # noqa: N818 - not an error: the end of the data
    """The dataset's iterator is exhausted."""


class SampleError(Exception):
    """A sample raised; the user's exception is the `__cause__`."""

    def __init__(self, index: Any) -> None:
        """Store the sample's index."""
        super().__init__(index)
        self.index = index


class _Sliced(NamedTuple):
    """A whole batch, sliced from arrays instead of being collated from samples."""

    batch: Any


class BatchFetcher:
    """Makes the batches that a worker is asked for, from its copy of a dataset.

    Args:
        turns: Runs the calls of threads, which share the random generators; None in a process.
        seeds: Runs the calls of a worker process, or of the trainer's thread; None elsewhere.
        later: Requests whose samples may be fetched before their batches are asked for.
        is_process: Whether the worker is a process.
        owned: The generators that were found before this process was forked; None if it was not.
        names: What others are called that a search of the process finds, by ID.
        is_replacement: Whether the worker is in the place of one that died.

    Attributes:
        failures: The samples that were left out of the last batch.
        slowest: The slowest sample of the last batch; None if samples were not timed one by one.
        cpu_s: Processor time of threads that fetch samples, in seconds.
        digests: Of a stream, those of the batch before the last one and of that; see `BatchResult`.
    """

    digests: tuple[int | None, int | None] = (None, None)

    def __init__(
        self,
        spec: BatchSpec,
        worker_id: int,
        *,
        turns: ThreadTurns | None,
        seeds: SeedsIfDrawn | BatchSeeds | None,
        later: deque[BatchRequest],
        is_process: bool,
        owned: OwnedGenerators | None = None,
        names: Mapping[int, str] | None = None,
        is_replacement: bool = False,
    ) -> None:
        self.failures: list[Failure] = []
        self.slowest: SlowSample | None = None
        self.cpu_s = 0.0
        self._spec, self._worker_id = spec, worker_id
        self._turns, self._seeds, self._later = turns, seeds, later
        self._is_process, self._owned_before, self._names = is_process, owned, names

    def is_open_for(self, request: BatchRequest) -> bool:
        """Return whether the epoch of a request has begun."""
        return True

    def open(self, request: BatchRequest) -> None:
        """Begin the epoch of a request."""

    def begin(self, request: BatchRequest) -> None:
        """Prepare for a batch, as part of the time that it takes."""

    def fetch(self, request: BatchRequest) -> Any:
        """Return the samples of a batch, for `collate`."""
        raise NotImplementedError

    def collate(self, request: BatchRequest, samples: Any) -> Any:
        """Make a batch from the samples that `fetch` returned."""
        raise NotImplementedError

    def audited(self, request: BatchRequest, samples: Any) -> list[AuditedSample]:
        """Return what samples are that are made a second time, before they are collated."""
        return []

    def audited_batch(self, request: BatchRequest, batch: Any) -> list[AuditedSample]:
        """Return what the batch is, if it is made a second time."""
        return []

    def finds_more(self) -> bool:
        """Return whether the batch made generators, and is to be made again now they are seeded."""
        return False

    def kept_owned(self) -> AbstractContextManager[None]:
        """Restore the generators that the dataset owns after a batch, where they are the user's."""
        return NOTHING_KEPT

    def begin_more(self) -> None:
        """Begin to fetch samples of later requests, if several are fetched at once."""

    def drop(self, request: BatchRequest) -> None:
        """Do not fetch the samples of a batch that are not begun."""

    def close(self) -> None:
        """End what fetches samples."""

    @property
    def has_state(self) -> bool:
        """Return whether what is read has a state."""
        raise NotImplementedError

    def state(self) -> WorkerState:
        """Return the state of what is read."""
        raise NotImplementedError

    def state_read_here(self) -> WorkerState | None:
        """Return the state of what this process alone reads; None if the dataset has all of it."""
        return None

    def reads_everything(self) -> bool:
        """Return, after a batch, whether each worker is known to read all of a dataset."""
        return False

    @staticmethod
    def ended_by(error: BaseException) -> NoReturn:
        """Raise what the worker ends with, if a batch ended with such an exception."""
        raise error

    def _read_again(self, request: BatchRequest) -> None:
        """Make a batch and drop it: reading it is the only way to the state after it."""
        with suppress(Exception):  # it was raised that time, too
            # Collated as well, for the random numbers that this may draw.
            self.collate(request, self.fetch(request))


class MapFetcher(BatchFetcher):
    """Fetches samples of a map-style dataset, by index.

    With a seed of the user, the generators that the dataset and `collate_fn` own are seeded like
    the global ones. Without workers they are unchanged after each batch.
    """

    def __init__(self, spec: BatchSpec, worker_id: int, **surroundings: Any) -> None:
        """See `BatchFetcher`; a dataset with a state continues from that of the worker."""
        super().__init__(spec, worker_id, **surroundings)
        states = spec.worker_states
        self._continued = states[worker_id] if states else WorkerState()
        if self._continued.dataset is not None:
            spec.dataset.load_state_dict(unpickled(self._continued.dataset))
        turns, seeds = self._turns, self._seeds
        self._untimed = 0  # batches until the next one whose samples are timed
        self._owned, self._epoch = NONE_OWNED, -1
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

    def is_open_for(self, request: BatchRequest) -> bool:
        """Return whether what was read since the state was taken has been read again."""
        return not self._continued.since

    def open(self, request: BatchRequest) -> None:
        """Read that again."""
        since, self._continued = self._continued.since, WorkerState()
        for index in since if isinstance(since, list) else ():
            self._read_again(request._replace(index=index))

    def fetch(self, request: BatchRequest) -> Any:
        """See `BatchFetcher`."""
        self.failures, index = [], request.index
        if self._sliced is not None:
            try:
                return _Sliced(self._sliced(index))
            except Exception:  # fetching one by one finds the sample
                if not self._sliced.has_samples:
                    raise
            index = torch.as_tensor(index).tolist()
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
        """See `BatchFetcher`."""
        self._find_owned(request.epoch)

    def _find_owned(self, epoch: int) -> None:
        """Find the generators that the dataset owns, before the first batch.

        Without workers, before the first of each epoch: the user may have changed the dataset.
        """
        spec, is_known = self._spec, self._epoch >= 0 and is_worker()
        if not self._is_seeded or not spec.seeds_owned or epoch == self._epoch or is_known:
            return
        self._epoch = epoch
        roots = {"dataset": spec.dataset, "collate_fn": spec.collate_fn}
        self._own(OwnedGenerators(self._owned_before, self._names, **roots))

    def finds_more(self) -> bool:
        """See `BatchFetcher`. It looks for them after the first batch of each epoch."""
        found, self._found = self._found, None
        if found is None or (more := found.grown()) is None:
            return False
        self._own(more)
        self._found = None
        return True

    def _own(self, owned: OwnedGenerators) -> None:
        """Seed these generators for each sample from now on."""
        self._found = self._owned = self._owned_before = owned
        if self._turns is not None:
            self._turns.owned = owned
        elif owned and self._seeds is not None:
            # Whether they draw is not detected: it is most likely.
            self._seeds.always()

    def kept_owned(self) -> AbstractContextManager[None]:
        """See `BatchFetcher`: not in a worker, which may also be a thread."""
        if not self._owned or self._turns is not None or is_worker():
            return NOTHING_KEPT
        return self._owned.kept()

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
            set_seed = self._with_owned(set_seed)
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

    def _with_owned(self, set_seed: SetSeed) -> SetSeed:
        """Return what seeds the generators that were found, too; threads do so by their turns."""
        owned = self._owned
        if not owned or self._turns is not None:
            return set_seed

        def seed_all(seed: int) -> None:
            set_seed(seed)
            owned.seed(seed)

        return seed_all

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
                self._with_owned(set_seed)(seed)
            return call()

        return run(seeded)

    def collate(self, request: BatchRequest, samples: Any) -> Any:
        """See `BatchFetcher`."""
        if isinstance(samples, _Sliced):
            return samples.batch
        collate_fn = self._spec.collate_fn
        if collate_fn is default_collate:  # it draws no random numbers
            is_known = self._spec.auto_collation and not self.failures
            return collated(collate_fn, samples, request.index if is_known else ())
        run = self._run_collation
        return self._call_seeded(run, request, COLLATE, lambda: collated(collate_fn, samples))

    def audited(self, request: BatchRequest, samples: Any) -> list[AuditedSample]:
        """See `BatchFetcher`. One that needs a whole batch is described with that alone."""
        if self.failures or isinstance(samples, _Sliced):
            return []
        is_whole = self._getitems is not None and self._spec.auto_collation
        if is_whole and -1 not in request.audited:
            return []
        every = samples if self._spec.auto_collation else [samples]
        return [self._described(at, every[at], is_whole) for at in request.audited if at >= 0]

    def audited_batch(self, request: BatchRequest, batch: Any) -> list[AuditedSample]:
        """See `BatchFetcher`. `default_collate` adds nothing to its samples."""
        is_needed = -1 in request.audited and not self.failures
        if not is_needed or self._spec.collate_fn in (default_collate, default_convert):
            return []
        return [self._described(-1, batch, is_whole=True)]

    def _described(self, offset: int, made: Any, is_whole: bool) -> AuditedSample:
        others = self._owned.others or None
        return AuditedSample(offset, digested(made), shown_leaves(made), is_whole, others)

    def state(self) -> WorkerState:
        """Return the state of the dataset."""
        return WorkerState(saved_state(self._spec.dataset), None, "within")

    @property
    def has_state(self) -> bool:
        """Return whether the dataset has a state."""
        return has_state(self._spec.dataset)
