"""A model of a loader: when each batch would be ready, and how long training would wait. PURE.

what batches and steps took, what can be changed ──> simulate ──> rate, waits
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from forebay.observe.measurements import Setup

# Batches outstanding where nothing limits them.
UNLIMITED = 1 << 40
# Batches that each worker makes, at least, where they are counted in rounds.
LEAST_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What was recorded of consecutive steps."""

    batch_s: Sequence[float]
    step_s: Sequence[float]
    # By number of the batch that begins an epoch: the trainer's seconds between the step before and
    # the call of `iter`; they count neither as steps nor as waits.
    epochs: Mapping[int, float] = field(default_factory=dict)
    handoff_s: float = 0.0
    ready: int = 0
    warmup: int = 0
    nbytes: float = 0.0  # of a batch
    start_s: float = 0.0  # which workers that an epoch begins with need
    is_tiny: bool = False  # whether batches are, of which more are requested

    def in_rounds(self, num_workers: int, batch_s: Sequence[float]) -> Work:
        """Return it with other times of batches, for so many workers that begin together.

        Such workers may also end together, round after round. It is repeated until there are
        enough rounds, all of them whole; the first does not count.
        """
        count = len(self.step_s)
        whole = num_workers * max(count // num_workers, LEAST_ROUNDS)
        times = -(-whole // count)
        epochs = {
            number + count * time: pause_s
            for time in range(times)
            for number, pause_s in self.epochs.items()
            if time == 0 or number > 0
        }
        return replace(
            self,
            batch_s=(list(batch_s) * times)[:whole],
            step_s=(list(self.step_s) * times)[:whole],
            epochs=epochs,
            ready=0,
            warmup=num_workers - 1,
        )


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation."""

    rate: float  # batches per second
    wait_share: float
    epoch_wait_share: float


def simulate(work: Work, setup: Setup) -> SimulationResult:
    """Return the rate and the waits of training with the recorded work and a setup."""
    count, step_s = len(work.step_s), work.step_s
    firsts = sorted(each for each in work.epochs if 0 < each < count)
    opening = set(firsts)
    closed = iter([*firsts, count]) if setup.waits_for_epochs else iter([count])
    workers = _Workers(work, setup)
    limit, got = next(closed), 0.0
    waited = waited_first = paused = first_got = 0.0
    for number in range(count):
        asked, refilled_at = got + (step_s[number - 1] if number else 0.0), got
        if number in opening:
            asked += work.epochs[number]
            paused += work.epochs[number] if number > work.warmup else 0.0
            if number == limit:
                limit, refilled_at = next(closed), asked
                workers.begin_epoch(asked)
        workers.request(number, limit, refilled_at)
        ready = workers.take(number, asked)
        got = max(asked, ready) + work.handoff_s
        if number > work.warmup:
            waited += got - asked
            waited_first += (got - asked) if number in opening else 0.0
        else:
            first_got = got
    elapsed = got - first_got - paused
    if elapsed <= 0.0:
        return SimulationResult(0.0, 0.0, 0.0)
    counted = count - 1 - work.warmup
    return SimulationResult(counted / elapsed, waited / elapsed, waited_first / elapsed)


class _Workers:
    """The workers of a simulation, and the batches that they have made."""

    def __init__(self, work: Work, setup: Setup) -> None:
        self._work, self._setup = work, setup
        self._count = setup.makers
        self._free = [0.0] * self._count  # when each is free; a heap without turns
        self._depth, self._low = max(depth_of(setup, work), 1), low_mark(setup, work)
        self._requested = 0
        self._is_full = False
        self._ends: list[float] = []  # of all batches in order; otherwise a heap of those not taken

    def begin_epoch(self, asked: float) -> None:
        if self._setup.keeps_workers:
            self._free = [max(free, asked) for free in self._free]
        else:
            self._free = [asked + self._work.start_s] * self._count
        self._is_full = False

    def request(self, taken: int, limit: int, at: float) -> None:
        """Request batches below `limit`, as far as the depth allows with so many taken."""
        depth, low = self._depth, self._low
        if not self._count:
            return
        while self._requested < limit:
            outstanding = self._requested - taken
            if outstanding >= depth:
                self._is_full = low is not None
                return
            if self._is_full and outstanding >= max(low or depth, 1):
                return
            self._is_full = False
            self._make(self._requested, at)
            self._requested += 1

    def _make(self, number: int, at: float) -> None:
        batch_s = self._work.batch_s
        if number < self._work.ready:
            end = 0.0
        elif self._setup.takes_turns:
            index = number % len(self._free)
            end = self._free[index] = max(self._free[index], at) + batch_s[number]
        else:
            end = max(self._free[0], at) + batch_s[number]
            heapq.heapreplace(self._free, end)
        if self._setup.in_order:
            self._ends.append(end)
        else:
            heapq.heappush(self._ends, end)

    def take(self, number: int, asked: float) -> float:
        """Return when the next batch is ready for the trainer."""
        if not self._count:
            return asked + self._work.batch_s[number]
        return self._ends[number] if self._setup.in_order else heapq.heappop(self._ends)


def stretched(num_workers: int, cores: float | None, cpu_s: float, other_s: float) -> float:
    """Return by what factor processor time lengthens where workers share too few cores."""
    # With all of them busy, each uses a core for `cpu_s` of `cpu_s * factor + other_s`; the factor
    # is what makes these shares add up to the cores.
    if cores is None or cpu_s <= 0.0:
        return 1.0
    return max(1.0, num_workers / max(cores, 0.01) - other_s / cpu_s)


# ---- loader setup --------------------------------------------------------------------------------


def has_buffer(setup: Setup) -> bool:
    """Return whether a buffer, rather than `prefetch_factor`, limits what is prefetched."""
    return setup.buffer_bytes is not None or setup.buffer_batches is not None


def depth_of(setup: Setup, work: Work) -> int:
    """Return how many such batches may be outstanding."""
    if has_buffer(setup):
        by_bytes = UNLIMITED
        if setup.buffer_bytes is not None and work.nbytes > 0:
            by_bytes = max(int(setup.buffer_bytes / work.nbytes), 1)
        return min(by_bytes, setup.buffer_batches or UNLIMITED)
    usual = setup.prefetch_factor * setup.most_makers
    return max(usual, setup.tiny_requests) if work.is_tiny else usual


def low_mark(setup: Setup, work: Work) -> int | None:
    """Return below how many batches a buffer that was full is filled again; None for at once."""
    low = setup.refill_below if has_buffer(setup) else None
    return int(low * depth_of(setup, work)) if isinstance(low, float) else low
