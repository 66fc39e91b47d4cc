"""Limit the number of outstanding requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.buffer import Buffer
from forebay.loading.messages import BatchResult, Result

# Requests to have outstanding beyond the batches made, so that workers continue meanwhile.
LOOKAHEAD = 256
# How many to request at a time: reading a sampler changes the generators and back.
CHUNK = 32
# Where batches are tiny, so many requests per worker, and how long making such a batch takes.
TINY_DEPTH = 64
TINY_S = 0.001


@dataclass(slots=True)
class Depth:
    """How many requests to have outstanding.

    Attributes:
        usual: That many, by torch's rules or where nothing else is said.
        most: That many while batches are tiny: a message then costs more than making a batch.
        buffer: How much to prefetch instead, across epochs.
        counts_batches: Whether the buffer's marks are kept here, because workers take turns.
        now: How many at present, between `usual` and `most`.
    """

    usual: int
    most: int = 0
    buffer: Buffer | None = None
    counts_batches: bool = False
    now: int = 0

    def missing(self, out: int, ready: int) -> int:
        """Return how many to request, with `out` of them out and `ready` of those answered."""
        buffer = self.buffer
        if buffer is None:
            short = max(self.now, self.usual) - out
            # Many at a time, unless there are only as many as torch would have.
            return short if short >= max((self.now - self.usual) // 4, 1) else 0
        if buffer.max_batches is not None and self.counts_batches:
            low = buffer.low_mark()
            below = low if isinstance(low, int) else math.ceil(low * buffer.max_batches)
            return buffer.max_batches - out if out < below else 0
        short = LOOKAHEAD - (out - ready)
        return short if short >= CHUNK else 0

    def saw(self, result: Result) -> None:
        """Record how long a batch took."""
        if isinstance(result, BatchResult):
            timing = result.timing
            is_tiny = timing.is_inline and timing.fetch_s + timing.collate_s < TINY_S
            self.now = min(max(self.now, self.usual) * 2, self.most) if is_tiny else self.usual
