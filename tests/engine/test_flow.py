"""The flow by itself: events in, commands out; no clock, process or thread."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.engine.events import (
    AlarmRang,
    Cause,
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
    TaskFailed,
    TaskFinished,
    TasksForgotten,
    TasksQueued,
    TasksReturned,
    WorkerDied,
    WorkerStarted,
)
from forebay.engine.flow import MAX_FRUITLESS_DEATHS, Flow
from forebay.engine.limits import Limits
from forebay.engine.states import IllegalMoveError, Move

BOOM = Cause("exception", "ValueError", "boom")
CRASH = Cause("crash", "WorkerDiedError", "killed by SIGKILL")


class Script:
    """A flow, and the commands that each event brought."""

    def __init__(self, tasks: int, **limits: Any) -> None:
        settings: dict[str, Any] = {"num_workers": 2, "slots": 10_000, "lookahead": 1000, **limits}
        self.flow = Flow(Limits(**settings))
        self.now = 0.0
        self.log: list[Command] = self.flow.start(self.now)
        self.say(TasksQueued(tuple(range(tasks)), ended=True))

    def say(self, event: Event, at: float | None = None) -> list[Command]:
        self.now = self.now if at is None else at
        commands = self.flow.handle(event, self.now)
        self.flow.check()
        self.log += commands
        return commands

    def finish(self, worker: int, task: int, attempt: int = 1, seconds: float = 1.0) -> Any:
        return self.say(TaskFinished(worker, task, attempt, f"result {task}", 10, seconds))

    def held_by(self, worker: int) -> list[int]:
        """Return the tasks of the last message to a worker."""
        return [task for task, _ in [c for c in self.of(SendTasks) if c.worker == worker][-1].tasks]

    def of(self, kind: type) -> list[Any]:
        return [command for command in self.log if isinstance(command, kind)]


def started(tasks: int, **limits: Any) -> Script:
    """Return a script whose two workers have started."""
    script = Script(tasks, **limits)
    script.say(WorkerStarted(0))
    script.say(WorkerStarted(1))
    return script


def test_workers_start_together_and_no_more_than_there_is_work_for() -> None:
    """Three tasks on eight allowed workers start three."""
    script = Script(3, num_workers=8)
    assert [command.worker for command in script.of(StartWorker)] == [0, 1, 2]


def test_nothing_is_sent_before_a_worker_is_there() -> None:
    """A starting worker gets no task."""
    assert Script(3).of(SendTasks) == []


def test_each_free_worker_gets_the_next_task() -> None:
    """Tasks go out in the order of the source, to whoever is free."""
    script = started(5)
    assert script.of(SendTasks) == [SendTasks(0, ((0, 1),)), SendTasks(1, ((1, 1),))]
    assert SendTasks(1, ((2, 1),)) in script.finish(1, 1)


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
    """With every worker busy for a while, or nothing left for an idle one, nobody hurries."""
    script = started(12, group_s=0.05, max_group=256)
    held = {0: [0], 1: [1]}

    def finish(worker: int) -> bool:
        sent = script.finish(worker, held[worker].pop(0), seconds=0.0001)
        for command in [each for each in sent if isinstance(each, SendTasks)]:
            held[command.worker] += [task for task, _ in command.tasks]
        return script.flow.is_relaxed

    assert not script.flow.is_relaxed  # each holds one task: its answer brings it the next
    assert finish(0)  # now it is known how short they are: both get several
    while held[0]:
        relaxed = finish(0)
    assert len(held[1]) > 1, "worker 0 is at its end, and there is nothing to send"
    assert relaxed
    while len(held[1]) > 1:
        relaxed = finish(1)
    assert not relaxed


def test_a_failure_that_nobody_heard_of_is_forgotten_too() -> None:
    """In order, a failed task waits for its turn; forgetting it ends it."""
    script = started(3, in_order=True)
    script.say(TaskFailed(1, 1, 1, BOOM, 0.1))
    assert script.say(TasksForgotten(2)) == [DropTask(1)]
    assert DropTask(0) in script.finish(0, 0)


def test_results_are_delivered_as_they_come_without_order() -> None:
    """Without `in_order` a result is handed over at once."""
    script = started(3)
    script.finish(1, 1)
    assert [result.task for result in script.of(DeliverResult)] == [1]


def test_results_wait_for_their_turn_in_order() -> None:
    """With `in_order` the second result waits for the first, failures too."""
    script = started(3, in_order=True)
    script.finish(1, 1)
    assert script.of(DeliverResult) == []
    script.say(TaskFailed(0, 0, 1, BOOM, 0.1))
    ends = [command for command in script.log if isinstance(command, ReportFailure | DeliverResult)]
    assert [end.task for end in ends] == [0, 1]


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
    flow.handle(TasksQueued(tuple(range(6)), ended=True), 0.0)
    flow.handle(WorkerStarted(0), 0.0)
    flow.handle(WorkerStarted(1), 0.0)
    first = flow.handle(TaskFinished(0, 0, 1, "r", 10, 0.1), 0.0)  # 10 delivered, 10 running
    second = flow.handle(TaskFinished(1, 1, 1, "r", 10, 0.1), 0.0)  # 20 delivered
    assert [type(command) for command in first + second] == [DeliverResult, DeliverResult]
    assert SendTasks(0, ((2, 1),)) in flow.handle(ResultsReleased((0,)), 0.0)
    flow.check()


def test_a_result_larger_than_the_budget_is_still_made() -> None:
    """One task may always run, or nothing would ever move."""
    script = started(3, max_bytes=5)
    script.finish(0, 0)
    script.finish(1, 1)
    script.say(ResultsReleased((0, 1)))
    assert script.of(SendTasks)[-1].tasks == ((2, 1),)


def test_once_full_it_rests_until_the_low_mark() -> None:
    """Producers run to the high mark, rest, and start again under the low one."""
    flow = Flow(Limits(num_workers=1, slots=4, refill_below=2, lookahead=100))
    flow.start(0.0)
    flow.handle(TasksQueued(tuple(range(20)), ended=True), 0.0)
    flow.handle(WorkerStarted(0), 0.0)
    for task in range(4):
        flow.handle(TaskFinished(0, task, 1, "r", 1, 0.1), 0.0)
    for task in range(2):
        assert flow.handle(ResultsReleased((task,)), 0.0) == []
    assert SendTasks(0, ((4, 1),)) in flow.handle(ResultsReleased((2,)), 0.0)


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


def test_a_dead_worker_is_replaced() -> None:
    """As many workers as before, under new numbers."""
    script = started(10)
    script.say(WorkerDied(0, CRASH))
    assert [command.worker for command in script.of(StartWorker)] == [0, 1, 2]


def test_an_idle_worker_that_dies_blames_nobody() -> None:
    """Without an unanswered task there is no suspect."""
    script = started(1)
    script.say(WorkerDied(1, CRASH))
    assert script.of(ReportFailure) == script.of(ReportRetry) == []


def test_a_blameless_death_costs_no_attempt() -> None:
    """A lost host is nobody's fault: the task goes out again as the same attempt."""
    script = started(2, retries=0)
    script.say(WorkerDied(0, CRASH, blameless=True))
    script.say(WorkerStarted(2))
    assert script.of(SendTasks)[-1] == SendTasks(2, ((0, 1),))


