"""Where workers run, how many, which thread runs their engine, and where their batches lie."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch

from forebay.base.process import LONGEST_WAIT_S, usable_memory
from forebay.base.system_limits import start_thread
from forebay.base.thread_ends import join_threads
from forebay.buffer import warn_of_full_disk
from forebay.devices.device import Copy, Device
from forebay.devices.flow import Allocate, Command, Discard, StartCopy, TransferFlow
from forebay.devices.slab import MOST, SHARE, DeviceSlab, PinnedWindow, Rebuilding
from forebay.engine.commands import Outcome
from forebay.engine.engine import COLLECT_S, Engine
from forebay.loading.batch_job import BatchJob, ProcessJob, turns_of
from forebay.loading.messages import BatchRequest, BatchResult, BatchSpec
from forebay.loading.samplers import set_generator, state_of_generator
from forebay.memory.layout import Slot
from forebay.memory.packed_batch import PackedBatch, memory_of, unpack
from forebay.memory.slab import Slab
from forebay.observe.measurements import Transfers
from forebay.observe.progress import log
from forebay.observe.record import Trace
from forebay.options import whole_cores
from forebay.pools.base import Pool, ThreadPool
from forebay.pools.processes import ProcessPool
from forebay.ranks import ranks_sharing_cores

if TYPE_CHECKING:
    from forebay.loading.settings import Settings


def _generator(device: str, state: str) -> torch.Generator:
    generator = torch.Generator(device)
    set_generator(generator, state)
    return generator


# Its own state is a tensor in shared memory, which is gone before a spawned worker can map it.
ForkingPickler.register(
    torch.Generator,
    lambda each: (_generator, (str(each.device), state_of_generator(each))),
)


# Seconds that a worker may take to start; on a cluster it may wait for free resources.
START_S, CLUSTER_START_S = 10.0, 120.0


def pool_for(
    settings: Settings, spec: BatchSpec, slots: BatchSlots | None, *, to_device: bool
) -> Pool:
    """Return a pool whose workers make batches.

    Args:
        slots: The slab that is shared with the workers, and the slot of each batch; None for
            threads.
    """
    # A worker that fetches samples of several batches at once has begun all that it holds.
    keeps_tasks = settings.by_torchs_rules or spec.concurrency > 1
    if slots is None:
        turns = turns_of(spec)
        return ThreadPool(BatchJob(spec, keeps_tasks=keeps_tasks, turns=turns), turns.abandon)
    if settings.cluster is not None:
        from forebay.loading.remote import pool_on_cluster

        borrows = not (to_device or slots.is_on_disk)
        return pool_on_cluster(spec, settings.cluster, spec.num_workers, slots, borrows=borrows)
    job = ProcessJob(spec, slots.slab, keeps_tasks=keeps_tasks)
    return ProcessPool(job, spec.num_workers, settings.start_method)


# ---- drivers -------------------------------------------------------------------------------------
# Run the engine of a feed: in the caller's thread, while it waits, or in a background thread.
#
#     CallerDriver       the engine runs only within `wait`: no thread in the trainer's process
#     BackgroundDriver   a thread runs it, so that workers get work while the trainer is busy
#
# If each request is for one worker, the caller's thread is enough: every worker has its requests in
# advance. If any worker may make the next batch, a thread sends it as soon as a worker is free.

# Answers are collected only while so many results are ready: the trainer may need several
# meanwhile, and collecting does not end early.
READY_TO_COLLECT = 8

Outcomes = Callable[[Sequence[Outcome]], None]


class CallerDriver:
    """Runs the engine in the caller's thread, within `wait`.

    Attributes:
        error: The exception that ended the driver; None while it runs.
    """

    releases_lazily = True

    def __init__(self, engine: Engine, pool: Pool, outcomes: Outcomes) -> None:
        self.error: BaseException | None = None
        self._engine, self._pool, self._outcomes = engine, pool, outcomes
        self._is_over = False

    def call(self, function: Callable[[], None]) -> None:
        """Call a function that uses the engine, now."""
        function()

    call_and_wait = call

    def wait(self, is_ready: Callable[[], bool], until: float | None) -> None:
        """Wait until something is ready or the time `until` has come, in monotonic seconds."""
        while not is_ready() and not self._is_over:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            self.poll(left)

    def poll(self, seconds: float | None) -> None:
        """Let the engine process events for at most `seconds`; None for no limit."""
        if not self._is_over:
            self._outcomes(self._engine.step(seconds))

    def was_at_rest(self) -> bool:
        """Return whether the last signal interrupted a wait, which leaves the state consistent."""
        was, self._pool.at_rest = self._pool.at_rest, False
        return was

    def stop(self) -> None:
        """Make whoever waits return, and a thread close the engine; any thread may call it."""
        self._is_over = True
        self._engine.wake()

    def close(self) -> None:
        """Close the engine and its workers, after `stop`."""
        self._engine.close()


class BackgroundDriver(CallerDriver):
    """Runs the engine in a thread, the only one that uses it; otherwise like `CallerDriver`."""

    releases_lazily = False

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        outcomes: Outcomes,
        ready: Callable[[], int],
        idle: Callable[[], None],
    ) -> None:
        """Start the thread; it calls `idle` each time that it has waited and nothing has come."""
        super().__init__(engine, pool, outcomes)
        self._ready, self._idle, self._waits = ready, idle, False
        self._arrived = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name="forebay-driver", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:  # the system may refuse another thread
            self._is_over = True
            engine.close()
            raise

    def call(self, function: Callable[[], None]) -> None:
        """Make the thread call a function when it wakes up."""
        self._inbox.append(function)
        self._engine.wake()

    def call_and_wait(self, function: Callable[[], None]) -> None:
        """Make the thread call a function, and return afterwards."""
        done = threading.Event()

        def call() -> None:
            function()
            done.set()

        self.call(call)
        while not done.wait(LONGEST_WAIT_S) and not self._is_over:
            pass

    def wait(self, is_ready: Callable[[], bool], until: float | None) -> None:
        """Wait until something is ready, the thread has ended, or the time `until` has come."""
        with self._arrived:
            super().wait(is_ready, until)

    def poll(self, seconds: float | None) -> None:
        """Wait for at most `seconds`: the thread processes all events."""
        with self._arrived:
            self._waits = True
            self._arrived.wait(LONGEST_WAIT_S if seconds is None else min(seconds, LONGEST_WAIT_S))
            self._waits = False

    def was_at_rest(self) -> bool:
        """See `CallerDriver`."""
        was, self._waits = self._waits, False
        return was

    def close(self) -> None:
        """Wait until the thread has closed the engine, after `stop`."""
        join_threads([self._thread], 5.0)
        self._inbox.clear()  # its functions hold references to the feed

    def _run(self) -> None:
        engine, inbox = self._engine, self._inbox
        try:
            while not self._is_over:
                while inbox:
                    inbox.popleft()()
                is_ahead = self._ready() >= READY_TO_COLLECT
                outcomes = engine.step(None, COLLECT_S if is_ahead else 0.0)
                if outcomes:
                    self._outcomes(outcomes)
                    with self._arrived:
                        self._arrived.notify_all()
                else:
                    self._idle()
                del outcomes  # while it waits for the next ones, nothing holds these
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self.error = error
        finally:
            with self._arrived:
                self._is_over = True
                self._arrived.notify_all()
            with suppress(Exception):
                engine.close()


# ---- auto workers --------------------------------------------------------------------------------
# `num_workers="auto"`: adjusts the number of workers to the training while it runs.
#
#     Feed.take ──> WorkerTuning.update ── totals of the trace ──> Tuner ── number ──> Feed.resize
#
# A batch does not depend on the worker that makes it, so changing their number changes no batch.

# The shortest time between two decisions.
EVERY_S = 0.25


class WorkerTuning:
    """Reads a trace at intervals, and changes the number of workers.

    Attributes:
        due: When to decide next, in seconds of `time.perf_counter()`.
    """

    def __init__(self, most: int, is_remote: bool, trace: Trace) -> None:
        self.due = 0.0
        self._trace = trace
        cores = max(1, whole_cores() // ranks_sharing_cores())
        from forebay.observe.tuner import Tuner

        self._tuner = Tuner(min(cores, most), most, math.inf if is_remote else cores)

    @property
    def num_workers(self) -> int:
        """The number of workers that there should be."""
        return self._tuner.num_workers

    def update(self, now: float, resize: Callable[[int], None]) -> None:
        """Decide on the number of workers; call `resize` if it is to change."""
        trace, self.due = self._trace, now + EVERY_S
        from forebay.observe.tuner import Totals

        totals = Totals(
            at=now,
            waited_s=trace.waited_s,
            steps=trace.step_count,
            steps_s=trace.steps_s,
            made=trace.made_count,
            made_s=trace.made_s,
            cpu_s=trace.cpu_s,
            queued_s=trace.queued_s,
            trainer_cpu_s=time.process_time(),
        )
        decision = self._tuner.decide(totals)
        trace.tried = self._tuner.rates
        if decision is None:
            return
        resize(decision.num_workers)
        trace.num_workers = decision.num_workers
        trace.decisions.append((now, decision.reason))
        log.info("num_workers=%d: %s", decision.num_workers, decision.reason)


# ---- slots ---------------------------------------------------------------------------------------
# Records which slot of the slab holds each batch, from its request until it is returned.


class BatchSlots:
    """The slots of the batches that were requested and not taken.

    Args:
        directory: The folder for the slab's file; None for memory.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.slab = Slab(directory)
        self.by_task: dict[int, Slot] = {}
        self.is_on_disk = directory is not None
        self._directory = directory  # None once the user was warned that its disk is full

    @property
    def prepare(self) -> Any:
        """A function that adds a slot to a request when it is sent; see `Engine`.

        It does not reference this object's owner: such a cycle would keep the slab in memory until
        the garbage collector runs.
        """
        return partial(_with_slot, self.slab, self.by_task)

    def settle(self, task: int, result: BatchResult) -> None:
        """Free the part of a slot that its batch, which has arrived, does not need."""
        slot = self.by_task.pop(task, None)
        if slot is None and result.batch.nbytes <= self.slab.largest:
            return
        slot = result.batch.settle(self.slab, slot)
        if slot is not None:
            self.by_task[task] = slot

    def open(self, task: int, result: BatchResult) -> BatchResult:
        """Unpack a batch; its slot, if it has one, is then freed with the batch."""
        packed = result.batch
        batch = unpack(packed, self.memory_of(task, packed), copies_small=True)
        return result._replace(batch=batch, is_inline=isinstance(packed.body, bytearray))

    def memory_of(self, task: int, packed: PackedBatch) -> memoryview:
        """Return the memory of a batch; its slot, if it has one, is freed with the last view."""
        if packed.refused is not None and self._directory is not None:
            directory, self._directory = self._directory, None  # one warning is enough
            warn_of_full_disk(directory, packed.refused, packed.nbytes)
        return memory_of(packed, self.slab, self.by_task.pop(task, None))

    def free(self, task: int) -> None:
        """Free the slot of a task whose batch will not be taken."""
        slot = self.by_task.pop(task, None)
        if slot is not None:
            self.slab.give_back(slot)

    def close(self) -> None:
        """Free all slots, and the slab once it holds no batch."""
        for task in list(self.by_task):
            self.free(task)
        self.slab.retire()


