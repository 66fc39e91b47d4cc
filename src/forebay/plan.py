"""Which samples form which batch: the plan of all epochs, for one rank or many. PURE.

    epoch e    position 0 ……………………………………………………………………… length
               | global batch 0      | global batch 1      | … tail
               | rank 0 | rank 1 | … |

The plan is of *global* batches: all samples of one step, over all ranks. Global batch `k` is the
samples at positions `k * global_batch_size` and after in the order of the epoch, and a rank's batch
is a slice of it. So the global batches are the same for any number of ranks that divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.seeds import EPOCH, EPOCHS, ORDER, Integers, Permutation, seed_of

if TYPE_CHECKING:
    from forebay.mixture import Mixture

# The order of an epoch, of which each batch asks for a part.
_order_of = lru_cache(maxsize=4)(partial(Permutation, in_tables=True))


# Ranks that share rows one by one. More ranks form groups, which get rows in turns beforehand: the
# time would grow with the square of the ranks.
MOST_RANKS = 32


def balanced(costs: npt.NDArray[np.float64], room: Sequence[int], rank: int) -> Integers:
    """Return a rank's rows of global batches, so that the ranks' costs are nearly equal.

    Longest first: each row, from the most expensive on, goes to the rank that would have the least
    cost if the rows it still takes cost the mean of those that are left (after Graham, "Bounds on
    multiprocessing timing anomalies", 1969, where each takes any number of them).

    Args:
        costs: [batches, rows of a batch].
        room: How many rows each rank takes; in total, as many as there are.

    Returns:
        [batches, rows of the rank]: which rows, ascending.
    """
    batches, count = costs.shape
    order = np.argsort(-costs, axis=1, kind="stable")
    ranks = len(room)
    sizes = [n for n in range(1, MOST_RANKS + 1) if ranks % n == 0 and len(set(room)) == 1]
    if ranks > MOST_RANKS and sizes:
        groups, (group, within) = ranks // sizes[-1], divmod(rank, sizes[-1])
        turns = np.arange(count // groups)
        places = turns * groups + np.where(turns % 2, groups - 1 - group, group)
        own = np.sort(order[:, places], axis=1)
        dealt = balanced(np.take_along_axis(costs, own, 1), room[: sizes[-1]], within)
        return np.take_along_axis(own, dealt, 1)
    falling = np.take_along_axis(costs, order, 1)
    means = falling[:, ::-1].cumsum(1)[:, ::-1] / np.arange(count, 0, -1)
    left = np.tile(np.array(room, np.float64), (batches, 1))
    loads = np.where(left, 0, np.inf)
    owners = np.empty((count, batches), np.int64)  # in the order of costs
    first = np.arange(batches) * ranks  # of each batch in flat views, which take half the time
    for owner, cost, mean in zip(owners, falling.T, means.T, strict=True):
        np.argmin(loads + left * mean[:, None], axis=1, out=owner)
        at = first + owner
        rest = left.ravel()[at] - 1
        left.ravel()[at] = rest
        loads.ravel()[at] += np.where(rest, cost, np.inf)
    return np.sort(order[rank == owners.T].reshape(batches, -1), axis=1)


# Positions to compute at a time: enough to be fast with numpy, few enough for a fast start.
BLOCK = 4096
# Positions of all ranks, where the rows of a global batch are dealt by their costs.
DEALT = 8 * BLOCK


class Share(NamedTuple):
    """One rank's part of one global batch."""

    first: int
    samples: int
    repeated: int = 0


class Block(NamedTuple):
    """Some consecutive batches of one rank.

    Attributes:
        indices: [batches, samples of a batch].
        positions: [batches]: the position of each batch's first sample, the others following it;
            or [batches, samples of a batch], if they do not.
    """

    indices: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    repeated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The batches of a map-style dataset, as a function of seed, epoch and number.

    Attributes:
        by_epoch: Whether samples depend on the epoch, which is then part of an index.
        order: Returns the samples at positions, by seed and epoch, if the order is random; None for
            that of a `Permutation`.
        costs_of: What samples cost, by their indices: the ranks then share the samples of a global
            batch so that they cost each of them nearly the same. None: a rank has consecutive ones.
    """

    length: int
    batch_size: int
    seed: int
    shuffle: bool = False
    world_size: int = 1
    rank: int = 0
    drop_last: bool = False
    tail: str = "repeat"
    mixture: Mixture | None = None
    by_epoch: bool = False
    order: Callable[[int, int, Integers], Integers] | None = None
    costs_of: Callable[[Integers], npt.NDArray[np.float64]] | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of one step, over all ranks."""
        return self.batch_size * self.world_size

    def end(self, sample: int = 0) -> int:
        """Return the position, over all ranks, at which an epoch from `sample` on ends."""
        left = max(self.length - sample, 0)
        return sample + left - (left % self.global_batch_size if self.drop_last else 0)

    def position_of(self, step: int) -> int:
        """Return the samples of all epochs before a step, over all ranks."""
        end = self.end()
        epoch, step = divmod(step, max(-(-end // self.global_batch_size), 1))
        return epoch * end + step * self.global_batch_size

    def steps(self, sample: int = 0) -> int:
        """Return how many batches this rank has from position `sample` of an epoch on."""
        full, tail = divmod(self.end(sample) - sample, self.global_batch_size)
        share = share_of(tail, self)
        return full + (share.samples + share.repeated > 0)

    def blocks(self, epoch: int, sample: int = 0, origin: int | None = None) -> Iterator[Block]:
        """Yield this rank's batches of an epoch, from a position on, in blocks.

        Args:
            origin: Samples of all earlier epochs, after which a mixture continues; None if these
                epochs were as long as this one.
        """
        before, end = epoch * self.end() if origin is None else origin, self.end(sample)
        size, world, ranks = self.batch_size, self.global_batch_size, range(self.world_size)
        together = max(min(BLOCK // size, DEALT // world if self.costs_of else BLOCK), 1)
        while (full := min((end - sample) // world, together)) > 0:
            starts = sample + world * np.arange(full)
            yield Block(*self._dealt(before, epoch, starts, [size] * self.world_size), 0)
            sample += full * world
        share = share_of(end - sample, self)
        if share.samples + share.repeated:
            room = [share_of(end - sample, replace(self, rank=rank)).samples for rank in ranks]
            indices, positions = self._dealt(before, epoch, np.array([sample]), room)
            if share.repeated:
                again = np.array(repeated_by(end - sample, self))
                samples = self._indices(before, epoch, again % self.length, 1)
                indices = np.concatenate([indices, samples.reshape(1, -1)], axis=1)
                if positions.ndim > 1:
                    positions = np.concatenate([positions, [end + again]], axis=1)
            yield Block(indices, positions, share.repeated)

    def _dealt(
        self, before: int, epoch: int, starts: npt.NDArray[np.int64], room: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return this rank's samples and positions of the global batches that start there.

        Args:
            room: How many samples each rank takes of each.
        """
        if self.costs_of is None:
            first = starts + sum(room[: self.rank])
            return self._indices(before, epoch, first, room[self.rank]), first
        every = self._indices(before, epoch, starts, sum(room))
        costs = self.costs_of(every.ravel()).reshape(every.shape)
        dealt = balanced(costs, room, self.rank)
        return np.take_along_axis(every, dealt, axis=1), starts[:, None] + dealt

    def _indices(
        self, before: int, epoch: int, starts: npt.NDArray[np.int64], count: int
    ) -> npt.NDArray[np.int64]:
        """Return the samples at `count` positions from each start on, a row for each start."""
        if self.mixture is not None:
            mixture = self.mixture
            if len(starts) == 1 or starts[1] - starts[0] == count:  # consecutive
                whole = len(starts) * count
                found = mixture.indices(self.seed, self.shuffle, before + int(starts[0]), whole)
                return found.reshape(len(starts), count)
            rows = [
                mixture.indices(self.seed, self.shuffle, before + start, count)
                for start in starts.tolist()
            ]
            return np.stack(rows)
        numbers = starts[:, None] + np.arange(count)
        if self.shuffle and self.order is not None:
            numbers = self.order(self.seed, epoch, numbers).astype(np.int64)
        elif self.shuffle:
            order = _order_of(self.length, seed_of(self.seed, ORDER, epoch))
            numbers = order.at(numbers).astype(np.int64)
        return numbers + epoch % EPOCHS * EPOCH if self.by_epoch else numbers


def share_of(samples: int, plan: Plan) -> Share:
    """Return one rank's part of a global batch of `samples` samples, which is at position 0.

    An incomplete batch is divided as evenly as possible: every rank has `samples // world_size` of
    them or one more, and where it has fewer than others, one is repeated. With the tail "fill" the
    ranks have whole batches, one after the other, and those that are left repeat samples.
    """
    if samples == plan.global_batch_size:
        return Share(plan.rank * plan.batch_size, plan.batch_size)
    if plan.tail == "fill":
        begin = min(plan.rank * plan.batch_size, samples)
        own = min(plan.batch_size, samples - begin)
        return Share(begin, own, plan.batch_size - own if samples else 0)
    begin = plan.rank * samples // plan.world_size
    end = (plan.rank + 1) * samples // plan.world_size
    most = -(-samples // plan.world_size)
    repeated = most - (end - begin) if plan.tail == "repeat" else 0
    return Share(begin, end - begin, repeated)


def repeated_by(samples: int, plan: Plan) -> range:
    """Return which samples one rank repeats, from the first on, after `samples` in the last batch.

    Whole batches are filled in the order of the ranks, as Accelerate fills them.
    """
    repeated = share_of(samples, plan).repeated
    if plan.tail == "fill":
        begin = max(plan.rank * plan.batch_size - samples, 0)
        return range(begin, begin + repeated)
    return range(plan.rank, plan.rank + repeated * plan.world_size, plan.world_size)
