"""Make one batch in a worker: fetch, collate, pack.

BatchJob           in any worker; by itself, in a thread
├── LocalJob       without workers, in the trainer's thread
└── ProcessJob     in a worker process: packs batches into shared memory
"""

from __future__ import annotations

import math
import operator
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from forebay.base import torch_internals
from forebay.base.batches import nbytes
from forebay.base.datasets import OwnedGenerators
from forebay.base.process import queued_s, read_bytes
from forebay.base.randomness import (
    SeedsIfDrawn,
    SetSeed,
    ThreadTurns,
    seed_generators,
    seed_nothing,
)
from forebay.collating.padding import slicing
from forebay.collating.rules import collated
from forebay.errors import OptionError, shortened
from forebay.failures import Failure, cut_own_frames
from forebay.loading.messages import (
    STREAM,
    BatchError,
    BatchRequest,
    BatchResult,
    BatchSpec,
    Result,
    WorkerExhausted,
    WorkerState,
)
from forebay.loading.samplers import NO_STATE, has_state
from forebay.loading.set_epoch import owner_of_set_epoch
from forebay.memory.packing import Packer, collate_into
from forebay.memory.slab import Slab
from forebay.observe.record import FINEST_S, MEASURED_S, SAMPLED_S, SlowSample, Timing
from forebay.plan import COLLATE, SAMPLE, child_seed, scrambled, seed_of
from forebay.pools.events import Answer, Assignment, Refusal
from forebay.ranks import process_group

# ---- fetch ---------------------------------------------------------------------------------------

# If samples take less than `TIMED_S` on average, they are timed one by one only in one of
# `TIMED_BATCHES` batches.
TIMED_S = 0.0001
TIMED_BATCHES = 16
FEW_SAMPLES = 4

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


class MapFetcher:
    """Fetches samples of a map-style dataset, by index.

    With a seed of the user, the generators that the dataset and `collate_fn` own are seeded like
    the global ones. Without workers they are unchanged after each batch.

    Args:
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
        self._run_seeded: RunSeeded = (
            (lambda call: call(seed_generators)) if turns is None else turns.run
        )
        # For very few samples, seeding takes less time than to find whether they draw.
        self._run_many_seeded: RunSeeded = self._run_seeded if seeds is None else seeds.run
        self._sliced = slicing(spec.dataset, spec.collate_fn) if spec.auto_collation else None
        self._is_seeded = spec.seed is not None and self._sliced is None  # a slice draws nothing
        self._getitems: Any = getattr(spec.dataset, "__getitems__", None)

    def fetch(self, request: BatchRequest, failures: list[Failure]) -> Any:
        """Return the samples of a batch, for `collate`."""
        index = request.index
        if self._sliced is not None:
            try:
                return _Sliced(self._sliced(index))
            except Exception:  # fetching one by one finds the sample
                if not self._sliced.has_samples:
                    raise
            index = torch.as_tensor(index).tolist()
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
        if not self._is_seeded or not spec.seeds_owned or epoch == self._epoch:
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

        if not self._is_seeded:
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
        if not self._is_seeded or self._spec.seed is None:
            return call()
        seed = seed_of(self._spec.seed, purpose, request.epoch, request.positions(1)[0])

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
        seed: 64 bits for the generators that the dataset owns; None to leave them as they are.
        state: The state to continue from; None to start at the beginning.
    """

    def __init__(
        self, spec: BatchSpec, seed: int | None = None, state: WorkerState | None = None
    ) -> None:
        self._spec, self.ended, dataset = spec, False, spec.dataset
        if seed is not None:
            OwnedGenerators(dataset=dataset, collate_fn=spec.collate_fn).seed(seed)
        if state is not None and state.dataset is not None:
            dataset.load_state_dict(state.dataset)
        self._samples: Iterator[Any] = iter(dataset)
        # Not before: a dataset that is its own iterator may start over in `__iter__`.
        if state is not None and state.iterator is not None:
            if not has_state(self._samples):
                kind = type(self._samples).__name__
                raise OptionError(NO_STATE.format("dataset's iterator", kind))
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
        """Return the next samples as a list, or the next sample; no sample is ever skipped."""
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


# ---- batch timer ---------------------------------------------------------------------------------
# Measures the time that a worker spends on its batches, in its own thread.


class _Used(NamedTuple):
    """What a worker has used so far, or for a `Timing`."""

    cpu_s: float = 0.0
    queued_s: float = 0.0
    threads_s: float = 0.0
    system_s: float = 0.0
    faults: int = 0
    read_bytes: int = 0


