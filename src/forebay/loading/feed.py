"""Send requests to the engine, and return its results as batches.

    planner ── put(requests) ──> Feed ──> engine ──> workers ──> slab
       ^                          │
       └───────── take() <────────┘  results, in order

For loaders without workers see `LocalFeed`.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from forebay.base.libraries import one_thread
from forebay.base.process import LONGEST_WAIT_S
from forebay.base.randomness import PrivateGenerators, generators_kept, generators_lent
from forebay.base.torch_internals import seed_as_worker
from forebay.devices.device import Device
from forebay.engine.commands import (
    DeliverResult,
    DropTask,
    Limits,
    Outcome,
    ReportFailure,
    ReportRetry,
)
from forebay.engine.engine import COLLECT_S, Engine, NewTask
from forebay.errors import WorkerDiedError
from forebay.loading.batch_job import LocalJob
from forebay.loading.messages import BatchResult, BatchSpec, Result, WorkerExhausted, WorkerState
from forebay.loading.slots import BatchSlots, DeviceBatches
from forebay.loading.workers import Workers, WorkerTuning, pool_for
from forebay.observe.record import FINEST_S, Trace
from forebay.pools.base import Pool
from forebay.pools.events import Assignment, Refusal
from forebay.pools.launch import occupy_standard_descriptors
from forebay.pools.worker import failure_of

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
        """Make whoever waits return; another thread may call it."""
        self._is_over = True
        self._engine.wake()

    def close(self) -> None:
        """Close the engine and its workers, after `stop`."""
        self._engine.close()


class BackgroundDriver:
    """Runs the engine in a thread, the only one that uses it; otherwise like `CallerDriver`."""

    releases_lazily = False

    def __init__(self, engine: Engine, outcomes: Outcomes, ready: Callable[[], int]) -> None:
        self.error: BaseException | None = None
        self._engine, self._outcomes, self._ready = engine, outcomes, ready
        self._arrived = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_over = False
        self._waits = False
        self._thread = threading.Thread(target=self._run, name="forebay-driver", daemon=True)
        try:
            self._thread.start()
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
            while not is_ready() and not self._is_over:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._waits = True
                self._arrived.wait(LONGEST_WAIT_S if left is None else min(left, LONGEST_WAIT_S))
                self._waits = False

    def poll(self, seconds: float) -> None:
        """Wait briefly: the thread processes all events."""
        with self._arrived:
            self._arrived.wait(seconds)

    def was_at_rest(self) -> bool:
        """See `CallerDriver`."""
        was, self._waits = self._waits, False
        return was

    def stop(self) -> None:
        """Make the thread close the engine, and whoever waits return."""
        self._is_over = True
        self._engine.wake()

    def close(self) -> None:
        """Wait until the thread has closed the engine, after `stop`."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
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
                del outcomes  # while it waits for the next ones, nothing holds these
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self.error = error
        finally:
            with self._arrived:
                self._is_over = True
                self._arrived.notify_all()
            with suppress(Exception):
                engine.close()


# ---- feed ----------------------------------------------------------------------------------------

# How long to wait for a thread that takes a batch, or processes it on a device, in seconds.
LEAVE_S = 5.0
# Batches to release in one call, where releasing them earlier has no effect.
RELEASED_TOGETHER = 16
CLOSED = (
    "this iterator was closed, with its loader or with its workers\n"
    "  It returns no more batches. Begin a new epoch: iter(loader)."
)


