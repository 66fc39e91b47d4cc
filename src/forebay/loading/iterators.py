"""Iterators over what workers make: torch's iterator, with forebay's engine behind it.

BatchIterator       torch's ways: its checks and warnings, raising, pinning, worker handles
├── LaneIterator    torch's rules: batch k is made by worker k mod num_workers
└── StreamIterator  one epoch of a stream, see `stream.py`: any worker, seeds by position
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data._utils import pin_memory
from torch.utils.data.dataloader import _DatasetKind

from forebay.engine.engine import NewTask
from forebay.engine.events import Cause
from forebay.engine.limits import Limits
from forebay.errors import WorkerDiedError
from forebay.loading.feed import RELEASED_TOGETHER, Feed, Taken
from forebay.loading.handles import WorkerHandle
from forebay.loading.local import QuickNext
from forebay.loading.recipe import LaneEnded, Made, NothingLeft, Order, Raised, SkippedSample
from forebay.loading.seeding import generators_kept, generators_taken
from forebay.loading.state import Place
from forebay.loading.stream import LOOKAHEAD, Stream
from forebay.plan.seeds import WORKER, seed_of

# A batch whose worker died, or hung, is made once more.
RETRIES = 1
# Where batches are tiny, so many orders a worker, and how long making such a batch takes.
TINY_DEPTH = 64
TINY_S = 0.001


class BatchIterator(QuickNext):
    """Hands out what a feed delivers, as torch's iterators do."""

    def __init__(self, loader: Any) -> None:
        """Make torch's checks and draws."""
        super().__init__(loader)
        self._skipped: list[SkippedSample] = loader._skipped
        self._feed: Feed
        self._workers: list[WorkerHandle] = []

    def _handed_out(self, taken: Taken, order: Order) -> Any:
        """Return the batch of a result, or raise what came instead."""
        if taken.cause is not None:
            raise _died(taken.cause, order, self._timeout)
        result = taken.result
        if isinstance(result, Raised):
            _raise(result)
        assert isinstance(result, Made)
        self._skipped += result.skipped
        if self._pin_memory:
            return pin_memory.pin_memory(result.batch, self._pin_memory_device)
        return result.batch

    def _next_data(self) -> Any:
        try:
            return self._following()
        except KeyboardInterrupt:
            self._feed.interrupted()
            raise

    def _following(self) -> Any:
        """Return the next batch."""
        raise NotImplementedError

    def _shutdown_workers(self) -> None:
        self._feed.close()

    def __del__(self) -> None:
        """Let the workers go with the last reference."""
        feed = getattr(self, "_feed", None)
        if feed is not None:
            feed.close()


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
        buffer = loader.buffer
        if buffer is not None:
            self._usual_depth = self._depth = self._most_depth = buffer.max_batches or LOOKAHEAD
        self._place: Place = loader._place
        self._open(loader)
        self._begin()

    def _open(self, loader: Any) -> None:
        """Start workers that have no orders yet."""
        self._key = 0
        limits = Limits(
            num_workers=self._num_workers,
            slots=self._most_depth * 2 + RELEASED_TOGETHER,
            max_bytes=None if loader.buffer is None else loader.buffer.max_bytes,
            in_order=self._in_order,
            retries=RETRIES,
            timeout_s=self._timeout or None,
            max_group=max(self._most_depth, 1),
            lookahead=0,
            all_workers=True,
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
        """Put an order in the place of the one that was answered with `result`."""
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


class StreamIterator(BatchIterator):
    """One epoch of a stream."""

    def __init__(self, loader: Any, begin: Callable[[Any, int], tuple[Stream, Feed]]) -> None:
        """Begin the epoch: `begin` gets this reader, and the base seed that it drew."""
        generator = loader._drawn_from
        with generators_taken():
            before = generator.get_state()
            super().__init__(loader)
            if loader.persistent_workers and loader._feed is not None and loader._feed.is_open:
                generator.set_state(before)  # torch draws it once for workers that persist
        # The loader knows its reader by a weak reference: a cycle would keep the workers alive.
        self._loader = loader
        try:
            self._stream, self._feed = begin(self, int(self._base_seed))
        except BaseException:
            loader._stop()  # what was begun may be torn
            raise
        self._is_inline = self._num_workers == 0
        self._keeps_workers = loader._keeps_workers
        self._workers = [WorkerHandle(self._feed, lane) for lane in range(self._num_workers)]

    def _following(self) -> Any:
        while self._loader._is_read_by(self):
            with generators_kept() if self._is_inline else nullcontext():
                found = self._stream.take()
            if found is None:
                self._loader._epoch_ended(self)
                raise StopIteration
            taken, order = found
            if isinstance(taken.result, NothingLeft):
                self._skipped += taken.result.skipped
                continue
            return self._handed_out(taken, order)
        raise StopIteration

    def _shutdown_workers(self) -> None:
        if not self._keeps_workers:
            self._feed.close()

    def __del__(self) -> None:
        """Let the workers go with the last reference, unless the loader keeps them."""
        if getattr(self, "_feed", None) is not None:
            self._shutdown_workers()


def is_tiny_batch(made: Made) -> bool:
    """Tell whether making a batch took less than sending an order for it does."""
    times = made.times
    return times.is_inline and times.fetch_s + times.collate_s < TINY_S


def _raise(raised: Raised) -> None:
    """Raise what the user's code raised, as torch does, with forebay's notes."""
    try:
        if isinstance(raised.error, BaseException):
            raise raised.error
        raised.error.reraise()
    except BaseException as error:
        for note in raised.notes:
            if note not in getattr(error, "__notes__", ()):  # some raise one object again and again
                error.add_note(note)
        raise


def _died(cause: Cause, order: Order, timeout: float) -> Exception:
    """Say why a batch could not be made however often it was tried."""
    text = repr(order.index)
    samples = f"samples {text if len(text) <= 200 else text[:200] + ' ...'}"
    after = "with the next one"
    if order.index is None or (isinstance(order.index, list) and None in order.index):
        samples = "the next samples of its stream"
        after = "without the rest of that worker's stream"
    where = (
        f"  It was at work on epoch {order.epoch}, batch {order.batch}: {samples}.\n"
        f"  The batch was tried {RETRIES + 1} times; the loader goes on {after}.\n"
        "  To see it happen in this process: num_workers=0 or, with a seed, "
        f"loader.replay(epoch={order.epoch}, batch={order.batch}).\n"
    )
    if cause.kind == "timeout":
        return WorkerDiedError(
            f"DataLoader timed out after {timeout:g} seconds: a worker did not finish a batch\n"
            f"{where}  Raise `timeout`, or see where it hangs:\n{cause.traceback}"
        )
    if cause.error == "SystemExit":
        return WorkerDiedError(
            f"DataLoader worker exited unexpectedly: sys.exit({cause.message}) was called\n"
            f"{where}{cause.traceback}"
        )
    if cause.kind == "exception":
        return WorkerDiedError(
            f"a worker could not answer: {cause.error}: {cause.message}\n{where}{cause.traceback}"
        )
    return WorkerDiedError(
        f"DataLoader worker exited unexpectedly: {cause.message}\n{where}{cause.traceback}"
    )
