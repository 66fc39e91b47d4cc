"""Make one batch in a worker: fetch, collate, pack; and measure the time that it takes.

BatchJob           in any worker; by itself, in a thread
├── LocalJob       without workers, in the trainer's thread; see `local_feed.py`
└── ProcessJob     in a worker process: packs batches into shared memory
    └── HostedJob  on a cluster
"""

from __future__ import annotations

import functools
import math
import operator
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import torch

from forebay.base import torch_internals
from forebay.base.batches import nbytes
from forebay.base.draw_detection import BatchSeeds, SeedsIfDrawn, ThreadTurns
from forebay.base.generators import OwnedGenerators
from forebay.base.machine import PrivateMemory, queued_s, read_bytes
from forebay.errors import cut_own_frames, shortened
from forebay.loading.fetch import BatchFetcher, EndOfDataset, SampleError
from forebay.loading.messages import (
    AuditedSample,
    BatchError,
    BatchRequest,
    BatchResult,
    BatchSpec,
    Result,
    WorkerExhausted,
    WorkerState,
)
from forebay.loading.snapshots import Snapshots, as_bytes
from forebay.memory.packing import Packer, collate_into
from forebay.memory.slab import Slab
from forebay.observe.measurements import SlowSample, Timing
from forebay.observe.record import FINEST_S, MEASURED_S, SAMPLED_S
from forebay.pools.events import Answer, Assignment

# What a dataset raises that looks its samples up in a dict or by the labels of a table's rows.
_NO_SUCH_KEY = (
    "forebay: the dataset has no sample {}. Without a sampler it is asked for the indices 0 to "
    "len(dataset) - 1, as in torch. If its samples have other keys: "
    "torch.utils.data.Subset(dataset, keys), or sampler=keys."
)


# ---- time ----------------------------------------------------------------------------------------
# Measured in the worker's own thread.


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
        self.sample_cpu_s = 0.0  # of threads that fetch samples
        self._is_worker, self._is_process = is_worker, is_process
        self._due = 0.0  # when to make a timing of a tiny batch
        self._measured_at = math.inf  # when the following was measured; inf for not yet
        self._used = _Used()
        self._memory = PrivateMemory(time.perf_counter()) if is_process else None
        self._clear(time.perf_counter())

    def _clear(self, now: float) -> None:
        """Begin new sums: of all batches since the last timing."""
        self._since = now
        self._batches, self._busy_s, self._fetch_s, self._failed_s = 0, 0.0, 0.0, 0.0
        self._slowest: SlowSample | None = None

    def measure(self) -> None:
        """Begin to measure the processor time of this thread, and of those that fetch samples."""
        cpu_s = time.thread_time() + self.sample_cpu_s
        used = resource.getrusage(resource.RUSAGE_THREAD)
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
            private_bytes=self._memory.measured(now, used.faults) if self._memory else 0,
            **used._replace(threads_s=max(used.threads_s, 0.0))._asdict(),
        )
        self._due = now + SAMPLED_S
        self._clear(now)
        return timing


# ---- batches -------------------------------------------------------------------------------------

# What a batch counts as at least: the records about one that waits take that much memory.
LEAST_BYTES = 1 << 10