class Feed:
    """Takes requests and returns results, in order unless `limits.in_order` is False.

    Args:
        tuning: Changes the number of workers; None to keep it.
        device: Where batches of worker processes are copied before they are taken; None if they
            stay in host memory.

    Attributes:
        request_more: Refers to a function that puts more requests, for the thread that runs the
            engine to call after each of its steps; None if only the trainer puts requests.
        in_use: Held by the thread that takes batches, if there may be several threads.
    """

    def __init__(
        self,
        spec: BatchSpec,
        workers: Workers,
        limits: Limits,
        trace: Trace,
        tuning: WorkerTuning | None = None,
        device: Device | None = None,
        *,
        turns: bool,
        by_caller: bool,
    ) -> None:
        self.ready: deque[DeliverResult | ReportFailure] = deque()
        self.ready_ends = 0
        self.exhausted: dict[int, int] = {}
        self.request_more: weakref.WeakMethod[Callable[[], None]] | None = None
        self.in_use = threading.RLock()
        self._owner = os.getpid()
        self._closed = False
        self._error: BaseException | None = None  # why there will be no more results
        self._timeout_s, self._start_s = limits.timeout_s, workers.start_s
        self._attempts = limits.retries + 1
        if tuning is not None:
            limits = replace(limits, num_workers=tuning.num_workers)
        self._trace, self._tuning, trace.num_workers = trace, tuning, limits.num_workers
        self._asked_at = 0.0  # when the trainer asked for a batch that it has not got yet
        self._taken: list[int] = []  # and not released yet
        occupy_standard_descriptors()
        slots = None if workers.backend == "thread" else BatchSlots(workers.directory)
        self.pool = pool_for(spec, workers, turns, slots, to_device=device is not None)
        prepare = None if slots is None or workers.backend != "process" else slots.prepare
        self._on_device: DeviceBatches | None = None
        if slots is not None and device is not None:
            self._on_device = DeviceBatches(device, slots, trace.transfers)
        self._slots: BatchSlots | DeviceBatches | None = self._on_device or slots
        try:
            self._engine = Engine(self.pool, limits, prepare=prepare)
        except BaseException:  # Ctrl-C, for example
            self.pool.close()
            raise
        outcomes, ready = partial(_pass_outcomes, weakref.ref(self)), partial(len, self.ready)
        self._driver: CallerDriver | BackgroundDriver
        if by_caller:
            self._driver = CallerDriver(self._engine, self.pool, outcomes)
        else:
            self._driver = BackgroundDriver(self._engine, outcomes, ready)
        _open_feeds.add(self)

    # ---- requests ------------------------------------------------------------------------------

    def put(self, tasks: list[NewTask]) -> None:
        """Queue requests; their task numbers must grow."""
        # If another thread closed it, the next `take` says so: a batch may have been taken before.
        if not self._closed:
            self.check()
            self._driver.call(partial(self._engine.put, tasks))

    def forget(self, before: int) -> None:
        """Drop every task with a lower number that was not taken."""
        self.check()
        self._driver.call_and_wait(partial(self._forget, before))

    def resize(self, num_workers: int) -> None:
        """Change the number of workers (`Engine.resize`); `get_worker_info()` keeps the first."""
        self.check()
        self._driver.call(partial(self._engine.resize, num_workers))

    def _forget(self, before: int) -> None:
        self._engine.forget(before)
        ready = self.ready
        for _ in range(len(ready)):  # in place: the driver and statistics look at it
            outcome = ready.popleft()
            if outcome.task >= before:
                ready.append(outcome)
                continue
            self.ready_ends -= _is_end(outcome)
            if isinstance(outcome, DeliverResult):
                self._engine.release((outcome.task,))
                self._free(outcome.task)

    # ---- results -------------------------------------------------------------------------------

    def take(self) -> tuple[int, Result]:
        """Return the next result and its task, waiting for it."""
        count = len(self.ready)
        asked_at, self._asked_at = self._asked_at, 0.0  # 0 where nothing has to be waited for
        if not count or self._closed or os.getpid() != self._owner:
            asked_at = asked_at or time.perf_counter()
            self._wait()
        outcome = self.ready.popleft()
        task = outcome.task
        if _is_end(outcome):
            self._asked_at = asked_at or time.perf_counter()
        elif asked_at:
            self._trace.taken(asked_at, time.perf_counter() - asked_at, count)
        else:
            self._trace.taken_at_once(count)
        if self._tuning is not None and (now := time.perf_counter()) >= self._tuning.due:
            self._tuning.update(now, self.resize)
        if isinstance(outcome, ReportFailure):
            return task, outcome.failure
        self._taken.append(task)
        if len(self._taken) >= self._released_together():
            self._release()
        if isinstance(result := outcome.result, WorkerExhausted):
            self.ready_ends -= 1
        elif self._slots is not None and isinstance(result, BatchResult) and not result.is_empty:
            result = self._slots.open(task, result)
            if self._on_device is not None:
                self._driver.call(self._on_device.advance)
        return task, result

    def _released_together(self) -> int:
        """Return how many batches to release in one call: waking the driver takes time."""
        if self._driver.releases_lazily:
            return RELEASED_TOGETHER
        return self._engine.above_low_mark or len(self.ready) // 8 + 1

    def _wait(self) -> None:
        self.check()
        until = None  # later than the engine would replace a worker that hangs
        if self._timeout_s is not None:
            until = time.monotonic() + self._timeout_s * self._attempts + self._start_s
        try:
            if self._taken:
                self._release()
            with generators_lent() if self._slots is None else nullcontext():
                self._driver.wait(partial(bool, self.ready), until)
        except WorkerDiedError as error:
            self._error = error
            self.close()
            raise
        except KeyboardInterrupt:
            raise  # the iterator handles it, wherever it comes
        except BaseException:
            self.interrupted()
            raise
        if not self.ready:
            self.check()
            raise WorkerDiedError(
                f"DataLoader timed out after {self._timeout_s:g} seconds: no worker answered\n"
                "  They may hang in worker_init_fn, or while they import the dataset's module.\n"
                f"  forebay gave them {self._start_s:g} s more to start, and waits again if it is "
                "asked again. Raise `timeout`, or try worker_init_fn in this process."
            )

    def _release(self) -> None:
        taken, self._taken = self._taken, []
        self._driver.call(partial(self._engine.release, taken))

    # ---- outcomes of the engine ----------------------------------------------------------------

    def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Queue the outcomes of a step of the engine."""
        for outcome in outcomes:
            match outcome:
                case DeliverResult():
                    self._arrived(outcome)
                    self.ready.append(outcome)
                case ReportFailure():
                    self._free(outcome.task)
                    self.ready.append(outcome)
                case DropTask():
                    self._free(outcome.task)
                case ReportRetry():
                    self._trace.restarted()
        if self._on_device is not None:
            self._on_device.advance()
        request_more = self.request_more and self.request_more()
        if request_more is not None:
            request_more()

    def _arrived(self, outcome: DeliverResult) -> None:
        task, result = outcome.task, outcome.result
        if is_batch := isinstance(result, BatchResult):
            if result.timing is not None:
                self._trace.held_bytes = self._engine.held_bytes
                self._trace.made(result.timing, outcome.nbytes)
        elif isinstance(result, WorkerExhausted):
            self.ready_ends += 1
            self.exhausted[result.worker_id] = task
        if self._slots is not None:
            if is_batch and not result.is_empty:
                self._slots.settle(task, result)
            else:
                self._slots.free(task)

    def _free(self, task: int) -> None:
        if self._slots is not None:
            self._slots.free(task)

    # ---- state ---------------------------------------------------------------------------------

    def worker_states(self) -> list[WorkerState]:
        """Return an empty list: each result carries its worker's state."""
        return []

    def waiting(self) -> list[tuple[int, int]]:
        """Return task and bytes of each batch that waits to be taken, in order."""
        ready = [each for each in list(self.ready) if not _is_end(each)]
        return [(each.task, getattr(each, "nbytes", 0)) for each in ready]

    @property
    def in_flight(self) -> int:
        """The number of batches that workers hold."""
        return 0 if self._closed else self._engine.running

    @property
    def room(self) -> int:
        """About how many batches the buffer has room for, besides those ready or in use."""
        return self._engine.room

    @property
    def is_open(self) -> bool:
        """Return whether it can be used: not closed, without an error, not in a forked process."""
        is_torn = self._error is not None or self._driver.error is not None
        return not self._closed and not is_torn and os.getpid() == self._owner

    def poll(self, seconds: float) -> None:
        """Let the engine process events for at most `seconds`."""
        self._driver.poll(seconds)

    def interrupted(self) -> None:
        """Handle an exception that came from a signal, such as Ctrl-C.

        During a wait it does no harm. At any other time it may have left an inconsistent state,
        so the feed is closed: continuing could hang or lose batches.
        """
        if self._closed or not self._driver.was_at_rest():
            self._error = self._error or RuntimeError(
                "this iterator was interrupted during its work and cannot continue\n"
                "  Its workers were ended. Begin a new epoch: iter(loader)."
            )
            self.close()

    def close(self) -> None:
        """Stop the workers, except in a fork of the trainer, which does not own them."""
        if self._closed:
            return
        self._closed = True
        _open_feeds.discard(self)
        if os.getpid() != self._owner:
            return
        self._driver.stop()
        has_left = self.in_use.acquire(timeout=LEAVE_S)  # another thread may take a batch
        try:
            self._driver.close()
            self.ready.clear()
            if self._slots is not None:
                self._slots.close()
        finally:
            if has_left:
                self.in_use.release()

    def check(self) -> None:
        """Raise the reason why there will be no more results, if there is one."""
        if os.getpid() != self._owner:
            raise RuntimeError(
                "this iterator belongs to the process that this one was forked from\n"
                f"  Its workers belong to process {self._owner}; this is {os.getpid()}. Nothing "
                "was taken. Begin a new epoch in this process: iter(loader)."
            )
        if self._driver.error is not None and not self.ready:
            raise self._driver.error
        if self._error is not None:
            raise self._error
        if self._closed:
            _leave_at_exit()
            raise RuntimeError(CLOSED)


