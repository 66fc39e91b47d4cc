"""The flow when tasks and workers fail: who is blamed, what is tried again, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import BOOM, CRASH, Script, started

from forebay.engine.commands import (
    DeliverResult,
    Finish,
    GiveUp,
    KillWorker,
    ReportFailure,
    ReportRetry,
    SendTasks,
    SetAlarm,
)
from forebay.engine.limits import MAX_DEATHS_IN_A_ROW, MAX_SIGNALLED
from forebay.failures import Failure
from forebay.pools.events import (
    AlarmRang,
    TaskFailed,
    TaskFinished,
    TasksForgotten,
    TasksQueued,
    WorkerDied,
    WorkerStarted,
)


def test_a_dead_worker_blames_its_first_unanswered_task_alone() -> None:
    """Tasks queued behind the one that ran are innocent and go to others."""
    script = started(200, group_s=0.05, max_group=100, retries=0)
    script.finish(0, 0, seconds=0.01)
    held = script.held_by(0)
    assert len(held) > 1
    script.say(WorkerDied(0, CRASH))
    assert [failure.task for failure in script.of(ReportFailure)] == [held[0]]
    script.say(WorkerStarted(2))
    assert script.held_by(2)[0] == held[1]


def test_an_external_death_costs_no_attempt() -> None:
    """A lost host is nobody's fault: the task goes out again as the same attempt."""
    script = started(2, retries=0)
    script.say(WorkerDied(0, CRASH, external=True))
    script.say(WorkerStarted(2))
    assert script.of(SendTasks)[-1] == SendTasks(2, ((0, 1),))


def test_a_signal_to_all_is_no_tasks_fault_until_it_comes_again_and_again() -> None:
    """Its worker was told to end: no attempt is used up, unless the task itself sends it."""
    script = started(1, retries=0, num_workers=1)
    for dead in range(MAX_SIGNALLED):
        script.say(WorkerDied(dead, CRASH, signalled=True))
        script.say(WorkerStarted(dead + 1))
        assert script.of(SendTasks)[-1] == SendTasks(dead + 1, ((0, 1),))
    assert script.of(ReportFailure) == script.of(ReportRetry) == []
    script.say(WorkerDied(MAX_SIGNALLED, CRASH, signalled=True))
    assert script.of(ReportFailure) == [ReportFailure(0, 1, 0.0, CRASH)]


def test_a_worker_that_was_asked_for_its_stacks_has_not_been_told_to_end() -> None:
    """SIGUSR1 ends it if the user's code has removed the handler; the task took too long."""
    script = started(1, retries=0, num_workers=1, timeout_s=1.0)
    script.say(AlarmRang(), at=2.0)
    script.say(WorkerDied(0, CRASH, signalled=True))
    (failed,) = script.of(ReportFailure)
    assert failed.failure.kind == "timeout"


def test_a_suspect_is_tried_again_alone_after_everything_else() -> None:
    """While a suspect runs nothing else does, so a second death is its own."""
    script = started(3, retries=1)
    script.say(WorkerDied(0, CRASH))
    script.say(WorkerStarted(2))
    assert script.of(SendTasks)[-1] == SendTasks(2, ((2, 1),))
    script.finish(2, 2)
    assert len(script.of(SendTasks)) == 3, "worker 1 still runs: not alone yet"
    script.finish(1, 1)
    assert script.of(SendTasks)[-1].tasks == ((0, 2),)
    alone = script.of(SendTasks)[-1].incarnation
    script.say(WorkerDied(alone, CRASH))
    assert script.of(ReportFailure) == [ReportFailure(0, 2, 0.0, CRASH)]
    assert script.of(Finish) == [Finish()]


