"""Iterators over what workers make: torch's iterator, with forebay's engine behind it.

BatchIterator       torch's ways: its checks and warnings, raising, pinning, worker handles
├── LaneIterator    torch's rules, see `lanes.py`: batch k is made by worker k mod num_workers
└── StreamIterator  one epoch of a stream, see `stream.py`: any worker, seeds by position
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.utils.data._utils import pin_memory

from forebay.engine.events import Cause
from forebay.errors import WorkerDiedError, shortened
from forebay.loading.feed import Feed, Taken
from forebay.loading.handles import WorkerHandle
from forebay.loading.local import QuickNext
from forebay.loading.recipe import ENDED, Made, NothingLeft, Order, Raised, SkippedSample
from forebay.loading.seeding import generators_kept, generators_taken
from forebay.loading.stream import Stream

# A batch whose worker died, or hung, is made once more.
RETRIES = 1


class BatchIterator(QuickNext):
    """Hands out what a feed delivers, as torch's iterators do."""

    def __init__(self, loader: Any) -> None:
        """Make torch's checks and draws."""
        super().__init__(loader)
        self._skipped: list[SkippedSample] = loader._skipped
        self._feed: Feed
        self._workers: list[WorkerHandle] = []
        self._one_at_a_time = threading.Lock()  # of the threads that share this iterator

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
            with self._one_at_a_time:
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
        self._epoch, self._is_over = self._stream.epoch, False
        self._is_inline = self._num_workers == 0
        self._keeps_workers = loader._keeps_workers
        self._workers = [WorkerHandle(self._feed, lane) for lane in range(self._num_workers)]

    def _following(self) -> Any:
        while self._loader._is_read_by(self):
            with generators_kept() if self._is_inline else nullcontext():
                found = self._stream.take()
            if found is None:
                self._loader._epoch_ended(self)
                self._is_over = True
                raise StopIteration
            taken, order = found
            if isinstance(taken.result, NothingLeft):
                self._skipped += taken.result.skipped
                continue
            return self._handed_out(taken, order)
        if self._is_over:
            raise StopIteration
        raise RuntimeError(
            "this iterator was ended by a later iter(loader), or by load_state_dict(): with "
            "`seed`, `buffer`, `backend` or `on_error` a loader is read by one at a time\n"
            f"  It had handed out a part of epoch {self._epoch}; nothing more comes from it. Make "
            "a second loader for a loop within a loop."
        )

    def _shutdown_workers(self) -> None:
        if not self._keeps_workers:
            self._feed.close()

    def __del__(self) -> None:
        """Let the workers go with the last reference, unless the loader keeps them."""
        if getattr(self, "_feed", None) is not None:
            self._shutdown_workers()


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
    samples = f"samples {shortened(order.index)}"
    after = "with the next one"
    here = f"num_workers=0 or, with a seed, loader.replay(epoch={order.epoch}, batch={order.batch})"
    if order.index is None or (isinstance(order.index, list) and None in order.index):
        samples = "the next samples of its stream"
        after, here = "without the rest of that worker's stream", "num_workers=0"
    tries = "once" if cause.kind == ENDED else f"{RETRIES + 1} times"
    where = (
        f"  It was at work on epoch {order.epoch}, batch {order.batch}: {samples}.\n"
        f"  The batch was tried {tries}; the loader goes on {after}.\n"
        f"  To see it happen in this process: {here}.\n"
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
    if cause.kind in ("exception", ENDED):
        return WorkerDiedError(
            f"a worker could not answer: {cause.error}: {cause.message}\n{where}{cause.traceback}"
        )
    return WorkerDiedError(
        f"DataLoader worker exited unexpectedly: {cause.message}\n{where}{cause.traceback}"
    )
