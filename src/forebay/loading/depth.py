"""How many requests to have outstanding, so that workers always find one."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.loading.messages import BatchResult, Result

# Outstanding requests beyond the batches made, so that a worker finds one when it is free.
LOOKAHEAD = 256
# The fewest to request at a time: each reading of a sampler saves and restores the generators.
CHUNK = 32
# Batches to release in one call, where releasing them earlier has no effect.
RELEASED_TOGETHER = 16
# Outstanding requests per worker for tiny batches, and how long a tiny batch takes at most.
TINY_DEPTH = 64
TINY_S = 0.001

# How long the trainer may wait while a sampler is read for an empty buffer. After that it is read a
# little further with each batch that is taken.
READ_S = 0.1


@dataclass(slots=True)
class Depth:
    """How many requests to have outstanding; it adapts to how long batches take.

    Attributes:
        most: So many while batches are tiny.
        refill_below: Once `usual` are outstanding, request none until fewer than this are. None to
            request again at once.
        fills_by_itself: Whether requests are missing as soon as others are answered, not only when
            taken, because `Limits` decide how many batches are made.
    """

    usual: int
    most: int = 0
    refill_below: int | None = None
    fills_by_itself: bool = False
    now: int = 0

    def missing(self, outstanding: int, ready: int, room: int = 0) -> int:
        """Return how many batches to request now."""
        if self.fills_by_itself:
            short = max(LOOKAHEAD, room + CHUNK) - (outstanding - ready)
            return short if short >= CHUNK else 0
        if self.refill_below is not None:
            return self.usual - outstanding if outstanding < self.refill_below else 0
        short = max(self.now, self.usual) - outstanding
        # Request several at a time, unless only as many are outstanding as in torch.
        return short if short >= max((self.now - self.usual) // 4, 1) else 0

    def record(self, result: Result) -> None:
        """Adapt the number to how long a batch took."""
        if isinstance(result, BatchResult):
            timing = result.timing
            is_tiny = result.is_inline and (timing is None or timing.seconds < TINY_S)
            self.now = min(max(self.now, self.usual) * 2, self.most) if is_tiny else self.usual