def _with_slot(slab: Slab, slots: dict[int, Slot], task: int, request: BatchRequest) -> Any:
    """Add a slot to a request; a request that is sent again keeps its slot."""
    slot = slots.get(task)
    if slot is None:
        slot = slab.take()
        if slot is None:
            return request
        slots[task] = slot
    return request._replace(slot=slot)


# ---- device batches ------------------------------------------------------------------------------
# Copy batches from the slab to a device before they are taken.
#
#     feed ── arrived ──> TransferFlow ── commands ──> device ── open ──> the batch on the device
#                              ^                          │
#                              └─────── released ─────────┘
#
# A slot of the slab is copied as a whole, in one copy, and the batch is rebuilt over the copy.
# That happens in the thread that runs the engine, so with a background thread it happens while
# the trainer is busy with the batch before. Opening a batch only makes the trainer's stream wait
# for its copy.


@dataclass(slots=True)
class _Copied:
    """A batch whose copy was started.

    Attributes:
        batch: The batch over the slot of the device; None if rebuilding it raised.
        view: The bytes of the slot, which keep the lease.
    """

    batch: Any
    slot: int
    lease: int
    view: torch.Tensor
    copy: Copy
    is_complete: bool = True
    error: Exception | None = None


class DeviceBatches:
    """The batches of one feed that are on a device or on their way.

    It has the methods of `BatchSlots`, which holds the batches until they are copied.

    **Threads.** `settle`, `advance` and `free` are called by the thread that runs the engine, and
    `open` by the consumer, whose current stream it uses; a lock lets one of them work at a time.
    A garbage collection within them may close the feed, so the lock may be taken twice.
    """

    def __init__(self, device: Device, slots: BatchSlots, transfers: Transfers) -> None:
        self._device, self._slots, self._transfers = device, slots, transfers
        self.slab = slots.slab
        self._flow = TransferFlow(reuses=device.reuses)
        self._slab = DeviceSlab(device)
        self._lock = threading.RLock()
        self._is_closed = False
        self._error: Exception | None = None  # of the device: nothing can be copied any more
        self._results: dict[int, BatchResult] = {}  # that have arrived, and were not started
        self._copied: dict[int, _Copied] = {}  # that were started, and not taken
        self._host: dict[int, tuple[memoryview, Copy]] = {}  # that are being copied
        reason = None
        if slots.is_on_disk:
            reason = "a buffer with directory= is on a disk, which cannot be page-locked"
        memory = usable_memory()
        limit = MOST if memory is None else min(MOST, memory // SHARE)
        self._window = PinnedWindow(device, limit, reason)
        if device.reuses:
            slots.slab.before_free = self._window.forget

    # ---- the engine's thread -------------------------------------------------------------------

    def settle(self, task: int, result: BatchResult) -> None:
        """Note a batch that has arrived, and free the part of its slot that it does not need."""
        self._slots.settle(task, result)
        nbytes = result.batch.end
        if not nbytes:  # no tensors, or none that fit into the slot
            return
        with self._lock:
            self._results[task] = result
            self._flow.arrived(task, nbytes)

    def advance(self) -> None:
        """Start the copies of the next batches, and free the memory of those that have ended."""
        with self._lock:
            if self._is_closed or self._error is not None:
                return
            with suppress(torch.OutOfMemoryError):  # it is tried again when the batch is taken
                self._note_ended()
                while commands := self._flow.advance():
                    self._perform(commands)

    def free(self, task: int) -> None:
        """Forget a batch that will not be taken; its slot is freed, if need be after its copy."""
        with self._lock:
            known = self._results.pop(task, None) or self._copied.pop(task, None)
            if known is not None:
                self._perform(self._flow.drop(task))
        self._slots.free(task)

    # ---- the consumer --------------------------------------------------------------------------

    def open(self, task: int, result: BatchResult) -> BatchResult:
        """Return a result with the batch on the device; the current stream waits for the copy.

        If the device has no memory for it, the batch is in host memory, and `refused` says why.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            self._note_ended()
            for slot in self._slab.returned():
                self._perform(self._flow.release(slot))
            if task not in self._results and task not in self._copied:
                result = self._slots.open(task, result)
                return result._replace(batch=self._device.moved(result.batch), is_moved=True)
            try:
                self._perform(self._flow.want(task))
            except torch.OutOfMemoryError as error:
                self._flow.drop(task)
                self._results.pop(task)
                return self._slots.open(task, result)._replace(
                    refused=error.with_traceback(None), is_moved=False
                )
            copied = self._copied.pop(task)
            self._slab.lend(copied.slot, copied.lease, copied.copy)
            self._flow.take(task)
        if copied.error is not None:
            raise copied.error
        batch = copied.batch if copied.is_complete else self._device.moved(copied.batch)
        return result._replace(batch=batch, is_inline=result.batch.body is not None, is_moved=True)

    def close(self) -> None:
        """Wait for the copies that were started, and give all memory back but that in use."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for copy in [each for _, each in self._host.values()]:
                copy.ended.synchronize()
            self._slots.slab.before_free = None
            self._window.close()
            for known in (self._results, self._copied, self._host):
                known.clear()
            self._slab.close()
        self._slots.close()

    # ---- commands ------------------------------------------------------------------------------

    def _note_ended(self) -> None:
        for task, (_, copy) in list(self._host.items()):
            if copy.ended.query():
                self._transfers.copy_s += copy.seconds()
                del self._host[task]

    def _perform(self, commands: list[Command]) -> None:
        """Perform commands."""
        try:
            for command in commands:
                self._perform_one(command)
        except torch.OutOfMemoryError:
            start = commands[-1]
            assert isinstance(start, StartCopy), "it comes after Allocate"
            self._flow.refuse(start.batch)
            raise
        except Exception as error:
            self._error = error
            raise

    def _perform_one(self, command: Command) -> None:
        match command:
            case Allocate(slot, nbytes):
                self._slab.allocate(slot, nbytes)
            case StartCopy(task, slot):
                self._start(task, slot)
            case Discard(slot):
                self._slab.discard(slot)

    def _start(self, task: int, slot: int) -> None:
        """Start to copy a batch, and rebuild it over the copy meanwhile."""
        packed = self._results.pop(task).batch
        host_slot = self._slots.by_task.get(task)
        memory = self._slots.memory_of(task, packed)
        host = torch.frombuffer(memory, dtype=torch.uint8)[: packed.end]
        is_pinned = False
        if host_slot is not None and self._device.reuses:
            room = min(host_slot.capacity, self._flow.largest)
            is_pinned = self._window.covers(host.data_ptr(), len(host), room)
        copy = self._slab.copy(slot, host, is_pinned=is_pinned)
        self._host[task] = memory, copy
        transfers = self._transfers
        transfers.copied_batches += 1
        transfers.copied_bytes += packed.end
        transfers.staged_bytes += 0 if is_pinned else packed.end
        transfers.pinned_bytes = self._window.nbytes
        transfers.pinned_reason = self._window.reason or ""
        view, lease = self._slab.lease(slot, packed.end)
        copied = self._copied[task] = _Copied(None, slot, lease, view, copy)
        # A device whose memory is not used again is page-locked host memory.
        method = "to" if self._device.reuses else "pin_memory"
        rebuilt = Rebuilding(host.data_ptr(), view, method)
        try:
            copied.batch = rebuilt(unpack(packed, memory))
        except Exception as error:  # noqa: BLE001 - a class of the user's; it is raised by `open`
            copied.error = error
        copied.is_complete = rebuilt.is_complete
