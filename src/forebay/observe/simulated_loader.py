"""Single changes of a loader's settings, tried in the simulation. PURE."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import median
from typing import Any, Literal, NamedTuple

from forebay.base.formatting import byte_unit, counted
from forebay.observe.measurements import Setup
from forebay.observe.recorded_work import RecordedWork
from forebay.observe.simulation import (
    SimulationResult,
    depth_of,
    has_buffer,
    simulate,
    stretched,
)
from forebay.options import AutoWorkers

Cause = Literal[
    "healthy",
    "workers",
    "cpu",
    "contention",
    "storage",
    "buffer",
    "skew",
    "startup",
    "consumer",
    "unknown",
]

# A change is worth it if it gives this many times the rate, or leaves this share of the waits.
GAIN = 1.1
LEFT = 0.4
# Prefetching is limited by its depth if at least this share of that was ready at some time.
FILLED = 0.6
# The smallest value is advised that gives this share of the rate with the largest.
NEARLY = 0.98
MOST_WORKERS = 512
MOST_CONCURRENCY = 64
# A sample is slow if it takes this many times what the slowest of a batch usually takes, and is
# among this share of the slowest.
SLOW_TIMES = 3.0
SLOW_SHARE = 0.01
# The advised buffer is this many times as large as needed: buffers refill only below 80 %.
BUFFER_ROOM = 1.25
# More than this many batches for each worker are better kept in a buffer.
MOST_PREFETCHED = 64
# The cores are the limit if more than this share of them is used.
BUSY_CORES = 0.85
# Other programs are the cause if they lengthen processor time by this factor.
DISTURBED = 1.3
# A sentence that compares numbers needs one that is so many times as large: so the numbers differ
# as they are shown, and by more than they vary.
MARGIN = 1.02


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the settings, and what it gave in the simulation."""

    advice: Mapping[str, Any]
    result: SimulationResult
    num_workers: int


