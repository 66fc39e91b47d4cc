"""The sampler behind `shuffle=True` where batches are to depend on the seed alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import RandomSampler

from forebay.plan.order import shuffled


class SeededShuffle(RandomSampler):
    """A random order that is a function of seed and epoch.

    Args:
        dataset: What to shuffle: its length counts.
        seed: The seed; None until the loader has drawn one.
        generator: As torch's; the loader draws the seed from it.
    """

    def __init__(self, dataset: Any, seed: int | None, generator: Any = None) -> None:
        """See the class."""
        super().__init__(dataset, generator=generator)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Give the order of this epoch from the next iteration on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Yield every index once."""
        return iter(shuffled(len(self.data_source), self.seed or 0, self.epoch))
