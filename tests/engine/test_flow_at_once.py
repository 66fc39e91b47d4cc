"""The flow when a worker runs several tasks at once: what begins when, and who is blamed."""

from __future__ import annotations

import pytest
from scripted import BOOM, CRASH, Script, started

from forebay.engine.commands import (
    DeliverResult,
    Finish,
    KillWorker,
    ReportFailure,
    ReportRetry,
    SendTasks,
)
from forebay.engine.tasks import RECLAIM_S
from forebay.pools.events import (
    AlarmRang,
    TaskFailed,
    TaskFinished,
    TasksReturned,
    WorkerDied,
    WorkerStarted,
)


def sent_to(script: Script, worker: int) -> list[int]:
    """Return all tasks that a worker was sent, in their order."""
    sent = [each for each in script.of(SendTasks) if each.incarnation == worker]
    return [task for each in sent for task, _ in each.tasks]


def test_a_worker_gets_as_many_tasks_as_it_runs_at_once() -> None:
    """Before anything is known of them, and again one for each that it answers."""
    script = started(40, at_once=4)
    assert (sent_to(script, 0), sent_to(script, 1)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    script.finish(0, 2)
    assert sent_to(script, 0) == [0, 1, 2, 3, 8]


def test_few_tasks_are_shared_by_the_workers() -> None:
    """Rather than that one of them runs all at once."""
    script = started(6, at_once=4)
    assert (sent_to(script, 0), sent_to(script, 1)) == ([0, 1, 2, 3], [4, 5])
    script = Script(6, at_once=4, group_s=0.05)
    script.flow._estimate = 0.03
    script.say(WorkerStarted(0))
    assert sent_to(script, 0) == [0, 1, 2]


def test_answers_come_in_any_order() -> None:
    """Each counts for its own task."""
    script = started(3, at_once=3, num_workers=1)
    for task in (1, 2, 0):
        script.finish(0, task)
    assert [each.task for each in script.of(DeliverResult)] == [1, 2, 0]
    assert script.of(Finish) == [Finish()]


def test_an_answer_for_a_task_that_waits_behind_those_it_runs_is_ignored() -> None:
    """No worker can have begun it."""
    script = started(9, at_once=2, num_workers=1, group_s=1.0, max_group=100)
    script.finish(0, 0, seconds=0.01)
    assert len(script.held_by(0)) > 2
    script.say(TaskFinished(0, 8, 1, "early", 1, 0.1))
    assert [each.task for each in script.of(DeliverResult)] == [0]


# ---- deaths ------------------------------------------------------------------------------------


def test_all_that_a_dead_worker_ran_are_tried_again_each_by_itself() -> None:
    """None of them has used up an attempt; what it had not begun goes to others at once."""
    script = started(8, at_once=3, num_workers=1, retries=0, group_s=9.0, max_group=100)
    script.finish(0, 1, seconds=0.01)
    assert sent_to(script, 0) == [0, 1, 2, 3, 4, 5]
    script.say(WorkerDied(0, CRASH))  # it ran 0, 2 and 3
    assert script.of(ReportFailure) == script.of(ReportRetry) == []
    script.say(WorkerStarted(1))
    for task in (0, 2, 3):
        assert script.of(SendTasks)[-1] == SendTasks(1, ((task, 1),))
        script.finish(1, task, seconds=0.01)
    assert sent_to(script, 1)[3:6] == [4, 5, 6]


def test_only_the_guilty_task_of_several_fails() -> None:
    """The one with which a worker dies again."""
    script = started(3, at_once=3, num_workers=1, retries=0)
    script.say(WorkerDied(0, CRASH))
    script.say(WorkerStarted(1))
    script.finish(1, 0)
    script.say(WorkerDied(1, CRASH))
    assert [each.task for each in script.of(ReportFailure)] == [1]
    script.say(WorkerStarted(2))
    script.finish(2, 2)
    assert [each.task for each in script.of(DeliverResult)] == [0, 2]
    assert script.of(Finish) == [Finish()]


def test_suspects_are_tried_by_several_workers_side_by_side() -> None:
    """Each has a worker to itself, and workers that run others take one when these have ended."""
    script = started(20, at_once=2)
    script.say(WorkerDied(0, CRASH))  # 0 and 1
    script.finish(1, 2)
    assert sent_to(script, 1) == [2, 3], "it still runs 3"
    script.finish(1, 3)
    assert sent_to(script, 1) == [2, 3, 0]
    script.say(WorkerStarted(2))
    assert sent_to(script, 2) == [1]
    script.finish(2, 1)
    assert sent_to(script, 2) == [1, 4, 5]
    assert sent_to(script, 1) == [2, 3, 0], "0 is to be alone"


def test_in_order_suspects_do_not_wait_for_what_comes_after_them() -> None:
    """All delivery waits for the first of them."""
    script = started(6, at_once=2, num_workers=1, in_order=True, retries=1)
    script.say(WorkerDied(0, CRASH))
    script.say(WorkerStarted(1))
    script.finish(1, 0)
    script.say(WorkerDied(1, CRASH))
    assert script.of(ReportRetry) == [ReportRetry(1, 1, CRASH)]
    script.say(WorkerStarted(2))
    assert script.of(SendTasks)[-1] == SendTasks(2, ((1, 2),))
    script.finish(2, 1, attempt=2)
    assert [each.task for each in script.of(DeliverResult)] == [0, 1]
    assert script.of(SendTasks)[-1].tasks == ((2, 1), (3, 1))


def test_in_order_a_suspect_does_not_keep_an_earlier_task_from_its_slot() -> None:
    """Later results fill the buffer, so only the task that all delivery waits for may begin."""
    script = started(6, at_once=2, num_workers=3, in_order=True, max_bytes=20)
    script.say(WorkerStarted(2))
    script.finish(2, 4)
    script.finish(2, 5)
    script.say(WorkerDied(1, CRASH))  # 2 and 3
    script.say(WorkerDied(0, CRASH, external=True))  # 0 and 1
    assert script.of(SendTasks)[-1] == SendTasks(2, ((0, 1),))


def test_an_external_death_suspects_none_of_several() -> None:
    """A lost host: all go out again at once, as the same attempts."""
    script = started(4, at_once=2, retries=0)
    script.say(WorkerDied(0, CRASH, external=True))
    script.say(WorkerStarted(2))
    assert script.of(SendTasks)[-1] == SendTasks(2, ((0, 1), (1, 1)))


def test_deaths_of_workers_with_several_tasks_come_to_an_end() -> None:
    """Although nothing is ever answered: each task dies by itself at last."""
    script, dead = started(30, at_once=5, retries=0), 0
    while not script.of(Finish) and dead < 100:
        script.say(WorkerDied(dead, CRASH))
        script.say(WorkerStarted(dead + 2))
        dead += 1
    assert sorted(each.task for each in script.of(ReportFailure)) == list(range(30))
    assert dead <= 30 + 30 / 2


# ---- time limits -------------------------------------------------------------------------------


def test_a_hung_task_times_out_alone() -> None:
    """The others that its worker ran go out again as the same attempts, and not by themselves."""
    script = started(4, at_once=3, num_workers=1, timeout_s=5.0, retries=0)
    script.now = 3.0
    script.finish(0, 1)  # so that 3 begins later
    script.say(AlarmRang(), at=4.9)
    assert script.of(KillWorker) == []
    script.finish(0, 2)
    script.say(AlarmRang(), at=5.0)
    assert script.of(KillWorker) == [KillWorker(0)]
    script.say(WorkerDied(0, CRASH))
    assert [(each.task, each.failure.kind) for each in script.of(ReportFailure)] == [(0, "timeout")]
    script.say(WorkerStarted(1))
    assert script.of(SendTasks)[-1] == SendTasks(1, ((3, 1),))


def test_all_that_exceed_the_limit_time_out_together() -> None:
    """Otherwise each would need a worker, and the limit, for itself."""
    script = started(3, at_once=3, num_workers=1, timeout_s=5.0, retries=0)
    script.finish(0, 1)
    script.say(AlarmRang(), at=5.0)
    script.say(WorkerDied(0, CRASH))
    assert [each.task for each in script.of(ReportFailure)] == [0, 2]


def test_in_order_the_first_one_times_out_alone() -> None:
    """Those behind it may be ready, and wait for it."""
    script = started(3, at_once=3, num_workers=1, timeout_s=5.0, retries=0, in_order=True)
    script.say(AlarmRang(), at=5.0)
    script.say(WorkerDied(0, CRASH))
    assert [each.task for each in script.of(ReportFailure)] == [0]
    script.say(WorkerStarted(1))
    assert script.of(SendTasks)[-1] == SendTasks(1, ((1, 1), (2, 1)))


def test_in_order_the_limit_counts_from_the_answer_before() -> None:
    """A task that waited for the one before it has its whole time."""
    script = started(3, at_once=2, num_workers=1, timeout_s=5.0, retries=0, in_order=True)
    script.now = 4.0
    script.finish(0, 0)
    script.say(AlarmRang(), at=8.9)
    assert not script.of(KillWorker)
    script.say(AlarmRang(), at=9.0)
    script.say(WorkerDied(0, CRASH))
    assert [each.task for each in script.of(ReportFailure)] == [1]


def test_one_that_is_answered_before_the_kill_is_not_blamed() -> None:
    """And neither are the others."""
    script = started(2, at_once=2, num_workers=1, timeout_s=5.0, retries=0)
    script.finish(0, 1)
    script.say(AlarmRang(), at=5.0)
    script.finish(0, 0)
    script.say(WorkerDied(0, CRASH))
    assert script.of(ReportFailure) == []
    assert len(script.of(DeliverResult)) == 2


def test_the_limit_counts_from_when_a_task_began() -> None:
    """Not from when it was sent: it waited for another to end."""
    script = started(
        5, at_once=2, num_workers=1, timeout_s=5.0, group_s=9.0, max_group=100, retries=0
    )
    script.finish(0, 0, seconds=0.01)
    assert sent_to(script, 0) == [0, 1, 2, 3]
    script.now = 4.0
    script.finish(0, 1, seconds=0.01)  # 3 begins
    script.say(AlarmRang(), at=5.0)  # 2 has run for 5 s
    script.say(WorkerDied(0, CRASH))
    assert [each.task for each in script.of(ReportFailure)] == [2]


def test_tasks_that_wait_are_taken_back_when_all_that_run_take_long() -> None:
    """While one of those ends sooner, the next one is begun there."""
    script = started(50, at_once=2, group_s=9.0, max_group=4)
    script.finish(0, 0, seconds=0.01)
    assert sent_to(script, 0) == [0, 1, 4, 5, 6, 7]
    script.now = RECLAIM_S / 2
    script.finish(0, 1, seconds=0.01)
    script.say(AlarmRang(), at=RECLAIM_S)
    assert script.flow._workers[0].returning == set(), "5 began half a second ago"
    script.say(AlarmRang(), at=RECLAIM_S * 1.5)
    assert list(script.flow._workers[0].tasks) == [4, 5]
    script.finish(0, 4, seconds=1.5)
    script.say(TasksReturned(0, (6, 7)))
    assert script.held_by(0)[0] == 6


@pytest.mark.parametrize("final", [False, True])
def test_a_failure_of_one_leaves_those_beside_it_alone(final: bool) -> None:
    """They go on, and keep the time at which they began."""
    script = started(3, at_once=3, num_workers=1, timeout_s=5.0, retries=1)
    script.say(TaskFailed(0, 1, 1, BOOM, 0.1, final=final), at=1.0)
    assert list(script.flow._workers[0].begun)[:2] == [0.0, 0.0]
    assert len(script.of(ReportFailure)) == final
