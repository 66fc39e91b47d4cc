"""One worker in the caller's own thread: nothing to start, real tracebacks, easy to debug.

It cannot be killed: a task that hangs blocks the caller, as any function call would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

from forebay.engine.events import Event, TaskFailed, WorkerDied, WorkerStarted
from forebay.engine.job import Assignment, Job
from forebay.engine.pools.base import Pool
from forebay.engine.pools.worker import failure_of, perform


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

    def send(self, incarnation: int, assignments: Sequence[Assignment]) -> None:
        """Keep the tasks for the next calls of `wait`."""
        self._held.extend((incarnation, each) for each in assignments)

    def kill(self, incarnation: int) -> None:
        """Do nothing: the worker is the calling thread."""

    def stop(self, incarnation: int) -> None:
        """Close the job."""
        if incarnation in self._open:
            self._open.remove(incarnation)
            self._job.close()

    def wait(self, timeout: float | None) -> list[Event]:
        """Return pending events, or else run one task and return its outcome."""
        if not self._events and self._held:
            # Ctrl-C during the task leaves the task in the queue.
            incarnation, assignment = self._held[0]
            self.at_rest = True
            event = perform(incarnation, self._job, assignment)
            if isinstance(event, TaskFailed) and event.failure.error == "KeyboardInterrupt":
                assert event.failure.exception is not None
                raise event.failure.exception  # Ctrl-C, not an error of the task
            self.at_rest = False
            self._held.popleft()
            return [event]
        events = list(self._events)
        self._events.clear()
        return events

    def wake(self) -> None:
        """Do nothing: `wait` never waits."""

    def close(self) -> None:
        """Close the job."""
        for incarnation in list(self._open):
            self.stop(incarnation)