def test_an_exception_is_tried_again_as_often_as_allowed() -> None:
    """`retries` more tries, then the failure is final."""
    script = started(1, retries=1, num_workers=1)
    script.say(TaskFailed(0, 0, 1, BOOM, 0.1))
    assert script.of(ReportRetry) == [ReportRetry(0, 1, BOOM)]
    script.say(TaskFailed(0, 0, 2, BOOM, 0.1))
    assert script.of(ReportFailure) == [ReportFailure(0, 2, 0.1, BOOM)]
    assert script.of(Finish) == [Finish()]


def test_a_final_failure_is_not_tried_again() -> None:
    """A missing file will be missing next time."""
    script = started(1, retries=5, num_workers=1)
    script.say(TaskFailed(0, 0, 1, BOOM, 0.1, final=True))
    assert script.of(ReportFailure) == [ReportFailure(0, 1, 0.1, BOOM)]


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
    alone = script.of(SendTasks)[-1].worker
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


def test_a_hang_is_killed_and_blamed_as_a_timeout() -> None:
    """The alarm condemns the worker; its death names the task and carries the stack."""
    script = started(2, timeout_s=5.0)
    assert script.of(SetAlarm) == [SetAlarm(5.0)]
    script.finish(1, 1)
    assert KillWorker(0) in script.say(AlarmRang(), at=5.0)
    script.say(WorkerDied(0, Cause("crash", "WorkerDiedError", "SIGKILL", "the stack")))
    (failure,) = script.of(ReportFailure)
    assert failure.task == 0
    assert (failure.cause.kind, failure.cause.traceback) == ("timeout", "the stack")
    assert "timeout=5 s" in failure.cause.message


