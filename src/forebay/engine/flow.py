"""Every decision about a task: events in, commands out. PURE: no clock, process, thread or file.

    consumer ── ResultsReleased, TasksForgotten ──┐
    pool ────── WorkerStarted, TaskFinished, … ───┼─> Flow.handle(events, now) ─> [Command, …]
    source ──── TasksQueued ──────────────────────┘

Guarantees, checked by a random state machine in the tests:
- `free + running + ready + leased == slots`, and each task in exactly one state;
- a task is delivered or reported failed exactly once, whatever dies meanwhile;
- an answer from a dead worker, or for an attempt that has ended, is ignored;
- with `in_order`, results and failures come in the order of the source.

Which task is blamed for a death: a worker answers each task separately and begins its tasks in the
order in which they were sent, so it ran the first unanswered ones, `at_once` at most. Several are
tried again, each by a worker that runs no other, at no cost. A single one is to blame. It is tried
again alone, with no other task running, after all other tasks (or once `max_suspects` wait),
because another task may have used up the memory. If the pool says that another task may have caused
a death, the death uses up an attempt only if no other task was running. With `in_order` a retry is
made at once instead, since all delivery waits for it.

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
    Command,
    DeliverResult,
    FetchTasks,
    Finish,
    GiveUp,
    KillWorker,
    SendTasks,
    SetAlarm,
    StartWorker,
    StopWorker,
)
from forebay.engine.limits import MAX_DEATHS_IN_A_ROW, MOST_AHEAD, Limits
from forebay.engine.tasks import Move, State, Task, TaskTable, Worker
from forebay.failures import Failure
from forebay.pools import events as happened


class Flow(TaskTable):
    """Decides which worker runs what, and how each answer, death and delay is handled."""

    def __init__(self, limits: Limits) -> None:
        """Start with no workers and no tasks; `start` asks for both."""
        super().__init__(limits)
        self._surplus = 0  # workers beyond num_workers that still hold tasks
        self._next_incarnation = 0
        self._sent_alone: int | None = None  # the last suspect that was sent alone
        self._deaths_in_a_row = 0
        self._first_after_death = 0  # the first worker that was started after the last such death
        self._alarm: float | None = None
        self._due_changed: list[Worker] = []  # whose `_due` may have changed since `_set_alarm`
        self._over = False

    # ---- entry points --------------------------------------------------------------------------

    def start(self, now: float) -> list[Command]:
        """Return the first commands."""
        return self.handle((), now)

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

    def _on_finished(
        self, events: Sequence[happened.TaskFinished], now: float, commands: list[Command]
    ) -> None:
        in_order, delivered = self.limits.in_order, []
        tasks = self._tasks
        last: Worker | None = None
        for incarnation, key, attempt, result, nbytes, seconds in events:
            worker, task = self._workers.get(incarnation), tasks.get(key)
            is_next = worker is not None and bool(worker.tasks) and worker.tasks[0] == key
            if worker and task and is_next and task.attempt == attempt:
                if worker is not last:  # answers of a worker come in series
                    self._begin_next(last, now)
                    last = worker
                worker.tasks.popleft()
                if worker.begun:
                    worker.begun.popleft()
            else:
                self._begin_next(last, now)
                last, task = None, self._answered(incarnation, key, attempt, now)
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
                fields = key, attempt, seconds, nbytes, result
                commands.append(tuple.__new__(DeliverResult, fields))  # calls no Python code
                continue
            self._move(Move.FINISHED, key)
            task.seconds, task.result = seconds, result
            if self._order[0] == key:
                self._deliver(commands)
        self._begin_next(last, now)
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
        if not worker.timed_out and self.limits.are_filled(self.held_bytes, event.memory):
            self._lower_high_mark(event.memory, commands)
            event = event._replace(external=True)
        elif event.signalled and not worker.timed_out and self._are_excused(worker.running):
            event = event._replace(external=True)
        suspects, failure = self._blamed(worker, event)
        # Such a death uses up an attempt, or each is tried alone from now on: they are bounded.
        if suspects:
            self._deaths_in_a_row = 0
        elif event.incarnation >= self._first_after_death:
            # Workers that die together, with their host, count once.
            self._deaths_in_a_row += 1
            self._first_after_death = self._next_incarnation
        broken = not worker.started and event.failure.kind == "exception"
        if broken or self._deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
            self._over = True
            commands.append(GiveUp(event.failure))
        timed_out = bool(worker.timed_out) and not self.limits.is_batched
        is_known = timed_out or len(suspects) == 1
        for key in worker.tasks:
            task = self._tasks[key]
            if not (is_known and key in suspects):
                task.alone |= key in suspects
                self._move(Move.SUSPECTED if task.alone else Move.ORPHANED, key)
                self._put_back(key, commands)
            elif event.maybe_external and self._can_be_tried_alone(key) and not task.unwanted:
                self._move(Move.SUSPECTED, key)
                self._suspects.append(key)
            else:
                task.seconds = self.limits.timeout_s or 0.0 if worker.timed_out else task.seconds
                self._fail(key, failure, commands, self._suspects)

    def _blamed(self, worker: Worker, event: happened.WorkerDied) -> tuple[list[int], Failure]:
        """Return the tasks that a death is attributed to, and the failure of each."""
        if event.external or not worker.timed_out:
            return [] if event.external else worker.running, event.failure
        failure = self.limits.timeout_failure(event.failure.traceback)
        return [key for key in worker.timed_out if key in worker.tasks], failure

    def _can_be_tried_alone(self, suspect: int) -> bool:
        """Return whether a suspect ran beside other tasks and can be tried without them."""
        waits = not self.limits.in_order and self._tasks[suspect].worker_id is None
        had_others = self.limits.num_workers > 1 or bool(self._workers)  # surplus ones count
        return waits and self._sent_alone != suspect and had_others

    def _on_resized(self, num_workers: int, group_s: float | None) -> None:
        assert num_workers >= 0, num_workers
        assert not self._bound, "tasks bound to worker IDs need the number of workers they had"
        group_s = self.limits.group_s if group_s is None else group_s
        self.limits = replace(self.limits, num_workers=num_workers, group_s=group_s)
        self._surplus = sum(map(self._is_surplus, self._workers.values()))

    def _on_alarm(self, now: float, commands: list[Command]) -> None:
        for number, worker in self._workers.items():
            if not worker.begun or worker.timed_out:
                continue
            worker.timed_out = worker.overdue(self.limits, now)
            if worker.timed_out:
                commands.append(KillWorker(number))
            elif worker.runs_long(now) and self._has_spare_tasks(worker):
                spare = list(islice(worker.tasks, self.limits.at_once, None))
                worker.returning.update(spare)
                self._take_back(worker, spare, commands)
        self._alarm = self._soonest_due(self._workers.values())
        if self._alarm is not None:
            commands.append(SetAlarm(self._alarm))

    # ---- ends and retries of tasks -------------------------------------------------------------

    def _answered(self, incarnation: int, key: int, attempt: int, now: float) -> Task | None:
        """Take an answered task off its worker; return None if the answer is late or unknown."""
        worker = self._workers.get(incarnation)
        is_first = worker is not None and bool(worker.tasks) and worker.tasks[0] == key
        if worker is None or not (is_first or key in worker.running):
            if worker is not None and key in worker.returning:
                worker.returning.remove(key)  # it was taken back while its answer was under way
                worker.remove(())
                self._begin(worker, now)
            return None
        task = self._tasks[key]
        if task.attempt != attempt:
            return None
        if is_first:
            worker.tasks.popleft()
            worker.begun.popleft()
            self._begin_next(worker, now)
        else:
            worker.remove((key,))
            self._begin(worker, now)
        return task

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
        if self._waits_for_memory:  # without delivered results the next one is needed in any case
            is_above = self.held_bytes > (limits.max_bytes or 0)
            self._waits_for_memory = is_above and counts[State.LEASED] > 0
        if (counts[State.QUEUED] or limits.all_workers) and not self._waits_for_memory:
            needed = limits.num_workers if limits.all_workers else min(limits.num_workers, todo)
            while len(self._workers) - self._surplus < needed:
                self._start_worker(commands)
        if counts[State.QUEUED] and not self._waits_for_memory:
            self._send_tasks(now, commands)
        if self._due_changed:
            self._set_alarm(commands)
        if limits.lookahead and not self._source_ended and not self._fetching:
            others = len(self._alone) + len(self._retries) + len(self._suspects)
            queued = counts[State.QUEUED] - others
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
        """Send work to every worker that needs more, so that they take turns at it."""
        sent: dict[int, list[tuple[int, int]]] = {}
        while self._send_groups(now, sent) and self.limits.ahead_s:
            pass
        commands += [SendTasks(incarnation, tuple(tasks)) for incarnation, tasks in sent.items()]

    def _send_groups(self, now: float, sent: dict[int, list[tuple[int, int]]]) -> bool:
        """Add a group of tasks for every worker that needs more; return whether any does."""
        counts, has_sent = self.counts, False
        if self._sent_alone is not None:
            if counts[State.RUNNING]:
                return False
            self._sent_alone = None
        alone = bool(self._suspects) and self._is_time_for_suspects()
        self._trying_suspects = alone
        if alone and counts[State.RUNNING]:
            return False
        for incarnation, worker in self._workers.items():
            if not worker.started or worker.timed_out or worker.returning:
                continue
            is_alone = bool(worker.tasks) and self._tasks[worker.tasks[0]].alone
            if is_alone or (self._surplus and self._is_surplus(worker)):
                continue
            bound = self._bound.get(worker.worker_id)
            queue = self._suspects if alone else self._retries or bound or self._queue
            if not alone and self._alone and (not queue or self._alone[0] < queue[0]):
                queue = self._alone
            if not queue:
                continue
            size = 1 if alone else self._group_size(worker, queue, now)
            if not size:
                continue
            # The task that all delivery waits for must not itself wait for a free slot.
            awaited = self.limits.in_order and queue[0] == self._order[0]
            free = max(self._free_slots(awaited and not counts[State.LEASED]), 0)
            count = min(size, free, len(queue))
            if self.limits.in_order and queue is bound and free < counts[State.QUEUED]:
                # The slots are for the first tasks of all workers: others would wait for these.
                beyond = next(islice(merge(*self._bound.values()), free, None))
                count = sum(key < beyond for key in islice(queue, count))
            if count <= 0:
                continue
            keys = [queue.popleft() for _ in range(count)]
            sent.setdefault(incarnation, []).extend(self._assign(worker, keys, now))
            has_sent = True
            if alone:
                (self._sent_alone,) = keys
                return False
        return has_sent

    def _assign(self, worker: Worker, keys: list[int], now: float) -> tuple[tuple[int, int], ...]:
        """Record that a worker holds these tasks; return each with its attempt."""
        self._move(Move.SENT, *keys)
        worker.tasks.extend(keys)
        self._begin(worker, now)
        return tuple([(key, self._tasks[key].attempt) for key in keys])

    def _group_size(self, worker: Worker, queue: deque[int], now: float) -> int:
        """Return how many tasks to send to a worker now: about `group_s` of work, if it needs more.

        With `ahead_s`, tasks that are longer are sent one by one.
        """
        held, limits = len(worker.tasks), self.limits
        if queue is self._bound.get(worker.worker_id):
            return limits.max_group  # no other worker can take them
        if queue is self._alone:
            return int(not held)
        at_once, estimate = limits.at_once, self._estimate
        size = unbegun = max(at_once - held, 0)  # those that it would begin now
        if queue is self._retries or estimate is None or not limits.group_s:
            return unbegun
        is_slow = not unbegun and now - worker.begun[-1] > happened.GIVE_BACK_S
        is_ahead = held * estimate <= at_once * max(limits.ahead_s - estimate, limits.group_s / 2)
        if not is_slow and is_ahead and (not limits.ahead_s or held < MOST_AHEAD):
            fitting = int(at_once * limits.group_s / max(estimate, 1e-9))
            size = max(size, min(limits.max_group, fitting), limits.ahead_s > estimate)
        if not size:
            return 0  # another task would wait here, where no other worker can take it
        # Where there is little work, or few slots, the other workers need their share of it.
        work = min(self.counts[State.QUEUED] + self.counts[State.RUNNING], limits.slots)
        size = min(size, -(-work // limits.num_workers) - held)
        if self._source_ended:
            # Guided self-scheduling (Polychronopoulos and Kuck, 1987), with half a share: groups
            # shrink towards the end, so that all workers end together.
            size = min(size, max(-(-len(queue) // (2 * limits.num_workers)), unbegun))
        return max(size, 0 if held else 1)

    def _begin(self, worker: Worker, now: float) -> None:
        """Record that the worker begins its next tasks now, as many as it runs at once."""
        worker.begin(self.limits.at_once, now)
        self._mark_due_changed(worker)

    def _begin_next(self, worker: Worker | None, now: float) -> None:
        """Record that the worker, which has answered its first tasks, begins the next ones."""
        if worker is None:
            return
        if worker.begun and self.limits.in_order:
            worker.begun[0] = now  # it may have waited for the ones before it
        self._begin(worker, now)

    def _mark_due_changed(self, worker: Worker) -> None:
        """Have `_set_alarm` check the worker's time limit, once all events are processed."""
        if not self._due_changed or self._due_changed[-1] is not worker:  # answers come in series
            self._due_changed.append(worker)

    def _set_alarm(self, commands: list[Command]) -> None:
        """Set the alarm earlier if one of these workers exceeds its time limit before it rings."""
        soonest = self._soonest_due(self._due_changed)
        if soonest is not None and (self._alarm is None or soonest < self._alarm):
            self._alarm = soonest
            commands.append(SetAlarm(soonest))
        self._due_changed.clear()

    def _soonest_due(self, workers: Iterable[Worker]) -> float | None:
        return min((at for each in workers if (at := self._due(each)) is not None), default=None)

    def _due(self, worker: Worker) -> float | None:
        return worker.due(self.limits, self._has_spare_tasks(worker))

    def _has_spare_tasks(self, worker: Worker) -> bool:
        """Return whether it holds tasks after those it runs that another worker could run."""
        tasks, at_once = worker.tasks, self.limits.at_once
        return len(tasks) > at_once and self._tasks[tasks[at_once]].worker_id is None
