"""Which source the sample at a position comes from, when several are mixed by weight. PURE.

    position p ── golden-ratio sequence ──> point in [0, 1) ── cumulative weights ──> source

The points `frac(offset + p * golden ratio)` fill the interval evenly from any position on, so
after `p` samples each source was drawn about `p * weight` times. How often a source was drawn
before any position is a sum of floors, which is exact in integers and takes a logarithm of
steps (Graham, Knuth and Patashnik, "Concrete Mathematics", 1994, section 3.5). So a resume, a
rank in the middle of a batch, and a change of weights all find their start without counting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.seeds import EPOCH, EPOCHS, GOLDEN, SOURCES, Permutation, seed_of

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
