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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How batches are made."""

    num_workers: int
    depth: int = UNLIMITED
    refill_below: int | None = None  # once `depth` are outstanding; None: request below `depth`
    in_order: bool = True
    takes_turns: bool = False
    waits_for_epoch: bool = False
    restarts: bool = False
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation."""

    rate: float  # batches per second
    wait_share: float
    epoch_wait_share: float


def simulate(work: Work, arrangement: Arrangement) -> SimulationResult:
    """Return the rate and the waits of training with the recorded work in an arrangement."""
    count, batch_s, step_s = len(work.step_s), work.batch_s, work.step_s
    firsts = sorted(each for each in work.epochs if 0 < each < count)
    opening = set(firsts)
    closed = iter([*firsts, count]) if arrangement.waits_for_epoch else iter([count])
    workers = _Workers(arrangement, batch_s, work.ready)
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

    def __init__(self, arrangement: Arrangement, batch_s: Sequence[float], ready: int) -> None:
        self._arrangement, self._batch_s = arrangement, batch_s
        self._free = [0.0] * arrangement.num_workers  # when each is free; a heap without turns
        self._ready = ready
        self._requested = 0
        self._is_full = False
        self._ends: list[float] = []  # of all batches in order; otherwise a heap of those not taken

    def begin_epoch(self, asked: float) -> None:
        arrangement = self._arrangement
        opened = asked + arrangement.start_s
        if arrangement.restarts:
            self._free = [opened] * arrangement.num_workers
        else:
            self._free = [max(free, asked) for free in self._free]
        self._is_full = False

    def request(self, taken: int, limit: int, at: float) -> None:
        """Request batches below `limit`, as far as the depth allows with so many taken."""
        arrangement = self._arrangement
        if not arrangement.num_workers:
            return
        depth = max(arrangement.depth, 1)
        while self._requested < limit:
            outstanding = self._requested - taken
            if outstanding >= depth:
                self._is_full = arrangement.refill_below is not None
                return
            if self._is_full and outstanding >= max(arrangement.refill_below or depth, 1):
                return
            self._is_full = False
            self._make(self._requested, at)
            self._requested += 1

    def _make(self, number: int, at: float) -> None:
        if number < self._ready:
            end = 0.0
        elif self._arrangement.takes_turns:
            index = number % len(self._free)
            end = self._free[index] = max(self._free[index], at) + self._batch_s[number]
        else:
            end = max(self._free[0], at) + self._batch_s[number]
            heapq.heapreplace(self._free, end)
        if self._arrangement.in_order:
            self._ends.append(end)
        else:
            heapq.heappush(self._ends, end)

    def take(self, number: int, asked: float) -> float:
        """Return when the next batch is ready for the trainer."""
        if not self._arrangement.num_workers:
            return asked + self._batch_s[number]
        return self._ends[number] if self._arrangement.in_order else heapq.heappop(self._ends)


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


def depth_of(setup: Setup, nbytes: float, *, is_tiny: bool = False) -> int:
    """Return how many batches of so many bytes may be outstanding."""
    if has_buffer(setup):
        by_bytes = UNLIMITED
        if setup.buffer_bytes is not None and nbytes > 0:
            by_bytes = max(int(setup.buffer_bytes / nbytes), 1)
        return min(by_bytes, setup.buffer_batches or UNLIMITED)
    each, workers = setup.prefetch_factor, setup.most_workers or setup.num_workers
    return (max(each, setup.prefetches_tiny) if is_tiny else each) * workers


def prefetch_factor_for(setup: Setup, depth: int) -> int:
    """Return the `prefetch_factor` for so many outstanding batches."""
    workers = max(setup.most_workers or setup.num_workers, 1)
    return max(-(-depth // workers), 1)


def arrangement_of(
    setup: Setup, nbytes: float, start_s: float, *, is_tiny: bool = False
) -> Arrangement:
    """Return what the simulation needs of a setup, with batches of so many bytes."""
    depth, low = depth_of(setup, nbytes, is_tiny=is_tiny), None
    if has_buffer(setup) and setup.refill_below is not None:
        is_share = isinstance(setup.refill_below, float)
        low = int(setup.refill_below * depth) if is_share else int(setup.refill_below)
    return Arrangement(
        num_workers=setup.num_workers,
        depth=depth,
        refill_below=low,
        in_order=setup.in_order,
        takes_turns=setup.takes_turns,
        waits_for_epoch=not setup.crosses_epochs and setup.num_workers > 0,
        restarts=not setup.keeps_workers,
        start_s=start_s,
    )
