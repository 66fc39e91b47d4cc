"""Make batches without workers: each in the caller's thread, when it is taken."""

from __future__ import annotations

import time
from collections import deque

from forebay.engine.engine import NewTask
from forebay.engine.job import Refusal
from forebay.engine.pools.worker import failure_of
from forebay.library_threads import one_thread
from forebay.loading.batch_job import LocalJob
from forebay.loading.messages import BatchResult, BatchSpec, Result, WorkerExhausted, WorkerState
from forebay.observe.trace import FINEST_S, Trace
from forebay.randomness import generators_kept


class LocalFeed:
    """A `Feed` without workers. An exception of the user's code becomes a `BatchError`.

    Args:
        spec: How to make batches.
        trace: Records events and times.
    """

    is_open, in_flight, ready_ends, room, pool, request_more = True, 0, 0, 0, None, None
    ready: tuple[()] = ()

    def __init__(self, spec: BatchSpec, trace: Trace) -> None:
        self.exhausted: dict[int, int] = {}
        self._job = LocalJob(spec)
        self._is_seeded = spec.seed is not None
        self._trace = trace
        self._is_slow = True  # so that measuring a batch takes a small part of it
        self._queue: deque[NewTask] = deque()

    def put(self, tasks: list[NewTask]) -> None:
        """Queue requests; an iterable dataset is begun now, as torch does."""
        self._job.prepare(tasks[0].payload)
        self._queue.extend(tasks)

    def forget(self, before: int) -> None:
        """Drop every task with a lower number."""
        while self._queue and self._queue[0].task < before:
            self._queue.popleft()

    def take(self) -> tuple[int, Result]:
        """Make the next batch, and return it with its task."""
        task = self._queue.popleft()
        if self._is_slow:
            self._job.timer.measure()
        began, result = time.perf_counter(), None
        try:
            if self._is_seeded:
                with generators_kept(), one_thread():  # as in a worker
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

    def interrupted(self) -> None:
        """Do nothing: there are no workers to stop."""

    close = check = interrupted