def _is_end(outcome: DeliverResult | ReportFailure) -> bool:
    return isinstance(outcome, DeliverResult) and isinstance(outcome.result, WorkerExhausted)


def _pass_outcomes(this: weakref.ref[Feed], outcomes: Sequence[Outcome]) -> None:
    feed = this()
    if feed is not None:
        feed.add_outcomes(outcomes)


_open_feeds: weakref.WeakSet[Feed | LocalFeed] = weakref.WeakSet()
_exit = threading.Event()


@atexit.register
def _close_all() -> None:
    """Stop the workers before the interpreter removes what their pools need."""
    _exit.set()
    for feed in list(_open_feeds):
        feed.close()


def _leave_at_exit() -> None:
    """End a daemon thread that takes batches at the interpreter's end, without a traceback."""
    if _exit.is_set() and threading.current_thread().daemon:
        raise SystemExit


# ---- local feed ----------------------------------------------------------------------------------
# Make batches without workers: each in the caller's thread, when it is taken.


class LocalFeed:
    """A `Feed` without workers. An exception of the user's code becomes a `BatchError`."""

    is_open, in_flight, ready_ends, room, pool, request_more = True, 0, 0, 0, None, None
    ready: tuple[()] = ()

    def __init__(self, spec: BatchSpec, trace: Trace) -> None:
        self.exhausted: dict[int, int] = {}
        self._job = LocalJob(spec)
        # With a seed, the trainer's random numbers do not depend on the batches, nor they on it.
        self._generators: Callable[[], AbstractContextManager[Any]] | None = None
        if spec.concurrency > 1:
            pass  # each thread that makes a sample does that
        elif spec.seed is not None:
            self._generators = generators_kept
        elif spec.is_iterable and spec.seeds_owned:
            begin = partial(seed_as_worker, worker_id=0, with_devices=False)
            self._generators = PrivateGenerators(spec.base_seed, begin)
        self._trace = trace
        self._is_slow = True  # so that measuring a batch takes a small part of it
        self._queue: deque[NewTask] = deque()
        self.in_use = threading.RLock()
        _open_feeds.add(self)

    def put(self, tasks: list[NewTask]) -> None:
        """Queue requests; an iterable dataset is begun now, as torch does."""
        self._job.prepare(tasks[0].payload, self._generators or nullcontext)
        self._queue.extend(tasks)
        if begin := self._job.begin:
            for each in tasks:
                begin(Assignment(each.task, 1, each.payload))

    def forget(self, before: int) -> None:
        """Drop every task with a lower number."""
        while self._queue and self._queue[0].task < before:
            self._job.drop(self._queue.popleft().payload)

    def take(self) -> tuple[int, Result]:
        """Make the next batch, and return it with its task."""
        _leave_at_exit()
        task = self._queue.popleft()
        if self._is_slow:
            self._job.timer.measure()
        began, result = time.perf_counter(), None
        try:
            if self._generators is not None:
                with self._generators(), one_thread():  # as in a worker
                    result = self._job.make(task.payload)
            else:
                result = self._job.make(task.payload)
        except Refusal as refusal:
            result = failure_of(refusal.__cause__ or refusal, refusal.kind)
        except KeyboardInterrupt:
            self._queue.appendleft(task)  # it is made when asked for again
            raise
        seconds = time.perf_counter() - began
        self._is_slow = seconds > FINEST_S
        if isinstance(result, BatchResult):
            if (timing := self._job.timing()) is not None:
                self._trace.made(timing, 0)
            self._trace.taken(began, seconds, 0)
        elif isinstance(result, WorkerExhausted):
            self.exhausted[result.worker_id] = task.task
        return task.task, result

    def worker_states(self) -> list[WorkerState]:
        """Return the state of an iterable dataset in a list; empty if it was not read."""
        state = self._job.state()
        return [] if state is None else [state]

    def waiting(self) -> list[tuple[int, int]]:
        """Return an empty list: no batch is prefetched."""
        return []

    def close(self) -> None:
        """Wait, at the interpreter's end, for a daemon thread: torch would abort in its midst."""
        self._job.close()
        if _exit.is_set() and self.in_use.acquire(timeout=LEAVE_S):
            self.in_use.release()

    def interrupted(self) -> None:
        """Do nothing: there are no workers to stop."""

    check = interrupted
