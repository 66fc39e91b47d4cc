"""The flow by itself: events in, commands out; no clock, process or thread."""

from __future__ import annotations

import pytest
from scripted import BOOM, CRASH, Script, check, started

from forebay.engine.commands import (
    DeliverResult,
    FetchTasks,
    Finish,
    SendTasks,
    StartWorker,
)
from forebay.engine.flow import Flow
from forebay.engine.limits import Limits
from forebay.engine.tasks import IllegalMoveError, Move
from forebay.pools.events import (
    AlarmRang,
    ResultsReleased,
    TaskFailed,
    TaskFinished,
    TasksQueued,
    TasksReturned,
    WorkerDied,
    WorkerStarted,
)


def test_workers_start_together_and_no_more_than_there_is_work_for() -> None:
    """Three tasks on eight allowed workers start three."""
    script = Script(3, num_workers=8)
    assert [command.incarnation for command in script.of(StartWorker)] == [0, 1, 2]


def test_long_tasks_are_never_bound_to_a_busy_worker() -> None:
    """A task that takes longer than a message's worth of work waits for a free worker."""
    script = started(10, group_s=0.05, max_group=100)
    script.finish(0, 0, seconds=3.0)
    assert all(len(command.tasks) == 1 for command in script.of(SendTasks))


def test_short_tasks_travel_in_groups() -> None:
    """Once tasks are known to be short, a message holds about `group_s` of them."""
    script = started(1000, group_s=0.05, max_group=256)
    script.finish(0, 0, seconds=0.001)
    assert len(script.held_by(0)) == 50


def test_the_last_tasks_are_shared_out_evenly() -> None:
    """A worker takes half its share of the tail, so that the last groups are small."""
    script = started(12, group_s=0.05, max_group=256)
    script.finish(0, 0, seconds=0.0001)
    assert len(script.held_by(0)) == 3


def test_answers_may_wait_while_none_of_them_changes_anything() -> None:
    """With every worker busy for that time, or nothing left for an idle one, nobody hurries."""
    script = started(12, group_s=0.05, max_group=256)
    held = {0: [0], 1: [1]}

    def finish(worker: int) -> bool:
        sent = script.finish(worker, held[worker].pop(0), seconds=0.0001)
        for command in [each for each in sent if isinstance(each, SendTasks)]:
            held[command.incarnation] += [task for task, _ in command.tasks]
        return script.flow.answers_can_wait(0.00005)

    # Each holds one task: its answer brings it the next.
    assert not script.flow.answers_can_wait(0.00005)
    assert finish(0)  # now it is known how short they are: both get several
    assert not script.flow.answers_can_wait(0.001), "that is longer than their work takes"
    while held[0]:
        can_wait = finish(0)
    assert len(held[1]) > 1, "worker 0 is at its end, and there is nothing to send"
    assert can_wait
    while len(held[1]) > 1:
        can_wait = finish(1)
    assert not can_wait


def test_with_order_what_is_awaited_is_tried_again_first() -> None:
    """Retries queue in the order of the source, whichever failed first."""
    script = started(5, in_order=True, retries=1, slots=2)
    script.say(TaskFailed(1, 1, 1, BOOM, 0.1))
    assert script.held_by(1) == [1]
    script.say(WorkerDied(1, CRASH))
    script.say(WorkerDied(0, CRASH))
    script.say(WorkerStarted(3))
    assert script.of(SendTasks)[-1] == SendTasks(3, ((0, 2),))


def test_no_more_is_made_than_there_are_slots() -> None:
    """Slots count what runs, waits and is in the consumer's hands; releasing frees them."""
    script = started(10, slots=2)
    script.finish(0, 0)
    script.finish(1, 1)
    assert len(script.of(SendTasks)) == 2
    script.say(ResultsReleased((0,)))
    assert [command.tasks for command in script.of(SendTasks)[2:]] == [((2, 1),)]


def test_no_more_is_made_than_there_are_bytes() -> None:
    """A running task reserves as much as the largest result so far."""
    flow = Flow(Limits(num_workers=2, slots=100, max_bytes=25, lookahead=10))
    flow.start(0.0)
    flow.handle([TasksQueued(tuple(range(6)), ended=True)], 0.0)
    flow.handle([WorkerStarted(0)], 0.0)
    flow.handle([WorkerStarted(1)], 0.0)
    first = flow.handle([TaskFinished(0, 0, 1, "r", 10, 0.1)], 0.0)  # 10 delivered, 10 running
    second = flow.handle([TaskFinished(1, 1, 1, "r", 10, 0.1)], 0.0)  # 20 delivered
    assert [type(command) for command in first + second] == [DeliverResult, DeliverResult]
    assert SendTasks(0, ((2, 1),)) in flow.handle([ResultsReleased((0,))], 0.0)
    check(flow)


