"""What happened (events, past tense) and what to do (commands, imperative).

Plain frozen records: the pools and the consumer make events, `flow.py` turns them into
commands, `engine.py` performs those. A worker's number is never used twice, so an event from a
worker that is gone is recognised and dropped. Times are seconds of a monotonic clock.

The two that every task needs are named tuples: a frozen dataclass costs five times as much to
make, and ten times as much to pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an attempt failed, or why a worker died.

    Attributes:
        kind: "exception", "timeout" or "crash" (the worker died under the task), or a word of
            the job's own that classifies the failure further.
        error: The error's type, such as "ValueError" or "WorkerDiedError".
        message: The error's words.
        traceback: The frames as text; "" if there are none.
        exception: The exception itself where it came through whole.
    """

    kind: str
    error: str
    message: str
    traceback: str = ""
    exception: BaseException | None = None


# ---- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TasksQueued:
    """There are new tasks: those that `FetchTasks` asked for, or others.

    Attributes:
        tasks: Their numbers, growing.
        ended: That no more will come.
        lanes: The lane of each, if only the worker of that lane may have it.
    """

    tasks: tuple[int, ...]
    ended: bool
    lanes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker is set up and waits for tasks."""

    worker: int


class TaskFinished(NamedTuple):
    """A worker answered. `nbytes` is what the result occupies, `seconds` the task's wall time."""

    worker: int
    task: int
    attempt: int
    result: Any
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The user's code raised. `final` failures are not worth another try (a missing file)."""

    worker: int
    task: int
    attempt: int
    cause: Cause
    seconds: float
    final: bool = False


@dataclass(frozen=True, slots=True)
class TasksReturned:
    """A worker gave back tasks that it had not begun, so that others can have them."""

    worker: int
    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker is gone.

    Attributes:
        worker: Its number.
        cause: How it died.
        blameless: Nothing that it ran can be the reason (a lost host, say).
        doubtful: What another worker ran may be the reason as well (the node's memory, say).
    """

    worker: int
    cause: Cause
    blameless: bool = False
    doubtful: bool = False


@dataclass(frozen=True, slots=True)
class RoomGrew:
    """There is room for more workers than before: so many in all."""

    num_workers: int


@dataclass(frozen=True, slots=True)
class AlarmRang:
    """The moment that `SetAlarm` asked for has come."""


@dataclass(frozen=True, slots=True)
class ResultsReleased:
    """The consumer is through with delivered results; their slots are free."""

    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TasksForgotten:
    """Nobody wants the tasks with numbers below `before` any more, save those delivered."""

    before: int


Event = (
    TasksQueued
    | WorkerStarted
    | TaskFinished
    | TaskFailed
    | TasksReturned
    | WorkerDied
    | RoomGrew
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
        worker: Its number, never used before.
        lane: Its place, from 0 to num_workers - 1, which a replacement inherits.
    """

    worker: int
    lane: int


@dataclass(frozen=True, slots=True)
class SendTasks:
    """Hand tasks to a worker, as `(task, attempt)`, to be run in this order."""

    worker: int
    tasks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Take the stacks of a worker that hangs and kill it; `WorkerDied` follows."""

    worker: int


class DeliverResult(NamedTuple):
    """Hand a result to the consumer, who releases it."""

    task: int
    attempt: int
    seconds: float
    nbytes: int
    result: Any


class DropTask(NamedTuple):
    """Forget a task: its worker is through with it, and nobody wants it."""

    task: int


@dataclass(frozen=True, slots=True)
class ReportRetry:
    """Tell the consumer that an attempt failed and that the task will be tried again."""

    task: int
    attempt: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tell the consumer that a task failed for good."""

    task: int
    attempt: int
    seconds: float
    cause: Cause


@dataclass(frozen=True, slots=True)
class SetAlarm:
    """Fire `AlarmRang` at this time; a later `SetAlarm` replaces an earlier one."""

    at: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Workers cannot be started; the run cannot go on."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Finish:
    """The source has ended and every task was delivered or failed."""


Command = (
    FetchTasks
    | StartWorker
    | SendTasks
    | KillWorker
    | DeliverResult
    | DropTask
    | ReportRetry
    | ReportFailure
    | SetAlarm
    | GiveUp
    | Finish
)
