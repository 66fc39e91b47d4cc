"""The contract of every pool, as tests that any pool can inherit.

    class TestMyPool(PoolTests):
        def make_pool(self, job): return MyPool(job)

The suite needs pytest. It drives the pool as the engine does, and waits for events only: no test
sleeps, and each ends by an event or by the suite's patience.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forebay.pools.base import Pool
from forebay.pools.events import (
    Assignment,
    Event,
    Job,
    StacksTaken,
    TaskFailed,
    TaskFinished,
    TasksReturned,
    WorkerDied,
    WorkerStarted,
)
from kit.faults import FaultyJob, Gate
from kit.leaks import everything, left_since

# Longest wait for an event that must happen, on a loaded machine.
PATIENCE_S = 180.0


class PoolTests:
    """Inherit and define `make_pool`; override the flags that do not apply to the pool."""

    survives_death = True  # a worker can die without ending the pool
    can_kill = True  # a worker that hangs can be killed

    def make_pool(self, job: Job) -> Pool:
        """Return a new pool for `job`, with room for two workers."""
        raise NotImplementedError

    @contextmanager
    def running(self, job: Job | None = None, workers: int = 1) -> Iterator[Pool]:
        """Yield a pool with `workers` started workers; close it at the end."""
        pool = self.make_pool(job or FaultyJob())
        try:
            for incarnation in range(workers):
                pool.start(incarnation, worker_id=0)
            events: list[Event] = []
            while sum(isinstance(event, WorkerStarted) for event in events) < workers:
                events += self.collect(pool)
            yield pool
        finally:
            pool.close()

    def collect(self, pool: Pool, until: Callable[[list[Event]], bool] = bool) -> list[Event]:
        """Return events, collected until `until` returns true."""
        events: list[Event] = []
        deadline = time.monotonic() + PATIENCE_S
        while not until(events):
            left = deadline - time.monotonic()
            assert left > 0, f"nothing more came within {PATIENCE_S} s; so far: {events}"
            events += pool.wait(left)
        return events

    def until(self, pool: Pool, is_so: Callable[[], bool]) -> list[Event]:
        """Let the pool work until something holds; return the events that came meanwhile."""
        events: list[Event] = []
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s; events: {events}"
            events += pool.wait(0.05)
        return events

    def died(self, events: list[Event]) -> bool:
        """Return whether a death is among the events."""
        return any(isinstance(event, WorkerDied) for event in events)

    def test_a_worker_says_that_it_has_started(self) -> None:
        """`start` is followed by exactly one `WorkerStarted`."""
        pool = self.make_pool(FaultyJob())
        try:
            pool.start(7, worker_id=0)
            assert self.collect(pool) == [WorkerStarted(7)]
        finally:
            pool.close()

    def test_tasks_are_answered_in_order_one_by_one(self) -> None:
        """Each task of a message gets a separate answer, in the order sent."""
        with self.running() as pool:
            pool.send(0, [Assignment(task, 1, f"payload {task}") for task in range(5)])
            events = self.collect(pool, lambda events: len(events) == 5)
        assert [(event.task, event.result) for event in events] == [  # type: ignore[union-attr]
            (task, f"payload {task}") for task in range(5)
        ]

    def test_an_answer_names_its_worker_and_attempt(self) -> None:
        """The flow needs both to recognize a late answer."""
        with self.running() as pool:
            pool.send(0, [Assignment(3, 2, "x")])
            (event,) = self.collect(pool)
        assert isinstance(event, TaskFinished)
        assert (event.incarnation, event.task, event.attempt, event.nbytes) == (0, 3, 2, 1)
        assert event.seconds >= 0

    @pytest.mark.parametrize("fault", ["raise", "sys.exit"])
    def test_an_exception_fails_its_task_and_the_worker_lives_on(self, fault: str) -> None:
        """The failure has the type, the message and the user's frames; the next task runs."""
        with self.running() as pool:
            pool.send(0, [Assignment(0, 1, fault), Assignment(1, 1, "after")])
            failed, finished = self.collect(pool, lambda events: len(events) == 2)
        assert isinstance(failed, TaskFailed)
        assert failed.failure.error == ("ValueError" if fault == "raise" else "SystemExit")
        assert failed.failure.kind == "exception"
        assert "faults.py" in failed.failure.traceback
        assert isinstance(finished, TaskFinished), finished

    def test_a_job_that_cannot_be_set_up_is_a_death_with_its_exception(self) -> None:
        """The failure is the exception, so that the run can end with it."""
        pool = self.make_pool(FaultyJob(broken="raise"))
        try:
            pool.start(0, worker_id=0)
            events = self.collect(pool, self.died)
        finally:
            pool.close()
        death, *later = events
        assert isinstance(death, WorkerDied)
        assert all(isinstance(event, WorkerDied) for event in later)  # that its process ended
        assert (death.failure.kind, death.failure.error) == ("exception", "ValueError")

    def test_large_payloads_and_results_come_through(self) -> None:
        """Megabytes in both directions at once neither block nor are damaged."""
        blob = b"x" * (8 << 20)
        with self.running() as pool:
            pool.send(0, [Assignment(task, 1, blob) for task in range(3)])
            events = self.collect(pool, lambda events: len(_answered(events)) == 3)
        finished = [event for event in events if isinstance(event, TaskFinished)]
        assert finished and all(event.result == blob for event in finished)

    def test_waiting_ends_by_the_timeout(self) -> None:
        """With nothing to report, `wait` returns an empty list."""
        with self.running() as pool:
            assert pool.wait(0.0) == []

    def test_closing_twice_is_closing_once(self) -> None:
        """`close` may be called again, also on a pool that never started anything."""
        pool = self.make_pool(FaultyJob())
        pool.close()
        pool.close()

    @pytest.mark.parametrize("fault", ["os._exit", "SIGSEGV", "SIGKILL"])
    def test_a_death_comes_after_all_that_the_worker_said(self, fault: str) -> None:
        """Answers given before the death are not lost, and the death has its cause."""
        if not self.survives_death:
            pytest.skip("a death here is the death of everything")
        with self.running() as pool:
            tasks = [Assignment(0, 1, "a"), Assignment(1, 1, "b"), Assignment(2, 1, fault)]
            pool.send(0, [*tasks, Assignment(3, 1, "never")])
            *answers, death = self.collect(pool, self.died)
        assert [event.task for event in answers] == [0, 1]  # type: ignore[union-attr]
        assert isinstance(death, WorkerDied)
        assert death.failure.kind == "crash"
        word = {"os._exit": "code 3", "SIGSEGV": "SIGSEGV", "SIGKILL": "SIGKILL"}[fault]
        assert word in death.failure.message

    def test_a_death_leaves_the_other_workers_alone(self) -> None:
        """One worker's death affects no other worker, and a replacement can be started."""
        if not self.survives_death:
            pytest.skip("a death here is the death of everything")
        with self.running(workers=2) as pool:
            pool.send(0, [Assignment(0, 1, "SIGKILL")])
            assert self.died(self.collect(pool))
            pool.send(0, [Assignment(1, 1, "to the dead")])
            pool.send(1, [Assignment(2, 1, "to the living")])
            pool.start(2, worker_id=0)
            events = self.collect(pool, lambda events: len(events) == 2)
        assert {type(event) for event in events} == {TaskFinished, WorkerStarted}

    def test_a_stopped_worker_closes_its_job_and_ends(self, tmp_path: Any) -> None:
        """`stop` lets an idle worker end by itself, and its end is not reported as a death."""
        closed = tmp_path / "closed"
        with self.running(FaultyJob(closed=closed)) as pool:
            pool.stop(0)
            assert self.until(pool, closed.exists) == []

    def test_a_worker_may_be_stopped_before_it_has_started(self) -> None:
        """At most its start is still reported, and its worker ID is free at once."""
        with self.running() as pool:
            pool.start(1, worker_id=1)
            pool.stop(1)
            pool.start(2, worker_id=1)
            events = self.collect(pool, lambda events: WorkerStarted(2) in events)
            assert set(events) <= {WorkerStarted(1), WorkerStarted(2)}

    def test_another_worker_may_follow_a_stopped_one(self) -> None:
        """The worker ID of a stopped worker is free at once."""
        with self.running() as pool:
            pool.stop(0)
            pool.start(1, worker_id=0)
            assert self.collect(pool) == [WorkerStarted(1)]
            pool.send(1, [Assignment(0, 1, "x")])
            assert isinstance(self.collect(pool)[0], TaskFinished)

    def test_stopping_a_dead_worker_changes_nothing(self) -> None:
        """`stop` of a worker whose death was reported, or that never was, is a no-op."""
        if not self.survives_death:
            pytest.skip("a death here is the death of everything")
        with self.running(workers=2) as pool:
            pool.send(0, [Assignment(0, 1, "SIGKILL")])
            assert self.died(self.collect(pool))
            pool.stop(0)
            pool.stop(7)
            pool.send(1, [Assignment(1, 1, "x")])
            assert isinstance(self.collect(pool)[0], TaskFinished)

    def test_stopped_workers_leave_nothing(self) -> None:
        """Processes, threads and descriptors of stopped workers do not wait for `close`."""
        with self.running() as pool:
            before = everything()
            for incarnation in range(1, 6):
                pool.start(incarnation, worker_id=1)
                assert self.collect(pool) == [WorkerStarted(incarnation)]
                pool.stop(incarnation)
            self.until(pool, lambda: not left_since(before))

    @pytest.mark.parametrize("fault", ["hang", "hang, deaf"])
    def test_a_worker_that_hangs_can_be_killed(self, fault: str) -> None:
        """`kill` is followed by the death, which says where the worker hung."""
        if not self.can_kill:
            pytest.skip("a worker here cannot be killed")
        with self.running() as pool:
            pool.send(0, [Assignment(0, 1, fault)])
            pool.kill(0)
            (death,) = self.collect(pool, self.died)
        assert isinstance(death, WorkerDied)

    def test_the_stack_of_a_hang_is_told(self, tmp_path: Any) -> None:
        """The death of a killed worker names the user's function that did not return."""
        if not self.can_kill:
            pytest.skip("a worker here cannot be killed")
        gate = Gate(tmp_path)
        with self.running() as pool:
            pool.send(0, [Assignment(0, 1, ("gate", gate))])
            gate.wait_reached()
            pool.kill(0)
            (death,) = self.collect(pool, self.died)
            if not self.survives_death:
                gate.open()  # let the abandoned thread end
        assert isinstance(death, WorkerDied)
        assert "in wait" in death.failure.traceback

    def test_a_worker_says_where_it_is_and_runs_on(self, tmp_path: Any) -> None:
        """`take_stacks` is followed by the calls of its task, twice if it is asked twice."""
        if not self.can_kill:
            pytest.skip("a worker here runs in the thread that would ask")
        gate = Gate(tmp_path)
        with self.running() as pool:
            pool.send(0, [Assignment(0, 1, ("gate", gate))])
            gate.wait_reached()
            for _ in range(2):
                pool.take_stacks(0)
                (taken,) = self.collect(pool)
                assert isinstance(taken, StacksTaken)
                assert taken.incarnation == 0
                assert taken.stacks.count("in wait\n") == 1, taken.stacks
                assert "in serve" not in taken.stacks
            gate.open()
            self.collect(pool, lambda events: any(type(each) is TaskFinished for each in events))

    def test_closing_does_not_wait_for_a_hang(self, tmp_path: Any) -> None:
        """`close` returns although a worker is in the middle of a task that never ends."""
        if not self.can_kill:
            pytest.skip("a worker here cannot be killed")
        gate = Gate(tmp_path)
        with self.running() as pool:
            pool.send(0, [Assignment(0, 1, ("gate", gate))])
            gate.wait_reached()
            pool.close()
            if not self.survives_death:
                gate.open()


def _answered(events: list[Event]) -> set[int]:
    """Return the tasks that are finished, or were returned since an earlier one took long."""
    finished = {event.task for event in events if isinstance(event, TaskFinished)}
    returned = (event.tasks for event in events if isinstance(event, TasksReturned))
    return finished.union(*returned)
