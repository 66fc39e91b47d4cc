"""Which samples share a row, by their lengths. PURE.

    lengths ──> classes: samples of one length, or of nearly one
                  └──> patterns: how many of which classes make a row, and how many such rows
    row of an epoch ──> its pattern ──> numbers within its classes ── permuted ──> samples

A row is packed (samples one after another, up to a size) or padded (a batch of similar lengths).
What decides is only how many samples there are of each length, so the patterns are made once from
a histogram, and the number of rows is the same in every epoch. In each epoch, the samples of a
class are dealt to the places of their class anew, by a keyed permutation: nothing is kept, and
any row of any epoch is found by itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.seeds import ROWS, Integers, permuted, seed_of


class Pattern(NamedTuple):
    """Rows that are made alike.

    Attributes:
        parts: Pairs of a class and the number of its samples in each row.
        rows: How many rows there are.
    """

    parts: tuple[tuple[int, int], ...]
    rows: int


# From the length of each class, and how many samples it has.
PatternsOf = Callable[[list[int], list[int]], list[Pattern]]


def packed_patterns(lengths: Sequence[int], counts: Sequence[int], size: int) -> list[Pattern]:
    """Return how samples fill rows.

    A row begins with the longest sample that is left, and gets those that fill its space exactly,
    or else best: one, or two of nearly equal length, or more. So short samples, which fit
    anywhere, are left for the end; best fit (Krell et al., "Efficient sequence packing without
    cross-contamination", 2021, arXiv 2107.02027) uses them first, and has nothing left to fill rows
    of medium ones with. As there, all rows that are alike are made at once: each pattern uses up
    a length, so the time grows with the number of lengths and not of samples.

    Args:
        lengths: The length of each class, ascending, from 1 to `size`.
        counts: How many samples each class has.
        size: How long a row is at most.
    """
    number = {length: at for at, length in enumerate(lengths)}
    left, live = dict(zip(lengths, counts, strict=True)), [*lengths]
    patterns = []
    while live:
        row: dict[int, int] = {}
        space, chosen = size, [live[-1]]
        while chosen:
            for length in chosen:
                row[length] = row.get(length, 0) + 1
                space -= length
            for length in {*chosen}:
                if row[length] == left[length]:
                    del live[bisect_left(live, length)]
            half = space // 2
            chosen = _filling(live, space, left.get(half, 0) - row.get(half, 0) > 1)
        rows = min(left[length] // each for length, each in row.items())
        for length, each in row.items():
            left[length] -= rows * each
            if not left[length] and rows > 1:  # if one row takes all, they are not live any more
                del live[bisect_left(live, length)]
        parts = tuple((number[length], each) for length, each in row.items())
        patterns.append(Pattern(parts, rows))
    return patterns


def _filling(live: list[int], space: int, has_two: bool) -> list[int]:
    """Return the next samples of a row, by length; none if nothing fits.

    Args:
        live: The lengths that are left, ascending.
        space: Tokens that the row still takes.
        has_two: Whether there are two samples of half the space.
    """
    end = bisect_right(live, space)
    longest = live[end - 1] if end else 0
    if longest in (0, space):
        return [longest] * (longest > 0)
    if 2 * longest < space:  # at least three: one of an equal share
        return [live[bisect_left(live, space / -(-space // longest))]]
    begin = bisect_left(live, space / 2)
    begin += 2 * live[begin] == space and not has_two
    best, found, other = longest, [longest], end
    for length in live[begin:end]:  # a pair of nearly equal lengths nearly always fills it exactly
        while other and live[other - 1] + length > space:
            other -= 1
        if not other:
            break
        if live[other - 1] + length > best:
            found = [length, live[other - 1]]
            best = sum(found)
            if best == space:
                break
    return found


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
    rest: tuple[tuple[int, int], ...] = ()
    taken = 0  # samples of the rest
    for number, (length, count) in enumerate(zip(longest, counts, strict=True)):
        room = min(max_tokens // length, max_samples or max_tokens)
        while count:
            if taken >= room:  # also if fewer of these fit than of the shorter ones
                patterns.append(Pattern(rest, 1))
                rest, taken = (), 0
            if not taken and count >= room:
                patterns.append(Pattern(((number, room),), count // room))
                count %= room
            else:
                used = min(room - taken, count)
                rest, taken, count = (*rest, (number, used)), taken + used, count - used
    return [*patterns, Pattern(rest, 1)] if rest else patterns


# Samples to sort and to count at a time.
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of every epoch.

    Attributes:
        members: The samples, class after class.
        starts: Where each class starts in `members`, and the end of the last.
        row_starts: The first row of each pattern, and the number of rows.
        part_starts: Where each pattern's parts start, and the end of the last.
        classes: The class of each part.
        each: How many samples of its class a row takes for each part.
        firsts: How many samples of its class earlier rows take, for each part's first row.
        costs: What a row costs, for each pattern.
        space: Tokens of all rows, if each sample is as long as the longest class of its row.
        bounds: The first row of each window, and the number of rows.
    """

    members: Integers
    starts: Integers
    row_starts: Integers
    part_starts: Integers
    classes: Integers
    each: Integers
    firsts: Integers
    costs: npt.NDArray[np.float64]
    space: int
    bounds: Integers

    def __len__(self) -> int:
        return int(self.row_starts[-1])

    def samples(self, row: int, epoch: int) -> Integers:
        """Return the members of a row in an epoch, longest class first."""
        pattern = self._patterns_of(row)
        parts = slice(self.part_starts[pattern], self.part_starts[pattern + 1])
        each = self.each[parts].astype(np.int64)
        numbers = np.repeat(self.firsts[parts] + (row - self.row_starts[pattern]) * each, each)
        numbers += np.arange(len(numbers)) - np.repeat(np.cumsum(each) - each, each)
        own = np.repeat(self.classes[parts], each)
        keys = (own + 1).astype(np.uint64) * np.uint64(seed_of(ROWS, epoch) | 1)
        begins = self.starts[own]
        places = begins + permuted(numbers, self.starts[own + 1] - begins, keys).astype(np.int64)
        return self.members[places]

    def costs_of(self, rows: Integers) -> npt.NDArray[np.float64]:
        """Return what these rows cost, in any epoch."""
        return self.costs[self._patterns_of(rows)]

    def _patterns_of(self, rows: int | Integers) -> Integers:
        return np.searchsorted(self.row_starts, rows, side="right") - 1


def arranged(
    own: Integers,
    bounds: Sequence[int],
    longest: Integers,
    costs: npt.NDArray[np.float64],
    patterns_of: PatternsOf,
    submit: Callable[..., Any],
    *,
    padded: bool = False,
) -> SampleRows:
    """Return the rows of samples, window by window.

    Args:
        own: The class of each sample.
        bounds: Where each window of samples begins, and the end of the last.
        longest: The longest sample of each class.
        costs: What a sample of each class costs.
        patterns_of: Returns rows for the lengths of some classes, and how many samples each has.
        submit: That of an executor: NumPy sorts in a thread while Python finds the patterns.
        padded: Whether each sample of a row costs as much as the most expensive one.
    """
    members = np.empty(len(own), np.uint32)
    found: list[tuple[Integers, ...]] = []
    known = 0  # classes of earlier windows
    sorts = []
    for begin, end in pairwise(bounds):
        counts = tally(own[begin:end], len(longest))
        sorts.append(submit(_sort, own, begin, end, counts, members))
        kinds = np.flatnonzero(counts)
        patterns = patterns_of(longest[kinds].tolist(), counts[kinds].tolist())
        parts = np.array([part for each in patterns for part in each.parts], np.int32)
        numbers = np.array([(len(pattern.parts), pattern.rows) for pattern in patterns])
        found.append((kinds, counts[kinds], parts[:, 0] + known, parts[:, 1], *numbers.T))
        known += len(kinds)
    for sort in sorts:
        sort.result()
    kinds, counts, classes, each, sizes, rows = map(np.concatenate, zip(*found, strict=True))
    starts, part_starts, row_starts = (np.append(0, np.cumsum(by)) for by in (counts, sizes, rows))
    # Samples of the class that earlier parts take: a running sum within each class.
    taken = each * np.repeat(rows, sizes)
    order = np.argsort(classes, kind="stable")
    firsts = np.empty_like(each)
    firsts[order] = np.cumsum(taken[order]) - taken[order] - starts[classes[order]]
    begins, kind = part_starts[:-1], kinds[classes]
    samples = np.add.reduceat(each, begins)
    row_costs = np.add.reduceat(each * costs[kind], begins)
    if padded:
        row_costs = samples * np.maximum.reduceat(costs[kind], begins)
    space = int(np.sum(rows * samples * np.maximum.reduceat(longest[kind], begins)))
    window_rows = np.append(0, np.cumsum([int(window[-1].sum()) for window in found]))
    kept = members, starts, row_starts, part_starts, classes, each, firsts, row_costs
    return SampleRows(*kept, space, window_rows)


def tally(values: Integers, kinds: int) -> Integers:
    """Return how often each number below `kinds` occurs, without a copy of the whole array."""
    found = np.zeros(kinds, np.int64)
    for begin in range(0, len(values), CHUNK):
        found += np.bincount(values[begin : begin + CHUNK], minlength=kinds)
    return found


def _sort(own: Integers, begin: int, end: int, counts: Integers, members: Integers) -> None:
    """Fill members from `begin` to `end` with these samples, class after class, ascending."""
    at = begin + np.cumsum(counts) - counts
    for first in range(begin, end, CHUNK):
        some = own[first : min(first + CHUNK, end)]
        order = np.argsort(some, kind="stable")
        here = np.bincount(some, minlength=len(counts))
        within = np.arange(len(some)) - np.repeat(np.cumsum(here) - here, here)
        members[np.repeat(at, here) + within] = order + first
        at += here