def test_many_suspects_are_tried_before_the_rest() -> None:
    """Once `max_suspects` wait, fresh work pauses for them."""
    script = started(10, retries=1, max_suspects=1)
    script.say(WorkerDied(0, CRASH))
    script.say(WorkerStarted(2))
    assert len(script.of(SendTasks)) == 2, "a suspect waits, so nothing new begins"
    script.finish(1, 1)
    assert script.of(SendTasks)[-1].tasks == ((0, 2),)
    sent = len(script.of(SendTasks))
    script.say(AlarmRang())
    assert len(script.of(SendTasks)) == sent, "the suspect runs, so nothing new begins"
    script.finish(script.of(SendTasks)[-1].incarnation, 0, attempt=2)
    assert len(script.of(SendTasks)) == sent + 2


def test_a_death_that_may_be_a_neighbours_doing_costs_no_try() -> None:
    """All that died are tried again alone, as the same attempt; who dies alone is to blame."""
    script = started(2, retries=0)
    script.say(WorkerDied(0, CRASH, maybe_external=True))
    script.say(WorkerDied(1, CRASH, maybe_external=True))
    assert script.of(ReportFailure) == script.of(ReportRetry) == []
    script.say(WorkerStarted(2))
    script.say(WorkerStarted(3))
    assert script.of(SendTasks)[2:] == [SendTasks(2, ((0, 1),))]
    script.say(WorkerDied(3, CRASH, maybe_external=True))
    script.say(WorkerDied(2, CRASH, maybe_external=True))
    assert script.of(ReportFailure) == [ReportFailure(0, 1, 0.0, CRASH)]
    script.say(WorkerStarted(4))
    assert script.of(SendTasks)[-1] == SendTasks(4, ((1, 1),))
    script.finish(4, 1)
    assert script.of(Finish) == [Finish()]


@pytest.mark.parametrize("limits", [{"num_workers": 1}, {"in_order": True}])
def test_who_cannot_be_tried_alone_is_blamed_at_once(limits: dict[str, Any]) -> None:
    """Where there are no neighbours, or all delivery would wait for the trial."""
    script = started(1, retries=0, **limits)
    script.say(WorkerDied(0, CRASH, maybe_external=True))
    assert [failure.task for failure in script.of(ReportFailure)] == [0]


def test_a_hang_is_killed_and_blamed_as_a_timeout() -> None:
    """The alarm condemns the worker; its death names the task and carries the stack."""
    script = started(2, timeout_s=5.0)
    assert script.of(SetAlarm) == [SetAlarm(5.0)]
    script.finish(1, 1)
    assert KillWorker(0) in script.say(AlarmRang(), at=5.0)
    script.say(WorkerDied(0, Failure("crash", "WorkerDiedError", "SIGKILL", "the stack")))
    (failure,) = script.of(ReportFailure)
    assert failure.task == 0
    assert (failure.failure.kind, failure.failure.traceback) == ("timeout", "the stack")
    assert "timeout=5 s" in failure.failure.message


def test_who_only_waited_for_the_one_that_hangs_is_not_blamed() -> None:
    """A pool that knows so says it of the death that it was ordered to cause."""
    script = started(2, timeout_s=5.0, retries=0)
    script.say(AlarmRang(), at=6.0)
    assert script.of(KillWorker) == [KillWorker(0), KillWorker(1)]
    script.say(WorkerDied(0, CRASH))
    script.say(WorkerDied(1, CRASH, external=True))
    assert [failure.task for failure in script.of(ReportFailure)] == [0]
    script.say(WorkerStarted(2))
    assert script.held_by(2) == [1]


def test_time_in_the_queue_is_not_time_in_the_task() -> None:
    """A task's clock starts when the one before it was answered."""
    script = started(300, timeout_s=5.0, group_s=0.05, max_group=100)
    script.say(TaskFinished(0, 0, 1, "r", 1, 0.001), at=4.0)
    assert script.say(AlarmRang(), at=5.0) == [KillWorker(1), SetAlarm(9.0)]


