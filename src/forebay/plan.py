"""Which samples form which batch: the plan of all epochs, for one rank or many. PURE.

    epoch e    position 0 ……………………………………………………………………… length
               | global batch 0      | global batch 1      | … tail
               | rank 0 | rank 1 | … |

The plan is of *global* batches: all samples of one step, over all ranks. Global batch `k` is the
samples at positions `k * global_batch_size` and after in the order of the epoch, and a rank's batch
is a slice of it. So the global batches are the same for any number of ranks that divides them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# ---- seeds ---------------------------------------------------------------------------------------
# Seeds as functions of a sample's position in the plan, never of the worker. PURE.
#
# The mixing is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
# 2014): each number of the path is added to the state, and the state is scrambled.

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

# The purpose of a seed: the first number of its path, so that different uses never coincide.
ORDER, SAMPLE, COLLATE, SAMPLER, WORKER, SOURCES, DEVICE, ROWS = range(8)


def seed_of(seed: int, *path: int) -> int:
    """Return 64 bits that depend on `seed` and on every number of the path, in order."""
    state = scrambled(seed & MASK)
    for step in path:
        state = child_seed(state, step)
    return state


def child_seed(seed: int, step: int) -> int:
    """Return what `seed_of` returns for a path that is one step longer than that of `seed`."""
    value = (seed + GOLDEN * (step + 1)) & MASK  # `scrambled`, without the call: once per sample
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def worker_seed_of(seed: int, epoch: int) -> int:
    """Return the base seed of the workers of an iterable dataset in an epoch.

    It has 62 bits, so that a worker ID can be added.
    """
    return seed_of(seed, WORKER, epoch) >> 2


def scrambled(value: int) -> int:
    """Return 64 bits in which every bit depends on every bit of `value`."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


# A dataset whose samples depend on the epoch gets the epoch, times EPOCH, added to each index, as
# messages show it: 3000000000007 is sample 7 of epoch 3. Epochs repeat after EPOCHS, so that an
# index has 62 bits.
EPOCH, EPOCHS = 10**12, 1 << 22

Integers = npt.NDArray[np.integer]

# ---- permutation ---------------------------------------------------------------------------------
# A random order of the numbers below any length, computed position by position. PURE.
#
# The order is a keyed permutation: a Feistel network over pairs of digits (Black and Rogaway,
# "Ciphers with arbitrary finite domains", 2002). A position is written as `row * columns + column`;
# each round adds to one of the two a function of the other and the key. `columns` is about the root
# of the length, so the grid has few more places than there are numbers; a position that is mapped
# beyond the end is permuted again until it is not.
#
# So the order of a billion samples takes neither memory nor time to create, and positions can be
# evaluated in any order. Measured by `tests/plan/test_permutation.py`: every permutation of up to
# seven samples is equally likely, as is every place for every sample and pair of samples of larger
# datasets.

# Rounds mix the two digits: a few suffice for many places, but with a handful of places it takes
# many rounds to reach all orders equally often.
ROUNDS, SMALL_ROUNDS, SMALL = 8, 24, 4096
# Up to so many rows or columns a round is looked up in a table: of 2 MB for all rounds.
MOST_IN_TABLE = 1 << 15

Positions = npt.NDArray[np.uint64]


