"""The one loop: wait for an event, ask the flow, perform its commands.

It owns the flow, the pool and the payloads of open tasks; all of it in the consumer's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from forebay.engine.events import (
    AlarmRang,
    Command,
    DeliverResult,
    Event,
    FetchTasks,
    Finish,
    GiveUp,
    KillWorker,
    ReportFailure,
    ReportRetry,
    ResultsReleased,
    ResultsWanted,
    SendTasks,
    SetAlarm,
    StartWorker,
    TasksQueued,
)
from forebay.engine.flow import Flow
from forebay.engine.job import Assignment, Job
from forebay.engine.limits import Limits
from forebay.engine.pools.base import Pool
from forebay.errors import WorkerDiedError

Outcome = DeliverResult | ReportRetry | ReportFailure

# While every worker has more to do than its present task, answers are collected for this long
# before they are looked at: being woken for each one would take a core from the workers.
COLLECT_S = 0.003


class Engine:
    """Runs the tasks of a source on the workers of a pool.

    Args:
        pool: Where the workers run; closed with the engine.
        limits: What the flow may do.
        source: Yields `(task, payload)`, each task a different number; read as work is needed.
        clock: Returns seconds that only grow.
    """

    def __init__(
        self,
        pool: Pool,
        limits: Limits,
        source: Iterator[tuple[int, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; the first `step` starts the workers."""
        self.finished = False
        self.stopped = False
        self._pool = pool
        self._flow = Flow(limits)
        self._source = source
        self._clock = clock
        self._payloads: dict[int, Any] = {}
        self._outcomes: list[Outcome] = []
        self._alarm: float | None = None
        self._perform(self._flow.start(clock()))

    def want(self, count: int) -> None:
        """Let the engine deliver this many results more."""
        self._take_in([ResultsWanted(count)])

    def release(self, tasks: Sequence[int]) -> None:
        """Give back the slots of delivered results."""
        self._take_in([ResultsReleased(tuple(tasks))])

    def step(self, timeout: float | None = None) -> list[Outcome]:
        """Wait up to `timeout` seconds for something to happen; return what came of it.

        Raises:
            WorkerDiedError: Workers cannot be started; the message says why.
        """
        if not self._outcomes and not self.finished:
            now = self._clock()
            if self._alarm is not None:
                left = max(self._alarm - now, 0.0)
                timeout = left if timeout is None else min(timeout, left)
            if self._flow.is_relaxed and (timeout is None or timeout > COLLECT_S):
                time.sleep(COLLECT_S)
            events: list[Event] = self._pool.wait(timeout)
            if self._alarm is not None and self._alarm <= self._clock():
                self._alarm = None
                events.append(AlarmRang())
            self._take_in(events)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

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
                case DeliverResult() | ReportFailure():
                    del self._payloads[command.task]
                    self._outcomes.append(command)
                case ReportRetry():
                    self._outcomes.append(command)
                case SendTasks():
                    payloads = self._payloads
                    self._pool.send(
                        command.worker,
                        [
                            Assignment(task, attempt, payloads[task])
                            for task, attempt in command.tasks
                        ],
                    )
                case FetchTasks():
                    fetched = list(islice(self._source, command.count))
                    self._payloads.update(fetched)
                    tasks = tuple(task for task, _ in fetched)
                    queued = TasksQueued(tasks, ended=len(tasks) < command.count)
                    todo.extend(self._flow.handle(queued, self._clock()))
                case StartWorker():
                    self._pool.start(command.worker)
                case KillWorker():
                    self._pool.kill(command.worker)
                case SetAlarm():
                    self._alarm = command.at
                case Finish():
                    self.finished = True
                case GiveUp():
                    raise WorkerDiedError(_unstartable(command))


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