class Claim(NamedTuple):
    """Two numbers of a sentence that is true only if the first is larger."""

    larger: float
    smaller: float

    @property
    def holds(self) -> bool:
        """Return whether it is, by more than rounding."""
        return self.larger > self.smaller * MARGIN


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause, what shows it, and what helps."""

    cause: Cause
    why: str
    change: Change | None = None
    remedy: str = ""
    is_expected: bool = True
    claims: tuple[Claim, ...] = ()  # what has to hold for `why` to be said


class SimulatedLoader:
    """Simulates a loader as it is, and with changes."""

    def __init__(self, recorded: RecordedWork, setup: Setup) -> None:
        self.recorded, self.setup = recorded, setup
        self._work = recorded.work
        is_inside = setup.backend == "thread" or not setup.num_workers or setup.is_sliced
        inside_s = recorded.core_s if is_inside else 0.0
        self.trainer_cpu_s = max(recorded.trainer_cpu_s - inside_s, 0.0)
        self.disturbance = 1.0
        if not setup.is_sliced and recorded.core_s > 0.0:
            measured = (recorded.core_s + recorded.queued_s) / recorded.core_s
            self.disturbance = max(1.0, measured / self._stretched(max(setup.num_workers, 1)))
        self.depth = depth_of(setup, recorded.work)

    # ---- as it is ------------------------------------------------------------------------------

    @cached_property
    def present(self) -> SimulationResult:
        """What the present settings come to in the simulation."""
        return simulate(self._work, self.setup)

    def capacity(self) -> float:
        """Return the batches per second that the loader could make if training took no time."""
        recorded, work = self.recorded, self._work
        num_workers = self.setup.makers
        if not num_workers:
            return 1.0 / max(recorded.batch_s, 1e-9)
        at_once = [0.0] * len(work.step_s)
        busy = replace(work, step_s=at_once, epochs={}, batch_s=self._batches(num_workers), ready=0)
        return simulate(busy, self.setup).rate

    def helps(self, change: Change) -> bool:
        """Return whether a change is worth it."""
        return change.result.rate >= self.present.rate * GAIN or self.removes_waits(change)

    def removes_waits(self, change: Change) -> bool:
        """Return whether most of the waits would be gone."""
        return change.result.wait_share < self.present.wait_share * LEFT

    def limit_after(self, change: Change) -> str:
        """Return what would limit training after a change, as the end of a sentence."""
        recorded, cores, result = self.recorded, self.setup.cores, change.result
        if result.wait_share < 0.1:
            return f"{self.setup.step} is the limit"
        used = (recorded.core_s + self.trainer_cpu_s) * result.rate
        if cores is not None and used > 0.85 * cores:
            return f"the {counted(cores, 'core')} {'is' if cores == 1 else 'are'} the limit"
        still = "still " * (result.wait_share < recorded.wait_share)
        return f"{self.setup.consumer} {still}waits {result.wait_share:.0%} of the time"

    @property
    def cores_needed(self) -> float:
        """How many cores training would use if it did not wait."""
        return (self.recorded.core_s + self.trainer_cpu_s) / max(self.recorded.step_s, 1e-9)

    @property
    def cores(self) -> str:
        """The cores, in words."""
        return "cores" if self.setup.cores is None else counted(self.setup.cores, "core")

    @property
    def cores_used(self) -> float:
        """How many cores training and its workers use, with the threads of libraries."""
        recorded = self.recorded
        used_s = recorded.core_s + recorded.extra_threads_s + self.trainer_cpu_s
        return used_s * recorded.rate

    @property
    def is_disturbed(self) -> bool:
        """Return whether other programs lengthen the processor time of batches noticeably."""
        recorded = self.recorded
        is_lengthened = self.disturbance >= DISTURBED
        return (
            is_lengthened
            and recorded.queued_s >= recorded.batch_s / 5
            and not recorded.has_idle_cores
        )

    @property
    def slowdown(self) -> float | None:
        """By what power of their number workers slow each other down; None if it is not known."""
        tried, now = self.setup.tried, self.setup.num_workers
        fewer = [count for count in tried if count < now]
        if self.recorded.slowdown is not None or not fewer or now not in tried:
            return self.recorded.slowdown
        before = max(fewer)
        return 1.0 - math.log(tried[now] / tried[before]) / math.log(now / before)

    # ---- changes -------------------------------------------------------------------------------

    def more_workers(self) -> Change | None:
        """Return the smallest number of workers that gives nearly all that workers can."""
        recorded, now = self.recorded, self.setup.num_workers
        needed = math.ceil(recorded.batch_s / max(recorded.step_s, 1e-6))
        most = min(max(2 * needed, now + 2, 4), MOST_WORKERS)
        if most <= now:
            return None

        def result(num_workers: int) -> SimulationResult:
            setup = self.setup.with_workers(num_workers)
            work = self._work.in_rounds(num_workers, self._batches(num_workers))
            return self._within_cores(simulate(work, setup))

        found, given = _smallest(now + 1, most, result, min(max(needed, now + 1), most))
        return Change({"num_workers": found}, given, found)

    def tried_out(self, change: Change) -> Change:
        """Return a change to more workers as an advice to let the loader try it."""
        setup = self.setup
        if not setup.may_adjust:
            return change
        value: str | AutoWorkers = "auto"
        if setup.most_workers is not None or change.num_workers > setup.auto_workers:
            value = AutoWorkers(max=change.num_workers)
        return replace(change, advice={"num_workers": value})

    def more_at_once(self) -> Change | None:
        """Return the smallest `concurrency` that gives nearly all that it can; None without one."""
        recorded, now, count = self.recorded, self.setup.concurrency, self.setup.num_workers
        if now is None or now >= MOST_CONCURRENCY or not count:
            return None
        cpu_s = recorded.batch_s - recorded.other_s

        def result(concurrency: int) -> SimulationResult:
            # Waits overlap; Python runs the rest in one thread at a time.
            batch_s = max((cpu_s + recorded.other_s * now) / concurrency, cpu_s)
            change = min(batch_s / max(recorded.batch_s, 1e-9), 1.0)
            batches = [seconds * change for seconds in self._work.batch_s]
            work = self._work.in_rounds(count, batches)
            return self._within_cores(simulate(work, self.setup))

        found, given = _smallest(now + 1, MOST_CONCURRENCY, result)
        return Change({"concurrency": found}, given, count)

    def undisturbed(self) -> Change:
        """Return what it would be without other programs on the cores."""
        count = self.setup.num_workers
        step_s = max(self.recorded.step_s, 1e-9)
        # Without workers, what the trainer waited for a core was for batches, above all.
        queued_s = self.recorded.trainer_queued_s if count else 0.0
        alone = max(1.0 - queued_s / step_s, 0.0)
        work = replace(
            self._work,
            batch_s=self._batches(count, disturbance=1.0),
            step_s=[seconds * alone for seconds in self._work.step_s],
        )
        return Change({}, self._within_cores(simulate(work, self.setup)), count)

    def without_slow_samples(self) -> Change | None:
        """Return what it would be if the slowest 1 % of samples took what others take, if any."""
        slowest = self.recorded.slowest_s
        known = [each for each in slowest if each > 0.0]
        if not known:
            return None
        usual = median(known)
        count = math.ceil(SLOW_SHARE * len(slowest) * (self.setup.batch_size or 1))
        limit = sorted(slowest, reverse=True)[:count][-1]
        limit = max(limit, SLOW_TIMES * usual)
        if max(slowest) < limit:
            return None
        even = [
            max(seconds - (slow - usual), 0.0) if slow >= limit else seconds
            for seconds, slow in zip(self._work.batch_s, slowest, strict=True)
        ]
        result = simulate(replace(self._work, batch_s=even), self.setup)
        return Change({}, result, self.setup.num_workers)

    def deeper(self) -> Change | None:
        """Return the smallest number of outstanding batches that gives nearly all that any can."""
        # Without workers nobody makes them; and what is never full is not too small.
        is_filled = self.recorded.most_ready + 1 >= FILLED * self.depth
        if not self.setup.num_workers or not is_filled:
            return None
        return self._with_depth(self.setup, self.depth + 1, in_buffer=has_buffer(self.setup))

    def no_epochs(self) -> Change | None:
        """Return the smallest change that lets epochs begin without a wait."""
        setup = self.setup
        if not setup.waits_for_epochs:
            return None
        at_once = replace(setup, keeps_workers=True)
        # Without parts of the dataset, any worker makes the next batch of a buffer.
        takes_turns = setup.takes_turns and not setup.may_adjust
        through = replace(at_once, crosses_epochs=True, takes_turns=takes_turns)
        buffered = self._with_depth(through, max(self.depth, 1), in_buffer=True)
        if setup.keeps_workers:
            return buffered
        result = simulate(self._work, at_once)
        kept = Change({"persistent_workers": True}, result, setup.num_workers)
        gained = kept.result.rate - self.present.rate
        is_nearly_all = gained >= 0.8 * (buffered.result.rate - self.present.rate)
        return kept if is_nearly_all else buffered

    # ---- parts of these ------------------------------------------------------------------------

    def _with_depth(self, setup: Setup, least: int, *, in_buffer: bool) -> Change:
        nbytes, most = self._work.nbytes, len(self._work.step_s) + 1

        def result(depth: int) -> SimulationResult:
            limited = replace(setup, buffer_bytes=None, buffer_batches=depth, refill_below=None)
            return simulate(self._work, limited)

        depth, given = _smallest(least, max(most, least), result)
        each = max(-(-depth // max(setup.most_makers, 1)), 1)
        if not in_buffer and each <= MOST_PREFETCHED:
            deep = result(each * setup.most_makers)
            return Change({"prefetch_factor": each}, deep, setup.num_workers)
        advice = {"buffer": _rounded_bytes(depth * BUFFER_ROOM * max(nbytes, 1024.0))}
        return Change(advice, given, setup.num_workers)

    def _within_cores(self, result: SimulationResult) -> SimulationResult:
        """Return a result limited to the processor time that the cores can give."""
        cpu_s, cores = self.recorded.core_s + self.trainer_cpu_s, self.setup.cores
        if cores is None or result.rate * cpu_s <= cores:
            return result
        share = (1.0 - result.wait_share) * cores / (cpu_s * result.rate)
        return replace(result, rate=cores / cpu_s, wait_share=1.0 - share)

    def _stretched(self, num_workers: int) -> float:
        """Return by what factor the loader's own processes lengthen processor time."""
        recorded, cores = self.recorded, self.setup.cores
        if cores is not None and recorded.core_s > 0.0:  # where all are used, training uses a part
            cores *= recorded.core_s / (recorded.core_s + self.trainer_cpu_s)
        return stretched(num_workers, cores, recorded.core_s, recorded.other_s)

    def _batches(self, num_workers: int, disturbance: float | None = None) -> list[float]:
        """Return the seconds of each batch if this many workers are all busy."""
        recorded = self.recorded
        factor = self.disturbance if disturbance is None else disturbance
        cpu_s = recorded.core_s * self._stretched(num_workers) * factor
        change = (recorded.other_s + cpu_s) / max(recorded.batch_s, 1e-9)
        return [seconds * change for seconds in self._work.batch_s]


def _smallest(
    low: int, high: int, result: Callable[[int], SimulationResult], *others: int
) -> tuple[int, SimulationResult]:
    """Return the smallest number that is nearly as fast as `high` and others, and its result."""
    known = cache(result)
    enough = NEARLY * max(known(each).rate for each in (high, *others))
    found = low + bisect_left(range(low, high), True, key=lambda each: known(each).rate >= enough)
    return found, known(found)


def _rounded_bytes(nbytes: float) -> str:
    """Return a size as a string, rounded up to two digits."""
    unit, factor = byte_unit(nbytes)
    number = nbytes / factor
    digits = 10 ** max(math.floor(math.log10(number)) - 1, -1)
    return f"{math.ceil(number / digits) * digits:g}{unit}"