class BatchTimer:
    """Adds up times until there is a `Timing` to send.

    Three readings of the clock for each batch: tiny ones take only some ten microseconds.
    """

    def __init__(self, *, is_worker: bool = False, is_process: bool = False) -> None:
        self.began_at = self.fetched_at = 0.0
        self._is_worker, self._is_process = is_worker, is_process
        self._due = 0.0  # when to make a timing of a tiny batch
        self._measured_at = math.inf  # when the following was measured; inf for not yet
        self._used = _Used()
        self._clear(time.perf_counter())

    def _clear(self, now: float) -> None:
        """Begin new sums: of all batches since the last timing."""
        self._since = now
        self._batches, self._busy_s, self._fetch_s, self._failed_s = 0, 0.0, 0.0, 0.0
        self._slowest: SlowSample | None = None

    def measure(self) -> None:
        """Begin to measure the processor time of this thread."""
        cpu_s, used = time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD)
        threads_s = time.process_time() - cpu_s if self._is_process else 0.0
        self._used = _Used(
            cpu_s, queued_s(), threads_s, used.ru_stime, used.ru_minflt, read_bytes()
        )
        self._measured_at = time.perf_counter()

    def failed(self) -> None:
        """Leave the present batch out: it is not made, but the worker had something to do."""
        self._failed_s += time.perf_counter() - self.began_at

    def timing(self, worker_id: int, slowest: SlowSample | None) -> Timing | None:
        """Return the time spent on the batch that has just become ready; None if that is little."""
        now, began_at = time.perf_counter(), self.began_at
        seconds = now - began_at
        self._batches += 1
        self._busy_s += seconds
        self._fetch_s += self.fetched_at - began_at
        if slowest and (self._slowest is None or slowest.seconds > self._slowest.seconds):
            self._slowest = slowest
        if seconds < FINEST_S and now < self._due:
            return None
        used = _Used()
        if now - self._measured_at >= MEASURED_S:
            before = self._used
            self.measure()
            used = _Used(*map(operator.sub, self._used, before))
        idle_s = now - self._since - self._busy_s - self._failed_s if self._is_worker else 0.0
        timing = Timing(
            worker_id=worker_id,
            ended_at=now,
            seconds=seconds,
            batches=self._batches,
            busy_s=self._busy_s,
            fetch_s=self._fetch_s,
            collate_s=self._busy_s - self._fetch_s,
            idle_s=max(idle_s, 0.0),
            slowest=self._slowest,
            **used._replace(threads_s=max(used.threads_s, 0.0))._asdict(),
        )
        self._due = now + SAMPLED_S
        self._clear(now)
        return timing


# ---- batch job -----------------------------------------------------------------------------------

# What a batch counts as at least: the records about one that waits take that much memory.
LEAST_BYTES = 1 << 10


