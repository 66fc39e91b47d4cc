"""The tasks of a flow and who holds them: their states and moves, queues, order, and room. PURE.

`tests/test_flow_docs.py` compares the table in `docs/explanation/flow.md` with `TRANSITIONS`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import Any

from forebay.engine.commands import (
    Command,
    DeliverResult,
    DropTask,
    LowerHighMark,
    ReportFailure,
    ReportRetry,
)
from forebay.engine.limits import MAX_SIGNALLED, Limits
from forebay.failures import Failure
from forebay.pools import events as happened

# If a task has run for this long, the tasks behind it are given to other workers, and its worker
# gets no new ones until it has returned them. It is longer than GIVE_BACK_S, so that the worker's
# own clock makes it return them.
RECLAIM_S = 1.0


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
    signalled: int = 0  # how often its worker ended by a signal that is sent to all
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

    def runs_long(self, now: float) -> bool:
        """Return whether the tasks behind those that it runs are given to other workers."""
        return now >= self.begun[-1] + RECLAIM_S

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


class TaskTable:
    """The tasks of a flow: the state of each, the queues they wait in, and what is delivered next.

    Attributes:
        counts: The number of tasks in each state.
        held_bytes: Bytes of the results that are ready or leased.
    """

    def __init__(self, limits: Limits) -> None:
        """Start without tasks."""
        self.limits = limits
        self.counts = dict.fromkeys(State, 0)
        self.held_bytes = 0
        self._tasks: dict[int, Task] = {}
        self._workers: dict[int, Worker] = {}
        self._estimate: float | None = None  # seconds a task takes, smoothed
        self._queue: deque[int] = deque()  # by number: new tasks, and those put back
        self._bound: dict[int, deque[int]] = {}  # likewise, for tasks that one worker ID may run
        # By worker ID: the failure that ended its stream. Its later tasks fail with it.
        self._blocked: dict[int, Failure] = {}
        self._alone: deque[int] = deque()  # to be tried by a worker that runs no other task
        self._retries: deque[int] = deque()  # to be retried, each in its own message
        self._suspects: deque[int] = deque()  # died or hung: to be retried alone
        self._trying_suspects = False
        self._order: deque[int] = deque()  # tasks to deliver: by number with in_order, or as ended
        self._largest = 0  # bytes to expect of a running task: the largest result seen
        self._refill_at: int | None = None  # since it was full: make more below so many results
        self._fetching = False
        self._source_ended = False
        self._waits_for_memory = False  # before workers are started, until results are released

    def _on_queued(self, event: happened.TasksQueued) -> None:
        self._fetching = False
        self._source_ended = event.ended
        if event.worker_ids is None:
            self._tasks.update((key, Task()) for key in event.tasks)
            self._queue.extend(event.tasks)
        else:
            for key, worker_id in zip(event.tasks, event.worker_ids, strict=True):
                self._tasks[key] = Task(worker_id)
                self._queue_of(key).append(key)
        self.counts[State.QUEUED] += len(event.tasks)
        if self.limits.in_order:
            self._order.extend(event.tasks)

    def _on_forgotten(self, before: int, commands: list[Command]) -> None:
        for key in [key for key in self._tasks if key < before]:
            task = self._tasks[key]
            if task.state is State.RUNNING:
                task.unwanted = True  # its worker cannot be interrupted
            elif task.state is State.QUEUED:
                for queue in (self._queue_of(key), self._retries, self._suspects):
                    if key in queue:
                        queue.remove(key)
                self._drop(key, commands)
            elif task.state is State.READY:
                self.held_bytes -= task.nbytes
                self._drop(key, commands)
            elif task.state is State.FAILED:  # and not reported yet, in order
                del self._tasks[key]
                commands.append(DropTask(key))
        self._blocked.clear()
        self._order = deque(key for key in self._order if key >= before)
        self._deliver(commands)

    def _are_excused(self, keys: Iterable[int]) -> bool:
        """Count a signal to the worker of these tasks; return whether none is to blame for it.

        One may send it itself: a script that ends with `kill 0`, for example.
        """
        tasks = [self._tasks[key] for key in keys]
        for task in tasks:
            task.signalled += 1
        return all(task.signalled <= MAX_SIGNALLED for task in tasks)

    def _lower_high_mark(self, memory: int, commands: list[Command]) -> None:
        """Hold half of the bytes from now on, and make nothing until the rest is consumed."""
        most, before = self.held_bytes // 2, self.limits.max_bytes
        if before is None or most < before:
            self.limits = replace(self.limits, max_bytes=most)
            commands.append(LowerHighMark(self.held_bytes, most, memory))
        self._waits_for_memory = True

    def _take_back(self, worker: Worker, keys: list[int], commands: list[Command]) -> None:
        """Put tasks that a worker has not begun back into the queue."""
        for key in reversed(keys):  # each goes before the one put back last
            self._move(Move.RETURNED, key)
            self._put_back(key, commands)
        worker.remove(set(keys))

    def _fail(
        self,
        key: int,
        failure: Failure,
        commands: list[Command],
        again: deque[int],
        final: bool = False,
    ) -> None:
        task = self._tasks[key]
        if task.unwanted:
            self._drop(key, commands)
            return
        if task.attempt > self.limits.retries or final:
            if self.limits.failure_ends_worker and task.worker_id is not None:
                self._blocked[task.worker_id] = failure
            self._end(key, Move.FAILED, failure, commands)
            return
        self._move(Move.RETRIED, key)
        commands.append(ReportRetry(key, task.attempt, failure))
        task.attempt += 1
        if self.limits.in_order or task.worker_id is not None:
            self._put_back(key, commands)
        else:
            again.append(key)

    def _end(self, key: int, move: Move, failure: Failure, commands: list[Command]) -> None:
        """End a task without a result."""
        self._move(move, key)
        self._tasks[key].failure = failure
        if not self.limits.in_order:
            self._order.append(key)
        self._deliver(commands)

    def _fail_blocked(self, commands: list[Command]) -> None:
        """Fail the tasks that wait for a worker blocked by an earlier failure."""
        for worker_id, failure in self._blocked.items():
            queue = self._bound.get(worker_id)
            while queue:
                self._end(queue.popleft(), Move.ABANDONED, failure, commands)

    def _put_back(self, key: int, commands: list[Command]) -> None:
        """Queue a task in the order of the source: before all that have not been sent yet."""
        if self._tasks[key].unwanted:
            self._drop(key, commands)
            return
        self._refill_at = None  # it counted as made when the buffer was full
        at, queue = 0, self._queue_of(key)
        while at < len(queue) and queue[at] < key:
            at += 1
        queue.insert(at, key)

    def _queue_of(self, key: int) -> deque[int]:
        task = self._tasks[key]
        if task.worker_id is not None:
            return self._bound.setdefault(task.worker_id, deque())
        return self._alone if task.alone else self._queue

    def _drop(self, key: int, commands: list[Command]) -> None:
        """End a task that is no longer needed."""
        self._move(Move.FORGOTTEN, key)
        del self._tasks[key]
        commands.append(DropTask(key))

    def _deliver(self, commands: list[Command]) -> None:
        """Deliver the results that are next in order."""
        delivered = []
        while self._order:
            key = self._order[0]
            task = self._tasks[key]
            if task.state is State.READY:
                delivered.append(key)
                commands.append(
                    DeliverResult(key, task.attempt, task.seconds, task.nbytes, task.result)
                )
                task.result = None
            elif task.state is State.FAILED:
                assert task.failure is not None
                commands.append(ReportFailure(key, task.attempt, task.seconds, task.failure))
                del self._tasks[key]
            else:
                break
            self._order.popleft()
        self._move(Move.DELIVERED, *delivered)

    def _move(self, move: Move, *keys: int) -> None:
        """Move one task, or several that are in the same state."""
        if not keys:
            return
        tasks, before = self._tasks, self._tasks[keys[0]].state
        after = TRANSITIONS.get((before, move), before)
        for key in keys:
            task = tasks[key]
            if task.state is not before or after is before:
                state = f"{task.state.value} by {task.moved}"
                raise IllegalMoveError(f"task {key} is {state}, not to be {move}")
            task.state, task.moved = after, move
        self.counts[before] -= len(keys)
        self.counts[after] += len(keys)

    def _is_time_for_suspects(self) -> bool:
        """Return whether to try the suspects now, each alone; True until none is left."""
        count = len(self._suspects)
        no_others = self._source_ended and self.counts[State.QUEUED] == count
        return self._trying_suspects or no_others or count >= self.limits.max_suspects

    def _free_slots(self, awaited: bool) -> int:
        """Return how many tasks may begin now, within slots, bytes and the low mark."""
        limits, running = self.limits, self.counts[State.RUNNING]
        made = running + self.counts[State.READY] + self.counts[State.LEASED]
        slots = free = limits.slots - made
        if limits.max_bytes is not None and self._largest:
            left = limits.max_bytes - self.held_bytes - running * self._largest
            free = min(slots, left // self._largest)
        if limits.refill_below is not None:
            if self._refill_at is None and free <= 0:
                self._refill_at = limits.low_mark(made)
            elif self._refill_at is not None and made < self._refill_at:
                self._refill_at = None
            if self._refill_at is not None:
                free = 0
        if free <= 0 and (awaited or not made):
            free = 1  # also when a single result is larger than the whole budget
        return min(free, slots)

    @property
    def room(self) -> int:
        """About how many results of average size there is room for, besides those leased."""
        counts, held, most = self.counts, self.held_bytes, self.limits.max_bytes
        made = counts[State.READY] + counts[State.LEASED]
        room = self.limits.slots - made
        if most is not None:  # before the first result there is no room
            each = held // made if made else self._largest
            room = min(room, (most - held) // each if each else 0)
        return max(room, 0) + counts[State.READY]

    @property
    def above_low_mark(self) -> int:
        """How many results to release before a full buffer is refilled; 0 while it is not full."""
        if self._refill_at is None:
            return 0
        counts = self.counts
        made = counts[State.RUNNING] + counts[State.READY] + counts[State.LEASED]
        return max(made - self._refill_at + 1, 0)

    def busy_workers(self) -> list[tuple[float, int, int | None]]:
        """Return when each busy worker began a task, its incarnation, the task; last, starting."""
        workers, waits = self._workers.items(), bool(self.counts[State.QUEUED])
        running = sorted((each.begun[0], at, each.tasks[0]) for at, each in workers if each.running)
        starting = [at for at, each in workers if waits and not each.started]
        return [*running, *((float("inf"), at, None) for at in starting)]

    def answers_can_wait(self, seconds: float) -> bool:
        """Return whether no worker waits for the flow, so that answers may be collected for a time.

        True while every worker has that many seconds of work after its current tasks, or if
        no tasks are left for those that do not.
        """
        estimate, at_once = self._estimate or 0.0, self.limits.at_once
        busy = sum(
            (len(worker.tasks) - at_once) * estimate >= seconds * at_once
            for worker in self._workers.values()
        )
        return bool(busy) and (busy == len(self._workers) or not self.counts[State.QUEUED])
