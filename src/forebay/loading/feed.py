"""Send requests to the engine, and return its results as batches.

    planner ── put(requests) ──> Feed ──> engine ──> workers ──> slab
       ^                          │
       └───────── take() <────────┘  results, in order

For loaders without workers see `local_feed.py`.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from forebay.base.randomness import generators_lent
from forebay.devices.device import Device
from forebay.engine.commands import (
    DeliverResult,
    DropTask,
    LowerHighMark,
    Outcome,
    ReportFailure,
    ReportRetry,
)
from forebay.engine.engine import Engine, NewTask
from forebay.engine.tasks import State
from forebay.errors import WorkerDiedError
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import (
    BatchRequest,
    BatchResult,
    BatchSpec,
    Result,
    WorkerExhausted,
    WorkerState,
)
from forebay.loading.open_feeds import CLOSED, INTERRUPTED, LEAVE_S, OPEN_FEEDS, leave_at_exit
from forebay.loading.selections import RELEASED_TOGETHER
from forebay.loading.workers import (
    CLUSTER_START_S,
    START_S,
    BackgroundDriver,
    BatchSlots,
    CallerDriver,
    WorkerTuning,
    pool_for,
)
from forebay.observe.progress import log
from forebay.observe.record import Trace
from forebay.options import backend_name
from forebay.pools.processes import occupy_standard_descriptors
from forebay.pools.zygote_handle import handlers_deferred

if TYPE_CHECKING:  # few loaders have them
    from forebay.loading.device_batches import DeviceBatches

# How long nobody may take a batch, while there is nothing to do, before the workers are stopped.
IDLE_S = 600.0


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
        is_midway: Whether that thread is changing what belongs together, such as results and
            requests: an exception that comes then, from the handler of a signal, closes the feed.
    """

    def __init__(
        self,
        kind: LoaderKind,
        spec: BatchSpec,
        trace: Trace,
        tuning: WorkerTuning | None,
        device: Device | None,
    ) -> None:
        limits, buffer = kind.limits(), kind.buffer
        backend = backend_name(kind.backend)
        self.ready: deque[DeliverResult | ReportFailure] = deque()
        self.ready_ends = 0
        self._fill, self._gone = (0, 0), 0  # results that arrived, and room; results taken
        self.exhausted: dict[int, int] = {}
        self.request_more: weakref.WeakMethod[Callable[[], None]] | None = None
        self.in_use = threading.RLock()
        self._owner = os.getpid()
        self._closed = self.is_midway = False
        self._error: BaseException | None = None  # why there will be no more results
        self._timeout_s = limits.timeout_s
        self._start_s = START_S if kind.cluster is None else CLUSTER_START_S
        self._attempts = limits.retries + 1
        if tuning is not None:
            limits = replace(limits, num_workers=tuning.num_workers)
        self._trace, self._tuning, trace.num_workers = trace, tuning, limits.num_workers
        self._asked_at = 0.0  # when the trainer asked for a batch that it has not got yet
        self._found = 0  # how many results were there when it last began to wait
        self._taken: list[int] = []  # and not released yet
        self._may_stop = kind.may_stop_workers
        self._taken_at, self._stopped = time.monotonic(), 0  # `_stopped`: how many workers
        occupy_standard_descriptors()
        directory = None if buffer is None else buffer.directory
        slots = None if backend == "thread" else BatchSlots(directory)
        self.pool = pool_for(kind, spec, slots, to_device=device is not None)
        prepare = None if slots is None or backend != "process" else slots.prepare
        self._on_device: DeviceBatches | None = None
        if slots is not None and device is not None:
            from forebay.loading.device_batches import DeviceBatches

            self._on_device = DeviceBatches(device, slots, trace.transfers)
        self._slots: BatchSlots | DeviceBatches | None = self._on_device or slots
        try:
            is_forked = backend == "process" and kind.start_method == "fork"
            advice = partial(_advice_if_stuck, is_forked)
            self._engine = Engine(self.pool, limits, prepare=prepare, advice=advice)
        except BaseException:  # Ctrl-C, for example
            self.pool.close()
            raise
        outcomes, ready = partial(_pass_outcomes, weakref.ref(self)), partial(len, self.ready)
        self._driver: CallerDriver
        # A thread, if batches are copied to a device: during a step.
        if kind.runs_in_caller and device is None:
            self._driver = CallerDriver(self._engine, self.pool, outcomes)
        else:
            idle = partial(_stop_if_idle, weakref.ref(self))
            self._driver = BackgroundDriver(self._engine, self.pool, outcomes, ready, idle)
        OPEN_FEEDS.add(self)

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

    def stop_if_idle(self) -> None:
        """Stop the workers if nobody has taken a batch for long; `take` starts them again.

        For the thread that runs the engine. The batches that are ready stay: there is one, so if
        a batch is taken meanwhile, the next `take` comes before a wait.
        """
        flow = self._engine.flow
        is_idle = self.ready and not flow.counts[State.RUNNING] and not self._stopped
        if self._may_stop and is_idle and time.monotonic() - self._taken_at > IDLE_S:
            self._stopped = flow.limits.num_workers
            self._engine.resize(0)
            log.info("no batch was taken for %g s: the workers are stopped until one is", IDLE_S)

    def _start_again(self) -> None:
        if self._stopped:
            num_workers, self._stopped = self._stopped, 0
            self._engine.resize(num_workers)

    def _forget(self, before: int) -> None:
        self._engine.forget(before)
        ready = self.ready
        for _ in range(len(ready)):  # in place: the driver and statistics look at it
            outcome = ready.popleft()
            if outcome.task >= before:
                ready.append(outcome)
                continue
            self.ready_ends -= _is_end(outcome)
            self._gone += 1
            if isinstance(outcome, DeliverResult):
                self._engine.release((outcome.task,))
                self._free(outcome.task)

    # ---- results -------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until there is a result to take."""
        if self._may_stop:
            self._taken_at = time.monotonic()  # before `_stopped` is read: see `stop_if_idle`
            if self._stopped and os.getpid() == self._owner:
                self._driver.call(self._start_again)
        self._found = len(self.ready)
        if not self._found or self._closed or os.getpid() != self._owner:
            asked_at, self._asked_at = self._asked_at or time.perf_counter(), 0.0
            self._wait()
            self._asked_at = asked_at

    def take(self) -> tuple[int, Result]:
        """Return the next result and its task, after `wait`."""
        count = self._found
        asked_at, self._asked_at = self._asked_at, 0.0  # 0 where nothing had to be waited for
        outcome = self.ready.popleft()
        self._gone += 1
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
        return self._engine.flow.above_low_mark or len(self.ready) // 8 + 1

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
        arrived = self._fill[0]
        for outcome in outcomes:
            match outcome:
                case DeliverResult():
                    self._arrived(outcome)
                    self.ready.append(outcome)
                    arrived += 1
                case ReportFailure():
                    self._free(outcome.task)
                    self.ready.append(outcome)
                    arrived += 1
                case DropTask():
                    self._free(outcome.task)
                case ReportRetry():
                    self._trace.restarted()
                case LowerHighMark():
                    self._trace.restarted()
                    if self._slots is not None:
                        self._slots.slab.keep_no_pages()
        self._fill = arrived, self._engine.flow.room
        if self._on_device is not None:
            self._on_device.advance()
        request_more = self.request_more and self.request_more()
        if request_more is not None:
            request_more()

    def _arrived(self, outcome: DeliverResult) -> None:
        task, result = outcome.task, outcome.result
        if is_batch := isinstance(result, BatchResult):
            if result.timing is not None:
                self._trace.held_bytes = self._engine.flow.held_bytes
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
        return 0 if self._closed else self._engine.flow.counts[State.RUNNING]

    @property
    def fill(self) -> tuple[int, int]:
        """How many results wait, and about how many more there is room for.

        Both as of the last ones that arrived: counted apart, those that arrive in between would
        be missing, and too few would be requested.
        """
        arrived, room = self._fill
        return max(arrived - self._gone, 0), room

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
        if self._closed or self.is_midway or not self._driver.was_at_rest():
            self._error = self._error or RuntimeError(INTERRUPTED)
            self.close()

    @handlers_deferred()  # an exception in the middle would leave pipes and processes
    def close(self) -> None:
        """Stop the workers, except in a fork of the trainer, which does not own them."""
        if self._closed:
            return
        self._closed = True
        OPEN_FEEDS.discard(self)
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
            leave_at_exit()
            raise RuntimeError(CLOSED)


def _advice_if_stuck(is_forked: bool, request: BatchRequest) -> list[str]:
    """Return what to do about a worker that does not finish a batch."""
    fork = (
        "Worker processes are forks of this one, with none of its threads, and with each lock as "
        "it was at the fork.",
        "If that line waits for one of these, use multiprocessing_context='forkserver'.",
    )
    return [
        f"The batch is {request.samples_shown}.",
        *(fork if is_forked else ()),
        "If it may take that long, nothing is wrong; timeout= replaces a worker that takes longer.",
    ]


def _is_end(outcome: DeliverResult | ReportFailure) -> bool:
    return isinstance(outcome, DeliverResult) and isinstance(outcome.result, WorkerExhausted)


def _pass_outcomes(this: weakref.ref[Feed], outcomes: Sequence[Outcome]) -> None:
    feed = this()
    if feed is not None:
        feed.add_outcomes(outcomes)


def _stop_if_idle(this: weakref.ref[Feed]) -> None:
    feed = this()
    if feed is not None:
        feed.stop_if_idle()