def test_a_worker_that_hangs_in_a_task_that_was_taken_back_is_killed() -> None:
    """It answered late, by its own clock was not slow, and so began what others were to do."""
    script = Script(300, num_workers=1, timeout_s=5.0, group_s=0.05, max_group=100)
    script.say(WorkerStarted(0))
    script.finish(0, 0, seconds=0.01)
    first, second, *_ = script.held_by(0)
    script.say(AlarmRang(), at=1.0)
    script.say(TaskFinished(0, first, 1, "r", 1, 0.1), at=2.0)
    assert script.say(AlarmRang(), at=5.0) == [SetAlarm(7.0)]
    assert script.say(AlarmRang(), at=7.0) == [KillWorker(0)]
    script.say(WorkerDied(0, CRASH))
    script.say(WorkerStarted(1))
    assert script.held_by(1)[0] == second
    assert script.of(ReportRetry) == script.of(ReportFailure) == []


def test_an_answer_that_overtakes_the_kill_counts() -> None:
    """A task answered after its worker timed out is done, and nobody is blamed."""
    script = started(2, timeout_s=5.0)
    script.say(AlarmRang(), at=5.0)
    script.finish(0, 0)
    script.say(WorkerDied(0, CRASH))
    assert [result.task for result in script.of(DeliverResult)] == [0]
    assert script.of(ReportFailure) == []


def test_a_job_that_cannot_be_set_up_ends_the_run() -> None:
    """An exception before the first task will not go away by starting again."""
    script = Script(3)
    assert GiveUp(BOOM) in script.say(WorkerDied(0, BOOM))


def test_workers_that_keep_dying_without_an_answer_end_the_run() -> None:
    """Starting workers for ever would be a hang."""
    script = Script(3, num_workers=1)
    for number in range(MAX_DEATHS_IN_A_ROW):
        script.say(WorkerDied(number, CRASH))
    assert script.of(GiveUp) == [GiveUp(CRASH)]


def test_workers_that_die_together_are_one_misfortune() -> None:
    """A host of many workers may be lost, and their replacements do the work."""
    many = 3 * MAX_DEATHS_IN_A_ROW
    script = Script(many, num_workers=many)
    for number in range(many):
        script.say(WorkerStarted(number))
    for number in range(many):
        script.say(WorkerDied(number, CRASH, external=True))
    for number in range(many, 2 * many):
        script.say(WorkerStarted(number))
    for number in range(many, 2 * many):
        (task,) = script.held_by(number)
        script.finish(number, task)
    assert script.of(GiveUp) == []
    assert len(script.of(DeliverResult)) == many


@pytest.mark.parametrize("failure_ends_worker", [True, False])
def test_what_ends_a_lane_ends_what_waits_there(failure_ends_worker: bool) -> None:
    """An iterator that raised is over: its other batches fail at once, those of others do not."""
    script = started(
        6,
        (0, 1, 0, 1, 0, 1),
        in_order=True,
        all_workers=True,
        retries=0,
        failure_ends_worker=failure_ends_worker,
    )
    script.say(TaskFailed(0, 0, 1, BOOM, 1.0))
    assert script.of(ReportFailure)[0].task == 0
    for task in (1, 3, 5):
        script.finish(1, task)
    if failure_ends_worker:
        script.say(TaskFailed(0, 2, 1, BOOM, 1.0))  # it had this one already
    else:
        script.finish(0, 2)
        script.finish(0, 4)
    failed = [command.task for command in script.of(ReportFailure)]
    assert failed == ([0, 2, 4] if failure_ends_worker else [0])
    assert script.of(Finish) == [Finish()]


def test_a_lane_that_ended_is_open_again_once_its_tasks_are_forgotten() -> None:
    """The next epoch has an iterator of its own."""
    script = started(
        4, (0, 1, 0, 1), in_order=True, all_workers=True, retries=0, failure_ends_worker=True
    )
    script.say(TaskFailed(0, 0, 1, BOOM, 1.0))
    script.say(TasksForgotten(4))
    script.say(TasksQueued((4, 5), ended=True, worker_ids=(0, 1)))
    assert script.of(SendTasks)[-2:-1] == [SendTasks(0, ((4, 1),))]