class Permutation:
    """The order of `length` numbers under one key.

    Args:
        length: How many numbers, at least 1.
        in_tables: Compute each round for all rows or columns first, if they are not too many: worth
            it for more positions than a few batches, which then take a quarter of the time.
    """

    __slots__ = ("_columns", "_length", "_rounds", "_rows")

    def __init__(self, length: int, key: int, in_tables: bool = False) -> None:
        """Compute the keys of the rounds; without tables nothing grows with the length."""
        self._length = length
        # Even: with two odd sides every round, and so the whole, would be an even permutation.
        self._columns = max(2, 2 * math.ceil(math.sqrt(length) / 2))
        self._rows = -(-length // self._columns)
        steps = range(1, 1 + (SMALL_ROUNDS if length <= SMALL else ROUNDS))
        keys = [np.uint64(scrambled((key + GOLDEN * step) & MASK)) for step in steps]
        self._rounds = _rounds(np.uint64(self._rows), np.uint64(self._columns), keys)
        if in_tables and self._columns <= MOST_IN_TABLE:
            sides = (
                np.arange(self._rows, dtype=np.uint64),
                np.arange(self._columns, dtype=np.uint64),
            )
            tables = [addend(sides[step % 2]) for step, addend in enumerate(self._rounds)]
            self._rounds = [partial(_looked_up, table) for table in tables]

    def at(self, positions: npt.ArrayLike) -> Positions:
        """Return the numbers at these positions."""
        found = self._permuted(np.asarray(positions, np.uint64))
        limit = np.uint64(self._length)
        outside = found >= limit
        while outside.any():
            found[outside] = self._permuted(found[outside])
            outside = found >= limit
        return found

    def _permuted(self, places: Positions) -> Positions:
        return _mixed(places, np.uint64(self._rows), np.uint64(self._columns), self._rounds)


def permuted(positions: npt.ArrayLike, lengths: npt.ArrayLike, keys: Positions) -> Positions:
    """Return the number at each position of an order of its own, with its own length and key.

    What `Permutation` does for many positions of one order, for a few positions of each of many.
    """
    found = np.array(positions, np.uint64)
    limits = np.asarray(lengths, np.uint64)
    columns = np.maximum(2 * np.ceil(np.sqrt(limits.astype(np.float64)) / 2), 2).astype(np.uint64)
    rows = (limits + columns - np.uint64(1)) // columns
    steps = (np.arange(ROUNDS, dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    every = _scrambled(keys + steps[:, None])
    left = np.arange(len(found))
    while len(left):
        rounds = _rounds(rows[left], columns[left], every[:, left])
        found[left] = _mixed(found[left], rows[left], columns[left], rounds)
        left = left[found[left] >= limits[left]]
    return found


# What a round adds to one of two digits, as a function of the other.
Round = Callable[[Positions], Positions]


def _rounds(rows: Any, columns: Any, keys: Iterable[Any]) -> list[Round]:
    """Return the rounds for a grid of rows and columns, columns first."""
    return [
        partial(_addend, key=key, base=rows if step % 2 else columns)
        for step, key in enumerate(keys)
    ]


def _addend(digits: Positions, key: Any, base: Any) -> Positions:
    with np.errstate(over="ignore"):
        found: Positions = _scrambled(digits + key) % base
    return found


def _looked_up(table: Positions, digits: Positions) -> Positions:
    return table.take(digits.view(np.int64))


def _mixed(places: Positions, rows: Any, columns: Any, rounds: Sequence[Round]) -> Positions:
    """Return where the places of a grid of rows and columns are moved to."""
    row, column = np.divmod(places, columns)
    for step, addend in enumerate(rounds):
        if step % 2:
            row = _sum(row, addend(column), rows)
        else:
            column = _sum(column, addend(row), columns)
    moved: Positions = row * columns + column
    return moved


def _sum(digits: Positions, others: Positions, base: Any) -> Positions:
    """Return sums modulo the base; half the time of a division."""
    total = digits + others
    found: Positions = np.minimum(total, total - base)  # below 0 it is beyond all digits
    return found


# The order of an epoch, of which each batch asks for a part.
_order_of = lru_cache(maxsize=4)(partial(Permutation, in_tables=True))


def _scrambled(values: Positions) -> Positions:
    """Do what `seeds.scrambled` does, for an array."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# ---- mixture -------------------------------------------------------------------------------------
# Which source the sample at a position comes from, when several are mixed by weight. PURE.
#
#     position p ── golden-ratio sequence ──> point in [0, 1) ── cumulative weights ──> source
#
# The points `frac(offset + p * golden ratio)` fill the interval evenly from any position on, so
# after `p` samples each source was drawn about `p * weight` times. How often a source was drawn
# before any position is a sum of floors, which is exact in integers and takes a logarithm of
# steps (Graham, Knuth and Patashnik, "Concrete Mathematics", 1994, section 3.5). So a resume, a
# rank in the middle of a batch, and a change of weights all find their start without counting.

_WHOLE = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sources and their weights.

    Positions count all samples of all epochs of the mixture. Each source has separate epochs: its
    sample number `n` is the one at position `n % length` of its epoch `n // length`.

    Attributes:
        lengths: Samples of each source, at least 1.
        by_epoch: The sources whose samples depend on the epoch.
        schedule: Positions, ascending, and the weights from there on; the first is 0.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    since: int = 0
    counts: tuple[int, ...] = ()
    by_epoch: frozenset[int] = frozenset()
    schedule: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def during(self, seed: int, position: int) -> Mixture:
        """Return the mixture with the weights that the schedule has at a position."""
        stages = sum(begin <= position for begin, _ in self.schedule)
        return _stage(self, seed, stages) if stages else self

    def changed(self, weights: tuple[float, ...], seed: int, position: int) -> Mixture:
        """Return the mixture with other weights from a position on."""
        return replace(self, weights=weights, since=position, counts=self.drawn(seed, position))

    def state(self) -> dict[str, Any]:
        """Return the attributes that may change during a run, as JSON-serializable data."""
        return {"weights": self.weights, "since": self.since, "counts": self.counts}

    def drawn(self, seed: int, position: int) -> tuple[int, ...]:
        """Return how many samples of each source come before a position at or after `since`."""
        if self.schedule:
            return self.during(seed, position).drawn(seed, position)
        start = seed_of(seed, SOURCES)
        bounds = [0, *self._bounds()]
        below = [
            _count(start, position, bound) - _count(start, self.since, bound) for bound in bounds
        ]
        before = self.counts or (0,) * len(self.lengths)
        steps = zip(before, below, below[1:], strict=False)
        return tuple(count + high - low for count, low, high in steps)

    def indices(self, seed: int, shuffle: bool, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the samples at `count` consecutive positions."""
        if self.schedule:
            changes = [at for at, _ in self.schedule if first < at < first + count]
            spans = pairwise([first, *changes, first + count])
            stages = [(self.during(seed, begin), begin, end - begin) for begin, end in spans]
            return np.concatenate([each.indices(seed, shuffle, *span) for each, *span in stages])
        positions = np.arange(first, first + count, dtype=np.uint64)
        with np.errstate(over="ignore"):
            points = positions * np.uint64(GOLDEN) + np.uint64(seed_of(seed, SOURCES))
        bounds = np.array([bound for bound in self._bounds() if bound < _WHOLE], np.uint64)
        sources = np.searchsorted(bounds, points, side="right")
        found = np.empty(count, np.int64)
        offset = 0
        for source, (length, drawn) in enumerate(
            zip(self.lengths, self.drawn(seed, first), strict=True)
        ):
            own = sources == source
            numbers = np.arange(drawn, drawn + int(own.sum()))
            found[own] = offset + _source_indices(seed, source, length, numbers, shuffle)
            if source in self.by_epoch:
                found[own] += numbers // length % EPOCHS * EPOCH
            offset += length
        return found

    def _bounds(self) -> list[int]:
        """Return where each source's part of the interval ends, in units of 2^-64."""
        total = sum(self.weights)
        bounds = [min(int(sum_ / total * _WHOLE), _WHOLE) for sum_ in accumulate(self.weights)]
        last = max(at for at, weight in enumerate(self.weights) if weight > 0)
        return bounds[:last] + [_WHOLE] * (len(bounds) - last)


@lru_cache(maxsize=64)
def _stage(mixture: Mixture, seed: int, stages: int) -> Mixture:
    """Return a mixture in one stage of its schedule, as one without a schedule."""
    begin, weights = mixture.schedule[stages - 1]
    before = _stage(mixture, seed, stages - 1) if stages > 1 else replace(mixture, schedule=())
    return before.changed(weights, seed, begin)


def _source_indices(
    seed: int, source: int, length: int, numbers: npt.NDArray[np.int64], shuffle: bool
) -> npt.NDArray[np.int64]:
    """Return the indices of the samples with these numbers in a source."""
    indices = numbers % length
    if shuffle:
        for epoch in np.unique(numbers // length).tolist():
            these = numbers // length == epoch
            order = Permutation(length, seed_of(seed, SOURCES, source, epoch))
            indices[these] = order.at(indices[these]).astype(np.int64)
    return indices


def _count(start: int, positions: int, bound: int) -> int:
    """Return how many of the first positions have their point below a bound."""
    # In units of 2^64, a point x is below the bound if floor(x) exceeds floor(x - bound).
    whole = _floor_sum(positions, _WHOLE, GOLDEN, start)
    return whole - _floor_sum(positions, _WHOLE, GOLDEN, start - bound + _WHOLE) + positions


def _floor_sum(count: int, modulus: int, factor: int, start: int) -> int:
    """Return the sum of floor((factor * i + start) / modulus) over i from 0 to count - 1."""
    total = 0
    while count:
        total += (count - 1) * count // 2 * (factor // modulus) + count * (start // modulus)
        factor, start = factor % modulus, start % modulus
        count, start = divmod(factor * count + start, modulus)
        modulus, factor = factor, modulus
    return total


# ---- balance -------------------------------------------------------------------------------------


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


# ---- batch plan ----------------------------------------------------------------------------------

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

    def blocks(
        self, epoch: int, sample: int = 0, order: int | None = None, origin: int | None = None
    ) -> Iterator[Block]:
        """Yield this rank's batches of an epoch, from a position on, in blocks.

        Args:
            origin: Samples of all earlier epochs, after which a mixture continues; None if these
                epochs were as long as this one.
        """
        drawn = epoch if order is None else order
        before, end = epoch * self.end() if origin is None else origin, self.end(sample)
        size, world, ranks = self.batch_size, self.global_batch_size, range(self.world_size)
        together = max(min(BLOCK // size, DEALT // world if self.costs_of else BLOCK), 1)
        while (full := min((end - sample) // world, together)) > 0:
            starts = sample + world * np.arange(full)
            yield Block(*self._dealt(before, drawn, starts, [size] * self.world_size), 0)
            sample += full * world
        share = share_of(end - sample, self)
        if share.samples + share.repeated:
            room = [share_of(end - sample, replace(self, rank=rank)).samples for rank in ranks]
            indices, positions = self._dealt(before, drawn, np.array([sample]), room)
            if share.repeated:
                again = self._indices(before, drawn, np.array([self.rank % self.length]), 1)
                indices = np.concatenate([indices, again], axis=1)
                if positions.ndim > 1:
                    positions = np.concatenate([positions, [[end + self.rank]]], axis=1)
            yield Block(indices, positions, share.repeated)

    def _dealt(
        self, before: int, drawn: int, starts: npt.NDArray[np.int64], room: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return this rank's samples and positions of the global batches that start there.

        Args:
            room: How many samples each rank takes of each.
        """
        if self.costs_of is None:
            first = starts + sum(room[: self.rank])
            return self._indices(before, drawn, first, room[self.rank]), first
        every = self._indices(before, drawn, starts, sum(room))
        costs = self.costs_of(every.ravel()).reshape(every.shape)
        dealt = balanced(costs, room, self.rank)
        return np.take_along_axis(every, dealt, axis=1), starts[:, None] + dealt

    def _indices(
        self, before: int, drawn: int, starts: npt.NDArray[np.int64], count: int
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
        if self.shuffle:
            order = _order_of(self.length, seed_of(self.seed, ORDER, drawn))
            numbers = order.at(numbers).astype(np.int64)
        return numbers + drawn % EPOCHS * EPOCH if self.by_epoch else numbers


def share_of(samples: int, plan: Plan) -> Share:
    """Return one rank's part of a global batch of `samples` samples, which is at position 0.

    An incomplete batch is divided as evenly as possible: every rank has `samples // world_size` of
    them or one more, and where it has fewer than others, one is repeated.
    """
    if samples == plan.global_batch_size:
        return Share(plan.rank * plan.batch_size, plan.batch_size)
    begin = plan.rank * samples // plan.world_size
    end = (plan.rank + 1) * samples // plan.world_size
    most = -(-samples // plan.world_size)
    repeated = most - (end - begin) if plan.tail == "repeat" else 0
    return Share(begin, end - begin, repeated)
