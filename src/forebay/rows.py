"""Which samples share a row, as a function of their lengths and the epoch. PURE.

    lengths ──> classes: samples of one length, or of nearly one
                  └──> patterns: how many of which classes make a row, and how many such rows
    row of an epoch ──> its pattern ──> numbers within its classes ── permuted ──> samples

A row is packed (samples one after another, up to a size) or padded (a batch of similar lengths).
What decides is only how many samples there are of each length, so the patterns are made once from
a histogram, and the number of rows is the same in every epoch. In each epoch, the samples of a
class are dealt to the places of their class anew, by a keyed permutation: nothing is kept, and any
row of any epoch is found by itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.plan import ROWS, Integers, permuted, seed_of


class Pattern(NamedTuple):
    """Rows that are made alike.

    Attributes:
        parts: Pairs of a class and the number of its samples in each row.
        rows: How many rows there are.
    """

    parts: tuple[tuple[int, int], ...]
    rows: int


# ---- patterns ------------------------------------------------------------------------------------


def packed_patterns(lengths: Sequence[int], counts: Sequence[int], size: int) -> list[Pattern]:
    """Return how samples fill rows.

    Best fit, from the longest to the shortest: each sample goes to the row with the least space
    that it fits in. All samples of one length, and all rows that are alike, are handled at once,
    so the time grows with the number of lengths and not of samples (histogram packing: Krell et
    al., "Efficient sequence packing without cross-contamination", 2021, arXiv 2107.02027).

    Args:
        lengths: The length of each class, ascending, from 1 to `size`.
        counts: How many samples each class has.
        size: How long a row is at most.
    """
    spaces: list[int] = []  # ascending: the different spaces that rows have left
    rows: dict[int, list[Pattern]] = {}  # by space

    def put(space: int, pattern: Pattern) -> None:
        if space not in rows:
            rows[space] = []
            insort(spaces, space)
        rows[space].append(pattern)

    for number in range(len(lengths) - 1, -1, -1):
        length, left = lengths[number], counts[number]
        while left:
            at = bisect_left(spaces, length)
            if at == len(spaces):  # no row has room: new ones
                space, before = size, Pattern((), left)
            else:
                space = spaces[at]
                before = rows[space].pop()
                if not rows[space]:
                    del rows[space], spaces[at]
            each = min(space // length, left)
            used = min(left // each, before.rows)
            left -= used * each
            put(space - each * length, Pattern((*before.parts, (number, each)), used))
            if used < before.rows and before.parts:
                put(space, Pattern(before.parts, before.rows - used))
    return [pattern for space in spaces for pattern in rows[space]]


def grouped_patterns(
    longest: Sequence[int], counts: Sequence[int], max_tokens: int, max_samples: int | None
) -> list[Pattern]:
    """Return how samples form padded batches; class `i` has `counts[i]`, up to `longest[i]` long.

    A batch takes samples of one class. What is left of a class is less than a batch, and goes into
    the first batch of the next longer class, if it fits.

    Args:
        longest: The longest sample of each class, ascending, from 1 to `max_tokens`.
        counts: How many samples each class has.
        max_tokens: The samples of a batch times the longest, at most.
        max_samples: The samples of a batch, at most.
    """
    patterns: list[Pattern] = []
    rest: tuple[tuple[int, int], ...] = ()  # of the shorter classes
    for number, (length, count) in enumerate(zip(longest, counts, strict=True)):
        room = min(max_tokens // length, max_samples or count + max_tokens)
        taken = sum(each for _, each in rest)
        if taken >= room:  # fewer of these fit than of the shorter ones
            patterns.append(Pattern(rest, 1))
            rest, taken = (), 0
        if rest and taken + count >= room:
            patterns.append(Pattern((*rest, (number, room - taken)), 1))
            rest, count = (), count - (room - taken)
        elif rest:
            rest, count = (*rest, (number, count)), 0
        if count >= room:
            patterns.append(Pattern(((number, room),), count // room))
        if count % room:
            rest = ((number, count % room),)
    return [*patterns, Pattern(rest, 1)] if rest else patterns


def merged(lengths: Integers, ratio: float) -> Integers:
    """Return the class of each length; the longest of a class is up to `ratio` times its shortest.

    Args:
        lengths: Different ones, ascending.
        ratio: More than 1.
    """
    found = np.empty(len(lengths), np.int64)
    begin, number = 0, 0
    while begin < len(lengths):
        end = max(int(np.searchsorted(lengths, lengths[begin] * ratio, side="right")), begin + 1)
        found[begin:end] = number
        begin, number = end, number + 1
    return found


# ---- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of every epoch.

    Attributes:
        members: The samples, class after class.
        starts: Where each class starts in `members`, and the end of the last.
        ends: The number of rows up to the end of each pattern.
        part_starts: Where each pattern's parts start, and the end of the last.
        classes: The class of each part.
        each: How many samples of its class a row takes for each part.
        firsts: How many samples of its class earlier rows take, for each part's first row.
        costs: What a row costs, for each pattern.
    """

    members: Integers
    starts: Integers
    ends: Integers
    part_starts: Integers
    classes: Integers
    each: Integers
    firsts: Integers
    costs: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def samples(self, row: int, epoch: int) -> list[int]:
        """Return the members of a row in an epoch, longest class first."""
        pattern = int(np.searchsorted(self.ends, row, side="right"))
        within = row - (int(self.ends[pattern - 1]) if pattern else 0)
        parts = slice(int(self.part_starts[pattern]), int(self.part_starts[pattern + 1]))
        each, classes = self.each[parts], self.classes[parts]
        numbers = np.repeat(self.firsts[parts] + within * each, each)
        numbers += np.arange(len(numbers)) - np.repeat(np.cumsum(each) - each, each)
        own = np.repeat(classes, each)
        sizes = self.starts[own + 1] - self.starts[own]
        keys = (own + 1).astype(np.uint64) * np.uint64(seed_of(ROWS, epoch) | 1)
        found: list[int] = self.members[
            self.starts[own] + permuted(numbers, sizes, keys).astype(np.int64)
        ].tolist()
        return found

    def costs_of(self, rows: Integers) -> npt.NDArray[np.float64]:
        """Return what these rows cost, in any epoch."""
        return self.costs[np.searchsorted(self.ends, rows, side="right")]


