"""Seeds, and orders of numbers, as functions of a key and never of the worker. PURE.

The mixing is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014): each number of the path is added to the state, and the state is scrambled.

An order is a keyed permutation: a Feistel network over pairs of digits (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). A position is written as `row * columns + column`;
each round adds to one of the two a function of the other and the key. `columns` is about the root
of the length, so the grid has few more places than there are numbers; a position that is mapped
beyond the end is permuted again until it is not.

So the order of a billion samples takes neither memory nor time to create, and positions can be
evaluated in any order. Measured by `tests/plan/test_permutation.py`: every permutation of up to
seven samples is equally likely, as is every place for every sample and pair of samples of larger
datasets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

# The purpose of a seed: the first number of its path, so that different uses never coincide.
ORDER, SAMPLE, COLLATE, SAMPLER, WORKER, SOURCES, DEVICE, ROWS, WINDOWS = range(9)


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


def _scrambled(values: Positions) -> Positions:
    """Do what `scrambled` does, for an array."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