class BatchJob:
    """Makes batches in the process that it is opened in."""

    where = "in DataLoader worker thread {}"
    is_process = False
    _owned: OwnedGenerators | None = None

    def __init__(
        self, spec: BatchSpec, *, keeps_tasks: bool = False, turns: ThreadTurns | None = None
    ) -> None:
        self.keeps_tasks = keeps_tasks
        self._spec = spec
        self._turns = turns
        self._seeds: SeedsIfDrawn | BatchSeeds | None = None
        self._worker_id, self._is_replacement = 0, False
        self._fetcher: BatchFetcher | None = None  # once there is a request
        self._init_error: BaseException | None = None
        self._has_made = False
        self._snapshots: Snapshots | None = None
        self._ended: int | None = None  # the epoch whose end was answered
        # With `concurrency`: requests whose samples are to be fetched, once that can begin.
        self._later: deque[BatchRequest] = deque()

    def _new_snapshots(self) -> Snapshots:
        """Return what takes the states of the dataset."""
        return Snapshots(
            lambda state: state._replace(
                dataset=as_bytes(state.dataset), iterator=as_bytes(state.iterator)
            ),
            time.perf_counter,
        )

    @functools.cached_property
    def timer(self) -> BatchTimer:
        """Measures what batches take, in the process that makes them."""
        return BatchTimer()

    def open(self, incarnation: int, worker_id: int) -> None:
        """Call the user's `worker_init_fn`; in a thread there is nothing else to set up."""
        self._worker_id, self._is_replacement = worker_id, incarnation != worker_id
        if self._spec.worker_init_fn is not None:
            try:
                self._spec.worker_init_fn(worker_id)
            except Exception as error:  # noqa: BLE001 - it is raised in the trainer, as torch does
                self._init_error = error
        self._snapshots = self._new_snapshots()  # each thread has a shallow copy of the job
        self.timer = BatchTimer(is_worker=True, is_process=self.is_process)
        self.timer.measure()
        self._later = deque()

    def run(self, assignment: Assignment) -> Answer:
        """Answer a request with a `BatchResult`, a `BatchError` or a `WorkerExhausted`."""
        result = self.make(assignment.payload)
        if not isinstance(result, BatchResult):
            return Answer(result, 0)
        if (timing := self.timing()) is not None:
            result = result._replace(timing=timing)
        return Answer(result, max(nbytes(result.batch), LEAST_BYTES))

    def close(self) -> None:
        """End what fetches samples."""
        if self._fetcher is not None:
            self._fetcher.close()

    @property
    def begin(self) -> Callable[[Assignment], None] | None:
        """Begins to fetch the samples of a batch that `run` makes later; None for one at a time."""
        return self._begin if self._spec.concurrency > 1 else None

    def _begin(self, assignment: Assignment) -> None:
        self._later.append(assignment.payload)
        if self._fetcher is not None:  # otherwise the first batch is to be made first
            self._fetcher.begin_more()

    def drop(self, request: BatchRequest) -> None:
        """Do not fetch the samples of a batch that are not begun: it is not needed."""
        for at, each in enumerate(self._later):
            if each is request:  # not `remove`, which would compare the user's indices
                del self._later[at]
                break
        if self._fetcher is not None:
            self._fetcher.drop(request)

    def make(self, request: BatchRequest) -> Result:
        """Make one batch, catching what the user's code raises."""
        if self._init_error is not None:
            return self.raised(request, self._init_error, None)
        try:
            return self._made(request, self._fetcher_for(request))
        except EndOfDataset:
            # Of a worker that ends with its epoch, the next one does not need it.
            is_kept = self._spec.keeps_workers or not self._spec.num_workers
            is_needed = is_kept and request.epoch != self._ended
            self._ended = request.epoch
            return WorkerExhausted(self._worker_id, self._state(must=True) if is_needed else None)
        except SampleError as error:
            return self._failed(request, error.__cause__ or error, error.index)
        except Exception as error:  # noqa: BLE001 - collate_fn may raise anything
            return self._failed(request, error, None)
        except BaseException as error:  # noqa: BLE001 - SystemExit, for example
            return self._ended_by(request, error)

    def _failed(self, request: BatchRequest, error: BaseException, index: Any) -> BatchError:
        """Describe an exception, with the state after it: the batch counts as returned."""
        state = None
        with suppress(Exception):  # the first one is raised
            state = self._state(must=request.wants_state)
        return self.raised(request, error, index)._replace(state=state)

    def _state(self, *, must: bool = False) -> WorkerState | None:
        """Return the state of the dataset; None if it is not taken after this batch."""
        fetcher = self._fetcher
        if not self._spec.tracks_state or fetcher is None or self._snapshots is None:
            return None
        must = must or not fetcher.has_state
        found: WorkerState | None = self._snapshots.take(fetcher.state, must=must)
        return found

    def raised(self, request: BatchRequest, error: BaseException, index: Any) -> BatchError:
        """Describe an exception for the trainer, which raises it."""
        cut_own_frames(error)
        return BatchError(error, self._notes(request, index, error))

    def _ended_by(self, request: BatchRequest, error: BaseException) -> Result:
        self._spec.fetcher.ended_by(error)
        raise AssertionError("it raises")

    def _before_collation(self, request: BatchRequest) -> None:
        """Prepare for collation; overridden where batches are packed."""

    def _made(self, request: BatchRequest, fetcher: BatchFetcher) -> BatchResult:
        timer = self.timer
        timer.began_at = time.perf_counter()
        try:
            fetcher.begin(request)
            with fetcher.kept_owned():
                batch, audited = self._collated(request, fetcher)
                if fetcher.finds_more():
                    batch, audited = self._collated(request, fetcher)
        except BaseException:
            timer.failed()
            raise
        state = self._state(must=request.wants_state) if self._spec.tracks_state else None
        before, digest = fetcher.digests
        result = BatchResult(
            None if audited is None else batch,
            failures=tuple(fetcher.failures),
            is_empty=audited is None,
            state=state,
            audited=audited or (),
            digest=digest,
            digest_before=before,
        )
        is_first, self._has_made = not self._has_made, True
        if is_first and self.is_process and fetcher.reads_everything():
            return result._replace(is_undivided=True)
        return result

    def _collated(
        self, request: BatchRequest, fetcher: BatchFetcher
    ) -> tuple[Any, tuple[AuditedSample, ...] | None]:
        """Return a batch, and its audited samples; None instead if all samples were left out."""
        samples = fetcher.fetch(request)
        self.timer.fetched_at = time.perf_counter()
        if fetcher.failures and not samples:
            return None, None
        audited = fetcher.audited(request, samples) if request.audited else []
        self._before_collation(request)
        batch = fetcher.collate(request, samples)
        if request.audited:
            audited += fetcher.audited_batch(request, batch)
        return batch, (*audited,)

    def timing(self) -> Timing | None:
        """Return the time spent on the batch that has just become ready; see `BatchTimer`."""
        fetcher = self._fetcher
        self.timer.sample_cpu_s = fetcher.cpu_s if fetcher else 0.0
        return self.timer.timing(self._worker_id, fetcher.slowest if fetcher else None)

    def _made_fetcher(self) -> BatchFetcher:
        """Return what fetches samples, before the first batch."""
        fetcher: BatchFetcher = self._spec.fetcher(
            self._spec,
            self._worker_id,
            turns=self._turns,
            seeds=self._seeds,
            later=self._later,
            is_process=self.is_process,
            owned=self._owned,
            is_replacement=self._is_replacement,
        )
        self._fetcher = fetcher
        return fetcher

    def _fetcher_for(self, request: BatchRequest) -> BatchFetcher:
        """Return what fetches samples, with the epoch of the request begun."""
        fetcher = self._fetcher or self._made_fetcher()
        if not fetcher.is_open_for(request):
            fetcher.open(request)
        return fetcher

    def _notes(self, request: BatchRequest, index: Any, error: BaseException) -> tuple[str, ...]:
        """Return the notes for an exception: sample, batch, and how to reproduce it."""
        every = request.index.tolist() if torch.is_tensor(request.index) else request.index
        what = f"sample {index!r}" if index is not None else f"samples {shortened(every)}"
        where = self.where.format(self._worker_id).removeprefix("in DataLoader ")
        notes = [f"forebay: {what}, {request}, {where}"]
        if self._spec.seed is not None:
            notes.append(request.replay_note)
        asked = every if index is None and isinstance(every, Iterable) else [index]
        if type(error) is KeyError and str(error) in map(repr, asked):
            notes.append(_NO_SUCH_KEY.format(error))
        return tuple(notes)


