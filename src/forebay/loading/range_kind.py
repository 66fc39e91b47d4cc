"""Loaders of ranges of samples: each batch is of one range, and each sample comes once.

    RangeSampler ──> RangeKind.open ──> Selection, Selection, …

A sample's random numbers depend on its index only, so they are the same for any ranges, batch size
and number of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from forebay.loading.kind import LoaderKind
from forebay.loading.position import Position
from forebay.loading.selections import Reader, Selection, Start


class RangeKind(LoaderKind):
    """Loaders whose batch sampler is a `RangeSampler`."""

    kind_name = "ranges"
    is_arithmetic = True

    def __post_init__(self) -> None:
        """Take the batch size from the sampler."""
        super().__post_init__()
        self.batch_size = self.index_sampler.batch_size

    @property
    def _may_grow(self) -> bool:
        return True

    def draw(self, begin: Callable[..., Any], position: Position, *, has_workers: bool) -> None:
        """Begin without a draw: the generators of the process stay as they are."""
        begin(self.drawn_from, draws=False, resets=False)

    def seeds(self, base_seed: int, shared_seed: int | None, epoch: int) -> tuple[int, int | None]:
        """See `LoaderKind`; they are those of the loader's seed."""
        return self.batch_seed or 0, shared_seed

    def open(self, start: Start, order: int | None) -> Reader:
        """See `LoaderKind`; a sample's position is its index."""
        batches = islice(self.index_sampler, start.batch, None)
        return Reader(Selection(batch, _positions(batch)) for batch in batches)


def _positions(batch: list[int]) -> int | list[int]:
    """Return the indices of a batch, which ascend; the first if the others follow it."""
    return batch[0] if batch[-1] - batch[0] == len(batch) - 1 else batch