class BatchJob:
    """Makes batches in the process that it is opened in."""

    where = "in DataLoader worker thread {}"

    def __init__(
        self, spec: BatchSpec, *, keeps_tasks: bool = False, turns: ThreadTurns | None = None
    ) -> None:
        self.keeps_tasks = keeps_tasks
        self._spec = spec
        self._turns = turns
        self._seeds: SeedsIfDrawn | None = None
        self._worker_id = 0
        self._begun: tuple[int, int | None] | None = None  # epoch, and the dataset's
        self._dataset_epoch: int | None = None
        self._map_fetcher: MapFetcher | None = None
        self._iterable_fetcher: IterableFetcher | None = None
        self._init_error: BaseException | None = None
        self.timer = BatchTimer()

    def open(self, incarnation: int, worker_id: int) -> None:
        """Call the user's `worker_init_fn`; in a thread there is nothing else to set up."""
        self._worker_id = worker_id
        if self._spec.worker_init_fn is not None:
            try:
                self._spec.worker_init_fn(worker_id)
            except Exception as error:  # noqa: BLE001 - it is raised in the trainer, as torch does
                self._init_error = error
        # Each thread has a shallow copy of the job.
        self.timer = BatchTimer(is_worker=True, is_process=self._seeds is not None)
        self.timer.measure()

    def run(self, assignment: Assignment) -> Answer:
        """Answer a request with a `BatchResult`, a `BatchError` or a `WorkerExhausted`."""
        result = self.make(assignment.payload)
        if not isinstance(result, BatchResult):
            return Answer(result, 0)
        if (timing := self.timing()) is not None:
            result = result._replace(timing=timing)
        return Answer(result, max(nbytes(result.batch), LEAST_BYTES))

    def close(self) -> None:
        """Do nothing: no cleanup is needed."""

    def make(self, request: BatchRequest) -> Result:
        """Make one batch, catching what the user's code raises."""
        if self._init_error is not None:
            return self.raised(request, self._init_error, None)
        try:
            return self._made(request, self._fetcher(request))
        except EndOfDataset:
            assert self._iterable_fetcher is not None
            state = self._iterable_fetcher.state() if self._spec.tracks_state else None
            return WorkerExhausted(self._worker_id, state)
        except SampleError as error:
            return self.raised(request, error.__cause__ or error, error.index)
        except Exception as error:  # noqa: BLE001 - collate_fn may raise anything
            return self.raised(request, error, None)
        except BaseException as error:  # noqa: BLE001 - SystemExit, for example
            return self._ended_by(request, error)

    def raised(self, request: BatchRequest, error: BaseException, index: Any) -> BatchError:
        """Describe an exception for the trainer, which raises it."""
        cut_own_frames(error)
        return BatchError(error, self._notes(request, index))

    def _ended_by(self, request: BatchRequest, error: BaseException) -> Result:
        if self._spec.is_iterable:  # a generator has ended then, and could not be read on
            raise Refusal(STREAM) from error
        raise error

    def _before_collation(self, request: BatchRequest) -> None:
        """Prepare for collation; overridden where batches are packed."""

    def _made(self, request: BatchRequest, fetcher: MapFetcher | IterableFetcher) -> BatchResult:
        failures: list[Failure] = []
        batch, timer, states = None, self.timer, None
        timer.began_at = time.perf_counter()
        try:
            if isinstance(fetcher, MapFetcher):
                fetcher.begin(request.epoch)
                states = fetcher.owned_states()
            samples = fetcher.fetch(request, failures)
            timer.fetched_at = time.perf_counter()
            is_empty = bool(failures) and not samples
            if not is_empty:
                self._before_collation(request)
                batch = fetcher.collate(request, samples)
        except BaseException:
            timer.failed()
            raise
        finally:
            if states is not None and isinstance(fetcher, MapFetcher):
                fetcher.restore_owned(states)
        state = fetcher.state() if self._spec.tracks_state else None
        return BatchResult(batch, failures=tuple(failures), is_empty=is_empty, state=state)

    def timing(self) -> Timing | None:
        """Return the time spent on the batch that has just become ready; see `BatchTimer`."""
        fetcher = self._map_fetcher
        return self.timer.timing(self._worker_id, fetcher.slowest if fetcher else None)

    def _fetcher(self, request: BatchRequest) -> MapFetcher | IterableFetcher:
        """Return the fetcher for a request, after setting the dataset's epoch."""
        if self._spec.is_iterable:
            # A prefetched epoch starts again if `set_epoch` was called with another value.
            if (request.epoch, request.dataset_epoch) != self._begun:
                self._begin_iterable(request)
            assert self._iterable_fetcher is not None
            return self._iterable_fetcher
        if self._map_fetcher is None:
            spec = self._spec
            state = spec.worker_states[self._worker_id] if spec.worker_states else WorkerState()
            if state.dataset is not None:
                spec.dataset.load_state_dict(state.dataset)
            self._map_fetcher = MapFetcher(spec, self._turns, self._seeds)
        self._set_dataset_epoch(request)
        return self._map_fetcher

    def _begin_iterable(self, request: BatchRequest) -> None:
        spec, is_first = self._spec, self._iterable_fetcher is None
        self._set_dataset_epoch(request)
        # In a worker's first epoch worker_init_fn may have seeded the generators itself.
        if request.worker_seed is not None and request.epoch != spec.first_epoch:
            torch_internals.seed_as_worker(request.worker_seed, self._worker_id)
        if isinstance(spec.dataset, IterDataPipe) and request.shared_seed is not None:
            generator = torch.Generator()
            generator.manual_seed(request.shared_seed)
            apply_random_seed(spec.dataset, generator)
        state = spec.worker_states[self._worker_id] if is_first and spec.worker_states else None
        if state is not None and request.epoch != spec.first_epoch:
            state = state._replace(phase="before")
        seed = None
        if request.worker_seed is not None:
            seed = scrambled(request.worker_seed + self._worker_id)
        self._iterable_fetcher = IterableFetcher(spec, seed, state)
        self._begun = request.epoch, request.dataset_epoch
        # Skip the batches that the dead worker returned before; reading them is the only way.
        for _ in range(request.preceding):
            with suppress(Exception):  # it was raised that time, too
                # Collated as well, for the random numbers that this may draw.
                spec.collate_fn(self._iterable_fetcher.fetch(request, []))

    def _set_dataset_epoch(self, request: BatchRequest) -> None:
        epoch = request.dataset_epoch
        if epoch is not None and epoch != self._dataset_epoch:
            self._dataset_epoch = epoch
            owner_of_set_epoch(self._spec.dataset).set_epoch(epoch)

    def _notes(self, request: BatchRequest, index: Any) -> tuple[str, ...]:
        """Return the notes for an exception: sample, batch, and how to reproduce it."""
        every = request.index.tolist() if torch.is_tensor(request.index) else request.index
        what = f"sample {index!r}" if index is not None else f"samples {shortened(every)}"
        where = self.where.format(self._worker_id).removeprefix("in DataLoader ")
        note = f"forebay: {what}, {request}, {where}"
        return (note,) if self._spec.seed is None else (note, request.replay_note)


