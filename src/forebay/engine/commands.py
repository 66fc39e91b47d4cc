"""What to do, in the imperative: the flow gives commands, and `engine.py` performs them. PURE.

Named tuples: a frozen dataclass takes five times as long to define and to make.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from forebay.failures import Failure


class FetchTasks(NamedTuple):
    """Take up to `count` tasks from the source; answer with one `TasksQueued`."""

    count: int  # type: ignore[assignment] # `tuple.count` is of no use here


class StartWorker(NamedTuple):
    """Begin starting a worker; `WorkerStarted` or `WorkerDied` follows."""

    incarnation: int
    worker_id: int


class SendTasks(NamedTuple):
    """Send tasks to a worker, as `(task, attempt)`, to be run in this order."""

    incarnation: int
    tasks: tuple[tuple[int, int], ...]


class KillWorker(NamedTuple):
    """Record the stack traces of a worker that hangs and kill it; `WorkerDied` follows."""

    incarnation: int


class StopWorker(NamedTuple):
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


class LowerHighMark(NamedTuple):
    """Free what held results do not need: memory ran out, and they take much of it.

    Attributes:
        held: Bytes of results that are ready or delivered.
        most: The new `Limits.max_bytes`.
        memory: Bytes that this program may use.
    """

    held: int
    most: int
    memory: int


class ReportRetry(NamedTuple):
    """Tell the consumer that an attempt failed and that the task will be tried again."""

    task: int
    attempt: int
    failure: Failure


class ReportFailure(NamedTuple):
    """Tell the consumer that a task failed and is not tried again."""

    task: int
    attempt: int
    seconds: float
    failure: Failure


class SetAlarm(NamedTuple):
    """Fire `AlarmRang` at this time; a later `SetAlarm` replaces an earlier one."""

    at: float


class GiveUp(NamedTuple):
    """Workers cannot be started; the run cannot continue."""

    failure: Failure


class Finish(NamedTuple):
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
