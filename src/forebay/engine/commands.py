"""What the flow decides with: its limits, tasks and workers, and the commands it gives. PURE."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

from forebay.failures import Failure

# If a task has run for this long, the tasks behind it are given to other workers, and its worker
# gets no new ones until it has returned them. It is longer than GIVE_BACK_S, so that the worker's
# own clock makes it return them.
RECLAIM_S = 1.0
# How often in a row workers may be lost, with no answer and no suspect, before the flow gives up.
# Workers that die together count once.
MAX_DEATHS_IN_A_ROW = 10
# The share of all memory from which on held results are why it runs out.
LARGE_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the flow.

    Attributes:
        num_workers: Workers kept alive while there is work for them; at least 1.
        at_once: Tasks that each worker runs at the same time: the first of those that it holds.
        max_bytes: The most bytes of results being made, ready or delivered; None for no limit.
            One task may always run, whatever its size.
        refill_below: Once full, wait until fewer than this many results are being made, ready
            or delivered before making more: a number, or a share of the number when it was full.
            None refills at once.
        in_memory: Whether results that are held take memory of this machine.
        timeout_s: Seconds that one attempt may take; None for no limit.
    """

    num_workers: int
    slots: int
    at_once: int = 1
    max_bytes: int | None = None
    refill_below: int | float | None = None
    in_memory: bool = True
    in_order: bool = False
    retries: int = 0
    timeout_s: float | None = None
    group_s: float = 0.0
    max_group: int = 1
    lookahead: int = 1
    all_workers: bool = False
    failure_ends_worker: bool = False
    max_suspects: int = 64

    def low_mark(self, most: int) -> int:
        """Return below how many results to make more, of a buffer that holds `most` when full."""
        low = self.refill_below
        return low if isinstance(low, int) else max(int((low or 1.0) * most), 1)

    def timeout_failure(self, stacks: str) -> Failure:
        """Return the failure of a task that exceeded the time limit."""
        words = f"ran past timeout={self.timeout_s:g} s; its worker was killed"
        return Failure("timeout", "SampleTimeoutError", words, stacks)

    def are_filled(self, held_bytes: int, memory: int) -> bool:
        """Return whether held results, and no task, are why a worker was killed for memory.

        Args:
            memory: Bytes that this program may use; 0 if the worker died otherwise.
        """
        return self.in_memory and memory > 0 and held_bytes >= LARGE_SHARE * memory


# ---- states --------------------------------------------------------------------------------------
# The life of a task, as data: its states and the only moves between them. PURE.
#
# `tests/test_flow_docs.py` draws the diagram in `docs/explanation/flow.md` from `TRANSITIONS`.


class State(Enum):
    """Where a task is. A slot is held from RUNNING until RELEASED."""

    QUEUED = "queued"  # waits for a worker; holds no slot
    RUNNING = "running"  # a worker has it, begun or next in line; holds a slot
    READY = "ready"  # its result waits for the consumer; holds a slot
    LEASED = "leased"  # the consumer uses its result; holds a slot
    RELEASED = "released"  # finished; its slot is free
    FAILED = "failed"  # finished without a result; holds no slot

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs Python code


class Move(Enum):
    """A transition of a task from one state to the next."""

    SENT = "sent to a worker"
    RETURNED = "given back before it began"
    ORPHANED = "its worker died while running another task"
    SUSPECTED = "its worker died, perhaps because of another task"
    RETRIED = "failed, attempts left"
    FINISHED = "answered"
    FAILED = "failed, no attempts left"
    ABANDONED = "blocked by an earlier failure of its worker"
    DELIVERED = "passed to the consumer"
    RELEASED = "released by the consumer"
    FORGOTTEN = "no longer needed"

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[State, Move], State] = {
    (State.QUEUED, Move.SENT): State.RUNNING,
    (State.RUNNING, Move.RETURNED): State.QUEUED,
    (State.RUNNING, Move.ORPHANED): State.QUEUED,
    (State.RUNNING, Move.SUSPECTED): State.QUEUED,
    (State.RUNNING, Move.RETRIED): State.QUEUED,
    (State.RUNNING, Move.FINISHED): State.READY,
    (State.RUNNING, Move.FAILED): State.FAILED,
    (State.READY, Move.DELIVERED): State.LEASED,
    (State.LEASED, Move.RELEASED): State.RELEASED,
    (State.QUEUED, Move.ABANDONED): State.FAILED,
    (State.QUEUED, Move.FORGOTTEN): State.RELEASED,
    (State.RUNNING, Move.FORGOTTEN): State.RELEASED,
    (State.READY, Move.FORGOTTEN): State.RELEASED,
}


@dataclass(slots=True)
class Task:
    """One task and its state; `attempt` counts from 1.

    Only the worker with ID `worker_id` may run it (None: any). An unwanted task is dropped when its
    current attempt ends. A worker that runs one `alone` runs no other task meanwhile.
    """

    worker_id: int | None = None
    unwanted: bool = False
    alone: bool = False
    state: State = State.QUEUED
    attempt: int = 1
    nbytes: int = 0
    seconds: float = 0.0
    result: Any = None
    failure: Failure | None = None
    moved: Move | None = None  # how it came into its state


@dataclass(slots=True)
class Worker:
    """A worker, the tasks it holds in the order it begins them, and when it began the first ones.

    Attributes:
        begun: When it began each of the tasks that it runs, earliest first. If it holds none but
            is to return some, when it may have begun one of those.
        timed_out: The tasks for which it is being killed.
        returning: Tasks that were taken back, and not yet returned or answered.
    """

    worker_id: int
    started: bool = False
    tasks: deque[int] = field(default_factory=deque)
    begun: deque[float] = field(default_factory=deque)
    timed_out: list[int] = field(default_factory=list)
    returning: set[int] = field(default_factory=set)

    @property
    def running(self) -> list[int]:
        """The tasks that it has begun."""
        return list(islice(self.tasks, len(self.begun)))

    def begin(self, at_once: int, now: float) -> None:
        """Record that it begins the next tasks now, as far as it can run more at once."""
        count = min(len(self.tasks), at_once) or bool(self.returning)
        while len(self.begun) < count:
            self.begun.append(now)
        while len(self.begun) > count:
            self.begun.pop()

    def due(self, limits: Limits, has_spare_tasks: bool) -> float | None:
        """Return when one of its tasks exceeds a time limit; None for never."""
        if not self.begun or self.timed_out:
            return None
        due = [] if limits.timeout_s is None else [self.begun[0] + limits.timeout_s]
        if has_spare_tasks:
            due.append(self.begun[-1] + RECLAIM_S)
        return min(due, default=None)

    def overdue(self, limits: Limits, now: float) -> list[int]:
        """Return the tasks that exceed the time limit; one to be returned if it holds no others.

        In order, only the first may: those behind it may be ready, and wait for it.
        """
        if limits.timeout_s is None:
            return []
        running = zip(self.tasks or sorted(self.returning), self.begun, strict=False)
        first = islice(running, 1 if limits.in_order else None)
        return [key for key, begun in first if now >= begun + limits.timeout_s]

    def remove(self, keys: Container[int]) -> None:
        """Remove tasks that it holds no more."""
        begun = zip(self.tasks, self.begun, strict=False)
        self.begun = deque(at for key, at in begun if key not in keys)
        self.tasks = deque(key for key in self.tasks if key not in keys)


class IllegalMoveError(AssertionError):
    """The state of a task does not allow a move: a bug in forebay."""


# ---- commands ------------------------------------------------------------------------------------
# What to do, in the imperative; `engine.py` performs them. The records that every task needs are
# named tuples, which take a fifth of the time to make.


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
