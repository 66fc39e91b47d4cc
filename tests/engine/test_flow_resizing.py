"""The flow by itself while the number of its workers changes."""

from __future__ import annotations

import pytest
from scripted import CRASH, Script, started

from forebay.engine.commands import (
    DeliverResult,
    Finish,
    SendTasks,
    StartWorker,
    StopWorker,
)
from forebay.pools.events import (
    AlarmRang,
    TaskFinished,
    TasksReturned,
    WorkerDied,
    WorkersResized,
    WorkerStarted,
)


def busy(workers: int, tasks: int = 100, **limits: object) -> Script:
    """Return a script whose workers have started and hold one task each."""
    script = Script(tasks, num_workers=workers, all_workers=True, **limits)
    for incarnation in range(workers):
        script.say(WorkerStarted(incarnation))
    return script


@pytest.mark.parametrize("in_order", [True, False])
def test_a_busy_surplus_worker_answers_first_and_gets_nothing_more(in_order: bool) -> None:
    """Its result counts; the next tasks go to the others."""
    script = busy(2, in_order=in_order)
    assert script.say(WorkersResized(1)) == []
    script.finish(0, 0)
    assert script.of(SendTasks)[-1] == SendTasks(0, ((2, 1),))
    last = script.finish(1, 1)
    assert StopWorker(1) in last
    assert [result.task for result in script.of(DeliverResult)] == [0, 1]
    assert not [each for each in last if isinstance(each, SendTasks | StartWorker)]


def test_a_surplus_worker_finishes_the_group_that_it_holds() -> None:
    """The tasks are short, and asking for them back would take longer than running them."""
    script = started(1000, group_s=0.05, max_group=4)
    script.finish(0, 0, seconds=0.001)
    script.finish(1, 1, seconds=0.001)
    held = list(script.flow._workers[1].tasks)
    assert len(held) > 1
    script.say(WorkersResized(1))
    for task in held:
        assert script.of(StopWorker) == []
        script.finish(1, task, seconds=0.001)
    assert script.of(StopWorker) == [StopWorker(1)]


def test_tasks_behind_a_long_one_are_taken_back_from_a_surplus_worker() -> None:
    """It is stopped after the long one, although what it gives back is still to come."""
    script = started(24, group_s=0.05, max_group=4)
    script.finish(0, 0, seconds=0.001)
    script.finish(1, 1, seconds=0.001)
    long, *behind = script.flow._workers[1].tasks
    assert behind
    script.say(WorkersResized(1))
    script.say(TaskFinished(0, script.flow._workers[0].tasks[0], 1, "r", 1, 0.001), at=0.9)
    script.say(AlarmRang(), at=1.0)
    assert StopWorker(1) in script.finish(1, long, seconds=1.2)
    assert script.say(TasksReturned(1, tuple(behind))) == []
    while held := script.flow._workers[0].tasks:
        script.say(TaskFinished(0, held[0], 1, "r", 1, 0.001))
    assert sorted(result.task for result in script.of(DeliverResult)) == list(range(24))
    assert script.of(Finish) == [Finish()]


def test_a_surplus_worker_that_is_needed_again_is_kept() -> None:
    """No second worker gets its worker ID."""
    script = busy(3)
    script.say(WorkersResized(1))
    assert script.say(WorkersResized(2)) == []
    assert script.finish(1, 1)[-1] == SendTasks(1, ((3, 1),))
    assert StopWorker(2) in script.finish(2, 2)


def test_a_death_beside_surplus_workers_may_be_caused_by_their_tasks() -> None:
    """A single worker is asked for, but more of them ran."""
    script = started(2, retries=0)
    script.say(WorkersResized(1))
    script.say(WorkerDied(0, CRASH, maybe_external=True))
    script.finish(1, 1)
    script.say(WorkerStarted(2))
    assert script.of(SendTasks)[-1] == SendTasks(2, ((0, 1),))


def test_tasks_bound_to_workers_rule_another_number_out() -> None:
    """Worker k of n reads every nth batch: no other number of workers makes the same batches."""
    script = started(4, (0, 1, 0, 1), all_workers=True)
    with pytest.raises(AssertionError, match="bound to worker IDs"):
        script.flow.handle([WorkersResized(3)], 0.0)
