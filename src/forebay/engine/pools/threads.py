"""Workers as threads of this process: no pickling, one interpreter lock.

A thread cannot be killed. One that hangs is abandoned: it is a daemon, nothing waits for it, and
its late answers are dropped, since the flow no longer knows its incarnation.
"""

from __future__ import annotations

import copy
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import final

from forebay.engine.events import Event, WorkerDied
from forebay.engine.job import Assignment, Job
from forebay.engine.pools.base import Pool
from forebay.engine.pools.worker import serve
from forebay.failures import Failure

# How long `close` waits in total for workers that are in the middle of a task.
CLOSE_S = 1.0


class _Worker:
    """A thread and the queue of its tasks; None in the queue ends the thread."""

    def __init__(
        self, incarnation: int, worker_id: int, job: Job, events: queue.SimpleQueue[Event | None]
    ) -> None:
        self.tasks: queue.SimpleQueue[Sequence[Assignment] | None] = queue.SimpleQueue()
        self._has_ended = False
        self.thread = threading.Thread(
            target=serve,
            args=(incarnation, worker_id, job, self._receive, events.put, lambda: self._has_ended),
            name=f"forebay-worker-{incarnation}",
            daemon=True,
        )
        self.thread.start()

    def end(self) -> None:
        """Make the thread end after its current task."""
        self._has_ended = True
        self.tasks.put(None)

    def _receive(self, wait: bool) -> Sequence[Assignment] | None:
        try:
            return self.tasks.get(block=wait)
        except queue.Empty:
            return ()


@final
class ThreadPool(Pool):
    """Runs each worker in a daemon thread.

    Args:
        job: What the workers do; each thread has a shallow copy of it.
        abandoned: Called with a thread that is abandoned, to release its locks; returns
            whether it was only waiting for another thread.
    """

    def __init__(
        self, job: Job, abandoned: Callable[[threading.Thread], bool] | None = None
    ) -> None:
        self._job = job
        self._abandoned = abandoned
        self._workers: dict[int, _Worker] = {}
        self._stopping: list[_Worker] = []
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def start(self, incarnation: int, worker_id: int) -> None:
        """Start a thread."""
        job = copy.copy(self._job)
        self._workers[incarnation] = _Worker(incarnation, worker_id, job, self._events)

    def send(self, incarnation: int, assignments: Sequence[Assignment]) -> None:
        """Put the tasks into the thread's queue."""
        if incarnation in self._workers:
            self._workers[incarnation].tasks.put(assignments)

    def kill(self, incarnation: int) -> None:
        """Abandon a thread, and record where it hangs."""
        abandoned = self._workers.pop(incarnation)
        abandoned.end()
        waited = self._abandoned is not None and self._abandoned(abandoned.thread)
        frame = sys._current_frames().get(abandoned.thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        failure = Failure("crash", "WorkerDiedError", "the thread was abandoned", stack)
        self._events.put(WorkerDied(incarnation, failure, external=waited))

    def stop(self, incarnation: int) -> None:
        """Put the end into the thread's queue."""
        worker = self._workers.pop(incarnation, None)
        if worker is not None:
            worker.end()
            alive = [each for each in self._stopping if each.thread.is_alive()]
            self._stopping = [*alive, worker]

    def wait(self, timeout: float | None) -> list[Event]:
        """Return the events of all threads."""
        try:
            events = [self._events.get(timeout=timeout)]
        except queue.Empty:
            return []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return [event for event in events if event is not None]

    def wake(self) -> None:
        """Put an empty event into the queue."""
        self._events.put(None)

    def close(self) -> None:
        """Tell every thread to stop; wait briefly for those in the middle of a task."""
        for worker in self._workers.values():
            worker.end()
        ending = [*self._workers.values(), *self._stopping]
        share = CLOSE_S / max(len(ending), 1)
        for worker in ending:
            worker.thread.join(share)
            if worker.thread.is_alive() and self._abandoned is not None:
                self._abandoned(worker.thread)
        self._workers.clear()
        self._stopping.clear()
