"""Decide which batch to request when: prefetching across epochs, `set_epoch`, turns of workers.

Long because one owner makes, answers and drops requests, with one record of them.

    source ──> planner ── requests ──> feed ── results ──> planner ──> iterator

All of it happens in the trainer's thread, while it takes batches. With a buffer the planner runs
ahead into epochs that have not begun; what they are based on, `set_epoch` above all, has to be
predicted, and what was requested on a wrong prediction is dropped.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay.engine.engine import NewTask
from forebay.failures import Failure
from forebay.loading.depth import Depth
from forebay.loading.messages import (
    BatchRequest,
    BatchResult,
    Result,
    WorkerExhausted,
    WorkerState,
)
from forebay.loading.samplers import Carried
from forebay.loading.set_epoch import SetEpochRecorders, Values, next_values
from forebay.loading.sources import Reader, Selection, Source, Start
from forebay.plan.seeds import worker_seed_of

if TYPE_CHECKING:
    from forebay.loading.feed import Feed
    from forebay.loading.local_feed import LocalFeed


@dataclass(slots=True)
class PlannedEpoch:
    """An epoch of which batches were requested, or will be.

    Attributes:
        start: Which epoch, and where in it reading began.
        values: What `set_epoch` is expected to be called with before it.
        first_task: The number of its first request.
        reader: Reads its selections.
        carried: What the source carried before it was opened.
        next_worker: The worker whose turn it is.
        ended: Workers that make no more of it.
        worker_seed: What workers of an iterable dataset begin it with.
        batch: Number of the next batch to be requested.
        preceding: By worker, how many of its batches were requested.
    """

    start: Start
    values: Values
    first_task: int
    reader: Reader
    carried: Carried | None
    next_worker: int
    ended: set[int]
    worker_seed: int | None
    batch: int
    preceding: dict[int, int] = field(default_factory=dict)


class Planner:
    """Requests the batches of a source, epoch after epoch, and passes on the results.

    Args:
        source: Where requests come from.
        recorders: What the user calls `set_epoch` with.
        depth: How many requests to have out.
        turns: Number of workers that take turns, each with a part of its own; 0 where any worker
            may make any batch.
        in_order: Whether results come in the order of the requests.
        shares_dataset: Whether batches are made of the trainer's own copy of the dataset, so that
            no request may set its epoch.
        may_run_ahead: Whether epochs may be requested that have not begun.
        worker_seed: What workers of an iterable dataset are seeded by, epoch after epoch.

    Attributes:
        epoch: The epoch of the last batch handed out; -1 before the first.
        batch: Batches of it that were handed out.
        samples: Samples of them that this rank had since `start`.
        start: Where it was begun.
        worker_states: Where each worker's copy of the dataset stands, if that is tracked.
        next_worker: The worker whose turn it is.
        shared_seed: Of this epoch, for a datapipe.
        is_over: Whether this epoch was handed out to its end.
    """

    def __init__(
        self,
        source: Source,
        recorders: SetEpochRecorders,
        depth: Depth,
        *,
        turns: int = 0,
        in_order: bool = True,
        shares_dataset: bool = False,
        may_run_ahead: bool = False,
        worker_seed: int | None = None,
    ) -> None:
        self.source = source
        self.epoch, self.batch, self.samples = -1, 0, 0
        self.start = Start(0)
        self.worker_states: list[WorkerState] = []
        self.next_worker = 0
        self.shared_seed: int | None = None
        self.is_over = True
        self._feed: Feed | LocalFeed | None = None
        self._recorders, self._depth = recorders, depth
        self._turns, self._in_order = turns, in_order
        self._shares_dataset = shares_dataset
        self._runs_ahead = may_run_ahead
        self._worker_seed = worker_seed
        self._epochs: deque[PlannedEpoch] = deque()
        self._requests: dict[int, BatchRequest] = {}  # by task, in order: requested and not taken
        self._next_task = 0
        self._carried: dict[int, Carried] = {}  # by task: what the sampler carries after it
        self._carried_now: Carried | None = None
        self._values: dict[int, Values] = {}  # before each epoch that has begun
        self._seen: Any = None  # the fingerprint when the sampler was last read
        self._is_stale = False

    # ---- epochs --------------------------------------------------------------------------------

    def begin(self, feed: Feed | LocalFeed, start: Start, next_worker: int = 0) -> None:
        """Begin an epoch, keeping what was made of it already.

        Args:
            feed: Where requests go; what another feed made is lost.
            start: The epoch, and where to begin in it.
            next_worker: The worker whose turn it is.
        """
        is_new, self._feed = feed is not self._feed, feed
        self._note_changes()
        epochs = self._epochs
        while epochs and epochs[0].start.epoch < start.epoch:
            self._leave(epochs.popleft())
        values = self._values[start.epoch] = self._recorders.values()
        first_task = self._next_task
        if epochs:
            planned = epochs[0]
            is_kept = planned.values == values and planned.start == start
            if is_kept and not is_new and not self._is_stale:
                first_task = planned.first_task
            else:
                self.source.give_back(planned.carried)
                epochs.clear()
        self._drop(first_task)
        self.epoch, self.batch, self.samples, self.start = start.epoch, start.batch, 0, start
        self.next_worker, self.is_over, self._carried_now = next_worker, False, None
        self._is_stale = False
        if not epochs:
            self._open(start, values, next_worker)
            self._seen = self._fingerprint()  # reading it may change a sampler as well
        self._put_missing()

    def read_ahead(self) -> None:
        """Have the sampler draw its order now, where nothing of this epoch is requested yet."""
        if not self._requests:
            self._epochs[0].reader.begin()

    def take(self) -> tuple[BatchRequest, Result] | None:
        """Return the next result of this epoch and its request; None at the epoch's end.

        Raises:
            Exception: What the sampler raised instead of its next batch.
        """
        requests, feed = self._requests, self._feed
        assert feed is not None, "begin comes first"
        while True:
            if not requests:
                self._put_missing(at_least=1)
            if not requests or next(iter(requests.values())).epoch != self.epoch:
                reader = self._epochs[0].reader
                error, reader.error = reader.error, None
                if error is not None:
                    raise error
                self.is_over = True
                return None
            task, result = feed.take()
            request = requests.pop(task)
            worker = request.worker_id
            if worker is not None and not self._is_from(worker, result):
                continue
            self.batch += 1
            self.samples += self.source.count(request.index)
            if self._carried:
                self._carried_now = self._carried.pop(task, self._carried_now)
            depth, empty = self._depth, feed.empty
            if depth.most > depth.usual:
                depth.saw(result)
            missing = depth.missing(len(requests) - empty, len(feed.ready) - empty)
            if missing:
                self._request(missing)
            return request, result

    def _is_from(self, worker: int, result: Result) -> bool:
        """Note a result of a worker that takes turns; return whether it is to be handed out."""
        ended, states = self._epochs[0].ended, self.worker_states
        is_batch = worker not in ended
        if isinstance(result, WorkerExhausted):
            ended.add(worker)
            if states and is_batch:
                states[worker] = result.state or states[worker]._replace(phase="ended")
            is_batch = False
            self._put_missing()
        elif isinstance(result, Failure) and self.source.kind == "iterable":
            ended.add(worker)  # a replacement would read to the same point
        elif isinstance(result, BatchResult) and result.state is not None:
            states[worker] = result.state
        self.next_worker = (worker + 1) % self._turns
        return is_batch

    def refresh(self) -> None:
        """Drop what was requested of epochs that have not begun: what it is based on changed."""
        self._is_stale = True

    def replan(self) -> None:
        """Request again everything that was not returned."""
        self._is_stale = True
        if self.is_over or self._feed is None:
            return
        self.start = self.start._replace(batch=self.batch, sample=self.sample)
        self.samples = 0
        self._epochs.clear()
        self._drop(self._next_task)
        self._open(self.start, self._values[self.epoch], self.next_worker)
        self._is_stale = False
        self._put_missing()

    def detach(self) -> None:
        """Forget the closed feed; the position is kept."""
        self._feed = None

    def _drop(self, first: int) -> None:
        """Drop all requests before a task."""
        assert self._feed is not None
        self._feed.forget(first)
        self._requests = {task: each for task, each in self._requests.items() if task >= first}
        self._carried = {task: each for task, each in self._carried.items() if task >= first}

    # ---- where it stands -----------------------------------------------------------------------

    def has_next(self) -> bool:
        """Tell whether anything of this epoch is left.

        With a plan, the epoch ends on all ranks at once. Of an iterable dataset only the workers
        know that, so there it is the end once it was met.
        """
        end = self.source.end_of(self.start)
        if self.is_over or self.source.kind == "iterable" or end is not None:
            return not self.is_over and (end is None or self.sample < end)
        if self._feed is not None and not self._requests:
            self._put_missing(at_least=1)
        if self._requests and next(iter(self._requests.values())).epoch == self.epoch:
            return True
        if not self._epochs:  # it could not be begun
            return True
        reader = self._epochs[0].reader
        return reader.has_failed or (self._feed is None and reader.has_more())

    def origin_of(self, epoch: int) -> int:
        """Return how many samples all epochs before one have, if all later ones are alike."""
        start, origin = self.start, self.start.origin
        if self.epoch < 0 or epoch == start.epoch:
            return origin
        own, usual = self.source.end_of(start) or 0, self.source.end_of(Start(epoch)) or 0
        later = epoch - start.epoch
        return origin + (own + (later - 1) * usual if later > 0 else later * usual)

    @property
    def sample(self) -> int:
        """Samples of this epoch that were handed out, over all ranks."""
        return self.source.handed_out(self.start, self.batch - self.start.batch, self.samples)

    def carried(self) -> tuple[Carried | None, Values]:
        """Return what the source carries from here on, and what `set_epoch` was called with."""
        if self.has_next():
            before = self._epochs[0].carried if self._epochs else self.source.carried()
            return self._carried_now or before, self._values[self.epoch]
        after = next((each for each in self._epochs if each.start.epoch > self.epoch), None)
        carried = after.carried if after is not None else self.source.carried()
        return carried, self._recorders.values()

    def numbers_of(self, tasks: list[int]) -> list[tuple[int, int]]:
        """Return epoch and number of the batches of requests that follow the last one taken."""
        found, (epoch, batch) = [], (self.epoch, self.batch - 1)
        known = [self._requests.get(task) for task in tasks]  # another thread may take them
        for request in filter(None, known):
            batch = batch + 1 if request.epoch == epoch else 0
            epoch = request.epoch
            found.append((epoch, batch if self._turns else request.batch))
        return found

    def planned(self, epoch: int) -> PlannedEpoch | None:
        """Return an epoch that is being handed out or requested; None if it is neither."""
        return next((each for each in self._epochs if each.start.epoch == epoch), None)

    def values_of(self, epoch: int) -> Values:
        """Return what `set_epoch` was called with before an epoch, or is expected to be."""
        if epoch in self._values or not self._values:
            return self._values.get(epoch, self._recorders.values())
        last = max(self._values)
        values, before = self._values[last], self._values.get(last - 1)
        for _ in range(last, epoch):
            values, before = next_values(values, before), values
        return values

    # ---- requests ------------------------------------------------------------------------------

    def _put_missing(self, at_least: int = 0) -> None:
        assert self._feed is not None
        empty, ready = self._feed.empty, len(self._feed.ready)
        missing = self._depth.missing(len(self._requests) - empty, ready - empty)
        if missing or at_least:
            self._request(max(missing, at_least))

    def _request(self, count: int) -> None:
        """Request so many batches, of the next epochs too where that may be."""
        assert self._feed is not None
        tasks: list[NewTask] = []
        reads_sampler = self._runs_ahead and self.source.kind == "sampler"
        if reads_sampler:
            self._note_changes()
        while count > 0:
            found = self._read(count)
            tasks += found
            count -= len(found)
            if count > 0 and not self._open_next():
                break
        if reads_sampler:
            self._seen = self._fingerprint()
        if tasks:
            self._feed.put(tasks)

    def _note_changes(self) -> None:
        """Note whether the user changed the sampler since it was last read."""
        seen, self._seen = self._seen, self._fingerprint()
        self._is_stale |= seen is not None and seen != self._seen

    def _fingerprint(self) -> Any:
        return self._recorders.fingerprint() if self._runs_ahead else None

    def _read(self, count: int) -> list[NewTask]:
        """Return new requests of the last epoch; fewer than `count` where it has no more."""
        epoch = self._epochs[-1]
        if not self._turns:
            return [self._task(epoch, each) for each in epoch.reader.read(count)]
        tasks: list[NewTask] = []
        while len(tasks) < count:
            worker = self._next_turn(epoch)  # first: nothing is read that no worker has a turn for
            selections = [] if worker is None else epoch.reader.read(1)
            if not selections:
                break
            tasks.append(self._task(epoch, selections[0], worker))
        return tasks

    def _task(
        self, epoch: PlannedEpoch, selection: Selection, worker: int | None = None
    ) -> NewTask:
        task, preceding = self._next_task, 0
        if worker is not None:
            preceding = epoch.preceding.get(worker, 0)
            epoch.preceding[worker] = preceding + 1
        index, position, repeated, carried = selection
        request = BatchRequest(
            index,
            epoch.start.epoch,
            epoch.batch,
            position,
            repeated,
            worker,
            preceding,
            None if self._shares_dataset else epoch.values[-1],
            epoch.worker_seed,
            self.shared_seed,
        )
        if carried is not None:
            self._carried[task] = carried
        self._requests[task] = request
        self._next_task += 1
        epoch.batch += 1
        return NewTask(task, request, worker)

    def _next_turn(self, epoch: PlannedEpoch) -> int | None:
        """Return the worker whose turn it is; None if none has more, or room for more."""
        for _ in range(self._turns):
            worker = epoch.next_worker
            epoch.next_worker = (worker + 1) % self._turns
            if self._has_more(epoch, worker) and (self._in_order or self._has_room(worker)):
                return worker
        return None

    def _has_more(self, epoch: PlannedEpoch, worker: int) -> bool:
        assert self._feed is not None
        at_end = self._feed.exhausted.get(worker, -1) >= epoch.first_task
        return not at_end and worker not in epoch.ended

    def _has_room(self, worker: int) -> bool:
        held = sum(request.worker_id == worker for request in self._requests.values())
        active = self._turns - len(self._epochs[-1].ended)
        return held < max(self._depth.now, self._depth.usual) // max(active, 1)

    def _open_next(self) -> bool:
        """Begin to read the epoch after the last; return False if that must not be done yet."""
        last = self._epochs[-1]
        if not self._runs_ahead or self._is_stale or last.reader.error is not None:
            return False
        if self._turns:
            if any(self._has_more(last, worker) for worker in range(self._turns)):
                return False
        elif not last.reader.is_complete or last.batch == last.start.batch:
            return False
        if self._shares_dataset and last.values[-1] is not None:
            return False  # the only copy of the dataset is still at this epoch
        number = last.start.epoch
        before = self._epochs[-2].values if len(self._epochs) > 1 else self._values.get(number - 1)
        start = Start(number + 1, origin=last.start.origin + (self.source.end_of(last.start) or 0))
        self._open(start, next_values(last.values, before), 0)
        return True

    def _open(self, start: Start, values: Values, next_worker: int) -> None:
        carried, seed, ended = self.source.carried(), self._worker_seed, set()
        if start.epoch == self.epoch:
            states = enumerate(self.worker_states)
            ended = {worker for worker, state in states if state.phase == "ended"}
        reader = self.source.open(start, values)
        seed = None if seed is None else worker_seed_of(seed, start.epoch)
        task, batch = self._next_task, start.batch
        self._epochs.append(
            PlannedEpoch(start, values, task, reader, carried, next_worker, ended, seed, batch)
        )

    def _leave(self, epoch: PlannedEpoch) -> None:
        """Leave an epoch behind.

        If it was broken off and the sampler carries something, it is read to its end: what is
        carried on must not depend on how far the plan had come.
        """
        sampler: Any = getattr(self.source, "sampler", None)
        if self._epochs or epoch.reader.is_complete or epoch.carried is None:
            return
        if self.source.kind == "sampler":
            with suppress(TypeError):  # one without a length may have no end
                epoch.reader.read(max(len(sampler) - epoch.batch, 0) + 1)
