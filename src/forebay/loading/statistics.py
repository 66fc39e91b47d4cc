"""What a loader has done and what it waits for, as one immutable record."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.engine.events import DeliverResult, ReportFailure
from forebay.loading.recipe import LaneEnded, Made

# Waits kept for the percentiles: the last so many.
KEPT_WAITS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A look at a loader: `loader.statistics()`.

    Attributes:
        epoch: The epoch of the last batch handed out; -1 before the first.
        batch: How many batches of that epoch were handed out.
        ready_batches: Batches that wait to be handed out, those that raised among them.
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
        room_s: Seconds that workers had nothing to do, for lack of room for more batches.
        restarts: Tries of batches that ended in the death of a worker.
        failures: Samples that were left out (`on_error="skip"`).
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
    room_s: float
    restarts: int
    failures: int


@dataclass(slots=True)
class Tally:
    """The counts behind `Statistics`, over all epochs of a loader."""

    ready_batches: int = 0
    ready_bytes: int = 0
    waited_s: float = 0.0
    waits: list[float] = field(default_factory=list)
    fetch_s: float = 0.0
    fetch_cpu_s: float = 0.0
    collate_s: float = 0.0
    room_s: float = 0.0
    restarts: int = 0
    _at: int = 0

    def waited(self, seconds: float) -> None:
        """Count a wait of the trainer."""
        self.waited_s += seconds
        if len(self.waits) < KEPT_WAITS:
            self.waits.append(seconds)
        else:
            self.waits[self._at] = seconds
            self._at = (self._at + 1) % KEPT_WAITS

    def came(self, outcome: DeliverResult | ReportFailure) -> None:
        """Count what became ready."""
        if not is_of_a_batch(outcome):
            return
        if isinstance(outcome, DeliverResult) and isinstance(outcome.result, Made):
            times = outcome.result.times
            self.fetch_s += times.fetch_s
            self.fetch_cpu_s += times.fetch_cpu_s
            self.collate_s += times.collate_s
            self.room_s += times.room_s
        self.ready_batches += 1
        self.ready_bytes += _nbytes(outcome)

    def went(self, outcome: DeliverResult | ReportFailure) -> None:
        """Count what is ready no more."""
        if not is_of_a_batch(outcome):
            return
        self.ready_batches -= 1
        self.ready_bytes -= _nbytes(outcome)

    def percentile(self, share: float) -> float:
        """Return the wait that `share` of the kept ones did not exceed; 0.0 without any."""
        waits = sorted(self.waits)
        return waits[min(int(share * len(waits)), len(waits) - 1)] if waits else 0.0


def is_of_a_batch(outcome: DeliverResult | ReportFailure) -> bool:
    """Tell a batch, or what came instead, from the mark that a worker's part is at its end."""
    return not (isinstance(outcome, DeliverResult) and isinstance(outcome.result, LaneEnded))


def _nbytes(outcome: DeliverResult | ReportFailure) -> int:
    return outcome.nbytes if isinstance(outcome, DeliverResult) else 0
