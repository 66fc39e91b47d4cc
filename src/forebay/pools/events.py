"""Events: what happened, in the past tense, as named tuples.

The pools and the consumer create events, `flow.py` turns them into the commands of `commands.py`,
and `engine.py` performs these. Times are seconds of a monotonic clock.

A worker has two numbers. Its `worker_id`, from 0 to num_workers - 1, is the one that users see; the
replacement of a dead worker has the same. Its `incarnation` is never used twice, so that an event
from a dead worker is recognized and dropped.

Workers import this module, and each of them costs processor time before the first task: a frozen
dataclass takes five times as long to define as a named tuple, and ten times as long to pickle.
Annotations are evaluated at once: a named tuple would compile each of them from a string.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from forebay.failures import Failure


class TasksQueued(NamedTuple):
    """There are new tasks, from the source after `FetchTasks`, or from `Engine.put`.

    Attributes:
        worker_ids: For each task, the only worker that may run it; None if any worker may.
    """

    tasks: tuple[int, ...]
    ended: bool
    worker_ids: tuple[int, ...] | None = None


class WorkerStarted(NamedTuple):
    """A worker has started and is ready for tasks."""

    incarnation: int


class TaskFinished(NamedTuple):
    """A worker answered. `nbytes` is the size of its result, `seconds` the task's wall time."""

    incarnation: int
    task: int
    attempt: int
    result: Any
    nbytes: int
    seconds: float


class TaskFailed(NamedTuple):
    """The user's code raised. A `final` failure is not retried (a missing file, for example)."""

    incarnation: int
    task: int
    attempt: int
    failure: Failure
    seconds: float
    final: bool = False


class TasksReturned(NamedTuple):
    """A worker returned tasks that it had not begun, so that others can run them."""

    incarnation: int
    tasks: tuple[int, ...]


class WorkerDied(NamedTuple):
    """A worker died.

    Attributes:
        memory: If it was killed, perhaps because memory ran out: the bytes that this program may
            use; 0 for other deaths.
        signalled: Whether it ended by a signal that is sent to all processes of a program.
    """

    incarnation: int
    failure: Failure
    external: bool = False
    maybe_external: bool = False
    memory: int = 0
    signalled: bool = False


class StacksTaken(NamedTuple):
    """What a worker is doing now, innermost call first; "" if it could not be asked."""

    incarnation: int
    stacks: str


class WorkersResized(NamedTuple):
    """The number of workers is to change.

    Attributes:
        num_workers: The new number; with 0 no task begins. Not allowed while tasks are bound to
            worker IDs.
        group_s: The new `Limits.group_s`; None if it stays.
    """

    num_workers: int
    group_s: float | None = None


class AlarmRang(NamedTuple):
    """The time of the last `SetAlarm` was reached."""


class ResultsReleased(NamedTuple):
    """The consumer has finished with delivered results; their slots are free."""

    tasks: tuple[int, ...]


class TasksForgotten(NamedTuple):
    """The tasks with numbers below `before` are no longer needed, except those delivered."""

    before: int


Event = (
    TasksQueued
    | WorkerStarted
    | TaskFinished
    | TaskFailed
    | TasksReturned
    | WorkerDied
    | StacksTaken
    | WorkersResized
    | AlarmRang
    | ResultsReleased
    | TasksForgotten
)


# ---- job -----------------------------------------------------------------------------------------
# The protocol of a job: the code that a worker runs for each task, with any pool.

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
    """

    def __init__(self, kind: str) -> None:
        """Store the kind of the failure."""
        super().__init__(kind)
        self.kind = kind


class Job(Protocol):
    """The code that a worker runs; pickled only once for all process workers.

    One with a `batch_size` runs so many tasks by one call: `run_all(assignments)` returns an answer
    for each. One with `copies` runs several at once, each copy in a thread.
    """

    keeps_tasks: bool

    def open(self, incarnation: int, worker_id: int) -> None:
        """Set up the worker before its first task."""

    def run(self, assignment: Assignment) -> Answer:
        """Run one task. An exception fails that task; the worker continues."""

    def close(self) -> None:
        """Clean up in the worker when it is stopped; not called if it dies."""
