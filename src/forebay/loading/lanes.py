"""One pass by torch's rules: batch k is made by worker k mod num_workers, from its own seeds."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _DatasetKind

from forebay.engine.engine import NewTask
from forebay.engine.limits import Limits
from forebay.loading.feed import RELEASED_TOGETHER
from forebay.loading.handles import WorkerHandle
from forebay.loading.iterators import RETRIES, BatchIterator
from forebay.loading.recipe import LaneEnded, Made, Order
from forebay.loading.state import Place
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
        self._seed: int | None = loader.seed
        self._persistent_workers = loader._keeps_workers
        self._place: Place = loader._place
        self._open(loader)
        self._begin()

    def _open(self, loader: Any) -> None:
        """Start workers that have no orders yet."""
        self._key = 0
        seed = self._epoch_seed(self._place.epoch)
        base_seed = int(self._base_seed) if seed is None else seed
        recipe = loader._recipe(base_seed, self._shared_seed)
        self._feed = loader._open_feed(recipe, self._limits(), keeps_tasks=True)
        self._workers = [WorkerHandle(self._feed, lane) for lane in range(self._num_workers)]

    def _limits(self) -> Limits:
        return Limits(
            num_workers=self._num_workers,
            # What is out is bounded by its number here, so that no lane waits for another's slot.
            slots=self._most_depth * 2 + RELEASED_TOGETHER,
            in_order=self._in_order,
            retries=RETRIES,
            timeout_s=self._timeout or None,
            max_group=max(self._most_depth, 1),
            lookahead=0,
            all_workers=True,
            lanes_end=self._dataset_kind == _DatasetKind.Iterable,
        )

    def _epoch_seed(self, epoch: int) -> int | None:
        """Return what the workers begin an epoch with: a sample has no place to seed it by."""
        return None if self._seed is None else seed_of(self._seed, WORKER, epoch) >> 2

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._place, self._index_sampler = loader._place, loader._index_sampler
        super()._reset(loader, first_iter)
        if not self._feed.is_open:
            self._open(loader)
        self._begin()

    def draw_order(self) -> None:
        """Nothing: the first orders are out already."""

    def _begin(self) -> None:
        """Put the first orders of the pass."""
        if self._key:
            self._feed.forget(self._key)
        ended = {number for number, lane in enumerate(self._place.lanes) if lane.ended}
        self._active = [lane not in ended for lane in range(self._num_workers)]
        self._orders: dict[int, tuple[int, Order]] = {}
        self._plan(self._place.epoch, self._place.batch, self._place.next_lane)
        self._put(self._depth)

    def _plan(self, epoch: int, batch: int = 0, next_lane: int = 0) -> None:
        """Let orders be of an epoch, from a batch on that a lane is to make."""
        self._planned, self._batch, self._next_lane = epoch, batch, next_lane
        self._lane_seed = self._epoch_seed(epoch)
        self._turns = [0] * self._num_workers
        self._ended = False

    def _is_over(self) -> bool:
        """Tell whether nothing more of the pass is to come."""
        return not self._orders

    def _has_more(self, lane: int) -> bool:
        """Tell whether there is something to order from a lane."""
        return self._active[lane]

    def _dataset_epoch(self) -> int | None:
        """Return what to give to the `set_epoch` of the workers' datasets."""
        return None

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
        order = Order(
            index,
            self._planned,
            self._batch,
            self._dataset_epoch(),
            shared_seed,
            self._turns[lane],
            self._lane_seed,
        )
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
            if self._has_more(lane) and (self._in_order or self._has_room(lane)):
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
        while not self._is_over():
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


def is_tiny_batch(made: Made) -> bool:
    """Tell whether making a batch took less than sending an order for it does."""
    times = made.times
    return times.is_inline and times.fetch_s + times.collate_s < TINY_S
