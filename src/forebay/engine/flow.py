"""Every decision about a task: events in, commands out. PURE: no clock, process, thread or file.

    consumer ── ResultsReleased, TasksForgotten ──┐
    pool ────── WorkerStarted, TaskFinished, … ───┼─> Flow.handle(events, now) ─> [Command, …]
    source ──── TasksQueued ──────────────────────┘

Guarantees, checked by a random state machine in the tests:
- `free + running + ready + leased == slots`, and each task in exactly one state;
- a task is delivered or reported failed exactly once, whatever dies meanwhile;
- an answer from a dead worker, or for an attempt that has ended, is ignored;
- with `in_order`, results and failures come in the order of the source.

Which task is blamed for a death: a worker answers each task separately and runs its tasks in the
order in which they were sent, so when it dies the first unanswered task is the suspect and the
others are not at fault. A suspect is tried again alone, with no other task running, after all other
tasks (or once `max_suspects` wait), because another task may have used up the memory. If the pool
says that another task may have caused a death, the death uses up an attempt only if no other task
was running. With `in_order` a retry is made at once instead, since all delivery waits for it.

How the number of workers is reduced: the workers with the highest worker IDs are surplus. They get
no more tasks, finish those they hold, and are then stopped. Tasks that would take long are taken
back after `RECLAIM_S`, as from any worker. A surplus worker that is needed again is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import merge
from itertools import islice

from forebay.engine.commands import (
    RECLAIM_S,
    TRANSITIONS,
    Command,
    DeliverResult,
    DropTask,
    FetchTasks,
    Finish,
    GiveUp,
    IllegalMoveError,
    KillWorker,
    Limits,
    Move,
    ReportFailure,
    ReportRetry,
    SendTasks,
    SetAlarm,
    StartWorker,
    State,
    StopWorker,
    Task,
    Worker,
)
from forebay.failures import Failure
from forebay.pools import events as happened

# How often in a row workers may be lost, with no answer and no suspect, before the flow gives up.
# Workers that die together count once.
MAX_DEATHS_IN_A_ROW = 10


class Flow:
    """Decides which worker runs what, and how each answer, death and delay is handled."""

    def __init__(self, limits: Limits) -> None:
        """Start with no workers and no tasks; `start` asks for both."""
        self.limits = limits
        self.counts = dict.fromkeys(State, 0)
        self.held_bytes = 0
        self._tasks: dict[int, Task] = {}
        self._workers: dict[int, Worker] = {}
        self._surplus = 0  # workers beyond num_workers that still hold tasks
        self._next_incarnation = 0
        self._queue: deque[int] = deque()  # by number: new tasks, and those put back
        self._bound: dict[int, deque[int]] = {}  # likewise, for tasks that one worker ID may run
        # By worker ID: the failure that ended its stream. Its later tasks fail with it.
        self._blocked: dict[int, Failure] = {}
        self._retries: deque[int] = deque()  # to be retried, each in its own message
        self._suspects: deque[int] = deque()  # died or hung: to be retried alone
        self._trying_suspects = False
        self._sent_alone: int | None = None  # the last suspect that was sent alone
        self._order: deque[int] = deque()  # tasks to deliver: by number with in_order, or as ended
        self._largest = 0  # bytes to expect of a running task: the largest result seen
        self._estimate: float | None = None  # seconds a task takes, smoothed
        self._refill_at: int | None = None  # since it was full: make more below so many results
        self._fetching = False
        self._source_ended = False
        self._deaths_in_a_row = 0
        self._first_after_death = 0  # the first worker that was started after the last such death
        self._alarm: float | None = None
        self._due_changed: list[Worker] = []  # whose `_due` may have changed since `_set_alarm`
        self._over = False

    # ---- entry points --------------------------------------------------------------------------

    def start(self, now: float) -> list[Command]:
        """Return the first commands."""
        commands: list[Command] = []
        self._decide(now, commands)
        return commands

    def handle(self, events: Sequence[happened.Event], now: float) -> list[Command]:
        """Process events, all at time `now`, and return the commands to perform, in order."""
        commands: list[Command] = []
        finished: list[happened.TaskFinished] = []  # a series of them, which nearly all events are
        for event in events:
            if type(event) is happened.TaskFinished:
                finished.append(event)
                continue
            if finished:
                self._on_finished(finished, now, commands)
                finished = []
            match event:
                case happened.TaskFailed():
                    self._on_failed(event, now, commands)
                case happened.TasksQueued():
                    self._on_queued(event)
                case happened.TasksReturned():
                    self._on_returned(event, now, commands)
                case happened.WorkerStarted():
                    worker = self._workers.get(event.incarnation)
                    if worker is not None:
                        worker.started = True
                case happened.WorkerDied():
                    self._on_died(event, commands)
                case happened.WorkersResized():
                    self._on_resized(event.num_workers, event.group_s)
                case happened.AlarmRang():
                    self._on_alarm(now, commands)
                case happened.ResultsReleased():
                    self._move(Move.RELEASED, *event.tasks)
                    for key in event.tasks:
                        self.held_bytes -= self._tasks.pop(key).nbytes
                case happened.TasksForgotten():
                    self._on_forgotten(event.before, commands)
        if finished:
            self._on_finished(finished, now, commands)
        self._decide(now, commands)
        return commands

    # ---- events --------------------------------------------------------------------------------

    def _on_queued(self, event: happened.TasksQueued) -> None:
        self._fetching = False
        self._source_ended = event.ended
        if event.worker_ids is None:
            self._tasks.update((key, Task()) for key in event.tasks)
            self._queue.extend(event.tasks)
        else:
            for key, worker_id in zip(event.tasks, event.worker_ids, strict=True):
                self._tasks[key] = Task(worker_id)
                self._queue_of(key).append(key)
        self.counts[State.QUEUED] += len(event.tasks)
        if self.limits.in_order:
            self._order.extend(event.tasks)

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
        self._blocked.clear()
        self._order = deque(key for key in self._order if key >= before)
        self._deliver(commands)

    def _on_finished(
        self, events: Sequence[happened.TaskFinished], now: float, commands: list[Command]
    ) -> None:
        in_order, delivered = self.limits.in_order, []
        for incarnation, key, attempt, result, nbytes, seconds in events:
            task = self._answered(incarnation, key, attempt, now)
            if task is None:
                continue
            self._deaths_in_a_row = 0
            old = self._estimate
            self._estimate = seconds if old is None else old + 0.1 * (seconds - old)
            if nbytes > self._largest:
                self._largest = nbytes
            if task.unwanted:
                self._drop(key, commands)
                continue
            task.nbytes = nbytes
            self.held_bytes += nbytes
            if not in_order:  # nothing waits for another task
                delivered.append(key)
                commands.append(DeliverResult(key, attempt, seconds, nbytes, result))
                continue
            self._move(Move.FINISHED, key)
            task.seconds, task.result = seconds, result
            if self._order[0] == key:
                self._deliver(commands)
        self._move(Move.FINISHED, *delivered)
        self._move(Move.DELIVERED, *delivered)

    def _on_failed(self, event: happened.TaskFailed, now: float, commands: list[Command]) -> None:
        task = self._answered(event.incarnation, event.task, event.attempt, now)
        if task is None:
            return
        self._deaths_in_a_row = 0
        task.seconds = event.seconds
        self._fail(event.task, event.failure, commands, self._retries, final=event.final)

    def _on_returned(
        self, event: happened.TasksReturned, now: float, commands: list[Command]
    ) -> None:
        worker = self._workers.get(event.incarnation)
        if worker is None:
            return
        worker.returning.clear()
        given = set(event.tasks)
        self._take_back(worker, [key for key in worker.tasks if key in given], commands)
        self._begin(worker, now)

    def _on_died(self, event: happened.WorkerDied, commands: list[Command]) -> None:
        worker = self._workers.pop(event.incarnation, None)
        if worker is None:
            return
        suspect, failure = (worker.tasks[0] if worker.tasks else None), event.failure
        if event.external:
            suspect = None
        elif worker.timed_out is not None:
            suspect = worker.timed_out if worker.timed_out == suspect else None
            failure = Failure(
                "timeout",
                "SampleTimeoutError",
                f"ran past timeout={self.limits.timeout_s:g} s; its worker was killed",
                event.failure.traceback,
            )
        # A death attributed to a task uses up one of its attempts, so such deaths are bounded.
        if suspect is not None:
            self._deaths_in_a_row = 0
        elif event.incarnation >= self._first_after_death:
            # Workers that die together, with their host, count once.
            self._deaths_in_a_row += 1
            self._first_after_death = self._next_incarnation
        broken = not worker.started and event.failure.kind == "exception"
        if broken or self._deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
            self._over = True
            commands.append(GiveUp(event.failure))
        for key in worker.tasks:
            if key != suspect:
                self._move(Move.ORPHANED, key)
                self._put_back(key, commands)
        if suspect is not None and event.maybe_external and self._can_be_tried_alone(suspect):
            self._move(Move.SUSPECTED, suspect)
            if self._tasks[suspect].unwanted:
                self._drop(suspect, commands)
            else:
                self._suspects.append(suspect)
        elif suspect is not None:
            if failure.kind == "timeout":
                self._tasks[suspect].seconds = self.limits.timeout_s or 0.0
            self._fail(suspect, failure, commands, self._suspects)

    def _can_be_tried_alone(self, suspect: int) -> bool:
        """Return whether a suspect ran beside other tasks and can be tried without them."""
        waits = not self.limits.in_order and self._tasks[suspect].worker_id is None
        had_others = self.limits.num_workers > 1 or bool(self._workers)  # surplus ones count
        return waits and self._sent_alone != suspect and had_others

    def _on_resized(self, num_workers: int, group_s: float | None) -> None:
        assert num_workers >= 1, num_workers
        assert not self._bound, "tasks bound to worker IDs need the number of workers they had"
        group_s = self.limits.group_s if group_s is None else group_s
        self.limits = replace(self.limits, num_workers=num_workers, group_s=group_s)
        self._surplus = sum(map(self._is_surplus, self._workers.values()))

    def _on_alarm(self, now: float, commands: list[Command]) -> None:
        timeout = self.limits.timeout_s
        for number, worker in self._workers.items():
            if worker.begun is None or worker.timed_out is not None:
                continue
            if timeout is not None and now >= worker.begun + timeout:
                worker.timed_out = worker.tasks[0] if worker.tasks else min(worker.returning)
                commands.append(KillWorker(number))
            elif now >= worker.begun + RECLAIM_S and self._has_spare_tasks(worker):
                worker.returning.update(list(worker.tasks)[1:])
                self._take_back(worker, list(worker.tasks)[1:], commands)
        self._alarm = self._soonest_due(self._workers.values())
        if self._alarm is not None:
            commands.append(SetAlarm(self._alarm))

    def _take_back(self, worker: Worker, keys: list[int], commands: list[Command]) -> None:
        """Put tasks that a worker has not begun back into the queue."""
        taken = set(keys)
        for key in keys:
            self._move(Move.RETURNED, key)
            self._put_back(key, commands)
        worker.tasks = deque(key for key in worker.tasks if key not in taken)

    # ---- ends and retries of tasks -------------------------------------------------------------

    def _answered(self, incarnation: int, key: int, attempt: int, now: float) -> Task | None:
        """Take an answered task off its worker; return None if the answer is late or unknown."""
        worker = self._workers.get(incarnation)
        if worker is None or not worker.tasks or worker.tasks[0] != key:
            if worker is not None and key in worker.returning:
                worker.returning.remove(key)  # it was taken back while its answer was under way
                self._begin(worker, now)
            return None
        task = self._tasks[key]
        if task.attempt != attempt:
            return None
        worker.tasks.popleft()
        self._begin(worker, now)
        return task

    def _fail(
        self,
        key: int,
        failure: Failure,
        commands: list[Command],
        again: deque[int],
        final: bool = False,
    ) -> None:
        task = self._tasks[key]
        if task.unwanted:
            self._drop(key, commands)
            return
        if task.attempt > self.limits.retries or final:
            if self.limits.failure_ends_worker and task.worker_id is not None:
                self._blocked[task.worker_id] = failure
            self._end(key, Move.FAILED, failure, commands)
            return
        self._move(Move.RETRIED, key)
        commands.append(ReportRetry(key, task.attempt, failure))
        task.attempt += 1
        if self.limits.in_order or task.worker_id is not None:
            self._put_back(key, commands)
        else:
            again.append(key)

    def _end(self, key: int, move: Move, failure: Failure, commands: list[Command]) -> None:
        """End a task without a result."""
        self._move(move, key)
        self._tasks[key].failure = failure
        if not self.limits.in_order:
            self._order.append(key)
        self._deliver(commands)

    def _fail_blocked(self, commands: list[Command]) -> None:
        """Fail the tasks that wait for a worker blocked by an earlier failure."""
        for worker_id, failure in self._blocked.items():
            queue = self._bound.get(worker_id)
            while queue:
                self._end(queue.popleft(), Move.ABANDONED, failure, commands)

    def _put_back(self, key: int, commands: list[Command]) -> None:
        """Queue a task in the order of the source: before all that have not been sent yet."""
        if self._tasks[key].unwanted:
            self._drop(key, commands)
            return
        at, queue = 0, self._queue_of(key)
        while at < len(queue) and queue[at] < key:
            at += 1
        queue.insert(at, key)

    def _queue_of(self, key: int) -> deque[int]:
        worker_id = self._tasks[key].worker_id
        if worker_id is None:
            return self._queue
        return self._bound.setdefault(worker_id, deque())

    def _drop(self, key: int, commands: list[Command]) -> None:
        """End a task that is no longer needed."""
        self._move(Move.FORGOTTEN, key)
        del self._tasks[key]
        commands.append(DropTask(key))

    def _deliver(self, commands: list[Command]) -> None:
        """Deliver the results that are next in order."""
        delivered = []
        while self._order:
            key = self._order[0]
            task = self._tasks[key]
            if task.state is State.READY:
                delivered.append(key)
                commands.append(
                    DeliverResult(key, task.attempt, task.seconds, task.nbytes, task.result)
                )
                task.result = None
            elif task.state is State.FAILED:
                assert task.failure is not None
                commands.append(ReportFailure(key, task.attempt, task.seconds, task.failure))
                del self._tasks[key]
            else:
                break
            self._order.popleft()
        self._move(Move.DELIVERED, *delivered)

    def _move(self, move: Move, *keys: int) -> None:
        tasks, counts, before, after = self._tasks, self.counts, None, None
        for key in keys:
            task = tasks[key]
            if task.state is not before:  # the same for most of them
                before = task.state
                after = TRANSITIONS.get((before, move))
            if after is None:
                state = f"{task.state.value} by {task.moved}"
                raise IllegalMoveError(f"task {key} is {state}, not to be {move}")
            counts[task.state] -= 1
            counts[after] += 1
            task.state, task.moved = after, move

    def longest_task(self) -> tuple[int, float] | None:
        """Return the task that has been running for longest, and when it began, if there is one."""
        workers = self._workers.values()
        running = [
            (one.begun, one.tasks[0])
            for one in workers
            if one.started and one.begun is not None and one.tasks
        ]
        if not running:
            return None
        begun, key = min(running)
        return key, begun

    # ---- decisions -----------------------------------------------------------------------------

    def _decide(self, now: float, commands: list[Command]) -> None:
        if self._over:
            return
        if self._blocked:
            self._fail_blocked(commands)
        if self._surplus:
            self._surplus = self._stop_surplus(commands)
        counts, limits = self.counts, self.limits
        todo = counts[State.QUEUED] + counts[State.RUNNING]
        if self._source_ended and not todo and not counts[State.READY] and not self._fetching:
            self._over = True
            commands.append(Finish())
            return
        if counts[State.QUEUED] or limits.all_workers:
            needed = limits.num_workers if limits.all_workers else min(limits.num_workers, todo)
            while len(self._workers) - self._surplus < needed:
                self._start_worker(commands)
        if counts[State.QUEUED]:
            self._send_tasks(now, commands)
        if self._due_changed:
            self._set_alarm(commands)
        if limits.lookahead and not self._source_ended and not self._fetching:
            queued = counts[State.QUEUED] - len(self._retries) - len(self._suspects)
            if queued <= limits.lookahead // 2:
                self._fetching = True
                commands.append(FetchTasks(limits.lookahead - queued))

    def _start_worker(self, commands: list[Command]) -> None:
        taken = {worker.worker_id for worker in self._workers.values()}
        free = next(each for each in range(self.limits.num_workers) if each not in taken)
        self._workers[self._next_incarnation] = Worker(free)
        commands.append(StartWorker(self._next_incarnation, free))
        self._next_incarnation += 1

    def _is_surplus(self, worker: Worker) -> bool:
        return worker.worker_id >= self.limits.num_workers

    def _stop_surplus(self, commands: list[Command]) -> int:
        """Stop the surplus workers without tasks; return the number of those with tasks."""
        surplus = [number for number, each in self._workers.items() if self._is_surplus(each)]
        idle = [number for number in surplus if not self._workers[number].tasks]
        for number in idle:
            del self._workers[number]
            commands.append(StopWorker(number))
        return len(surplus) - len(idle)

    def _send_tasks(self, now: float, commands: list[Command]) -> None:
        """Send work to every worker that needs more."""
        counts = self.counts
        if self._sent_alone is not None:
            if counts[State.RUNNING]:
                return
            self._sent_alone = None
        alone = bool(self._suspects) and self._is_time_for_suspects()
        self._trying_suspects = alone
        if alone and counts[State.RUNNING]:
            return
        for incarnation, worker in self._workers.items():
            if not worker.started or worker.timed_out is not None or worker.returning:
                continue
            if self._surplus and self._is_surplus(worker):
                continue
            bound = self._bound.get(worker.worker_id)
            queue = self._suspects if alone else self._retries or bound or self._queue
            if not queue:
                continue
            size = 1 if alone else self._group_size(worker, queue, now)
            if not size:
                continue
            # The task that all delivery waits for must not itself wait for a free slot.
            awaited = self.limits.in_order and queue[0] == self._order[0]
            free = self._free_slots(awaited and not counts[State.LEASED])
            count = min(size, free, len(queue))
            if self.limits.in_order and queue is bound and free < counts[State.QUEUED]:
                # The slots are for the first tasks of all workers: others would wait for these.
                beyond = next(islice(merge(*self._bound.values()), max(free, 0), None))
                count = sum(key < beyond for key in islice(queue, count))
            if count <= 0:
                continue
            keys = [queue.popleft() for _ in range(count)]
            commands.append(SendTasks(incarnation, self._assign(worker, keys, now)))
            if alone:
                (self._sent_alone,) = keys
                return

    def _is_time_for_suspects(self) -> bool:
        """Return whether to try the suspects now, each alone; True until none is left."""
        count = len(self._suspects)
        no_others = self._source_ended and self.counts[State.QUEUED] == count
        return self._trying_suspects or no_others or count >= self.limits.max_suspects

    def _assign(self, worker: Worker, keys: list[int], now: float) -> tuple[tuple[int, int], ...]:
        """Record that a worker holds these tasks; return each with its attempt."""
        self._move(Move.SENT, *keys)
        idle = not worker.tasks
        worker.tasks.extend(keys)
        if idle:
            self._begin(worker, now)
        else:
            self._mark_due_changed(worker)
        tasks = self._tasks
        return tuple([(key, tasks[key].attempt) for key in keys])

    def _group_size(self, worker: Worker, queue: deque[int], now: float) -> int:
        """Return how many tasks to send to a worker now: about `group_s` of work."""
        held, limits = len(worker.tasks), self.limits
        if queue is self._bound.get(worker.worker_id):
            return limits.max_group  # no other worker can take them
        if queue is self._retries or self._estimate is None or not limits.group_s:
            return 0 if held else 1
        is_slow = held and worker.begun is not None and now - worker.begun > happened.GIVE_BACK_S
        if is_slow or held * self._estimate > limits.group_s / 2:
            return 0  # another task would wait here, where no other worker can take it
        size = min(limits.max_group, int(limits.group_s / max(self._estimate, 1e-9)))
        # Where there is little work, or few slots, the other workers need their share of it.
        work = min(self.counts[State.QUEUED] + self.counts[State.RUNNING], limits.slots)
        size = min(size, -(-work // limits.num_workers) - held)
        if self._source_ended:
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
            if self._refill_at is None and free <= 0:
                low = limits.refill_below
                self._refill_at = low if isinstance(low, int) else max(int(low * made), 1)
            elif self._refill_at is not None and made < self._refill_at:
                self._refill_at = None
            if self._refill_at is not None:
                free = 0
        if free <= 0 and (awaited or not made):
            free = 1  # also when a single result is larger than the whole budget
        return min(free, slots)

    @property
    def room(self) -> int:
        """About how many results there is room for, besides those ready or leased.

        Each is assumed to be as large as these are on average; before the first there is no room.
        """
        made, held = self.counts[State.READY] + self.counts[State.LEASED], self.held_bytes
        room, most = self.limits.slots - made, self.limits.max_bytes
        if most is not None:
            each = held // made if made else self._largest
            room = min(room, (most - held) // each if each else 0)
        return max(room, 0)

    @property
    def above_low_mark(self) -> int:
        """How many results to release before a full buffer is refilled; 0 while it is not full."""
        if self._refill_at is None:
            return 0
        counts = self.counts
        made = counts[State.RUNNING] + counts[State.READY] + counts[State.LEASED]
        return max(made - self._refill_at + 1, 0)

    def _begin(self, worker: Worker, now: float) -> None:
        """Record that the worker begins its next task now, if it has one."""
        worker.begun = now if worker.tasks or worker.returning else None
        self._mark_due_changed(worker)

    def _mark_due_changed(self, worker: Worker) -> None:
        """Have `_set_alarm` check the worker's time limit, once all events are processed."""
        if not self._due_changed or self._due_changed[-1] is not worker:  # answers come in series
            self._due_changed.append(worker)

    def _set_alarm(self, commands: list[Command]) -> None:
        """Set the alarm earlier if one of these workers exceeds its time limit before it rings."""
        workers = self._due_changed
        if self.limits.timeout_s is not None or any(len(each.tasks) > 1 for each in workers):
            soonest = self._soonest_due(workers)
            if soonest is not None and (self._alarm is None or soonest < self._alarm):
                self._alarm = soonest
                commands.append(SetAlarm(soonest))
        self._due_changed.clear()

    def _soonest_due(self, workers: Iterable[Worker]) -> float | None:
        return min((at for each in workers if (at := self._due(each)) is not None), default=None)

    def _due(self, worker: Worker) -> float | None:
        """Return when the worker's current task exceeds its time limit; None for never."""
        if worker.begun is None or worker.timed_out is not None:
            return None
        timeout = self.limits.timeout_s
        if self._has_spare_tasks(worker):
            timeout = RECLAIM_S if timeout is None else min(RECLAIM_S, timeout)
        return None if timeout is None else worker.begun + timeout

    def _has_spare_tasks(self, worker: Worker) -> bool:
        """Return whether it holds tasks after its current one that another worker could run."""
        return len(worker.tasks) > 1 and self._tasks[worker.tasks[1]].worker_id is None

    def answers_can_wait(self, seconds: float) -> bool:
        """Return whether no worker waits for the flow, so that answers may be collected for a time.

        True while every worker has that many seconds of work after its current task, or if
        no tasks are left for those that do not.
        """
        estimate = self._estimate or 0.0
        busy = sum(
            (len(worker.tasks) - 1) * estimate >= seconds for worker in self._workers.values()
        )
        return bool(busy) and (busy == len(self._workers) or not self.counts[State.QUEUED])
