"""PURE: trainings whose workers are fast enough on average, but that wait with torch's loader."""

from __future__ import annotations

import random
from dataclasses import dataclass

BATCH = 8


@dataclass(frozen=True, slots=True)
class Pattern:
    """One training.

    Attributes:
        title: Its description in the table.
        sample_s: Seconds that a sample sleeps.
        step_s: Seconds that the consumer sleeps after a batch.
        cycle: Batches in an epoch, or between two pauses.
        epochs: Whether a cycle is an epoch; all is one epoch otherwise.
        pause_s: Seconds that the consumer sleeps after a cycle, in addition.
        slow: How many times longer one batch of each cycle takes, at a random place.
    """

    title: str
    sample_s: float
    step_s: float
    cycle: int
    epochs: bool = False
    pause_s: float = 0.0
    slow: float = 1.0

    def cycles(self, seconds: float) -> int:
        """Return how many cycles of steps take the given seconds."""
        return max(1, round(seconds / (self.cycle * self.step_s + self.pause_s)))

    def sample_costs(self, cycles: int) -> list[float]:
        """Return the seconds that a sample of each batch sleeps."""
        costs = []
        place = random.Random(0)
        for _ in range(cycles):
            once = [self.sample_s] * self.cycle
            once[place.randrange(self.cycle)] *= self.slow
            costs += once
        return costs

    def steps(self, cycles: int) -> list[float]:
        """Return the seconds that the consumer sleeps after each batch."""
        return ([self.step_s] * (self.cycle - 1) + [self.step_s + self.pause_s]) * cycles


PATTERNS = {
    "epochs": Pattern("epochs of 10 batches, 10 ms samples, 50 ms steps", 0.01, 0.05, 10, True),
    "bursts": Pattern(
        "20 batches at once, then 2 s of pause, 10 ms samples", 0.01, 0.0, 20, pause_s=2.0
    ),
    "slow": Pattern(
        "one batch in ten 10 times slower, 5 ms samples, 42 ms steps", 0.005, 0.042, 10, slow=10.0
    ),
}
