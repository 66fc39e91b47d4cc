"""Events (what happened, past tense) and commands (what to do, imperative) as frozen records.

The pools and the consumer create events, `flow.py` turns them into commands, and `engine.py`
performs the commands. Times are seconds of a monotonic clock.

A worker has two numbers. Its `worker_id`, from 0 to num_workers - 1, is the one that users see; the
replacement of a dead worker has the same. Its `incarnation` is never used twice, so that an event
from a dead worker is recognized and dropped.

The records that every task needs are named tuples: a frozen dataclass costs five times as much to
make, and ten times as much to pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from forebay.failures import Failure

# ---- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TasksQueued:
    """There are new tasks, from the source after `FetchTasks`, or from `Engine.put`.

    Attributes:
        tasks: Their numbers, increasing.
        ended: Whether these are the last tasks.
        worker_ids: For each task, the only worker that may run it; None if any worker may.
    """

    tasks: tuple[int, ...]
    ended: bool
    worker_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class WorkerStarted:
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


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The user's code raised. A `final` failure is not retried (a missing file, for example)."""

    incarnation: int
    task: int
    attempt: int
    failure: Failure
    seconds: float
    final: bool = False


@dataclass(frozen=True, slots=True)
class TasksReturned:
    """A worker returned tasks that it had not begun, so that others can run them."""

    incarnation: int
    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker died.

    Attributes:
        incarnation: Which worker.
        failure: How it died.
        external: Whether its tasks cannot be the cause (a lost host, for example).
        maybe_external: Whether a task of another worker may be the cause (the node's memory).
    """

    incarnation: int
    failure: Failure
    external: bool = False
    maybe_external: bool = False


@dataclass(frozen=True, slots=True)
class WorkersResized:
    """The number of workers is to change.

    Attributes:
        num_workers: The new number, at least 1. Not allowed while tasks are bound to worker IDs.
        group_s: The new `Limits.group_s`; None if it stays.
    """

    num_workers: int
    group_s: float | None = None


@dataclass(frozen=True, slots=True)
class AlarmRang:
    """The time of the last `SetAlarm` was reached."""


@dataclass(frozen=True, slots=True)
class ResultsReleased:
    """The consumer has finished with delivered results; their slots are free."""

    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TasksForgotten:
    """The tasks with numbers below `before` are no longer needed, except those delivered."""

    before: int


Event = (
    TasksQueued
    | WorkerStarted
    | TaskFinished
    | TaskFailed
    | TasksReturned
    | WorkerDied
    | WorkersResized
    | AlarmRang
    | ResultsReleased
    | TasksForgotten
)


# ---- commands ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FetchTasks:
    """Take up to `count` tasks from the source; answer with one `TasksQueued`."""

    count: int


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Begin starting a worker; `WorkerStarted` or `WorkerDied` follows.

    Attributes:
        incarnation: A number never used before.
        worker_id: From 0 to num_workers - 1; a replacement has that of the dead worker.
    """

    incarnation: int
    worker_id: int


@dataclass(frozen=True, slots=True)
class SendTasks:
    """Send tasks to a worker, as `(task, attempt)`, to be run in this order."""

    incarnation: int
    tasks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Record the stack traces of a worker that hangs and kill it; `WorkerDied` follows."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Stop a worker that holds no task; its later events are ignored."""

    incarnation: int


class DeliverResult(NamedTuple):
    """Pass a result to the consumer, which releases its slot later."""

    task: int
    attempt: int
    seconds: float
    nbytes: int
    result: Any


class DropTask(NamedTuple):
    """Drop a task that is no longer needed; no worker holds it."""

    task: int


@dataclass(frozen=True, slots=True)
class ReportRetry:
    """Tell the consumer that an attempt failed and that the task will be tried again."""

    task: int
    attempt: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tell the consumer that a task failed and is not tried again."""

    task: int
    attempt: int
    seconds: float
    failure: Failure


@dataclass(frozen=True, slots=True)
class SetAlarm:
    """Fire `AlarmRang` at this time; a later `SetAlarm` replaces an earlier one."""

    at: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Workers cannot be started; the run cannot continue."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Finish:
    """The source has ended and every task was delivered or failed."""


Command = (
    FetchTasks
    | StartWorker
    | SendTasks
    | KillWorker
    | StopWorker
    | DeliverResult
    | DropTask
    | ReportRetry
    | ReportFailure
    | SetAlarm
    | GiveUp
    | Finish
)

# What the consumer of an engine sees of a task.
Outcome = DeliverResult | ReportRetry | ReportFailure | DropTask
