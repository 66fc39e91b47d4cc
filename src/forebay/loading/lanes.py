"""One pass by torch's rules: batch k is made by worker k mod num_workers, from its own seeds.

Iterable datasets are read this way even with a buffer: each worker has a part of its own, so there
is nothing to hand out but turns.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _DatasetKind

from forebay.engine.engine import NewTask
from forebay.engine.limits import Limits
from forebay.loading.buffer import MOST_BATCHES, Buffer
from forebay.loading.feed import RELEASED_TOGETHER
from forebay.loading.handles import WorkerHandle
from forebay.loading.iterators import RETRIES, BatchIterator
from forebay.loading.recipe import LaneEnded, Made, Order
from forebay.loading.state import Place
from forebay.loading.stream import LOOKAHEAD
from forebay.plan.seeds import WORKER, seed_of

# Where batches are tiny, so many orders a worker, and how long making such a batch takes.
TINY_DEPTH = 64
TINY_S = 0.001


class LaneIterator(BatchIterator):
    """One pass by torch's rules: who makes which batch, and from which random numbers.

    There are `prefetch_factor * num_workers` batches under way, as torch has it. Where the user
    does not set that, and batches are tiny, there are more: each message to a worker costs more
    than such a batch.
    """

    def __init__(self, loader: Any) -> None:
        """Start the workers and give them their first orders."""
        super().__init__(loader)
        self._in_order = loader.in_order
        self._usual_depth = self._depth = loader.prefetch_factor * self._num_workers
        self._most_depth = self._depth
        if loader._may_prefetch_more():
            self._most_depth = max(self._depth, TINY_DEPTH * self._num_workers)
        self._buffer: Buffer | None = loader.buffer
        if self._buffer is not None:
            depth = self._buffer.max_batches or LOOKAHEAD
            self._usual_depth = self._depth = self._most_depth = depth
        self._place: Place = loader._place
        self._open(loader)
        self._begin()

    def _open(self, loader: Any) -> None:
        """Start workers that have no orders yet."""
        self._key = 0
        buffer = self._buffer
        is_counted = buffer is None or buffer.max_batches is not None
        limits = Limits(
            num_workers=self._num_workers,
            # What is out is bounded by its number here, so that no lane waits for another's slot.
            slots=self._most_depth * 2 + RELEASED_TOGETHER if is_counted else MOST_BATCHES,
            max_bytes=None if buffer is None or buffer.max_bytes is None else int(buffer.max_bytes),
            refill_below=None if buffer is None or is_counted else buffer.low_mark(),
            in_order=self._in_order,
            retries=RETRIES,
            timeout_s=self._timeout or None,
            max_group=max(self._most_depth, 1),
            lookahead=0,
            all_workers=True,
            lanes_end=self._dataset_kind == _DatasetKind.Iterable,
        )
        base_seed = int(self._base_seed)
        if loader.seed is not None:  # an iterable dataset: no place of a sample to seed it by
            base_seed = seed_of(loader.seed, WORKER, loader._place.epoch) >> 2
        self._feed = loader._open_feed(
            loader._recipe(base_seed, self._shared_seed), limits, keeps_tasks=True
        )
        self._workers = [WorkerHandle(self._feed, lane) for lane in range(self._num_workers)]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._place, self._index_sampler = loader._place, loader._index_sampler
        super()._reset(loader, first_iter)
        if self._feed.is_open:
            self._feed.forget(self._key)
        else:
            self._open(loader)
        self._begin()

    def draw_order(self) -> None:
        """Nothing: the first orders are out already."""

    def _begin(self) -> None:
        self._batch = self._place.batch
        self._next_lane = self._place.next_lane
        ended = {number for number, lane in enumerate(self._place.lanes) if lane.ended}
        self._active = [lane not in ended for lane in range(self._num_workers)]
        self._turns = [0] * self._num_workers
        self._orders: dict[int, tuple[int, Order]] = {}
        self._ended = False
        self._put(self._depth)

    def _new_task(self) -> NewTask | None:
        """Read the sampler once more, for the next lane whose turn it is."""
        try:
            index = self._next_index()
        except StopIteration:
            self._ended = True
            return None
        lane = self._lane()
        if lane is None:
            return None
        shared_seed = self._shared_seed if isinstance(self._dataset, IterDataPipe) else None
        order = Order(index, self._place.epoch, self._batch, None, shared_seed, self._turns[lane])
        self._turns[lane] += 1
        task = NewTask(self._key, order, lane)
        self._orders[self._key] = lane, order
        self._key += 1
        self._batch += 1
        return task

    def _lane(self) -> int | None:
        for _ in range(self._num_workers):
            lane = self._next_lane
            self._next_lane = (lane + 1) % self._num_workers
            if self._active[lane] and (self._in_order or self._has_room(lane)):
                return lane
        return None

    def _has_room(self, lane: int) -> bool:
        held = sum(owner == lane for owner, _ in self._orders.values())
        return bool(held < self._depth // sum(self._active))

    def _put(self, count: int) -> None:
        tasks = [self._new_task() for _ in range(count)]
        self._feed.put([task for task in tasks if task is not None])

    def _put_next(self, result: Any) -> None:
        """Put orders in the place of the one that was answered with `result`."""
        if self._buffer is not None:
            self._put(_missing(self._buffer, len(self._orders), self._feed.ready()))
            return
        if self._depth == self._most_depth == self._usual_depth:
            self._put(1)
            return
        is_tiny = isinstance(result, Made) and is_tiny_batch(result)
        self._depth = min(self._depth * 2, self._most_depth) if is_tiny else self._usual_depth
        missing = self._depth - len(self._orders)
        # Many at a time, unless there are only as many as torch would have.
        if not self._ended and missing >= max((self._depth - self._usual_depth) // 4, 1):
            self._put(missing)

    def _following(self) -> Any:
        while self._orders:
            taken = self._feed.take()
            lane, order = self._orders.pop(taken.task)
            if isinstance(taken.result, LaneEnded) or not self._active[lane]:
                if self._active[lane]:
                    self._active[lane] = False
                    self._place.lane_ended(lane)
                    self._put_next(None)
                continue
            if taken.cause is not None and self._dataset_kind == _DatasetKind.Iterable:
                self._active[lane] = False  # whoever reads on there comes to the same place
            self._put_next(taken.result)
            self._place.went()
            self._place.lane_went(lane, getattr(taken.result, "lane", None))
            return self._handed_out(taken, order)
        self._place.is_over = True
        if not self._persistent_workers:
            self._shutdown_workers()
        raise StopIteration


def _missing(buffer: Buffer, out: int, ready: int) -> int:
    """Return how many orders to put, with `out` of them out and `ready` of those answered."""
    if buffer.max_batches is not None:
        low = buffer.low_mark()
        below = low if isinstance(low, int) else math.ceil(low * buffer.max_batches)
        return buffer.max_batches - out if out < below else 0
    short = LOOKAHEAD - (out - ready)
    return short if short >= LOOKAHEAD // 8 else 0  # many at a time


def is_tiny_batch(made: Made) -> bool:
    """Tell whether making a batch took less than sending an order for it does."""
    times = made.times
    return times.is_inline and times.fetch_s + times.collate_s < TINY_S
