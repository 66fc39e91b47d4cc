"""Make batches without workers: each in the caller's thread, when it is taken.

Slices of what is in memory take less time than to receive them from a worker; a thread makes some
in advance while the caller does something else. The caller makes what that has not begun itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.graph_settings import apply_sharding

from forebay.base.batches import nbytes
from forebay.base.draw_detection import BatchSeeds, ThreadTurns
from forebay.base.libraries import one_thread
from forebay.engine.engine import NewTask
from forebay.loading.batch_job import BatchJob
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import (
    BatchRequest,
    BatchResult,
    BatchSpec,
    Result,
    WorkerExhausted,
    WorkerState,
)
from forebay.loading.open_feeds import EXIT, INTERRUPTED, LEAVE_S, OPEN_FEEDS, leave_at_exit
from forebay.loading.selections import Generators
from forebay.observe.record import FINEST_S, Trace
from forebay.pools.events import Assignment, Refusal
from forebay.pools.worker import failure_of
from forebay.ranks import process_group

# A thread is worth it for batches of so many seconds, if the caller does something else for this
# share of that time: otherwise the two only wait for each other.
LEAST_S, STEP_SHARE = 0.0003, 0.25
# Steps that count for that, about.
SMOOTHED = 8


class LocalJob(BatchJob):
    """Makes batches in the trainer's own thread, without setting up a worker.

    Args:
        seeds: Seeds the samples, which are made one at a time; None if nothing is seeded, or
            several are made at once.
    """

    where = "in this process"

    def __init__(self, spec: BatchSpec, seeds: BatchSeeds | None) -> None:
        super().__init__(spec, turns=ThreadTurns() if spec.concurrency > 1 else None)
        self._seeds = seeds
        if spec.tracks_state:
            self._snapshots = self._new_snapshots()
        if isinstance(spec.dataset, IterDataPipe | MapDataPipe):
            apply_sharding(spec.dataset, *process_group())

    def prepare(self, request: BatchRequest, generators: Generators) -> None:
        """Begin to iterate an iterable dataset, if this is the first request of its epoch."""
        fetcher = self._fetcher or self._made_fetcher()
        if not fetcher.is_open_for(request):
            with generators():
                fetcher.open(request)

    def state(self) -> WorkerState | None:
        """Return the state of an iterable dataset; None if it was not read, or results have it."""
        if self._fetcher is None or self._spec.tracks_state:
            return None
        return self._fetcher.state_read_here()

    def _ended_by(self, request: BatchRequest, error: BaseException) -> Result:
        """Return an error that the trainer's loop raises, even if it ends the process."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        return self.raised(request, error, None)


