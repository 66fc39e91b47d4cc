"""How a loader is set up, as far as its speed depends on it: a plain record. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from forebay.observe.simulation import UNLIMITED, Arrangement


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a loader is set up.

    Attributes:
        num_workers: Workers; 0 if the trainer's process makes the batches.
        most_workers: With `num_workers="auto"` the largest number, for which batches are
            prefetched; otherwise None.
        auto_workers: The largest number that `num_workers="auto"` tries.
        backend: Where they run.
        cores: Cores that they may use, with the trainer; None if not known.
        prefetch_factor: Batches that each worker prefetches, without a buffer.
        takes_turns: Whether batches are made by the workers in turn.
        in_order: Whether batches come in the order of the sampler.
        keeps_workers: Whether workers live on from epoch to epoch.
        crosses_epochs: Whether batches of the next epoch are prefetched.
        buffer_bytes: High mark of the buffer in bytes; None if it has none.
        buffer_batches: High mark in batches; None if it has none.
        refill_below: Low mark: a number of batches, or a share of a full buffer.
        batch_size: Samples of a batch; None if not known.
        is_iterable: Whether the dataset is iterable.
        is_sliced: Whether batches are slices of tensors in memory.
        prefetches_tiny: Batches that are prefetched per worker while batches are tiny; 0 if that
            makes no difference.
        tried: By number of workers that were tried: batches per second.
        samples: Samples of the dataset; None if not known.
        read_limit: The most bytes per second that may be read from a disk; None for no limit.
        free_memory: Bytes of memory that files may occupy; None if not known.
        consumer: What takes the batches, in the words of the verdict.
        step: What it does with one.
    """

    num_workers: int
    most_workers: int | None = None
    auto_workers: int = 8
    backend: Literal["process", "thread", "ray"] = "process"
    cores: float | None = None
    prefetch_factor: int = 2
    takes_turns: bool = False
    in_order: bool = True
    keeps_workers: bool = False
    crosses_epochs: bool = False
    buffer_bytes: int | None = None
    buffer_batches: int | None = None
    refill_below: int | float | None = None
    batch_size: int | None = None
    is_iterable: bool = False
    is_sliced: bool = False
    prefetches_tiny: int = 0
    tried: Mapping[int, float] = field(default_factory=dict)
    samples: int | None = None
    read_limit: int | None = None
    free_memory: int | None = None
    consumer: str = "training"
    step: str = "the training step"

    @property
    def has_buffer(self) -> bool:
        """Whether a buffer, rather than `prefetch_factor`, limits what is prefetched."""
        return self.buffer_bytes is not None or self.buffer_batches is not None

    def depth(self, nbytes: float, *, is_tiny: bool = False) -> int:
        """Return how many batches of so many bytes may be outstanding."""
        if self.has_buffer:
            by_bytes = UNLIMITED
            if self.buffer_bytes is not None and nbytes > 0:
                by_bytes = max(int(self.buffer_bytes / nbytes), 1)
            return min(by_bytes, self.buffer_batches or UNLIMITED)
        each, workers = self.prefetch_factor, self.most_workers or self.num_workers
        each = max(each, self.prefetches_tiny) if is_tiny else each
        return each * workers if self.takes_turns else (each + 1) * workers - 1

    def prefetching(self, depth: int) -> int:
        """Return the `prefetch_factor` for so many outstanding batches."""
        workers = max(self.most_workers or self.num_workers, 1)
        return max(-(-depth // workers) if self.takes_turns else -(-(depth + 1) // workers) - 1, 1)

    def arrangement(self, nbytes: float, start_s: float, *, is_tiny: bool = False) -> Arrangement:
        """Return what the simulation needs."""
        depth, low = self.depth(nbytes, is_tiny=is_tiny), None
        if self.has_buffer and self.refill_below is not None:
            is_share = isinstance(self.refill_below, float)
            low = int(self.refill_below * depth) if is_share else int(self.refill_below)
        return Arrangement(
            num_workers=self.num_workers,
            depth=depth,
            refill_below=low,
            in_order=self.in_order,
            takes_turns=self.takes_turns,
            waits_for_epoch=not self.crosses_epochs and self.num_workers > 0,
            restarts=not self.keeps_workers,
            start_s=start_s,
        )
