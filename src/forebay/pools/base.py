"""The contract of a pool, and the pools in this process: inline and of threads."""

from __future__ import annotations

import copy
import queue
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import final

from forebay.base.process import join_threads, start_thread
from forebay.failures import Failure
from forebay.pools.events import (
    Assignment,
    Event,
    Job,
    StacksTaken,
    TaskFailed,
    WorkerDied,
    WorkerStarted,
)
from forebay.pools.worker import (
    STACK_BEGINS,
    TaskQueue,
    failure_of,
    perform_all,
    serve,
    without_our_frames,
)

# ---- base ----------------------------------------------------------------------------------------
# The contract of a pool.
#
# A pool hosts workers. It makes no decisions: it starts, feeds, stops and kills workers on
# request, and `wait` returns what happened to them. `tests/kit/conformance.py` tests every pool.


class Pool(ABC):
    """Workers of one kind. All methods but `wake` are called from one thread."""

    at_rest = False
    group_s = 0.1

    @abstractmethod
    def start(self, incarnation: int, worker_id: int) -> None:
        """Start a worker; `wait` returns `WorkerStarted` or `WorkerDied` for it later."""

    def send(self, incarnation: int, assignments: Sequence[Assignment]) -> None:
        """Send tasks to one worker; see `send_to_all`."""
        self.send_to_all([(incarnation, assignments)])

    @abstractmethod
    def send_to_all(self, groups: Sequence[tuple[int, Sequence[Assignment]]]) -> None:
        """Send tasks to workers, as pairs of incarnation and tasks, to be run in this order.

        It never blocks, and does nothing for a dead worker.
        """

    @abstractmethod
    def kill(self, incarnation: int) -> None:
        """Kill a worker that hangs; `WorkerDied`, with the stack of the hang, follows."""

    @abstractmethod
    def take_stacks(self, incarnation: int) -> None:
        """Have `wait` return `StacksTaken` for a worker that runs on, unless it ends before."""

    @abstractmethod
    def stop(self, incarnation: int) -> None:
        """Let an idle worker close its job and end; never blocks; no-op for a dead worker.

        Its end is not reported. An event that was on its way may still come. A worker that has not
        started may end before it opens its job.
        """

    @abstractmethod
    def wait(self, timeout: float | None) -> list[Event]:
        """Return what happened; wait up to `timeout` seconds for an event (None: without limit).

        It may return early without events. The events of one worker come in the order in which
        they happened, its death last.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make `wait` return, now or at its next call. Any thread may call this."""

    @abstractmethod
    def close(self) -> None:
        """Stop every worker within seconds, by force if necessary. Safe to call twice."""


# ---- inline --------------------------------------------------------------------------------------
# One worker in the caller's own thread: nothing to start, real tracebacks, easy to debug.
#
# It cannot be killed: a task that hangs blocks the caller, as any function call would.