class LocalFeed:
    """A `Feed` without workers. An exception of the user's code becomes a `BatchError`."""

    in_flight, ready_ends, fill, pool, request_more = 0, 0, (0, 0), None, None
    # For `close`: an ending interpreter has removed global names.
    _ending, _leave_s = EXIT, LEAVE_S

    def __init__(self, kind: LoaderKind, spec: BatchSpec, trace: Trace) -> None:
        self.exhausted: dict[int, int] = {}
        # A slice of what is in memory draws nothing.
        is_seeded = spec.seed is not None and spec.concurrency == 1 and not kind.is_sliced
        seeds = BatchSeeds() if is_seeded else None
        self._job, self._generators = LocalJob(spec, seeds), kind.local_generators(spec, seeds)
        self._trace, trace.num_workers = trace, 0
        self._is_slow = True  # so that measuring a batch takes a small part of it
        self._made_s = self._step_s = 0.0
        self._taken_at = self._waited_at = time.perf_counter()
        self.is_open, self.is_midway = True, False  # see `Feed`
        self._result: Result | None = None  # made and not taken; how many others were made then
        self._found = 0
        self._queue: deque[NewTask] = deque()
        # Those before the queue's: None or a cancelled one is left to the caller.
        self._ahead: deque[tuple[NewTask, Future[Result] | None]] = deque()
        self._most_ahead = kind.sliced_ahead
        self._job_ahead = LocalJob(spec, None) if self._most_ahead else self._job  # of the thread
        self._thread: ThreadPoolExecutor | None = None
        self._owner = os.getpid()
        self.in_use = threading.RLock()
        self._has_ended = self._ending.is_set()  # with the interpreter
        OPEN_FEEDS.add(self)

    def put(self, tasks: list[NewTask]) -> None:
        """Queue requests; an iterable dataset is begun now, as torch does."""
        self._job.prepare(tasks[0].payload, self._generators or nullcontext)
        self._queue.extend(tasks)
        if begin := self._job.begin:
            for each in tasks:
                begin(Assignment(each.task, 1, each.payload))
        if self._most_ahead:
            self._send_ahead()

    def forget(self, before: int) -> None:
        """Drop every task with a lower number."""
        self._result = None
        while self._ahead and self._ahead[0][0].task < before:
            task, made = self._ahead.popleft()
            self._job.drop(task.payload)
            if made is not None:
                made.cancel()
        while self._queue and self._queue[0].task < before:
            self._job.drop(self._queue.popleft().payload)

    def wait(self) -> None:
        """Make the next batch, or wait for the thread that does.

        If it is interrupted, the batch is made when it is waited for again.
        """
        self.check()
        if self._has_ended:
            leave_at_exit()
        if self._result is not None:  # it was interrupted before that was taken
            return
        self._waited_at, self._found = time.perf_counter(), 0
        self.is_midway = True
        if os.getpid() != self._owner:  # in a fork of the trainer there is no such thread
            self._queue.extendleft(task for task, _ in reversed(self._ahead))
            self._ahead.clear()
            self._owner, self._most_ahead = os.getpid(), 0
        if not self._ahead:
            self._ahead.append((self._queue.popleft(), None))
        if self._most_ahead:
            # Between epochs it may be very long.
            step_s = min(self._waited_at - self._taken_at, self._made_s)
            self._step_s += (step_s - self._step_s) / SMOOTHED
            self._send_ahead()
            self._found = len(self.ready)
        self.is_midway = False
        task, made = self._ahead[0]
        self._result = self._make(task) if made is None or made.cancel() else made.result()

    def take(self) -> tuple[int, Result]:
        """Return the batch that was made, and its task, after `wait`."""
        result, self._result = self._result, None
        assert result is not None
        task, _ = self._ahead.popleft()
        began = self._waited_at
        if isinstance(result, BatchResult):
            if result.timing is not None:
                self._trace.made(result.timing, 0)
            self._trace.taken(began, time.perf_counter() - began, self._found)
        elif isinstance(result, WorkerExhausted):
            self.exhausted[result.worker_id] = task.task
        self._taken_at = time.perf_counter()
        return task.task, result

    def _make(self, task: NewTask) -> Result:
        """Make a batch in this thread."""
        if self._is_slow:
            self._job.timer.measure()
        began = time.perf_counter()
        if self._generators is None:
            result = _made(self._job, task.payload)
        else:
            with self._generators(), one_thread():  # as in a worker
                result = _made(self._job, task.payload)
        self._made_s = time.perf_counter() - began
        self._is_slow = self._made_s > FINEST_S
        return result

    def _send_ahead(self) -> None:
        """Give the thread the next requests, if that is worth it."""
        is_worth_it = self._made_s >= LEAST_S and self._step_s >= STEP_SHARE * self._made_s
        while is_worth_it and self._queue and len(self._ahead) <= self._most_ahead:
            if self._thread is None:
                begin = self._job_ahead.timer.measure
                self._thread = ThreadPoolExecutor(1, "forebay-slices", begin)
            try:
                made = self._thread.submit(_made, self._job_ahead, self._queue[0].payload)
            except RuntimeError:  # the system refuses a thread, or the interpreter is ending
                self._most_ahead = 0
                return
            self._ahead.append((self._queue.popleft(), made))

    @property
    def ready(self) -> list[tuple[NewTask, Future[Result]]]:
        """The next batches that are made."""
        found = []
        for task, made in self._ahead:
            if made is None or not made.done() or made.cancelled():
                break
            found.append((task, made))
        return found

    def worker_states(self) -> list[WorkerState]:
        """Return the state of an iterable dataset in a list; empty if it was not read."""
        state = self._job.state()
        return [] if state is None else [state]

    def waiting(self) -> list[tuple[int, int]]:
        """Return task and bytes of each batch that waits to be taken, in order."""
        ready = [(each.task, made.result()) for each, made in self.ready]
        return [(task, nbytes(getattr(result, "batch", None))) for task, result in ready]

    def close(self) -> None:
        """Stop the threads.

        At the interpreter's end, wait for a daemon thread that takes a batch: torch would abort in
        its midst.
        """
        self._job.close()
        thread, self._thread, self._most_ahead = self._thread, None, 0
        if thread is not None and os.getpid() == self._owner:
            thread.shutdown(cancel_futures=True)
        self._has_ended = self._ending.is_set()
        if self._has_ended and self.in_use.acquire(timeout=self._leave_s):
            self.in_use.release()

    def interrupted(self) -> None:
        """Handle an exception that came from a signal: at most times it does no harm."""
        self.is_open = self.is_open and not self.is_midway

    def check(self) -> None:
        """Raise an error if it was interrupted where that did harm."""
        if not self.is_open:
            raise RuntimeError(INTERRUPTED)


def _made(job: LocalJob, request: Any) -> Result:
    try:
        result = job.make(request)
    except Refusal as refusal:
        return failure_of(refusal.__cause__ or refusal, refusal.kind)
    if isinstance(result, BatchResult) and (timing := job.timing()) is not None:
        return result._replace(timing=timing)
    return result