def rows_of(
    members: Integers,
    counts: Integers,
    patterns: Sequence[Pattern],
    costs: npt.NDArray[np.float64],
    *,
    padded: bool = False,
) -> Rows:
    """Return the rows that patterns describe.

    Args:
        members: The samples, class after class.
        counts: The number of samples of each class.
        patterns: How many of which classes make a row.
        costs: What a sample of each class costs.
        padded: Whether each sample of a row costs as much as the most expensive one.
    """
    parts = np.array([part for pattern in patterns for part in pattern.parts], np.int64)
    classes, each = parts.T.copy()
    per_pattern = np.array([len(pattern.parts) for pattern in patterns], np.int64)
    times = np.array([pattern.rows for pattern in patterns], np.int64)
    part_starts = np.concatenate([[0], np.cumsum(per_pattern)])
    # Samples of the class that earlier parts take: a running sum within each class.
    taken = each * np.repeat(times, per_pattern)
    order = np.argsort(classes, kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)])
    firsts = np.empty_like(each)
    firsts[order] = np.cumsum(taken[order]) - taken[order] - starts[classes[order]]
    if padded:
        samples = np.add.reduceat(each, part_starts[:-1])
        row_costs = samples * np.maximum.reduceat(costs[classes], part_starts[:-1])
    else:
        row_costs = np.add.reduceat(each * costs[classes], part_starts[:-1])
    return Rows(members, starts, np.cumsum(times), part_starts, classes, each, firsts, row_costs)