def test_time_in_the_queue_is_not_time_in_the_task() -> None:
    """A task's clock starts when the one before it was answered."""
    script = started(300, timeout_s=5.0, group_s=0.05, max_group=100)
    script.say(TaskFinished(0, 0, 1, "r", 1, 0.001), at=4.0)
    assert script.say(AlarmRang(), at=5.0) == [KillWorker(1), SetAlarm(9.0)]


def test_an_answer_that_overtakes_the_kill_counts() -> None:
    """A task answered after its worker was condemned is done, and nobody is blamed."""
    script = started(2, timeout_s=5.0)
    script.say(AlarmRang(), at=5.0)
    script.finish(0, 0)
    script.say(WorkerDied(0, CRASH))
    assert [result.task for result in script.of(DeliverResult)] == [0]
    assert script.of(ReportFailure) == []


def test_late_answers_are_dropped() -> None:
    """An answer from a worker that is gone, or for an attempt that is over, changes nothing."""
    script = started(2, retries=1)
    script.say(WorkerDied(0, CRASH))
    assert script.finish(0, 0) == []
    assert script.finish(1, 1, attempt=7) == []
    assert script.finish(99, 1) == []
    assert script.of(DeliverResult) == []


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


def test_a_job_that_cannot_be_set_up_ends_the_run() -> None:
    """An exception before the first task will not go away by starting again."""
    script = Script(3)
    assert GiveUp(BOOM) in script.say(WorkerDied(0, BOOM))


def test_workers_that_keep_dying_without_an_answer_end_the_run() -> None:
    """Starting workers for ever would be a hang."""
    script = Script(3, num_workers=1)
    for number in range(MAX_FRUITLESS_DEATHS):
        script.say(WorkerDied(number, CRASH))
    assert script.of(GiveUp) == [GiveUp(CRASH)]


def test_workers_that_die_together_are_one_misfortune() -> None:
    """A host of many workers may be lost, and their replacements do the work."""
    many = 3 * MAX_FRUITLESS_DEATHS
    script = Script(many, num_workers=many)
    for number in range(many):
        script.say(WorkerStarted(number))
    for number in range(many):
        script.say(WorkerDied(number, CRASH, blameless=True))
    for number in range(many, 2 * many):
        script.say(WorkerStarted(number))
    for number in range(many, 2 * many):
        (task,) = script.held_by(number)
        script.finish(number, task)
    assert script.of(GiveUp) == []
    assert len(script.of(DeliverResult)) == many


def test_many_tasks_that_kill_their_workers_do_not_end_the_run() -> None:
    """Each death is laid to a task and used up, however many come in a row."""
    script = Script(3 * MAX_FRUITLESS_DEATHS, num_workers=1, retries=0)
    for number in range(3 * MAX_FRUITLESS_DEATHS):
        script.say(WorkerStarted(number))
        script.say(WorkerDied(number, CRASH))
    assert script.of(GiveUp) == []
    assert len(script.of(ReportFailure)) == 3 * MAX_FRUITLESS_DEATHS
    assert script.of(Finish) == [Finish()]


def test_the_source_is_read_as_work_is_needed() -> None:
    """A long source is not read ahead of the workers by more than `lookahead`."""
    flow = Flow(Limits(num_workers=1, slots=100, lookahead=4))
    assert flow.start(0.0) == [FetchTasks(4)]
    flow.handle(TasksQueued((0, 1, 2, 3), ended=False), 0.0)
    assert FetchTasks(3) not in flow.handle(WorkerStarted(0), 0.0)
    assert FetchTasks(2) in flow.handle(TaskFinished(0, 0, 1, "r", 1, 0.1), 0.0)


def test_an_empty_source_finishes_at_once() -> None:
    """No task, no worker, no wait."""
    flow = Flow(Limits(num_workers=2, slots=4, lookahead=4))
    flow.start(0.0)
    assert flow.handle(TasksQueued((), ended=True), 0.0) == [Finish()]


def test_an_illegal_move_tells_the_tasks_story() -> None:
    """A bug in the flow stops it with the task's history, and changes nothing."""
    script = started(1)
    with pytest.raises(IllegalMoveError, match=r"task 0 is running.*SENT"):
        script.flow._move(0, Move.DELIVERED)
    script.flow.check()
