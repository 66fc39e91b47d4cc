"""What a loader has done and what it waits for: counts, and an immutable record of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Waits kept for the percentiles: the last so many.
KEPT_WAITS = 4096


class Timing(NamedTuple):
    """What a worker spent on one batch.

    Attributes:
        fetch_s: Seconds getting samples, by the clock.
        fetch_cpu_s: Seconds of processor time in that.
        collate_s: Seconds making a batch of them.
        idle_s: Seconds that the worker had nothing to do before.
        is_inline: Whether the batch was small enough to travel with its answer.
    """

    fetch_s: float
    fetch_cpu_s: float
    collate_s: float
    idle_s: float
    is_inline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot of a loader: `loader.statistics()`.

    Attributes:
        epoch: The epoch of the last batch handed out; -1 before the first.
        batch: How many batches of that epoch were handed out.
        ready_batches: Batches that wait to be handed out, including those that raised.
        ready_bytes: Their bytes.
        ready_from: Epoch and number of the first of them; None if there are none, or if they
            come in no order (`in_order=False`).
        ready_to: Epoch and number of the last of them, likewise.
        in_flight: Batches that workers have in hand: being made, or next.
        waited_s: Seconds the trainer waited for batches, in all.
        wait_p50_s: The median wait for one batch, of the last 4,096.
        wait_p95_s: The wait that 95 % of them did not exceed.
        wait_p99_s: The wait that 99 % of them did not exceed.
        fetch_s: Seconds that workers spent getting samples, by the clock.
        fetch_cpu_s: Seconds of processor time in that; far less means that they waited for a disk.
        collate_s: Seconds that workers spent making batches of samples.
        idle_s: Seconds that workers had nothing to do, for lack of room for more batches.
        restarts: Attempts at batches that ended with the death of a worker.
        failures: Samples that were left out (`on_error="skip"`).
        sources: For a mixture: by name, how many samples of each source were handed out over all
            ranks, and how many epochs of the source that is.
    """

    epoch: int
    batch: int
    ready_batches: int
    ready_bytes: int
    ready_from: tuple[int, int] | None
    ready_to: tuple[int, int] | None
    in_flight: int
    waited_s: float
    wait_p50_s: float
    wait_p95_s: float
    wait_p99_s: float
    fetch_s: float
    fetch_cpu_s: float
    collate_s: float
    idle_s: float
    restarts: int
    failures: int
    sources: Mapping[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(slots=True)
class Counters:
    """The counts behind `Statistics`, over all epochs of a loader.

    Attributes:
        waits: Seconds that the trainer waited for each of the last batches.
        waited_s: Seconds it waited for all of them.
        fetch_s: See `Statistics`; so are all others.
    """

    waits: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_WAITS))
    waited_s: float = 0.0
    fetch_s: float = 0.0
    fetch_cpu_s: float = 0.0
    collate_s: float = 0.0
    idle_s: float = 0.0
    restarts: int = 0

    def waited(self, seconds: float) -> None:
        """Count a wait of the trainer."""
        self.waits.append(seconds)
        self.waited_s += seconds

    def made(self, timing: Timing) -> None:
        """Count what a worker spent on a batch."""
        self.fetch_s += timing.fetch_s
        self.fetch_cpu_s += timing.fetch_cpu_s
        self.collate_s += timing.collate_s
        self.idle_s += timing.idle_s

    def known(self) -> dict[str, Any]:
        """Return the counts by the names that `Statistics` has for them."""
        waits = sorted(self.waits) or [0.0]
        last = len(waits) - 1
        shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
        known: dict[str, Any] = {
            f"wait_{name}_s": waits[min(int(share * len(waits)), last)]
            for name, share in shares.items()
        }
        names = ("waited_s", "fetch_s", "fetch_cpu_s", "collate_s", "idle_s", "restarts")
        return known | {name: getattr(self, name) for name in names}
