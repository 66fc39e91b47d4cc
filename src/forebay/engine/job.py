"""The protocol of a job: the code that a worker runs for each task, with any pool."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

# A worker whose task took longer than this returns the tasks that it has not begun.
GIVE_BACK_S = 0.2


class Assignment(NamedTuple):
    """One task for a worker: its number, the attempt (from 1), and what to do."""

    task: int
    attempt: int
    payload: Any


class Answer(NamedTuple):
    """A job's answer to one task; `nbytes` is the size of the result until it is consumed."""

    result: Any
    nbytes: int


class Refusal(Exception):  # noqa: N818 - marks a failure of a task
    """Raised by a job when a failure must not be retried.

    Its `__cause__` is the failure itself.

    Attributes:
        kind: The value for `Failure.kind`.
    """

    def __init__(self, kind: str) -> None:
        """Store the kind of the failure."""
        super().__init__(kind)
        self.kind = kind


class Job(Protocol):
    """The code that a worker runs; pickled only once for all process workers.

    Attributes:
        keeps_tasks: Whether a worker keeps the tasks behind a slow one, because no other may run
            them; otherwise it gives them back.
    """

    keeps_tasks: bool

    def open(self, incarnation: int, worker_id: int) -> None:
        """Set up the worker before its first task.

        Args:
            incarnation: A number that is never used for another worker.
            worker_id: From 0 to num_workers - 1; a replacement has the ID of the dead worker.
        """

    def run(self, assignment: Assignment) -> Answer:
        """Run one task. An exception fails that task; the worker continues."""
        ...

    def close(self) -> None:
        """Clean up in the worker when it is stopped; not called if it dies."""