def test_a_result_larger_than_the_budget_is_still_made() -> None:
    """One task may always run, or nothing would ever move."""
    script = started(3, max_bytes=5)
    script.finish(0, 0)
    script.finish(1, 1)
    script.say(ResultsReleased((0, 1)))
    assert script.of(SendTasks)[-1].tasks == ((2, 1),)


def test_tasks_bound_to_a_worker_wait_for_bytes_too() -> None:
    """Also when what runs may become larger than what is left, so that there is less than none."""
    script = started(4, (0, 1, 0, 1), max_bytes=15, in_order=True, max_group=1)
    for worker, task in ((0, 0), (1, 1), (0, 2)):
        sent = script.of(SendTasks)
        assert ((3, 1),) not in [each.tasks for each in sent]
        script.finish(worker, task)
        script.say(ResultsReleased((task,)))
    assert script.of(SendTasks)[-1] == SendTasks(1, ((3, 1),))


def test_once_full_it_rests_until_the_low_mark() -> None:
    """Producers run to the high mark, rest, and start again under the low one."""
    flow = Flow(Limits(num_workers=1, slots=4, refill_below=2, lookahead=100))
    flow.start(0.0)
    flow.handle([TasksQueued(tuple(range(20)), ended=True)], 0.0)
    flow.handle([WorkerStarted(0)], 0.0)
    for task in range(4):
        flow.handle([TaskFinished(0, task, 1, "r", 1, 0.1)], 0.0)
    for task in range(2):
        assert flow.handle([ResultsReleased((task,))], 0.0) == []
    assert SendTasks(0, ((4, 1),)) in flow.handle([ResultsReleased((2,))], 0.0)


def test_what_is_put_back_is_made_although_the_buffer_was_full() -> None:
    """It was full of what a slow worker held: without that, it is filled to the mark."""
    script = started(100, slots=12, refill_below=2, group_s=0.05, max_group=100, lookahead=100)
    script.finish(0, 0, seconds=0.001)
    script.finish(1, 1, seconds=0.001)
    held = script.held_by(0)
    assert len(held) > 2, "it is full of these"
    for task in script.held_by(1):
        script.say(TaskFinished(1, task, 1, "r", 1, 0.001))
    before = len(script.of(SendTasks))
    script.say(TasksReturned(0, tuple(held[1:])))
    assert [each.tasks for each in script.of(SendTasks)[before:]] == [
        tuple((task, 1) for task in held[1:])
    ]


def test_no_worker_holds_the_slots_of_the_others() -> None:
    """However short tasks are: a worker without a slot has nothing to do."""
    script = started(100, slots=6, group_s=0.05, max_group=100, in_order=True)
    script.finish(0, 0, seconds=0.001)
    script.finish(1, 1, seconds=0.001)
    script.say(ResultsReleased((0, 1)))
    assert sorted(len(script.flow._workers[worker].tasks) for worker in (0, 1)) == [3, 3]


def test_the_last_slots_are_for_the_tasks_that_come_first() -> None:
    """A worker that may run only later tasks leaves slots for those of a late worker."""
    script = Script(20, (0, 1) * 10, slots=6, in_order=True, max_group=10, all_workers=True)
    script.say(WorkerStarted(1))
    assert script.held_by(1) == [1, 3, 5]
    script.say(WorkerStarted(0))
    assert script.held_by(0) == [0, 2, 4]


def test_tasks_given_back_go_to_others_in_order() -> None:
    """What a slow worker had not begun is sent again first."""
    script = started(200, group_s=0.05, max_group=100)
    script.finish(0, 0, seconds=0.01)
    held = script.held_by(0)
    script.say(TasksReturned(0, tuple(held[1:])))
    script.finish(1, 1, seconds=0.01)
    assert script.of(SendTasks)[-1].tasks[0] == (held[1], 1)


