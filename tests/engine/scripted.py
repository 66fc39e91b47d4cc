"""A flow by itself, told one event after another, and what it commanded."""

from __future__ import annotations

from typing import Any

from forebay.engine.commands import Command, SendTasks
from forebay.engine.flow import Flow
from forebay.engine.limits import Limits
from forebay.engine.tasks import State
from forebay.failures import Failure
from forebay.pools.events import Event, TaskFinished, TasksQueued, WorkerStarted

BOOM = Failure("exception", "ValueError", "boom")
CRASH = Failure("crash", "WorkerDiedError", "killed by SIGKILL")


class Script:
    """A flow, and the commands that each event brought."""

    def __init__(
        self, tasks: int, worker_ids: tuple[int, ...] | None = None, **limits: Any
    ) -> None:
        settings: dict[str, Any] = {"num_workers": 2, "slots": 10_000, "lookahead": 1000, **limits}
        self.flow = Flow(Limits(**settings))
        self.now = 0.0
        self.log: list[Command] = self.flow.start(self.now)
        self.say(TasksQueued(tuple(range(tasks)), ended=True, worker_ids=worker_ids))

    def say(self, event: Event, at: float | None = None) -> list[Command]:
        self.now = self.now if at is None else at
        commands = self.flow.handle([event], self.now)
        check(self.flow)
        self.log += commands
        return commands

    def finish(self, worker: int, task: int, attempt: int = 1, seconds: float = 1.0) -> Any:
        return self.say(TaskFinished(worker, task, attempt, f"result {task}", 10, seconds))

    def held_by(self, worker: int) -> list[int]:
        """Return the tasks of the last message to a worker."""
        return [
            task for task, _ in [c for c in self.of(SendTasks) if c.incarnation == worker][-1].tasks
        ]

    def of(self, kind: type) -> list[Any]:
        return [command for command in self.log if isinstance(command, kind)]


def started(tasks: int, worker_ids: tuple[int, ...] | None = None, **limits: Any) -> Script:
    """Return a script whose two workers have started."""
    script = Script(tasks, worker_ids, **limits)
    script.say(WorkerStarted(0))
    script.say(WorkerStarted(1))
    return script


def check(flow: Flow) -> None:
    """Assert the invariants: every task is in exactly one state, and no slot is lost."""
    held = dict.fromkeys(State, 0)
    for task in flow._tasks.values():
        held[task.state] += 1
    for state in (State.QUEUED, State.RUNNING, State.READY, State.LEASED):
        assert held[state] == flow.counts[state], (state, held, flow.counts)
    bound = [key for queue in flow._bound.values() for key in queue]
    waiting = [*flow._queue, *bound, *flow._alone, *flow._retries, *flow._suspects]
    assert len(waiting) == len(set(waiting)) == held[State.QUEUED]
    on_workers = [key for worker in flow._workers.values() for key in worker.tasks]
    assert len(on_workers) == len(set(on_workers)) == held[State.RUNNING]
    worker_ids = [worker.worker_id for worker in flow._workers.values()]
    assert len(worker_ids) == len(set(worker_ids)), worker_ids
    surplus = [each for each in flow._workers.values() if flow._is_surplus(each)]
    assert flow._over or (len(surplus) == flow._surplus and all(w.tasks for w in surplus))
    used = held[State.RUNNING] + held[State.READY] + held[State.LEASED]
    assert used <= flow.limits.slots, (used, flow.limits.slots)
    ready = [t for t in flow._tasks.values() if t.state in (State.READY, State.LEASED)]
    soonest = flow._soonest_due(flow._workers.values())
    assert soonest is None or (flow._alarm is not None and flow._alarm <= soonest)
    assert flow.held_bytes == sum(task.nbytes for task in ready)