class ProcessJob(BatchJob):
    """Makes batches in a worker process, and packs them into shared memory."""

    where = "in DataLoader worker process {}"
    is_process = True

    def __init__(
        self,
        spec: BatchSpec,
        slab: Slab,
        *,
        keeps_tasks: bool = False,
        on_class: Callable[[type], None] | None = None,
    ) -> None:
        super().__init__(spec, keeps_tasks=keeps_tasks)
        self.finds_generators = spec.seeds_owned and spec.seed is not None
        if self.finds_generators:  # before a fork: to look at all samples would copy their memory
            self._owned = OwnedGenerators(dataset=spec.dataset, collate_fn=spec.collate_fn)
        self._slab = slab
        self._on_class = on_class
        self._packer: Packer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another interpreter, with the slab's descriptor."""
        state = {**self.__dict__, "_owned": None}
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
        is_of_sample = spec.seed is not None and spec.seeds_owned
        known = worker_id, spec.num_workers, seed, spec.dataset
        torch_internals.set_worker_info(*known, seed_is_current=is_of_sample)
        self._packer = Packer(self._slab, self._on_class)
        collate_into(self._packer)
        if spec.concurrency > 1:
            self._turns = ThreadTurns()
        else:
            self._seeds = seeds = SeedsIfDrawn()
            seeds.open()
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
            return Answer(self.raised(request, error, None)._replace(state=result.state), 0)
        result = result._replace(batch=None)  # any reference left to it is the user's
        packed = packer.seal(packed)
        result = result._replace(batch=packed, timing=self.timing())
        return Answer(result, max(packed.nbytes, LEAST_BYTES))

    def raised(self, request: BatchRequest, error: BaseException, index: Any) -> BatchError:
        """Describe an exception for the trainer, which raises it again, as torch does."""
        if self._on_class is not None:
            self._on_class(type(error))
        cut_own_frames(error)
        wrapped = torch_internals.wrapped_error(error, self.where.format(self._worker_id))
        return BatchError(wrapped, self._notes(request, index, error))

    def _before_collation(self, request: BatchRequest) -> None:
        assert self._packer is not None
        self._packer.begin(request.slot)
