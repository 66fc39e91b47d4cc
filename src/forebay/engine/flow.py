"""The engine's mind: events in, commands out. PURE: no clock, process, thread or file.

    consumer ── ResultsReleased, TasksForgotten ──┐
    pool ────── WorkerStarted, TaskFinished, … ───┼─> Flow.handle(event, now) ─> [Command, …]
    source ──── TasksQueued ──────────────────────┘

Guarantees, checked by a random state machine in the tests:
- `free + running + ready + leased == slots`, and each task in exactly one state (`check`);
- a task is delivered or reported failed exactly once, whatever dies on the way;
- an answer from a worker that is gone, or for an attempt that is over, changes nothing;
- with `in_order`, results and failures come in the order of the source.

Long because every decision about a task is here, so that nothing else has to be read to know it.

Who is blamed. A worker acknowledges each task by itself and runs its tasks in the order they
were sent, so when it dies the first unanswered one is the suspect and all others are innocent.
A suspect is tried again alone, with nothing else running, after everything else (or once
`max_suspects` wait): an innocent that was hit by its neighbour's memory gets a fair trial. Where
the pool says that a death may be a neighbour's doing, it uses up a try only if nothing ran beside
it. With `in_order` a retry comes at once instead, since all delivery waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

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
    RoomGrew,
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
from forebay.engine.limits import GIVE_BACK_S, RECLAIM_S, Limits
from forebay.engine.states import TRANSITIONS, IllegalMoveError, Move, State

# Generations of workers lost in a row, with no answer and no suspect, after which starting more is
# pointless.
MAX_FRUITLESS_DEATHS = 10


@dataclass(slots=True)
class _Task:
    """One unit of work and where it stands; `attempt` counts from 1, `place` in the source.

    `lane` is that of the only worker that may have it. An unwanted one ends with its attempt.
    """

    place: int
    lane: int | None = None
    unwanted: bool = False
    state: State = State.QUEUED
    attempt: int = 1
    nbytes: int = 0
    seconds: float = 0.0
    result: Any = None
    cause: Cause | None = None
    story: list[Move] = field(default_factory=list)


@dataclass(slots=True)
class _Worker:
    """A worker, the tasks it holds in the order it runs them, and when it began the first."""

    lane: int
    started: bool = False
    tasks: deque[int] = field(default_factory=deque)
    begun: float | None = None
    condemned: int | None = None
    robbed: bool = False  # it still holds tasks that were taken from it, until it gives them back


class Flow:
    """Decides which worker runs what, and what becomes of each answer, death and delay."""

    def __init__(self, limits: Limits) -> None:
        """Start with no workers and no tasks; the first `handle` asks for both."""
        self.limits = limits
        self.counts = dict.fromkeys(State, 0)
        self.held_bytes = 0
        self._tasks: dict[int, _Task] = {}
        self._workers: dict[int, _Worker] = {}
        self._next_worker = 0
        self._next_place = 0
        self._queue: deque[int] = deque()  # by place: fresh tasks, and innocent ones to be redone
        self._lanes: dict[int, deque[int]] = {}  # likewise, for tasks that are bound to a lane
        self._ended_lanes: dict[int, Cause] = {}  # nothing is sent there until tasks are forgotten
        self._retries: deque[int] = deque()  # raised before: again, each in a message of its own
        self._suspects: deque[int] = deque()  # died or hung before: again, alone on the machine
        self._trying_suspects = False
        self._trial: int | None = None  # the suspect that was sent alone last
        self._order: deque[int] = deque()  # what to deliver next; kept only with in_order
        self._largest = 0  # bytes to expect of a running task: the largest result seen
        self._estimate: float | None = None  # seconds a task takes, smoothed
        self._filling = True
        self._low_mark = 0
        self._fetching = False
        self._ended = False
        self._fruitless_deaths = 0
        self._newcomers = 0  # the first worker that was started after the last such death
        self._alarm: float | None = None
        self._over = False

    # ---- the one door --------------------------------------------------------------------------

    def start(self, now: float) -> list[Command]:
        """Return the first commands."""
        commands: list[Command] = []
        self._go_on(now, commands)
        return commands

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in what happened at `now` and return what is to be done, in order."""
        commands: list[Command] = []
        match event:
            case TaskFinished():
                self._on_finished(event, now, commands)
            case TaskFailed():
                self._on_failed(event, now, commands)
            case TasksQueued():
                self._on_queued(event)
            case TasksReturned():
                self._on_returned(event, now, commands)
            case WorkerStarted():
                worker = self._workers.get(event.worker)
                if worker is not None:
                    worker.started = True
            case WorkerDied():
                self._on_died(event, commands)
            case RoomGrew():
                self.limits = replace(self.limits, num_workers=event.num_workers)
            case AlarmRang():
                self._on_alarm(now, commands)
            case ResultsReleased():
                for key in event.tasks:
                    self.held_bytes -= self._tasks[key].nbytes
                    self._move(key, Move.RELEASED)
                    del self._tasks[key]
            case TasksForgotten():
                self._on_forgotten(event.before, commands)
        self._go_on(now, commands)
        return commands

    # ---- events --------------------------------------------------------------------------------

    def _on_queued(self, event: TasksQueued) -> None:
        self._fetching = False
        self._ended = event.ended
        lanes = event.lanes or (None,) * len(event.tasks)
        for key, lane in zip(event.tasks, lanes, strict=True):
            self._tasks[key] = _Task(self._next_place, lane)
            self._next_place += 1
            self.counts[State.QUEUED] += 1
            self._queue_of(key).append(key)
            if self.limits.in_order:
                self._order.append(key)

    def _on_forgotten(self, before: int, commands: list[Command]) -> None:
        for key in [key for key in self._tasks if key < before]:
            task = self._tasks[key]
            if task.state is State.RUNNING:
                task.unwanted = True  # its worker cannot be interrupted
            elif task.state is State.QUEUED:
                for queue in (self._queue_of(key), self._retries, self._suspects):
                    if key in queue:
                        queue.remove(key)
                self._drop(key, commands)
            elif task.state is State.READY:
                self.held_bytes -= task.nbytes
                self._drop(key, commands)
            elif task.state is State.FAILED:  # and not reported yet, in order
                del self._tasks[key]
                commands.append(DropTask(key))
        self._ended_lanes.clear()
        self._order = deque(key for key in self._order if key >= before)
        self._deliver(commands)

    def _on_finished(self, event: TaskFinished, now: float, commands: list[Command]) -> None:
        task = self._answered(event.worker, event.task, event.attempt, now, commands)
        if task is None:
            return
        self._fruitless_deaths = 0
        old = self._estimate
        self._estimate = event.seconds if old is None else old + 0.1 * (event.seconds - old)
        self._largest = max(self._largest, event.nbytes)
        if task.unwanted:
            self._drop(event.task, commands)
            return
        task.nbytes, task.seconds, task.result = event.nbytes, event.seconds, event.result
        self.held_bytes += event.nbytes
        self._move(event.task, Move.FINISHED)
        if not self.limits.in_order:
            self._order.append(event.task)
        self._deliver(commands)

    def _on_failed(self, event: TaskFailed, now: float, commands: list[Command]) -> None:
        task = self._answered(event.worker, event.task, event.attempt, now, commands)
        if task is None:
            return
        self._fruitless_deaths = 0
        task.seconds = event.seconds
        self._fail(event.task, event.cause, commands, self._retries, final=event.final)

    def _on_returned(self, event: TasksReturned, now: float, commands: list[Command]) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            return
        worker.robbed = False
        given = set(event.tasks)
        self._take_back(worker, [key for key in worker.tasks if key in given], commands)
        self._begin(worker, now, commands)

    def _on_died(self, event: WorkerDied, commands: list[Command]) -> None:
        worker = self._workers.pop(event.worker, None)
        if worker is None:
            return
        suspect, cause = (worker.tasks[0] if worker.tasks else None), event.cause
        if event.blameless:
            suspect = None
        elif worker.condemned is not None:
            suspect = worker.condemned if worker.condemned == suspect else None
            cause = Cause(
                "timeout",
                "SampleTimeoutError",
                f"ran past timeout={self.limits.timeout_s:g} s; its worker was killed",
                event.cause.traceback,
            )
        # A death that is laid to a task uses up one of its tries, so those come to an end.
        if suspect is not None:
            self._fruitless_deaths = 0
        elif event.worker >= self._newcomers:
            # Many that die together, with their host, are one misfortune.
            self._fruitless_deaths += 1
            self._newcomers = self._next_worker
        broken = not worker.started and event.cause.kind == "exception"
        if broken or self._fruitless_deaths >= MAX_FRUITLESS_DEATHS:
            self._over = True
            commands.append(GiveUp(event.cause))
        for key in worker.tasks:
            if key != suspect:
                self._move(key, Move.ORPHANED)
                self._put_back(key, commands)
        if suspect is not None and event.doubtful and self._may_be_innocent(suspect):
            self._move(suspect, Move.DOUBTED)
            if self._tasks[suspect].unwanted:
                self._drop(suspect, commands)
            else:
                self._suspects.append(suspect)
        elif suspect is not None:
            if cause.kind == "timeout":
                self._tasks[suspect].seconds = self.limits.timeout_s or 0.0
            self._fail(suspect, cause, commands, self._suspects)

    def _may_be_innocent(self, suspect: int) -> bool:
        """Tell whether a suspect had neighbours, and can be tried without any."""
        waits = not self.limits.in_order and self._tasks[suspect].lane is None
        return waits and self._trial != suspect and self.limits.num_workers > 1

    def _on_alarm(self, now: float, commands: list[Command]) -> None:
        timeout = self.limits.timeout_s
        for number, worker in self._workers.items():
            if worker.begun is None or worker.condemned is not None:
                continue
            if timeout is not None and now >= worker.begun + timeout:
                worker.condemned = worker.tasks[0]
                commands.append(KillWorker(number))
            elif self._is_overdue(worker, now):
                self._take_back(worker, list(worker.tasks)[1:], commands)
                worker.robbed = True
        times = [at for worker in self._workers.values() if (at := self._due(worker)) is not None]
        self._alarm = min(times, default=None)
        if self._alarm is not None:
            commands.append(SetAlarm(self._alarm))

    def _take_back(self, worker: _Worker, keys: list[int], commands: list[Command]) -> None:
        """Put tasks that a worker has not begun back into the queue."""
        taken = set(keys)
        for key in keys:
            self._move(key, Move.RETURNED)
            self._put_back(key, commands)
        worker.tasks = deque(key for key in worker.tasks if key not in taken)

    # ---- what becomes of a task ----------------------------------------------------------------

    def _answered(
        self, number: int, key: int, attempt: int, now: float, commands: list[Command]
    ) -> _Task | None:
        """Take an answered task from its worker; None if the answer is late or unknown."""
        worker = self._workers.get(number)
        if worker is None or not worker.tasks or worker.tasks[0] != key:
            return None
        task = self._tasks[key]
        if task.attempt != attempt:
            return None
        worker.tasks.popleft()
        self._begin(worker, now, commands)
        return task

    def _fail(
        self,
        key: int,
        cause: Cause,
        commands: list[Command],
        again: deque[int],
        final: bool = False,
    ) -> None:
        task = self._tasks[key]
        if task.unwanted:
            self._drop(key, commands)
            return
        if task.attempt > self.limits.retries or final:
            if self.limits.lanes_end and task.lane is not None:
                self._ended_lanes[task.lane] = cause
            self._end(key, Move.FAILED, cause, commands)
            return
        self._move(key, Move.RETRIED)
        commands.append(ReportRetry(key, task.attempt, cause))
        task.attempt += 1
        if self.limits.in_order or task.lane is not None:
            self._put_back(key, commands)
        else:
            again.append(key)

    def _end(self, key: int, move: Move, cause: Cause, commands: list[Command]) -> None:
        """Let a task be over, without a result."""
        self._move(key, move)
        self._tasks[key].cause = cause
        if not self.limits.in_order:
            self._order.append(key)
        self._deliver(commands)

    def _abandon(self, commands: list[Command]) -> None:
        """End what waits for a lane that came to an end: it would meet the same fault again."""
        for lane, cause in self._ended_lanes.items():
            queue = self._lanes.get(lane)
            while queue:
                self._end(queue.popleft(), Move.ABANDONED, cause, commands)

    def _put_back(self, key: int, commands: list[Command]) -> None:
        """Queue a task at its place in the source: before all that have not been sent yet."""
        if self._tasks[key].unwanted:
            self._drop(key, commands)
            return
        place, at, queue = self._tasks[key].place, 0, self._queue_of(key)
        while at < len(queue) and self._tasks[queue[at]].place < place:
            at += 1
        queue.insert(at, key)

    def _queue_of(self, key: int) -> deque[int]:
        lane = self._tasks[key].lane
        return self._queue if lane is None else self._lanes.setdefault(lane, deque())

    def _drop(self, key: int, commands: list[Command]) -> None:
        """End a task that nobody wants."""
        self._move(key, Move.FORGOTTEN)
        del self._tasks[key]
        commands.append(DropTask(key))

    def _deliver(self, commands: list[Command]) -> None:
        """Hand over what is next in line."""
        while self._order:
            key = self._order[0]
            task = self._tasks[key]
            if task.state is State.FAILED:
                assert task.cause is not None
                commands.append(ReportFailure(key, task.attempt, task.seconds, task.cause))
                del self._tasks[key]
            elif task.state is State.READY:
                self._move(key, Move.DELIVERED)
                commands.append(self._delivery(key, task))
                task.result = None
            else:
                return
            self._order.popleft()

    @staticmethod
    def _delivery(key: int, task: _Task) -> DeliverResult:
        return DeliverResult(key, task.attempt, task.seconds, task.nbytes, task.result)

    def _move(self, key: int, move: Move) -> None:
        task = self._tasks[key]
        after = TRANSITIONS.get((task.state, move))
        if after is None:
            story = " > ".join(past.name for past in task.story)
            raise IllegalMoveError(f"task {key} is {task.state.value}, not to be {move}; {story}")
        self.counts[task.state] -= 1
        self.counts[after] += 1
        task.state = after
        task.story.append(move)

    # ---- what happens next ---------------------------------------------------------------------

    def _go_on(self, now: float, commands: list[Command]) -> None:
        if self._over:
            return
        if self._ended_lanes:
            self._abandon(commands)
        counts = self.counts
        todo = counts[State.QUEUED] + counts[State.RUNNING]
        if self._ended and not todo and not counts[State.READY] and not self._fetching:
            self._over = True
            commands.append(Finish())
            return
        limits = self.limits
        needed = limits.num_workers if limits.all_workers else min(limits.num_workers, todo)
        if counts[State.QUEUED] or limits.all_workers:
            while len(self._workers) < needed:
                self._start_worker(commands)
        if counts[State.QUEUED]:
            self._feed(now, commands)
        queued = counts[State.QUEUED] - len(self._retries) - len(self._suspects)
        if not limits.lookahead:
            return
        if not self._ended and not self._fetching and queued <= limits.lookahead // 2:
            self._fetching = True
            commands.append(FetchTasks(limits.lookahead - queued))

    def _start_worker(self, commands: list[Command]) -> None:
        taken = {worker.lane for worker in self._workers.values()}
        lane = next(lane for lane in range(self.limits.num_workers) if lane not in taken)
        self._workers[self._next_worker] = _Worker(lane)
        commands.append(StartWorker(self._next_worker, lane))
        self._next_worker += 1

    def _feed(self, now: float, commands: list[Command]) -> None:
        """Send work to every worker that has room for it."""
        if self._trial is not None:
            if self.counts[State.RUNNING]:
                return
            self._trial = None
        fresh = bool(self._queue or self._retries or any(self._lanes.values()))
        if not self._suspects:
            self._trying_suspects = False
        elif len(self._suspects) >= self.limits.max_suspects or (self._ended and not fresh):
            self._trying_suspects = True
        alone = self._trying_suspects
        if alone and self.counts[State.RUNNING]:
            return
        for number, worker in self._workers.items():
            if not worker.started or worker.condemned is not None or worker.robbed:
                continue
            bound = self._lanes.get(worker.lane)
            queue = self._suspects if alone else self._retries or bound or self._queue
            room = 1 if alone else self._room(worker, queue, now)
            if not room or not queue:
                continue
            # What all delivery waits for must not wait for room in its turn.
            awaited = self._order_waits_for(queue[0]) and not self.counts[State.LEASED]
            count = min(room, self._free_slots(awaited), len(queue))
            if count <= 0:
                continue
            keys = [queue.popleft() for _ in range(count)]
            for key in keys:
                self._move(key, Move.SENT)
            idle = not worker.tasks
            worker.tasks.extend(keys)
            if idle:
                self._begin(worker, now, commands)
            else:
                self._watch(worker, commands)
            pairs = tuple((key, self._tasks[key].attempt) for key in keys)
            commands.append(SendTasks(number, pairs))
            if alone:
                (self._trial,) = keys
                return

    def _order_waits_for(self, key: int) -> bool:
        return self.limits.in_order and key == self._order[0]

    def _room(self, worker: _Worker, queue: deque[int], now: float) -> int:
        """Return how many tasks to send: about `group_s` of work, none bound to it needlessly."""
        held, limits = len(worker.tasks), self.limits
        if queue is self._lanes.get(worker.lane):
            return limits.max_group  # nobody else can take them
        if queue is self._retries or self._estimate is None or not limits.group_s:
            return 0 if held else 1
        is_slow = held and worker.begun is not None and now - worker.begun > GIVE_BACK_S
        if is_slow or held * self._estimate > limits.group_s / 2:
            return 0  # the next one would only wait there, where no other worker can take it
        size = min(limits.max_group, int(limits.group_s / max(self._estimate, 1e-9)))
        if self._ended:
            # Guided self-scheduling (Polychronopoulos and Kuck, 1987), with half a share: groups
            # shrink towards the end, so that all workers end together.
            size = min(size, -(-len(queue) // (2 * limits.num_workers)))
        return max(size, 0 if held else 1)

    def _free_slots(self, awaited: bool) -> int:
        """Return how many tasks may begin now, within slots, bytes and the low mark."""
        limits, running = self.limits, self.counts[State.RUNNING]
        made = running + self.counts[State.READY] + self.counts[State.LEASED]
        slots = limits.slots - made
        free = slots
        if limits.max_bytes is not None and self._largest:
            left = limits.max_bytes - self.held_bytes - running * self._largest
            free = min(slots, left // self._largest)
        if limits.refill_below is not None:
            if free <= 0 and self._filling:
                self._filling = False
                low = limits.refill_below
                self._low_mark = low if isinstance(low, int) else max(int(low * made), 1)
            elif made < self._low_mark:
                self._filling = True
            if not self._filling:
                free = 0
        if free <= 0 and (awaited or not made):
            free = 1  # also when a single result is larger than the whole budget
        return min(free, slots)

    def _begin(self, worker: _Worker, now: float, commands: list[Command]) -> None:
        """Note that the worker begins its next task now, if it has one."""
        worker.begun = now if worker.tasks else None
        self._watch(worker, commands)

    def _watch(self, worker: _Worker, commands: list[Command]) -> None:
        """See to it that the alarm rings when the worker's present task has taken too long."""
        at = self._due(worker)
        if at is not None and (self._alarm is None or at < self._alarm):
            self._alarm = at
            commands.append(SetAlarm(at))

    def _due(self, worker: _Worker) -> float | None:
        """Return when the worker's present task will have taken too long; None for never."""
        if worker.begun is None or worker.condemned is not None:
            return None
        timeout = self.limits.timeout_s
        if self._may_be_robbed(worker):
            timeout = RECLAIM_S if timeout is None else min(RECLAIM_S, timeout)
        return None if timeout is None else worker.begun + timeout

    def _is_overdue(self, worker: _Worker, now: float) -> bool:
        begun = worker.begun
        return begun is not None and self._may_be_robbed(worker) and now >= begun + RECLAIM_S

    def _may_be_robbed(self, worker: _Worker) -> bool:
        """Whether it holds tasks behind its present one that another worker could have."""
        return len(worker.tasks) > 1 and self._tasks[worker.tasks[1]].lane is None

    @property
    def is_relaxed(self) -> bool:
        """Whether no answer changes what a worker does next, so that answers may be collected.

        So it is while every worker has more to do than its present task, or while there is
        nothing left to send to those that have not.
        """
        busy = sum(len(worker.tasks) > 1 for worker in self._workers.values())
        return bool(busy) and (busy == len(self._workers) or not self.counts[State.QUEUED])

    # ---- for tests and statistics --------------------------------------------------------------

    def check(self) -> None:
        """Assert the accounting: every task in one state and one place, no slot lost."""
        held = dict.fromkeys(State, 0)
        for task in self._tasks.values():
            held[task.state] += 1
        for state in (State.QUEUED, State.RUNNING, State.READY, State.LEASED):
            assert held[state] == self.counts[state], (state, held, self.counts)
        bound = [key for queue in self._lanes.values() for key in queue]
        waiting = [*self._queue, *bound, *self._retries, *self._suspects]
        assert len(waiting) == len(set(waiting)) == held[State.QUEUED]
        on_workers = [key for worker in self._workers.values() for key in worker.tasks]
        assert len(on_workers) == len(set(on_workers)) == held[State.RUNNING]
        used = held[State.RUNNING] + held[State.READY] + held[State.LEASED]
        assert used <= self.limits.slots, (used, self.limits.slots)
        ready = [t for t in self._tasks.values() if t.state in (State.READY, State.LEASED)]
        times = [at for worker in self._workers.values() if (at := self._due(worker)) is not None]
        assert not times or (self._alarm is not None and self._alarm <= min(times))
        assert self.held_bytes == sum(task.nbytes for task in ready)
