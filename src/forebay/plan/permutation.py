"""A random order of the numbers below any length, computed position by position. PURE.

The order is a keyed permutation: a Feistel network over pairs of digits (Black and Rogaway,
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

import numpy as np
import numpy.typing as npt

from forebay.plan.seeds import GOLDEN, MASK, scrambled

# Rounds mix the two digits: a few suffice for many places, but with a handful of places it takes
# many rounds to reach all orders equally often.
ROUNDS, SMALL_ROUNDS, SMALL = 8, 24, 4096

Positions = npt.NDArray[np.uint64]


class Permutation:
    """The order of `length` numbers under one key.

    Args:
        length: How many numbers, at least 1.
        key: 64 bits; another key gives an independent order.
    """

    __slots__ = ("_columns", "_keys", "_length", "_rows")

    def __init__(self, length: int, key: int) -> None:
        """Compute the keys of the rounds; nothing grows with the length."""
        self._length = length
        # Even: with two odd sides every round, and so the whole, would be an even permutation.
        self._columns = max(2, 2 * math.ceil(math.sqrt(length) / 2))
        self._rows = -(-length // self._columns)
        rounds = SMALL_ROUNDS if length <= SMALL else ROUNDS
        self._keys = [scrambled((key + GOLDEN * (step + 1)) & MASK) for step in range(rounds)]

    def at(self, positions: npt.ArrayLike) -> Positions:
        """Return the numbers at these positions.

        Args:
            positions: Integers below the length, in any order and shape.

        Returns:
            A new array of the same shape.
        """
        found = self._permuted(np.asarray(positions, np.uint64))
        limit = np.uint64(self._length)
        outside = found >= limit
        while outside.any():
            found[outside] = self._permuted(found[outside])
            outside = found >= limit
        return found

    def _permuted(self, places: Positions) -> Positions:
        columns, rows = np.uint64(self._columns), np.uint64(self._rows)
        row, column = np.divmod(places, columns)
        with np.errstate(over="ignore"):
            for step, key in enumerate(self._keys):
                if step % 2:
                    row = (row + _scrambled(column + np.uint64(key)) % rows) % rows
                else:
                    column = (column + _scrambled(row + np.uint64(key)) % columns) % columns
        return row * columns + column


def _scrambled(values: Positions) -> Positions:
    """Do what `seeds.scrambled` does, for an array."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
