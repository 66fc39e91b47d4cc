"""What to do, in the imperative: the flow gives commands, and `engine.py` performs them. PURE.

The records that every task needs are named tuples, which take a fifth of the time to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from forebay.failures import Failure


@dataclass(frozen=True, slots=True)
class FetchTasks:
    """Take up to `count` tasks from the source; answer with one `TasksQueued`."""

    count: int


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Begin starting a worker; `WorkerStarted` or `WorkerDied` follows."""

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
class LowerHighMark:
    """Free what held results do not need: memory ran out, and they take much of it.

    Attributes:
        held: Bytes of results that are ready or delivered.
        most: The new `Limits.max_bytes`.
        memory: Bytes that this program may use.
    """

    held: int
    most: int
    memory: int


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
    | LowerHighMark
    | ReportRetry
    | ReportFailure
    | SetAlarm
    | GiveUp
    | Finish
)

# What the consumer of an engine sees.
Outcome = DeliverResult | ReportRetry | ReportFailure | DropTask | LowerHighMark
