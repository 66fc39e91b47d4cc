"""In which order samples come that are read in blocks. PURE.

    position ── global batch ──> lane, place in it ── window ──> permuted there ──> block, row

A dataset in a bucket is read in blocks of many samples, so the samples of a batch cannot come
from anywhere: they come from a window, a few blocks that are in memory together.

- The blocks are dealt to lanes, which stay the same in all epochs. Each global batch has equally
  many samples of each lane, lane after lane, so a rank reads few lanes, and a node keeps their
  blocks. Their number divides the global batch; where the number of ranks divides it, no two
  ranks read a block.
- In each epoch, the blocks of a lane come in another order. A window is some consecutive blocks
  of that order, and the samples of a window come in any order. The first one is a single block,
  and those after it double: the first batch needs little, and more is fetched meanwhile. Then one
  of another length in each lane follows, so that not all lanes begin a window at the same time.

Everything is a function of position, so the order is the same for any number of ranks and
workers, and wherever a run continues. What is where at the moment has no influence.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.seeds import GOLDEN, MASK, WINDOWS, Integers, Permutation, permuted, seed_of

# More lanes than this would mix less in each, and there are hardly more ranks that share a batch.
MOST_LANES = 256
# Numbers of ranks that divide this are usual, and shall divide the lanes wherever they can.
USUAL_RANKS = 8
# The least number of blocks in a lane's window, and of windows in a lane.
LEAST_BLOCKS = 4


class Window(NamedTuple):
    """Some blocks that are needed together.

    Attributes:
        due: The first global batch of the epoch that needs them.
        until: The last one.
        blocks: Their numbers, in the order in which the lane has them.
    """

    due: int
    until: int
    blocks: npt.NDArray[np.int64]


class _LaneOrder(NamedTuple):
    """The blocks of a lane in an epoch.

    Attributes:
        ends: How many samples the lane has up to and including each block.
        window_ends: The same for each window.
        bounds: How many blocks the lane has up to and including each window.
        keys: The key of each window's permutation.
    """

    blocks: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    window_ends: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Windows:
    """The order of the samples of every epoch.

    Args:
        starts: The first sample of each block, ascending from 0; then the number of samples.
        batch: The global batch size.
        lanes: How many lanes; it divides `batch`.
        blocks: How many blocks each lane's window has.
    """

    starts: npt.NDArray[np.int64]
    batch: int
    lanes: int
    blocks: int
    _members: list[npt.NDArray[np.int64]] = field(init=False, repr=False)
    _totals: npt.NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Deal the blocks to the lanes, so that all have nearly equally many samples."""
        lanes, rows = self.lanes, np.diff(self.starts)
        lane = dealt(rows, lanes)
        by_lane = np.argsort(lane, kind="stable")
        counts = np.bincount(lane, minlength=lanes)
        object.__setattr__(self, "_members", np.split(by_lane, np.cumsum(counts)[:-1]))
        totals = np.bincount(lane, weights=rows, minlength=lanes).astype(np.int64)
        object.__setattr__(self, "_totals", totals)

    @property
    def state(self) -> tuple[int, ...]:
        """What the order depends on beside seed and epoch."""
        return self.batch, self.lanes, self.blocks, len(self.starts) - 1

    @property
    def _each(self) -> int:
        """Samples of each lane in a global batch."""
        return self.batch // self.lanes

    @property
    def _full(self) -> int:
        """How many global batches have samples of each lane; what is left comes after them."""
        return int(self._totals.min()) // self._each

    def lanes_of(self, first: int, count: int) -> range:
        """Return the lanes of some consecutive samples of every global batch."""
        return range(first // self._each, -(-(first + count) // self._each))

    def at(self, seed: int, epoch: int, positions: Integers) -> npt.NDArray[np.int64]:
        """Return the samples at these positions of an epoch."""
        lanes, places = self._places(seed, epoch, positions)
        found = np.empty(lanes.shape, np.int64)
        starts, lengths = np.empty_like(found), np.empty_like(found)
        keys = np.empty(lanes.shape, np.uint64)
        groups = [(lane, lanes == lane) for lane in np.unique(lanes).tolist()]
        for lane, own in groups:
            order = self._order(seed, epoch, lane)
            window = np.searchsorted(order.window_ends, places[own], "right")
            begins = np.concatenate([[0], order.window_ends])
            starts[own], lengths[own] = begins[window], np.diff(begins)[window]
            keys[own] = order.keys[window]
        moved = permuted((places - starts).ravel(), lengths.ravel(), keys.ravel())
        places = starts + moved.astype(np.int64).reshape(places.shape)
        for lane, own in groups:
            order = self._order(seed, epoch, lane)
            at = np.searchsorted(order.ends, places[own], "right")
            blocks = order.blocks[at]
            from_end = order.ends[at] - places[own]
            found[own] = self.starts[blocks + 1] - from_end
        return found

    def windows(
        self, seed: int, epoch: int, lanes: Iterable[int], batch: int = 0
    ) -> Iterator[Window]:
        """Yield the windows of some lanes that are needed from a global batch on, by need."""
        return heapq.merge(
            *(self._windows(seed, epoch, lane, batch) for lane in lanes),
            key=lambda window: window.due,
        )

    def _windows(self, seed: int, epoch: int, lane: int, batch: int) -> Iterator[Window]:
        order, each, full = self._order(seed, epoch, lane), self._each, self._full
        last = -(-int(self.starts[-1]) // self.batch) - 1
        begin = first = 0
        for end, bound in zip(order.window_ends.tolist(), order.bounds.tolist(), strict=True):
            due, until = min(begin // each, full), (end - 1) // each
            until = until if until < full else last
            if until >= batch:
                yield Window(due, until, order.blocks[first:bound])
            begin, first = end, bound

    def _places(
        self, seed: int, epoch: int, positions: Integers
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return lane and place in it of each position."""
        number, within = np.divmod(np.asarray(positions, np.int64), self.batch)
        lanes, places = within // self._each, number * self._each + within % self._each
        late = number >= self._full
        if late.any():  # less than a block of each lane is left: any order
            left = self._totals - self._full * self._each
            ends = np.cumsum(left)
            rest = (number - self._full) * self.batch + within
            order = Permutation(int(ends[-1]), seed_of(seed, WINDOWS, epoch, self.lanes))
            rest = order.at(rest[late]).astype(np.int64)
            lanes[late] = np.searchsorted(ends, rest, "right")
            places[late] = rest - (ends - left)[lanes[late]] + self._full * self._each
        return lanes, places

    @lru_cache(maxsize=2 * MOST_LANES)  # noqa: B019 - as many as two epochs have
    def _order(self, seed: int, epoch: int, lane: int) -> _LaneOrder:
        members, key = self._members[lane], seed_of(seed, WINDOWS, epoch, lane)
        order = Permutation(len(members), key).at(np.arange(len(members)))
        blocks = members[order.astype(np.int64)]
        ends = np.cumsum(self.starts[blocks + 1] - self.starts[blocks])
        # After how many blocks each window ends: 1, 3, 7 and so on, since each is twice the one
        # before; then one whose length depends on the lane; then one every `self.blocks`.
        doubled = (1 << np.arange(1, self.blocks.bit_length())) - 1
        first = (1 << self.blocks.bit_length() - 1) - 1 + -(-self.blocks * (lane + 1) // self.lanes)
        bounds = np.arange(first, len(blocks) + self.blocks, self.blocks)
        bounds = np.concatenate([doubled, bounds])
        bounds = np.minimum(bounds[: np.searchsorted(bounds, len(blocks)) + 1], len(blocks))
        keys = np.arange(1, len(bounds) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return _LaneOrder(blocks, ends, ends[bounds - 1], bounds, keys + np.uint64(key & MASK))


def dealt(rows: npt.NDArray[np.int64], lanes: int) -> npt.NDArray[np.int64]:
    """Return the lane of each block, from the number of its samples.

    The largest come first, to and fro: then no two lanes differ by more than one block.
    """
    place = np.empty(len(rows), np.int64)
    place[np.argsort(-rows, kind="stable")] = np.arange(len(rows))
    lane = place % lanes
    return np.where(place // lanes % 2, lanes - 1 - lane, lane)


def lanes_for(batch: int, blocks: int, window: int) -> int:
    """Return how many lanes to deal blocks to: many, and such that 2, 4 or 8 ranks divide them.

    Args:
        batch: The global batch size.
        blocks: How many blocks there are.
        window: How many blocks are to be shuffled together, over all lanes.
    """
    most = min(batch, MOST_LANES, max(min(blocks, window) // LEAST_BLOCKS, 1))
    divisors = (lanes for lanes in range(1, most + 1) if batch % lanes == 0)
    return max(divisors, key=lambda lanes: (gcd(lanes, USUAL_RANKS), lanes))


class InOrder:
    """The blocks of samples that are read in order, as `Windows` says it of others.

    Args:
        starts: As of `Windows`.
        batch: The global batch size.
    """

    def __init__(self, starts: npt.NDArray[np.int64], batch: int) -> None:
        self.starts, self.batch, self.lanes = starts, batch, 1

    def lanes_of(self, first: int, count: int) -> range:
        """Return the only lane."""
        return range(1)

    def windows(
        self, seed: int, epoch: int, lanes: Iterable[int], batch: int = 0
    ) -> Iterator[Window]:
        """Yield each block as a window."""
        first = int(np.searchsorted(self.starts, batch * self.batch, "right")) - 1
        for block in range(max(first, 0), len(self.starts) - 1):
            due, until = self.starts[block], self.starts[block + 1] - 1
            yield Window(int(due) // self.batch, int(until) // self.batch, np.array([block]))
