"""The one loop: wait for an event, ask the flow, perform its commands.

It owns the flow, the pool and the payloads of open tasks; all of it in the consumer's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from forebay.engine.events import (
    AlarmRang,
    Command,
    DeliverResult,
    DropTask,
    Event,
    FetchTasks,
    Finish,
    GiveUp,
    KillWorker,
    ReportFailure,
    ReportRetry,
    ResultsReleased,
    SendTasks,
    SetAlarm,
    StartWorker,
    TasksForgotten,
    TasksQueued,
)
from forebay.engine.flow import Flow
from forebay.engine.job import Assignment, Job
from forebay.engine.limits import Limits
from forebay.engine.pools.base import Pool
from forebay.engine.states import State
from forebay.errors import WorkerDiedError

Outcome = DeliverResult | ReportRetry | ReportFailure | DropTask

# A good time to collect answers for, where nobody waits for them: being woken for each one would
# take a core from the workers.
COLLECT_S = 0.003


class NewTask(NamedTuple):
    """A task for `Engine.put`; `lane` is that of the only worker that may have it."""

    task: int
    payload: Any
    lane: int | None = None


class Engine:
    """Runs the tasks of a source on the workers of a pool.

    Args:
        pool: Where the workers run; closed with the engine.
        limits: What the flow may do.
        source: Yields `(task, payload)`, each task a higher number; read as work is needed. With
            `limits.lookahead` 0 it is not read, and tasks come by `put`.
        address: Called as `address(task, payload)` when a task is sent; returns what the worker
            gets for a payload.
        clock: Returns seconds that only grow.
    """

    def __init__(
        self,
        pool: Pool,
        limits: Limits,
        source: Iterator[tuple[int, Any]] | None = None,
        address: Callable[[int, Any], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; the first `step` starts the workers."""
        self.finished = False
        self.stopped = False
        self._pool = pool
        self._flow = Flow(limits)
        self._source = source if source is not None else iter(())
        self._address = address
        self._clock = clock
        self._payloads: dict[int, Any] = {}
        self._outcomes: list[Outcome] = []
        self._alarm: float | None = None
        self._perform(self._flow.start(clock()))

    def put(self, tasks: Sequence[NewTask], *, ended: bool = False) -> None:
        """Queue tasks; `ended` says that no more will come. All are bound to lanes, or none is."""
        self._payloads.update((each.task, each.payload) for each in tasks)
        bound = [each.lane for each in tasks if each.lane is not None]
        lanes = tuple(bound) if bound else None
        self._take_in([TasksQueued(tuple(each.task for each in tasks), ended, lanes)])

    def forget(self, before: int) -> None:
        """Drop the tasks with lower numbers that were not delivered; `DropTask` tells when."""
        self._take_in([TasksForgotten(before)])

    def release(self, tasks: Sequence[int]) -> None:
        """Give back the slots of delivered results."""
        self._take_in([ResultsReleased(tuple(tasks))])

    def step(self, timeout: float | None = None, collect_s: float = 0.0) -> list[Outcome]:
        """Wait up to `timeout` seconds for something to happen; return what came of it.

        Args:
            timeout: In seconds; None for ever.
            collect_s: For how long to let answers pile up while no worker waits for one of them
                to be looked at.

        Raises:
            WorkerDiedError: Workers cannot be started; the message says why.
        """
        if not self._outcomes and not self.finished:
            now = self._clock()
            if self._alarm is not None:
                left = max(self._alarm - now, 0.0)
                timeout = left if timeout is None else min(timeout, left)
            if collect_s and self._flow.is_relaxed and (timeout is None or timeout > collect_s):
                time.sleep(collect_s)
            events: list[Event] = self._pool.wait(timeout)
            if self._alarm is not None and self._alarm <= self._clock():
                self._alarm = None
                events.append(AlarmRang())
            self._take_in(events)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def running(self) -> int:
        """How many tasks the workers have in hand."""
        return self._flow.counts[State.RUNNING]

    def wake(self) -> None:
        """Have `step` return early. The one method that any thread may call."""
        self._pool.wake()

    def close(self) -> None:
        """End the workers; open tasks are forgotten."""
        self.stopped = True
        self._pool.close()

    def _take_in(self, events: Sequence[Event]) -> None:
        now = self._clock()
        for event in events:
            self._perform(self._flow.handle(event, now))

    def _perform(self, commands: Sequence[Command]) -> None:
        todo = deque(commands)
        while todo:
            command = todo.popleft()
            match command:
                case DeliverResult() | ReportFailure() | DropTask():
                    del self._payloads[command.task]
                    self._outcomes.append(command)
                case ReportRetry():
                    self._outcomes.append(command)
                case SendTasks():
                    self._pool.send(
                        command.worker,
                        [self._assignment(task, attempt) for task, attempt in command.tasks],
                    )
                case FetchTasks():
                    fetched = list(islice(self._source, command.count))
                    self._payloads.update(fetched)
                    tasks = tuple(task for task, _ in fetched)
                    queued = TasksQueued(tasks, ended=len(tasks) < command.count)
                    todo.extend(self._flow.handle(queued, self._clock()))
                case StartWorker():
                    self._pool.start(command.worker, command.lane)
                case KillWorker():
                    self._pool.kill(command.worker)
                case SetAlarm():
                    self._alarm = command.at
                case Finish():
                    self.finished = True
                case GiveUp():
                    raise WorkerDiedError(_unstartable(command))

    def _assignment(self, task: int, attempt: int) -> Assignment:
        payload = self._payloads[task]
        if self._address is not None:
            payload = self._address(task, payload)
        return Assignment(task, attempt, payload)


def _unstartable(command: GiveUp) -> str:
    cause = command.cause
    return (
        f"workers cannot be kept alive: {cause.error}: {cause.message}\n"
        "  Several died one after another without finishing a task, so forebay gave up; what was "
        "done is kept.\n"
        "  Try the function in this process first: num_workers=0.\n" + cause.traceback
    )


def pool_for(backend: str, num_workers: int, job: Job) -> Pool:
    """Return the pool that hosts `num_workers` workers for `job`; 0 means this very thread."""
    if num_workers == 0:
        from forebay.engine.pools.inline import InlinePool

        return InlinePool(job)
    if backend == "thread":
        from forebay.engine.pools.threads import ThreadPool

        return ThreadPool(job)
    from forebay.engine.pools.processes import ProcessPool

    return ProcessPool(job, num_workers)
