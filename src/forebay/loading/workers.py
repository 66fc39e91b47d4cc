"""The workers of a feed: where they run, where their batches lie, and how many there are.

    pool_for          the pool of a feed: processes, threads, or a cluster
    BatchSlots        which slot of the slab holds each batch, from its request until it is returned
    CallerDriver      runs the engine in the caller's thread, within `wait`: no other thread
    BackgroundDriver  runs it in a thread, so that workers get work while the trainer is busy
    WorkerTuning      adjusts the number of workers to the training: `num_workers="auto"`

If each request is for one worker, the caller's thread is enough: every worker has its requests in
advance. If any worker may make the next batch, a thread sends it as soon as a worker is free.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from forebay.base.draw_detection import ThreadTurns
from forebay.base.process import LONGEST_WAIT_S, join_threads, start_thread
from forebay.buffer import warn_of_full_disk
from forebay.engine.commands import Outcome
from forebay.engine.engine import COLLECT_S, Engine
from forebay.loading.batch_job import BatchJob, ProcessJob
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import BatchRequest, BatchResult, BatchSpec
from forebay.loading.user_states import set_generator, state_of_generator
from forebay.memory.layout import Slot
from forebay.memory.packed_batch import PackedBatch, memory_of, unpack
from forebay.memory.slab import Slab
from forebay.observe.progress import log
from forebay.observe.record import Trace
from forebay.options import whole_cores
from forebay.pools.base import Pool, ThreadPool
from forebay.pools.processes import ProcessPool
from forebay.ranks import ranks_sharing_cores

# ---- where they run ------------------------------------------------------------------------------


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
    kind: LoaderKind, spec: BatchSpec, slots: BatchSlots | None, *, to_device: bool
) -> Pool:
    """Return a pool whose workers make batches.

    Args:
        slots: The slab that is shared with the workers, and the slot of each batch; None for
            threads.
    """
    keeps_tasks = kind.keeps_tasks
    if slots is None:
        turns = ThreadTurns()
        return ThreadPool(BatchJob(spec, keeps_tasks=keeps_tasks, turns=turns), turns.abandon)
    if kind.cluster is not None:
        from forebay.loading.remote import pool_on_cluster

        borrows = not (to_device or slots.is_on_disk)
        return pool_on_cluster(spec, kind.cluster, slots.slab, slots.by_task, borrows=borrows)
    job = ProcessJob(spec, slots.slab, keeps_tasks=keeps_tasks)
    return ProcessPool(job, spec.num_workers, kind.start_method)


# ---- where batches lie ---------------------------------------------------------------------------


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


# ---- who runs the engine -------------------------------------------------------------------------

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
        # Released when something has arrived. Not a Condition or an Event: they are written in
        # Python, and stay locked if a signal's handler raises an exception while they are taken.
        self._arrived = threading.Lock()
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
        done = threading.Lock()
        done.acquire()

        def call() -> None:
            function()
            done.release()

        self.call(call)
        while not done.acquire(timeout=LONGEST_WAIT_S) and not self._is_over:
            pass

    def poll(self, seconds: float | None) -> None:
        """Wait for at most `seconds`: the thread processes all events."""
        self._waits = True
        longest = LONGEST_WAIT_S if seconds is None else min(seconds, LONGEST_WAIT_S)
        self._arrived.acquire(timeout=longest)
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
                    self._wake()
                else:
                    self._idle()
                del outcomes  # while it waits for the next ones, nothing holds these
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self.error = error
        finally:
            self._is_over = True
            self._wake()
            with suppress(Exception):
                engine.close()

    def _wake(self) -> None:
        """Wake the trainer; only the engine's thread calls this.

        If the lock is free, whoever waited is about to look again.
        """
        if self._arrived.locked():
            self._arrived.release()


# ---- how many ------------------------------------------------------------------------------------

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
