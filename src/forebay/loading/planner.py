"""Decide which batch to request when: prefetching across epochs, `set_epoch`, turns of workers.

    kind ──> planner ── requests ──> feed ── results ──> planner ──> iterator

The planner runs in the trainer's thread, when a batch is taken. With a buffer it requests batches
of epochs that have not begun. Such an epoch may depend on a later `set_epoch` of the sampler, which
the planner predicts; requests made on a wrong prediction are dropped.

With a buffer, the thread that runs the engine calls `request_more`, so that the buffer fills while
the trainer is busy. Only the trainer's thread reads a sampler, and reads it further ahead instead.
`_requesting` is held while requests are made. All else is read without it: it may have been held
when the trainer was forked, and then stays locked in the fork.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from forebay.buffer import MAX_BATCHES
from forebay.engine.engine import NewTask
from forebay.loading.changes import fingerprint
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import BatchRequest, Result, WorkerExhausted
from forebay.loading.open_feeds import CLOSED
from forebay.loading.samplers import (
    SamplerStates,
    chain_of,
    epoch_of,
    is_foreseen,
    next_epoch,
    plain_index,
    set_states,
)
from forebay.loading.selections import (
    CHUNK,
    LOOKAHEAD,
    READ_S,
    Depth,
    Drawn,
    PlannedEpoch,
    Selection,
    Start,
)

if TYPE_CHECKING:
    from forebay.loading.feed import Feed
    from forebay.loading.local_feed import LocalFeed


class Planner:
    """Requests the batches of a loader, epoch after epoch, and passes on the results.

    Attributes:
        kind: Says what to request; another one for each iteration.
        turns: Whose turn it is, and what workers have told; None if any worker makes a batch.
        orders: `epoch_of` the sampler, by epoch that has begun.
    """

    def __init__(self, kind: LoaderKind) -> None:
        self.kind, self.turns = kind, kind.turns()
        self.epoch, self.batch, self.samples, self.start = -1, 0, 0, Start(0)
        self.shared_seed: int | None = None
        self.is_over = True
        self._feed: Feed | LocalFeed | None = None
        self._setup, self._depth = kind.setup, Depth(kind.setup)
        self._runs_ahead = self._setup.crosses_epochs
        # Whether the thread that runs the engine makes the requests; whether some are made ahead.
        self._is_driven = self._setup.fills_by_itself and kind.is_arithmetic
        self._asks_ahead = self._setup.requests > 0 or self._setup.first_requests > 0
        self._ends_late = kind.torch_reads and not self._asks_ahead
        self._sampler = kind.foreseen_sampler
        self._was_left = self._is_stale = False  # the former: requests before were dropped
        self._peeks_from = math.inf
        self._epochs: deque[PlannedEpoch] = deque()
        self._requests: dict[int, BatchRequest] = {}  # by task, in order: requested and not taken
        self._next_task = 0
        self._sampler_states: dict[int, SamplerStates] = {}  # by task: the sampler states after it
        self._current_states: SamplerStates | None = None
        self.orders: dict[int, int | None] = {}
        self._order_before: int | None = None
        self._seen: Any = None  # the sampler's fingerprint when it was last read
        self._requesting = threading.RLock()  # reentrant: a signal's handler may use the loader
        # Requests of this epoch that were taken, and of a sampler to make at a time.
        self._answered, self._most_at_once = 0, MAX_BATCHES

    # ---- epochs --------------------------------------------------------------------------------

    def begin(self, feed: Feed | LocalFeed, start: Start, next_worker: int = 0) -> None:
        """Begin an epoch; keep its batches that were requested in advance, if they are valid."""
        is_new, self._feed = feed is not self._feed, feed
        if is_new:
            self._requesting = threading.RLock()
        with self._requesting:
            if not start.batch or start.epoch not in self.orders:  # not the rest of an epoch
                self._order_before = self.orders.get(self.epoch)
                self.orders[start.epoch] = epoch_of(self._sampler)
            first_task = self._first_kept(start, is_new=is_new)
        self._drop(first_task)
        with self._requesting:
            self.epoch, self.batch, self.samples, self.start = start.epoch, start.batch, 0, start
            self.is_over = self._is_stale = False
            self._current_states, self._answered = None, 0
            if self.turns is not None:
                self.turns.next_worker = next_worker
            is_usual = not start.by_sample and start.length is None
            self._peeks_from = self.kind.peeks_from() if is_usual else 0
            if not self._epochs:
                self._open(start, self.orders[start.epoch], next_worker)
                self._seen = self._fingerprint()  # reading a sampler may change it, too
            self._put_missing()
        if self._is_driven:
            feed.request_more = weakref.WeakMethod(self.request_more)

    def _first_kept(self, start: Start, *, is_new: bool) -> int:
        """Leave the current epoch; return the first task whose request is still valid."""
        self._note_changes()
        epochs = self._epochs
        if epochs and (start.epoch != self.epoch or not self._is_stale):  # `replan` stays there
            self._leave(epochs.popleft())
        if epochs:
            planned, order = epochs[0], self.orders[start.epoch]
            is_kept = (planned.order, planned.start) == (order, start)
            if is_kept and not is_new and not self._is_stale:
                return planned.first_task
            set_states(self.kind.index_sampler, planned.sampler_states)
            epochs.clear()
        return self._next_task

    def read_ahead(self) -> None:
        """Make the sampler draw its order now, unless batches of this epoch were requested."""
        if not self._requests:
            self._epochs[0].reader.draw(1)

    def take(self) -> tuple[BatchRequest, Result] | None:
        """Return the next result of this epoch and its request; None at the epoch's end."""
        feed, turns = self._open_feed, self.turns
        if turns is not None:  # here, where no batch is lost if a filter makes it an error
            turns.warn_of_copies()
        while True:
            if not self._requests:
                feed.check()
                feed.is_midway = True
                ask_for = self._put_missing if self._asks_ahead else self._request
                with self._requesting:
                    ask_for(1)
            feed.is_midway = False
            if not self._has_requests():
                reader = self._epochs[0].reader
                error, reader.error = reader.error, None
                if error is not None:
                    feed.is_midway = self.kind.is_arithmetic  # then no sampler has raised it
                    raise error
                self.is_over = True
                return None
            feed.wait()
            feed.is_midway = True
            task, told = feed.take()
            request = self._requests.pop(task)
            self._answered += 1
            if (result := self._noted(request, told)) is None:
                continue
            self.batch += 1
            self.samples += self.kind.count(request.index)
            self._current_states = self._sampler_states.pop(task, None)
            if self._setup.tiny_requests > self._setup.requests:
                self._depth.record(result)
            if self.batch >= self._peeks_from and not (self._requests or self._ends_late):
                with self._requesting:  # after the last batch it is then known that it was that
                    self._put_missing(at_least=1)
            elif not self._asks_ahead:
                self.kind.reached(self.start, self.batch - self.start.batch)
            elif not self._is_driven:
                self._put_missing()
            feed.is_midway = False
            return request, result

    def _has_requests(self) -> bool:
        """Return whether batches of this epoch were requested and not taken."""
        later = self._epochs[1].first_task if len(self._epochs) > 1 else self._next_task
        return self._epochs[0].first_task + self._answered < later

    def _noted(self, request: BatchRequest, result: Result) -> Result | None:
        """Record the result of a worker that takes turns; return what to pass on, if anything."""
        epoch = self._epochs[0].turns
        if request.worker_id is None or self.turns is None or epoch is None:
            return result
        if isinstance(result, WorkerExhausted):
            with self._requesting:
                self._put_missing()
        return self.turns.note(epoch, request, result)

    def refresh(self) -> None:
        """Drop requests for epochs that have not begun: the sampler or dataset has changed."""
        self._is_stale = True

    def replan(self) -> None:
        """Drop all requests and make them again, from the current position."""
        self._is_stale = True
        if not self.is_over and self._feed is not None and self._feed.is_open:
            start = self.start._replace(batch=self.batch, sample=self.sample)
            self.begin(self._feed, start)

    @property
    def _open_feed(self) -> Feed | LocalFeed:
        if self._feed is None:
            raise RuntimeError(CLOSED)
        return self._feed

    def detach(self, between_epochs: bool = False) -> None:
        """Forget the closed feed; the position is kept."""
        self._feed = None
        if not between_epochs:
            self.kind.close()

    def _drop(self, first: int) -> None:
        """Drop all requests with a task number below `first`."""
        with self._requesting:
            self._was_left = next(iter(self._requests), first) < first
            if not self._was_left and self.turns is None:
                return  # at the end of an epoch there are none
            self._requests = {task: each for task, each in self._requests.items() if task >= first}
            states = self._sampler_states
            self._sampler_states = {task: states[task] for task in states if task >= first}
        self._open_feed.forget(first)  # waits for the engine's thread, which may wait for the lock

    # ---- position ------------------------------------------------------------------------------

    def has_next(self, *, reads: bool = False) -> bool:
        """Return whether batches of this epoch are left, as far as is known.

        With a plan, the epoch ends on all ranks at once. The end of an iterable dataset is known
        only after the workers have reached it, that of a sampler after it was read to its end.

        Args:
            reads: Whether to read a sampler that may have ended, as torch does for the next batch.
        """
        end = self.kind.end_of(self.start)
        if self.is_over or end is not None:
            return not self.is_over and (end is None or self.sample < end)
        if not self._epochs:  # opening the epoch raised
            return True
        reader = self._epochs[0].reader
        if reads and self.batch >= self._peeks_from and not self._requests:
            reader.draw(1)
        return not reader.is_complete or reader.has_failed or self._has_requests()

    def origin_of(self, epoch: int) -> int:
        """Return the samples in all epochs before `epoch`; others than the current count as now."""
        start, origin = self.start, self.start.origin
        if epoch == start.epoch:
            return origin
        own, usual = self.kind.end_of(start) or 0, self.kind.end_of(Start(epoch)) or 0
        later = epoch - start.epoch
        return origin + (own + (later - 1) * usual if later > 0 else later * usual)

    @property
    def sample(self) -> int:
        """Samples of this epoch that were returned, over all ranks."""
        return self.kind.samples_returned(self.start, self.batch - self.start.batch, self.samples)

    def sampler_position(self) -> tuple[SamplerStates | None, Drawn | None, int | None]:
        """Return the states of samplers, what they drew ahead, and `epoch_of` the sampler."""
        kind = self.kind
        after = next((each for each in [*self._epochs] if each.start.epoch > self.epoch), None)
        if not self.has_next():
            states = kind.sampler_states() if after is None else after.sampler_states
            return states, None, epoch_of(self._sampler)
        order = self.orders[self.epoch]
        if not self._epochs:  # opening the epoch raised
            return kind.sampler_states(), None, order
        epoch, states, drawn = self._epochs[0], self._current_states, None
        if states is None and (self.batch == self.start.batch or not kind.follows):
            states, drawn = epoch.sampler_states, self.start.drawn
        if states is None and kind.follows:  # as it is now, and what it drew of this epoch
            reader, found = epoch.reader, list(self._requests.values())
            indices = [each.index for each in found if each.epoch == self.epoch]
            if kind.may_have_ended(self.batch + len(indices) + len(reader.ahead)):
                reader.draw(len(reader.ahead) + 1)
            indices += (each.index for each in reader.ahead)
            is_all = reader.is_drained and not reader.has_failed
            drawn = Drawn([plain_index(each) for each in indices], is_all)
            states = kind.sampler_states() if after is None else after.sampler_states
        return states, drawn, order

    def requested(self, tasks: list[int]) -> list[BatchRequest]:
        """Return what `tasks` request; another thread may take them."""
        return list(filter(None, map(self._requests.get, tasks)))

    def planned(self, epoch: int) -> PlannedEpoch | None:
        """Return the record of an epoch that is being returned or requested; None if neither."""
        return next((each for each in tuple(self._epochs) if each.start.epoch == epoch), None)

    # ---- requests ------------------------------------------------------------------------------

    def request_more(self) -> None:
        """Request what is missing; called in the thread that runs the engine."""
        with self._requesting:
            feed = self._feed
            if self._epochs and feed is not None and feed.is_open:  # not between two epochs
                self._put_missing()

    def _put_missing(self, at_least: int = 0) -> None:
        """Request as many batches as the depth allows now."""
        if (feed := self._feed) is None:  # another thread closed it: the next batch says so
            return
        ends = feed.ready_ends
        ready, room = (len(feed.ready), 0) if self._is_driven else feed.fill
        missing = self._depth.missing(len(self._requests) - ends, ready - ends, room)
        if missing and (most := self.kind.most_ahead()) < math.inf:
            more = int(most) - len(self._requests)
            missing = min(missing, more) if more >= min(missing, CHUNK) else 0
        if missing or at_least:
            self._request(max(missing, at_least))
        self.kind.reached(self.start, self.batch - self.start.batch + ready - ends)

    def _request(self, count: int) -> None:
        """Request `count` batches, of later epochs too if that is allowed."""
        feed = self._open_feed
        tasks: list[NewTask] = []
        reads_sampler = self._runs_ahead and not self.kind.is_arithmetic
        if reads_sampler:
            self._note_changes()
            count = min(count, self._most_at_once)
        until = time.perf_counter() + READ_S
        while count > 0:
            wanted = min(count, LOOKAHEAD)
            found = self._read(wanted)
            tasks += found
            count -= len(found)
            if len(found) < wanted and not self._open_next():
                break
            if reads_sampler and time.perf_counter() > until:
                self._most_at_once = CHUNK
                break
        if reads_sampler:
            self._seen = self._fingerprint()
        if tasks:
            feed.put(tasks)

    def _note_changes(self) -> None:
        """Record whether the user changed the sampler since it was last read."""
        seen, self._seen = self._seen, self._fingerprint()
        self._is_stale |= seen is not None and seen != self._seen

    def _fingerprint(self) -> Any:
        """Return a value that differs once a sampler was changed, except by its `set_epoch`."""
        if not self._runs_ahead or self._sampler is None:
            return None
        ignored = frozenset({"epoch"} if is_foreseen(self._sampler) else ())
        return [fingerprint(each, ignored) for each in chain_of(self._sampler)]

    def _read(self, count: int) -> list[NewTask]:
        """Return new requests of the last epoch; fewer than `count` at its end."""
        epoch = self._epochs[-1]
        if self.turns is None or epoch.turns is None:
            return [self._task(epoch, each) for each in epoch.reader.read(count)]
        tasks: list[NewTask] = []
        while len(tasks) < count:
            # Before reading: a selection is read only if a worker can make it.
            may_request = None if self._setup.in_order else self._may_request
            exhausted = self._open_feed.exhausted
            worker = self.turns.next_turn(epoch.turns, exhausted, may_request)
            selections = [] if worker is None else epoch.reader.read(1)
            if not selections:
                break
            tasks.append(self._task(epoch, selections[0], worker))
        return tasks

    def _task(
        self, epoch: PlannedEpoch, selection: Selection, worker: int | None = None
    ) -> NewTask:
        task, preceding = self._next_task, 0
        self._next_task += 1
        if worker is not None and epoch.turns is not None:
            preceding = epoch.turns.assign(worker)
        index, position, repeated, states = selection
        request = BatchRequest(
            index,
            epoch.start.epoch,
            epoch.batch,
            position,
            repeated,
            worker,
            preceding,
            epoch.worker_seed,
            self.shared_seed,
            self._was_left and not preceding,  # workers may have read batches that nobody took
            audited=self.kind.audited(index, epoch, next(iter(self.orders))),
        )
        if states is not None:
            self._sampler_states[task] = states
        self._requests[task] = self.kind.kept(request)
        epoch.batch += 1
        return NewTask(task, request, worker)

    def _may_request(self, worker: int) -> bool:
        held = sum(request.worker_id == worker for request in list(self._requests.values()))
        turns, epoch = self.turns, self._epochs[-1].turns
        assert turns is not None and epoch is not None
        most = max(self._depth.now, self._setup.requests)
        if self._setup.fills_by_itself:
            most += len(self._open_feed.ready)
        return held < most // max(turns.count - len(epoch.ended), 1)

    def _open_next(self) -> bool:
        """Open the epoch after the last one; return False if it must not be opened yet."""
        last = self._epochs[-1]
        if not self._runs_ahead or self._is_stale or last.reader.error is not None:
            return False
        if self.turns is not None and last.turns is not None:
            if not self.turns.is_over(last.turns, self._open_feed.exhausted):
                return False
        elif not last.reader.is_complete or last.batch == last.start.batch:
            return False
        number = last.start.epoch + 1
        before = self._epochs[-2].order if len(self._epochs) > 1 else self._order_before
        order = next_epoch(last.order, before)
        if order is not None and order != last.order:  # then it is the epoch
            if order < number:
                return False
            number = order
        start = Start(number, origin=last.start.origin + (self.kind.end_of(last.start) or 0))
        self._open(start, order, 0, is_ahead=True)
        return True

    def _open(
        self, start: Start, order: int | None, next_worker: int, *, is_ahead: bool = False
    ) -> None:
        # An epoch that was opened ahead may be dropped: the sampler is then set back.
        states = self.kind.sampler_states(if_cheap=not is_ahead)
        task, turns = self._next_task, None
        if self.turns is not None:
            turns = self.turns.opened(task, next_worker, is_rest=start.epoch == self.epoch)
        reader, seed = self.kind.open(start, order), self.kind.worker_seed(start.epoch)
        opened = PlannedEpoch(start, order, task, reader, states, turns, seed, start.batch)
        self._epochs.append(opened)

    def _leave(self, epoch: PlannedEpoch) -> None:
        """Let a sampler with a state end an epoch that was left early, whatever was requested."""
        has_states = epoch.sampler_states is not None or self.kind.follows
        if not (self._epochs or epoch.reader.is_complete) and has_states:
            self.kind.leave(epoch.reader, epoch.batch)
