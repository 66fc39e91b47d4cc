"""A random state machine over the flow: whatever dies, nothing is lost, doubled or miscounted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scripted import check

from forebay.engine.commands import (
    DeliverResult,
    DropTask,
    FetchTasks,
    Finish,
    GiveUp,
    KillWorker,
    ReportFailure,
    ReportRetry,
    SendTasks,
    SetAlarm,
    StartWorker,
    StopWorker,
)
from forebay.engine.flow import Flow
from forebay.engine.limits import MAX_DEATHS_IN_A_ROW, Limits
from forebay.failures import Failure
from forebay.pools.events import (
    GIVE_BACK_S,
    AlarmRang,
    Event,
    ResultsReleased,
    TaskFailed,
    TaskFinished,
    TasksForgotten,
    TasksQueued,
    TasksReturned,
    WorkerDied,
    WorkersResized,
    WorkerStarted,
)

CRASH = Failure("crash", "WorkerDiedError", "gone")
BOOM = Failure("exception", "ValueError", "boom")


class FlowMachine(RuleBasedStateMachine):
    """Plays pool, source and consumer at random, and keeps its own books."""

    @initialize(
        tasks=st.integers(0, 30),
        workers=st.integers(1, 4),
        slots=st.integers(1, 8),
        max_bytes=st.none() | st.integers(1, 60),
        low=st.none() | st.integers(1, 3),
        in_order=st.booleans(),
        retries=st.integers(0, 2),
        timeout=st.none() | st.just(5.0),
        group=st.sampled_from([0.0, 0.05]),
        lookahead=st.integers(1, 12),
        bound=st.booleans(),
        failure_ends_worker=st.booleans(),
        at_once=st.integers(1, 3),
    )
    def begin(
        self,
        tasks: int,
        workers: int,
        slots: int,
        max_bytes: int | None,
        low: int | None,
        in_order: bool,
        retries: int,
        timeout: float | None,
        group: float,
        lookahead: int,
        bound: bool,
        failure_ends_worker: bool,
        at_once: int,
    ) -> None:
        limits = Limits(
            num_workers=workers,
            at_once=1 if bound else at_once,
            slots=1000 if bound else slots,  # else a task could be bound to wait for ever
            max_bytes=None if bound else max_bytes,
            refill_below=None if low is None or bound else min(low, slots),
            in_order=in_order,
            retries=retries,
            timeout_s=timeout,
            group_s=group,
            max_group=4,
            lookahead=lookahead,
            max_suspects=2,
            all_workers=bound,
            failure_ends_worker=failure_ends_worker,
        )
        self.flow = Flow(limits)
        self.limits = limits
        self.num_workers = workers
        self.stopped: list[int] = []
        self.answering: int | None = None
        self.now = 0.0
        self.total = tasks
        self.bound = bound
        self.worker_ids: dict[int, int] = {}
        self.forgotten = 0
        self.dropped: list[int] = []
        self.fetched = 0
        self.starting: set[int] = set()
        self.alive: dict[int, list[tuple[int, int]]] = {}
        self.begun: dict[int, float] = {}  # when each task was begun last
        self.alone: set[int] = set()  # tasks whose worker died while it ran others, too
        self.died_by_themselves: set[int] = set()
        self.gone: list[tuple[int, int, int]] = []
        self.timed_out: set[int] = set()
        self.ends: list[int] = []
        self.leased: set[int] = set()
        self.finished = self.gave_up = False
        self.deaths = 0
        self.alarm: float | None = None
        self.obey(self.flow.start(self.now))

    def say(self, event: Event) -> None:
        self.obey(self.flow.handle([event], self.now))

    def obey(self, commands: list[Any]) -> None:
        for command in commands:
            match command:
                case FetchTasks(count):
                    keys = tuple(range(self.fetched, min(self.fetched + count, self.total)))
                    self.fetched += len(keys)
                    worker_ids = tuple(key % self.limits.num_workers for key in keys)
                    ended = len(keys) < count
                    self.say(TasksQueued(keys, ended, worker_ids if self.bound else None))
                case StartWorker(worker, worker_id):
                    self.starting.add(worker)
                    self.worker_ids[worker] = worker_id
                case StopWorker(worker):
                    self.stops(worker)
                case SendTasks(worker, tasks):
                    assert self.worker_ids[worker] < self.num_workers, "it is surplus"
                    if self.bound:
                        worker_id, workers = self.worker_ids[worker], self.limits.num_workers
                        assert all(task % workers == worker_id for task, _ in tasks)
                    assert worker not in self.timed_out
                    self.alive[worker].extend(tasks)
                    self.begins(worker)
                case KillWorker(worker):
                    self.timed_out.add(worker)
                case SetAlarm(at):
                    self.alarm = at
                case DeliverResult(task):
                    self.ends.append(task)
                    self.leased.add(task)
                case DropTask(task):
                    assert task < self.forgotten
                    self.ends_by_dropping(task)
                case ReportFailure(task, failure=failure):
                    self.ends.append(task)
                    self.is_blamed_rightly(task, failure)
                case ReportRetry(task, failure=failure):
                    self.is_blamed_rightly(task, failure)
                case Finish():
                    self.finished = True
                case GiveUp():
                    self.gave_up = True

    def is_blamed_rightly(self, task: int, failure: Failure) -> None:
        """For a death only a task is blamed that its worker ran by itself."""
        if failure is CRASH and not self.bound:  # otherwise others fail with it
            assert task in self.died_by_themselves

    def begins(self, worker: int) -> list[int]:
        """The worker begins the tasks that it can run now; return all that it runs."""
        running = [task for task, _ in self.alive[worker][: self.limits.at_once]]
        if self.alone.intersection(task for task, _ in self.alive[worker]):
            assert len(running) == 1, "it runs another task beside one that is to be alone"
        for task in running:
            self.begun.setdefault(task, self.now)
        return running

    def answer(self, worker: int, at: int, event: Callable[[int, int, int], Event]) -> None:
        """The worker answers a task that it runs; after a slow one it gives back all others."""
        running = self.begins(worker)
        task, attempt = self.alive[worker].pop(at % len(running))
        slow = self.now - self.begun.pop(task) > GIVE_BACK_S
        self.alone.discard(task)
        if not slow:
            self.begins(worker)
        self.deaths = 0
        self.answering = worker if slow else None
        self.say(event(worker, task, attempt))
        self.answering = None
        if slow and worker in self.alive:
            still = len(running) - 1
            held = [task for task, _ in self.alive[worker][still:]]
            del self.alive[worker][still:]
            for each in held:
                self.begun.pop(each, None)
            self.say(TasksReturned(worker, tuple(held)))

    def dies(self, worker: int, *, blames: bool) -> None:
        """The worker is gone, and with it what it ran."""
        held = self.alive.pop(worker, [])
        self.gone += [(worker, *pair) for pair in held]
        running = [task for task, _ in held[: self.limits.at_once]]
        for task, _ in held:
            self.begun.pop(task, None)
        if len(running) == 1:
            self.died_by_themselves.update(running)
        elif blames and worker not in self.timed_out:
            self.alone.update(running)

    def stops(self, worker: int) -> None:
        """The worker is told to end. It may hold tasks only if it is about to give them back."""
        assert self.worker_ids[worker] >= self.num_workers
        held = self.alive.pop(worker, [])
        for task, _ in held:
            self.begun.pop(task, None)
        assert not held or self.answering == worker
        self.gone += [(worker, *pair) for pair in held]
        self.starting.discard(worker)
        self.timed_out.discard(worker)
        self.stopped.append(worker)

    def ends_by_dropping(self, task: int) -> None:
        assert task not in self.ends
        self.dropped.append(task)

    def busy(self) -> list[int]:
        return [worker for worker, held in self.alive.items() if held]

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def worker_starts(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(sorted(self.starting)))
        self.starting.discard(worker)
        self.alive[worker] = []
        self.say(WorkerStarted(worker))

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), nbytes=st.integers(0, 40), seconds=st.sampled_from([0.001, 0.02, 1.0]))
    def task_finishes(self, data: Any, nbytes: int, seconds: float) -> None:
        self.answer(
            data.draw(st.sampled_from(self.busy())),
            data.draw(st.integers(0, 2)),
            lambda *which: TaskFinished(*which, None, nbytes, seconds),
        )

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), final=st.booleans())
    def task_raises(self, data: Any, final: bool) -> None:
        self.answer(
            data.draw(st.sampled_from(self.busy())),
            data.draw(st.integers(0, 2)),
            lambda *which: TaskFailed(*which, BOOM, 0.1, final),
        )

    @precondition(lambda self: (self.alive or self.starting) and self.deaths < 5)
    @rule(
        data=st.data(),
        external=st.booleans(),
        maybe_external=st.booleans(),
        memory=st.sampled_from([0, 0, 60]),
        signalled=st.booleans(),
    )
    def worker_dies(
        self, data: Any, external: bool, maybe_external: bool, memory: int, signalled: bool
    ) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive) + sorted(self.starting)))
        self.starting.discard(worker)
        is_full = bool(memory) and self.flow.held_bytes * 3 >= memory
        self.dies(worker, blames=not external and not is_full and not signalled)
        self.timed_out.discard(worker)
        self.deaths += 1
        self.say(WorkerDied(worker, CRASH, external, maybe_external, memory, signalled))

    @precondition(lambda self: not self.bound and not self.finished)
    @rule(num_workers=st.integers(1, 5))
    def workers_are_resized(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.say(WorkersResized(num_workers))

    @precondition(lambda self: self.stopped)
    @rule(data=st.data())
    def late_event_of_a_stopped_worker(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(self.stopped))
        self.say(data.draw(st.sampled_from([WorkerStarted(worker), WorkerDied(worker, CRASH)])))

    @precondition(lambda self: self.with_spare())
    @rule(data=st.data())
    def worker_gives_back(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(self.with_spare()))
        rest = self.alive[worker][self.limits.at_once :]
        del self.alive[worker][self.limits.at_once :]
        self.say(TasksReturned(worker, tuple(task for task, _ in rest)))

    def with_spare(self) -> list[int]:
        return [w for w, held in self.alive.items() if len(held) > self.limits.at_once]

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def late_answer(self, data: Any) -> None:
        worker, task, attempt = data.draw(st.sampled_from(self.gone))
        before = len(self.ends)
        self.say(TaskFinished(worker, task, attempt, None, 1, 0.1))
        assert len(self.ends) == before

    @precondition(lambda self: self.alarm is not None)
    @rule()
    def time_passes(self) -> None:
        assert self.alarm is not None
        self.now, self.alarm = max(self.now, self.alarm), None
        self.say(AlarmRang())

    @rule(more=st.integers(1, 6))
    def consumer_forgets(self, more: int) -> None:
        self.forgotten = min(self.forgotten + more, self.fetched)
        self.say(TasksForgotten(self.forgotten))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def consumer_releases(self, data: Any) -> None:
        task = data.draw(st.sampled_from(sorted(self.leased)))
        self.leased.discard(task)
        self.say(ResultsReleased((task,)))

    @invariant()
    def accounts_are_right(self) -> None:
        if hasattr(self, "flow"):
            check(self.flow)
            assert len(self.ends) == len(set(self.ends)), "something ended twice"
            assert len(self.dropped) == len(set(self.dropped)), "something was dropped twice"
            live = [self.worker_ids[worker] for worker in (*self.starting, *self.alive)]
            assert len(live) == len(set(live)), "two workers have the same worker ID"
            if self.limits.in_order:
                assert self.ends == sorted(self.ends)

    def teardown(self) -> None:
        """From wherever it is, a machine in which nothing dies any more comes to its end."""
        if not hasattr(self, "flow"):
            return
        for _ in range(5000):
            if self.finished or self.gave_up:
                break
            for task in sorted(self.leased):
                self.leased.discard(task)
                self.say(ResultsReleased((task,)))
            for worker in sorted(self.starting):
                self.starting.discard(worker)
                self.alive[worker] = []
                self.say(WorkerStarted(worker))
            for worker in sorted(self.timed_out & set(self.alive)):
                self.dies(worker, blames=True)
                self.timed_out.discard(worker)
                self.say(WorkerDied(worker, CRASH))
            for worker in self.busy():
                self.answer(worker, 0, lambda *which: TaskFinished(*which, None, 5, 0.01))
        assert self.finished or self.gave_up
        if not self.gave_up:
            ended = sorted([*self.ends, *self.dropped])
            assert ended == list(range(self.total)), "something was lost"
            live = [self.worker_ids[worker] for worker in (*self.starting, *self.alive)]
            assert all(worker_id < self.num_workers for worker_id in live), "some did not stop"


FlowMachine.TestCase.settings = settings(stateful_step_count=50, derandomize=True)
TestFlowMachine = pytest.mark.slow(FlowMachine.TestCase)
assert MAX_DEATHS_IN_A_ROW > 5, "the machine lets at most 5 workers die in a row"
