"""Passes over an iterable dataset with a buffer: the next is begun while this one is handed out.

    worker ──> batch, batch, batch, «ended» ──> the line of answers ──> trainer
                                       └─> when all workers said so, orders of the next epoch go out

Only a worker knows where its part ends, and it says so long before the trainer has come that far.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe

from forebay.engine.limits import Limits
from forebay.loading.buffer import MOST_BATCHES, Buffer
from forebay.loading.epochs import Said
from forebay.loading.lanes import LaneIterator
from forebay.loading.stream import LOOKAHEAD


class _Plan(NamedTuple):
    """An epoch that orders were put for: its number, its first task, and what it rests on."""

    epoch: int
    first: int
    said: Said


class AheadIterator(LaneIterator):
    """Passes by torch's rules for workers that persist, each begun as early as can be.

    What `set_epoch` will be called with is foreseen, as for a stream; where that was wrong, the
    epoch is made anew. A datapipe is seeded by the trainer when its epoch begins, and without order
    epochs would mix: there the next one waits for that.
    """

    def __init__(self, loader: Any) -> None:
        """Start the workers and give them their first orders."""
        self._buffer: Buffer = loader.buffer
        self._watches, self._tally = loader._watches, loader._tally
        self._plans: deque[_Plan] = deque()  # this epoch's, and those ahead
        self._said_before: Said | None = None
        super().__init__(loader)

    def ready(self) -> list[tuple[int, int]]:
        """Return epoch and number of each batch that waits to be handed out."""
        found: list[tuple[int, int]] = []
        last, number = self._place.epoch, self._place.batch - 1
        for task in self._feed.ready_batches():
            epoch = self._orders[task][1].epoch
            last, number = epoch, number + 1 if epoch == last else 0
            found.append((last, number))
        return found

    def _limits(self) -> Limits:
        buffer = self._buffer
        self._usual_depth = self._depth = self._most_depth = buffer.max_batches or LOOKAHEAD
        limits = super()._limits()
        if buffer.max_batches is None:
            limits = replace(limits, slots=MOST_BATCHES, refill_below=buffer.low_mark())
        if buffer.max_bytes is None:
            return limits
        return replace(limits, max_bytes=int(buffer.max_bytes))

    def _open(self, loader: Any) -> None:
        self._plans.clear()
        super()._open(loader)

    def _begin(self) -> None:
        """Go on with what was made of this epoch already, if what it rests on has come true."""
        said = self._watches.said()
        while self._plans and self._plans[0].epoch < self._place.epoch:
            self._said_before = self._plans.popleft().said
        if not self._plans or self._plans[0].said != said:
            self._plans = deque([_Plan(self._place.epoch, self._key, said)])
            super()._begin()
            return
        first = self._plans[0].first
        left = [task for task in self._orders if task < first]
        if left:  # a loop was broken off
            self._feed.forget(first)
            for task in left:
                del self._orders[task]
        self._active = [True] * self._num_workers
        self._put_next(None)

    def _is_over(self) -> bool:
        following = next(iter(self._orders.values()), None)
        return following is None or following[1].epoch != self._place.epoch

    def _dataset_epoch(self) -> int | None:
        return self._plans[-1].said.values[-1]

    def _has_more(self, lane: int) -> bool:
        is_later = self._plans[-1].epoch > self._place.epoch
        return (is_later or self._active[lane]) and not self._has_ended(lane)

    def _has_ended(self, lane: int) -> bool:
        """Tell whether a worker said that the last epoch of the plan is over for it."""
        return self._feed.ended.get(lane, -1) >= self._plans[-1].first

    def _put_next(self, result: Any) -> None:
        """Put orders up to the high mark, when they are fewer than the low mark."""
        ready = self._feed.ready()
        empty = max(ready - self._tally.ready_batches, 0)  # there, to say that a part has ended
        missing = _missing(self._buffer, len(self._orders) - empty, ready - empty)
        while missing > 0:
            before = self._key
            self._put(missing)
            missing -= self._key - before
            if missing and not self._plan_next():
                break

    def _plan_next(self) -> bool:
        """Go on to the epoch after the last of the plan, if that is over for all workers."""
        ended = all(map(self._has_ended, range(self._num_workers)))
        if not ended or not self._in_order or isinstance(self._dataset, IterDataPipe):
            return False
        last = self._plans[-1]
        before = self._plans[-2].said if len(self._plans) > 1 else self._said_before
        said = last.said.after(last.said.steps_from(before))
        self._plans.append(_Plan(last.epoch + 1, self._key, said))
        self._plan(last.epoch + 1)
        return True


def _missing(buffer: Buffer, out: int, ready: int) -> int:
    """Return how many orders to put, with `out` of them out and `ready` of those answered."""
    if buffer.max_batches is not None:
        low = buffer.low_mark()
        below = low if isinstance(low, int) else math.ceil(low * buffer.max_batches)
        return buffer.max_batches - out if out < below else 0
    short = LOOKAHEAD - (out - ready)
    return short if short >= LOOKAHEAD // 8 else 0  # many at a time
