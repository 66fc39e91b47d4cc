"""The engine's loop: wait for an event, ask the flow what to do, perform its commands.

It owns the flow, the pool and the payloads of open tasks, all in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from forebay.base.process import LONGEST_WAIT_S
from forebay.engine import commands as do
from forebay.engine.commands import (
    DeliverResult,
    DropTask,
    LowerHighMark,
    Outcome,
    ReportFailure,
    ReportRetry,
)
from forebay.engine.flow import Flow
from forebay.engine.limits import MAX_DEATHS_IN_A_ROW, Limits
from forebay.errors import ForebayError, OutputError, WorkerDiedError
from forebay.failures import Failure
from forebay.observe.progress import in_one_line, log, log_failed, log_retry
from forebay.pools import events as happened
from forebay.pools.base import Pool
from forebay.pools.events import Assignment, Event, StacksTaken, WorkerDied

# How long to collect answers while the trainer does not wait for one: waking up for each answer
# would take processor time from the workers.
COLLECT_S = 0.003
# How long nothing may come from busy workers before that is said, and how long to wait for the
# stacks of the one to be named.
SILENT_S, STACKS_S = 60.0, 5.0


# Calls no Python code, as the class would.
_make_assignment: Callable[[tuple[int, int, Any]], Assignment] = partial(tuple.__new__, Assignment)


class NewTask(NamedTuple):
    """A task for `Engine.put`; only the worker with ID `worker_id` may run it (None: any)."""

    task: int
    payload: Any
    worker_id: int | None = None


class Engine:
    """Runs the tasks of a source on the workers of a pool."""

    def __init__(
        self,
        pool: Pool,
        limits: Limits,
        source: Iterator[tuple[int, Any]] | None = None,
        prepare: Callable[[int, Any], Any] | None = None,
        name_of: Callable[[Any], str] = str,
        advice: Callable[[Any], Sequence[str]] = lambda _: (),
        silent_s: float | None = None,
    ) -> None:
        """Initialize; the first `step` starts the workers.

        Args:
            advice: Returns the lines of a warning that say what to do about a payload's worker, if
                it is stuck.
            silent_s: How long nothing may come before such a warning; None for `SILENT_S`.
        """
        self.finished = False
        self.flow = Flow(limits)  # other threads may read its properties
        self._pool = pool
        self._source = source if source is not None else iter(())
        self._prepare = prepare
        self._name_of = name_of
        self._payloads: dict[int, Any] = {}
        self._outcomes: list[Outcome] = []
        self._gave_up: Failure | None = None
        self._lowered: LowerHighMark | None = None  # the last one
        self._alarm: float | None = None
        self._advice, self._limit_s = advice, silent_s
        self._silent_s = 0.0  # for which nothing came while workers were busy
        self._stuck: int | None = None  # whose stacks were asked for
        self._has_warned = False
        self._worker_ids: dict[int, int] = {}  # by incarnation, if its death is to be logged
        self._lost: set[int] = set()  # IDs of workers that died and were not replaced
        self._perform(self.flow.start(time.monotonic()))

    def put(self, tasks: Sequence[NewTask]) -> None:
        """Queue one or more tasks, in increasing order of their numbers."""
        keys, payloads, ids = zip(*tasks, strict=True)
        self._payloads.update(zip(keys, payloads, strict=True))
        worker_ids = None if ids[0] is None else ids
        self._handle([happened.TasksQueued(keys, ended=False, worker_ids=worker_ids)])

    def forget(self, before: int) -> None:
        """Drop undelivered tasks with lower numbers; a `DropTask` follows for each."""
        self._handle([happened.TasksForgotten(before)])

    def release(self, tasks: Sequence[int]) -> None:
        """Free the slots of delivered results."""
        self._handle([happened.ResultsReleased(tuple(tasks))])

    def resize(self, num_workers: int) -> None:
        """Change the number of workers: start more, or stop those with the highest worker IDs.

        A worker that is to stop finishes its tasks first. With 0 no task begins. Not allowed while
        tasks are bound to worker IDs (see `NewTask`).
        """
        self._handle([happened.WorkersResized(num_workers)])

    def step(self, timeout: float | None = None, collect_s: float = 0.0) -> list[Outcome]:
        """Wait up to `timeout` seconds for events; return the resulting outcomes.

        Args:
            timeout: In seconds; None for no limit. An earlier return with no outcome is possible.
        """
        if not self._outcomes and not self.finished and self._gave_up is None:
            now = time.monotonic()
            if self._alarm is not None:
                left = max(self._alarm - now, 0.0)
                timeout = left if timeout is None else min(timeout, left)
            timeout = LONGEST_WAIT_S if timeout is None else min(timeout, LONGEST_WAIT_S)
            if 0.0 < collect_s < timeout and self.flow.answers_can_wait(collect_s):
                time.sleep(collect_s)
            began = time.monotonic()
            events: list[Event] = self._pool.wait(timeout)
            is_due = self._alarm is not None and self._alarm <= time.monotonic()
            if is_due:  # answers first: this thread may have waited for the interpreter
                events += self._pool.wait(0.0)
            if not self._has_warned:
                self._note_silence(events, time.monotonic() - began)
            for event in events:
                if type(event) is WorkerDied and event.incarnation in self._worker_ids:
                    worker_id = self._worker_ids.pop(event.incarnation)
                    self._lost.add(worker_id)
                    log.warning("worker %d died: %s", worker_id, in_one_line(event.failure.message))
            if is_due:
                self._alarm = None
                events.append(happened.AlarmRang())
            self._handle(events)
        outcomes, self._outcomes = self._outcomes, []
        if self._gave_up is not None and not outcomes:
            raise _unstartable(self._gave_up, self._lowered)
        return outcomes

    def longest_task(self) -> tuple[str, float] | None:
        """Return the name of the task that has been running for longest, and when it began."""
        began, _, task = next(iter(self.flow.busy_workers()), (0.0, 0, None))
        return None if task is None else (self._name_of(self._payloads[task]), began)

    def _note_silence(self, events: list[Event], waited_s: float) -> None:
        """Warn, once, if nothing comes for long although workers are busy or starting."""
        is_asked = self._stuck is not None
        taken = [each for each in events if is_asked and type(each) is StacksTaken]
        busy = [] if len(events) > len(taken) else self.flow.busy_workers()
        if not busy:
            self._silent_s, self._stuck = 0.0, None
            return
        # A pause of this process, such as by Ctrl-Z, does not count.
        self._silent_s += min(waited_s, LONGEST_WAIT_S)
        stacks = next((each.stacks for each in taken if each.incarnation == self._stuck), None)
        limit_s = (self._limit_s or SILENT_S) + (STACKS_S if is_asked else 0.0)
        if stacks is None and self._silent_s < limit_s:
            return
        began, incarnation, task = busy[0]
        if not is_asked:
            self._stuck = incarnation
            self._pool.take_stacks(incarnation)
            return
        from forebay.engine.notices import StuckWorker, warn_of_stuck_worker

        self._has_warned = True
        name = None if task is None else self._name_of(self._payloads[task])
        advice = () if task is None else self._advice(self._payloads[task])
        seconds = self._silent_s if task is None else time.monotonic() - began
        worker_id, others = self._worker_ids[incarnation], len(busy) - 1
        found = StuckWorker(worker_id, name, seconds, self._silent_s, others, stacks or "")
        warn_of_stuck_worker(found, advice)

    def wake(self) -> None:
        """Make `step` return early. The only method that other threads may call."""
        self._pool.wake()

    def close(self) -> None:
        """Stop the workers and drop open tasks."""
        self._pool.close()

    def _handle(self, events: Sequence[Event]) -> None:
        if events:
            self._perform(self.flow.handle(events, time.monotonic()))

    def _perform(self, commands: Sequence[do.Command]) -> None:
        todo = list(commands)
        groups: list[tuple[int, list[Assignment]]] = []
        for command in todo:  # the loop itself extends it
            if type(command) is DeliverResult or type(command) is DropTask:  # nearly all are
                del self._payloads[command.task]
                self._outcomes.append(command)
                continue
            match command:
                case ReportFailure():
                    payload = self._payloads.pop(command.task)
                    log_failed(self._name_of(payload), command.failure)
                    self._outcomes.append(command)
                case ReportRetry():
                    name = self._name_of(self._payloads[command.task])
                    log_retry(name, command.attempt, command.failure)
                    self._outcomes.append(command)
                case LowerHighMark():
                    from forebay.engine.notices import warn_of_full_memory

                    self._lowered = command
                    self._outcomes.append(command)
                    warn_of_full_memory(command)
                case do.SendTasks():
                    groups.append((command.incarnation, self._assignments(command.tasks)))
                case do.FetchTasks():
                    fetched = list(islice(self._source, command.count))
                    self._payloads.update(fetched)
                    tasks = tuple(task for task, _ in fetched)
                    queued = happened.TasksQueued(tasks, ended=len(tasks) < command.count)
                    todo.extend(self.flow.handle([queued], time.monotonic()))
                case do.StartWorker():
                    self._worker_ids[command.incarnation] = command.worker_id
                    if command.worker_id in self._lost:
                        self._lost.discard(command.worker_id)
                        log.info("worker %d is replaced", command.worker_id)
                    self._pool.start(command.incarnation, command.worker_id)
                case do.KillWorker():
                    killed = self._worker_ids.pop(command.incarnation)  # its death is not logged
                    self._lost.add(killed)
                    log.warning("worker %d is killed: its task takes longer than timeout", killed)
                    self._pool.kill(command.incarnation)
                case do.StopWorker():
                    self._worker_ids.pop(command.incarnation, None)
                    self._pool.stop(command.incarnation)
                case do.SetAlarm():
                    self._alarm = command.at
                case do.Finish():
                    self.finished = True
                case do.GiveUp():
                    self._gave_up = command.failure
        if groups:
            self._pool.send_to_all(groups)

    def _assignments(self, tasks: Sequence[tuple[int, int]]) -> list[Assignment]:
        payloads, prepare = self._payloads, self._prepare
        if prepare is None:
            of_each = [(task, attempt, payloads[task]) for task, attempt in tasks]
            return [*map(_make_assignment, of_each)]
        return [Assignment(task, attempt, prepare(task, payloads[task])) for task, attempt in tasks]


def _unstartable(failure: Failure, lowered: LowerHighMark | None) -> ForebayError:
    if failure.error == OutputError.__name__:  # a full disk, for example, as it says itself
        return OutputError(failure.message)
    if failure.kind == "exception":
        begin = "a worker cannot be set up"
        why = "It failed before its first task, and so would others"
    else:
        begin = "workers cannot be kept alive"
        why = f"{MAX_DEATHS_IN_A_ROW} times in a row, workers died without finishing a task"
    if lowered is not None:
        from forebay.engine.notices import full_memory

        raise WorkerDiedError(full_memory(lowered, f"{why}, so forebay gave up."))
    return WorkerDiedError(
        f"{begin}: {failure.error}: {failure.message}\n"
        f"  {why}, so forebay gave up.\n"
        f"  Make the same call in this process, with num_workers=0.\n{failure.traceback}"
    )