@final
class InlinePool(Pool):
    """Runs one task in each `wait`."""

    def __init__(self, job: Job) -> None:
        """Host `job` in this thread."""
        self._job = job
        self._events: deque[Event] = deque()
        self._held: deque[tuple[int, Assignment]] = deque()
        self._open: set[int] = set()

    def start(self, incarnation: int, worker_id: int) -> None:
        """Set the job up, now."""
        try:
            self._job.open(incarnation, worker_id)
        except Exception as error:  # noqa: BLE001 - whatever setting up user code raises
            self._events.append(WorkerDied(incarnation, failure_of(error)))
            return
        self._open.add(incarnation)
        self._events.append(WorkerStarted(incarnation))

    def send_to_all(self, groups: Sequence[tuple[int, Sequence[Assignment]]]) -> None:
        """Keep the tasks for the next calls of `wait`."""
        for incarnation, assignments in groups:
            self._held.extend((incarnation, each) for each in assignments)

    def kill(self, incarnation: int) -> None:
        """Do nothing: the worker is the calling thread."""

    def take_stacks(self, incarnation: int) -> None:
        """Do nothing: while a task runs, nobody can ask."""

    def stop(self, incarnation: int) -> None:
        """Close the job."""
        if incarnation in self._open:
            self._open.remove(incarnation)
            self._job.close()

    def wait(self, timeout: float | None) -> list[Event]:
        """Return pending events, or else run one task, or one batch, and return the outcomes."""
        if not self._events and self._held:
            # Ctrl-C during the task leaves the task in the queue.
            incarnation, _ = self._held[0]
            most = getattr(self._job, "batch_size", 1)
            batch = [task for number, task in islice(self._held, most) if number == incarnation]
            self.at_rest = True
            events: list[Event] = []
            for event in perform_all(incarnation, self._job, batch):
                if isinstance(event, TaskFailed) and event.failure.error == "KeyboardInterrupt":
                    assert event.failure.exception is not None
                    raise event.failure.exception  # Ctrl-C, not an error of the task
                events.append(event)
            self.at_rest = False
            for _ in batch:
                self._held.popleft()
            return events
        events = list(self._events)
        self._events.clear()
        return events

    def wake(self) -> None:
        """Do nothing: `wait` never waits."""

    def close(self) -> None:
        """Close the job."""
        for incarnation in list(self._open):
            self.stop(incarnation)


# ---- threads -------------------------------------------------------------------------------------
# Workers as threads of this process: no pickling, one interpreter lock.
#
# A thread cannot be killed. One that hangs is abandoned: it is a daemon, nothing waits for it, and
# its late answers are dropped, since the flow no longer knows its incarnation.

# How long `close` waits in total for workers that are in the middle of a task.
CLOSE_S = 1.0


class _Worker:
    """A thread and the queue of its tasks; None in the queue ends the thread."""

    def __init__(
        self, incarnation: int, worker_id: int, job: Job, events: queue.SimpleQueue[Event | None]
    ) -> None:
        self.tasks, self._has_ended = TaskQueue(), False
        receive = self.tasks.receive
        self.thread = threading.Thread(
            target=serve,
            args=(incarnation, worker_id, job, receive, events.put, lambda: self._has_ended),
            name=f"forebay-worker-{incarnation}",
            daemon=True,
        )
        start_thread(self.thread)

    def end(self) -> None:
        """Make the thread end after its current task."""
        self._has_ended = True
        self.tasks.put(None)


@final
class ThreadPool(Pool):
    """Runs each worker in a daemon thread."""

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

    def send_to_all(self, groups: Sequence[tuple[int, Sequence[Assignment]]]) -> None:
        """Put the tasks into the threads' queues."""
        for incarnation, assignments in groups:
            if incarnation in self._workers:
                self._workers[incarnation].tasks.put(assignments)

    def kill(self, incarnation: int) -> None:
        """Abandon a thread, and record where it hangs."""
        abandoned = self._workers.pop(incarnation)
        abandoned.end()
        waited = self._abandoned is not None and self._abandoned(abandoned.thread)
        stack = _stack_of(abandoned.thread)
        failure = Failure("crash", "WorkerDiedError", "the thread was abandoned", stack)
        self._events.put(WorkerDied(incarnation, failure, external=waited))

    def take_stacks(self, incarnation: int) -> None:
        """Read the stack of the thread."""
        if incarnation in self._workers:
            stack = _stack_of(self._workers[incarnation].thread)
            self._events.put(StacksTaken(incarnation, stack))

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
        join_threads([worker.thread for worker in ending], CLOSE_S)
        for worker in ending:
            if worker.thread.is_alive() and self._abandoned is not None:
                self._abandoned(worker.thread)
        self._workers.clear()
        self._stopping.clear()


def _stack_of(thread: threading.Thread) -> str:
    """Return where a thread is, in the form of `faulthandler`; "" if it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    lines = (
        f'  File "{each.filename}", line {each.lineno} in {each.name}\n'
        for each in reversed(traceback.extract_stack(frame))
    )
    return without_our_frames(f"{STACK_BEGINS}{''.join(lines)}")
