"""Limit the number of outstanding requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.buffer import Buffer, low_mark_of
from forebay.loading.messages import BatchResult, Result

# Outstanding requests beyond the batches made, so that a worker finds one when it is free.
LOOKAHEAD = 256
# The fewest to request at a time: each reading of a sampler saves and restores the generators.
CHUNK = 32
# Outstanding requests per worker for tiny batches, and how long a tiny batch takes at most.
TINY_DEPTH = 64
TINY_S = 0.001


@dataclass(slots=True)
class Depth:
    """How many requests to have outstanding.

    Attributes:
        usual: The number by torch's rules, which is also the default.
        most: The number while batches are tiny: a message then takes longer than making a batch.
        buffer: How much to prefetch across epochs; replaces the numbers above.
        counts_batches: Whether the buffer's marks are applied here, because workers take turns.
        now: The current number, between `usual` and `most`.
    """

    usual: int
    most: int = 0
    buffer: Buffer | None = None
    counts_batches: bool = False
    now: int = 0

    @property
    def fills_by_itself(self) -> bool:
        """Whether requests are missing as soon as others are answered, not only when taken."""
        is_counted = self.counts_batches and self.buffer and self.buffer.max_batches is not None
        return self.buffer is not None and not is_counted

    def missing(self, outstanding: int, ready: int, room: int = 0) -> int:
        """Return how many batches to request now.

        Args:
            outstanding: Outstanding requests, including those answered but not taken.
            ready: Outstanding requests that were answered.
            room: Batches that the buffer has room for, if they have to be requested now because
                nothing asks again before the next batch is taken.
        """
        buffer = self.buffer
        if buffer is None:
            short = max(self.now, self.usual) - outstanding
            # Request several at a time, unless only as many are outstanding as in torch.
            return short if short >= max((self.now - self.usual) // 4, 1) else 0
        if buffer.max_batches is not None and not self.fills_by_itself:
            low = low_mark_of(buffer)
            below = low if isinstance(low, int) else math.ceil(low * buffer.max_batches)
            return buffer.max_batches - outstanding if outstanding < below else 0
        short = max(LOOKAHEAD, room + CHUNK) - (outstanding - ready)
        return short if short >= CHUNK else 0

    def record(self, result: Result) -> None:
        """Adapt the number to how long a batch took."""
        if isinstance(result, BatchResult):
            timing = result.timing
            is_tiny = result.is_inline and (timing is None or timing.seconds < TINY_S)
            self.now = min(max(self.now, self.usual) * 2, self.most) if is_tiny else self.usual