def test_tasks_behind_one_that_takes_long_go_to_others() -> None:
    """What a worker holds behind a long task is taken from it, and done by the others."""
    script = started(12, group_s=0.05, max_group=100)
    script.finish(0, 0, seconds=0.001)
    long, *behind = script.held_by(0)
    assert behind
    script.say(TaskFinished(1, 1, 1, "r", 1, 0.001), at=0.9)
    script.say(AlarmRang(), at=1.0)
    while held := script.flow._workers[1].tasks:
        script.say(TaskFinished(1, held[0], 1, "r", 1, 0.001), at=1.1)
    assert set(behind) <= {result.task for result in script.of(DeliverResult)}
    script.say(TaskFinished(0, long, 1, "r", 1, 1.2), at=1.2)
    assert script.of(Finish) == [Finish()]
    assert script.say(TasksReturned(0, tuple(behind))) == [], "they are not done twice"


def test_a_worker_whose_answers_were_under_way_for_long_is_not_left_without_work() -> None:
    """This process was suspended: tasks are taken back, and turn out to be answered already."""
    script = started(9, group_s=0.05, max_group=100)
    script.say(WorkerDied(1, CRASH, external=True))
    script.finish(0, 0, seconds=0.01)
    held = script.held_by(0)
    assert len(held) > 1
    script.say(AlarmRang(), at=5.0)
    for task in held:
        script.say(TaskFinished(0, task, 1, "r", 1, 0.01), at=5.1)
    assert script.flow._workers[0].tasks, "it gets those that were taken back, or others"


def test_the_source_is_read_as_work_is_needed() -> None:
    """A long source is not read ahead of the workers by more than `lookahead`."""
    flow = Flow(Limits(num_workers=1, slots=100, lookahead=4))
    assert flow.start(0.0) == [FetchTasks(4)]
    flow.handle([TasksQueued((0, 1, 2, 3), ended=False)], 0.0)
    assert FetchTasks(3) not in flow.handle([WorkerStarted(0)], 0.0)
    assert FetchTasks(2) in flow.handle([TaskFinished(0, 0, 1, "r", 1, 0.1)], 0.0)


def test_an_illegal_move_tells_the_tasks_story() -> None:
    """A bug in the flow stops it with the task's history, and changes nothing."""
    script = started(1)
    with pytest.raises(IllegalMoveError, match=r"task 0 is running.*SENT"):
        script.flow._move(Move.DELIVERED, 0)
    check(script.flow)


# ---- work that workers hold while nobody sends more ----------------------------------------------


def held(script: Script) -> list[list[int]]:
    return [list(each.tasks) for each in script.flow._workers.values()]


def test_workers_hold_a_second_of_work_and_take_turns_at_it() -> None:
    """In groups of `group_s`, so that results come in the order of the tasks."""
    script = started(10_000, group_s=0.02, ahead_s=1.0, max_group=64)
    script.finish(0, 0, seconds=0.01)
    first, second = held(script)
    assert first[:4] == [2, 3, 6, 7]
    assert second[:5] == [1, 4, 5, 8, 9]
    assert 95 <= len(first) <= 101
    assert 95 <= len(second) <= 101


def test_longer_tasks_are_held_one_by_one_and_the_longest_not_at_all() -> None:
    """At most as many as take a second, without the one that is begun when it is over."""
    script = started(100, group_s=0.02, ahead_s=1.0, max_group=64)
    script.finish(0, 0, seconds=0.15)
    assert [len(each) for each in held(script)] == [6, 6]
    script = started(100, group_s=0.02, ahead_s=1.0, max_group=64)
    script.finish(0, 0, seconds=2.0)
    assert [len(each) for each in held(script)] == [1, 1]


@pytest.mark.parametrize("limit", [{"max_bytes": 100}, {"slots": 10}, {"slots": 10, "in_order": 1}])
def test_work_that_is_held_counts_as_work_that_is_made(limit) -> None:
    """Within the bytes and the results of the buffer; each worker has its share."""
    script = started(10_000, group_s=0.02, ahead_s=1.0, max_group=64, **limit)
    script.finish(0, 0, seconds=0.01)  # 10 bytes
    assert sorted(len(each) for each in held(script)) == [4, 5]


def test_a_worker_holds_no_more_than_a_thousand_tasks() -> None:
    """Each takes memory, however quick it is."""
    script = started(100_000, slots=100_000, group_s=0.02, ahead_s=1.0, max_group=64)
    script.finish(0, 0, seconds=1e-6)
    assert all(1024 <= len(each) <= 1024 + 64 for each in held(script))