class LocalJob(BatchJob):
    """Makes batches in the trainer's own thread, without setting up a worker."""

    where = "in this process"

    def __init__(self, spec: BatchSpec) -> None:
        """See `BatchJob`."""
        super().__init__(spec)
        if isinstance(spec.dataset, IterDataPipe | MapDataPipe):
            apply_sharding(spec.dataset, *process_group())

    def prepare(
        self, request: BatchRequest, generators: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Begin to iterate an iterable dataset, if this is the first request of its epoch."""
        if self._spec.is_iterable and request.epoch != (self._begun or (None,))[0]:
            with generators():
                self._begin_iterable(request)

    def state(self) -> WorkerState | None:
        """Return the state of an iterable dataset; None if it was not read."""
        return None if self._iterable_fetcher is None else self._iterable_fetcher.state()

    def _ended_by(self, request: BatchRequest, error: BaseException) -> Result:
        """Return an error that the trainer's loop raises, even if it ends the process."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        return self.raised(request, error, None)


class ProcessJob(BatchJob):
    """Makes batches in a worker process, and packs them into shared memory."""

    where = "in DataLoader worker process {}"

    def __init__(
        self,
        spec: BatchSpec,
        slab: Slab,
        *,
        keeps_tasks: bool = False,
        on_class: Callable[[type], None] | None = None,
    ) -> None:
        super().__init__(spec, keeps_tasks=keeps_tasks)
        self._slab = slab
        self._on_class = on_class
        self._packer: Packer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another interpreter, with the slab's descriptor."""
        state = dict(self.__dict__)
        state["_slab"] = DupFd(self._slab.fileno()), self._slab.extent
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach to the slab."""
        descriptor, extent = state.pop("_slab")
        self.__dict__.update(state)
        self._slab = Slab.attach(descriptor.detach(), extent)

    def open(self, incarnation: int, worker_id: int) -> None:
        """Set up this process as a torch worker: a seed, and `get_worker_info()`."""
        spec = self._spec
        seed = torch_internals.seed_as_worker(spec.base_seed, worker_id)
        torch_internals.become_worker(worker_id, spec.num_workers, seed, spec.dataset)
        self._packer = Packer(self._slab, self._on_class)
        collate_into(self._packer)
        self._seeds = SeedsIfDrawn()
        self._seeds.open()
        super().open(incarnation, worker_id)

    def run(self, assignment: Assignment) -> Answer:
        """Answer a request; see `BatchJob.run`."""
        packer, request = self._packer, assignment.payload
        assert packer is not None, "open comes first"
        result = self.make(request)
        if not isinstance(result, BatchResult) or result.is_empty:
            if isinstance(result, BatchResult):
                self.timer.failed()
            packer.begin(None)
            return Answer(result, 0)
        try:
            packed = packer.pack(result.batch)
        except Exception as error:  # noqa: BLE001 - whatever the batch's classes raise
            self.timer.failed()
            return Answer(self.raised(request, error, None), 0)
        result = result._replace(batch=None)  # any reference left to it is the user's
        packed = packer.seal(packed)
        result = result._replace(batch=packed, timing=self.timing())
        return Answer(result, max(packed.nbytes, LEAST_BYTES))

    def raised(self, request: BatchRequest, error: BaseException, index: Any) -> BatchError:
        """Describe an exception for the trainer, which raises it again, as torch does."""
        if self._on_class is not None:
            self._on_class(type(error))
        cut_own_frames(error)
        wrapped = torch_internals.wrapped(error, self.where.format(self._worker_id))
        return BatchError(wrapped, self._notes(request, index))

    def _before_collation(self, request: BatchRequest) -> None:
        assert self._packer is not None
        self._packer.begin(request.slot)
