"""Single changes of a loader's settings, tried in the simulation. PURE."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from forebay.observe.loader_setup import Setup
from forebay.observe.recorded_work import RecordedWork
from forebay.observe.simulation import Arrangement, SimulationResult, simulate, stretched
from forebay.units import counted

# A change is worth it if it gives this many times the rate, or leaves this share of the waits.
GAIN = 1.1
LEFT = 0.4
# The smallest value is advised that gives this share of the rate with the largest.
NEARLY = 0.98
MOST_WORKERS = 512
# Batches that take less than this are prefetched in larger numbers.
TINY_S = 0.001
# A sample is slow if it takes this many times what the slowest of a batch usually takes, and is
# among this share of the slowest.
SLOW_TIMES = 3.0
SLOW_SHARE = 0.01
# The advised buffer is this many times as large as needed: buffers refill only below 80 %.
BUFFER_ROOM = 1.25
# More than this many batches for each worker are better kept in a buffer.
MOST_PREFETCHED = 64


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the settings, and what it gave in the simulation.

    Attributes:
        advice: Arguments and their values.
        result: The rate and the waits with them.
        num_workers: The number of workers with them.
    """

    advice: Mapping[str, Any]
    result: SimulationResult
    num_workers: int


class SimulatedLoader:
    """Simulates a loader as it is, and with changes.

    Args:
        recorded: What the loader did.
        setup: Its settings.

    Attributes:
        depth: Batches that may be outstanding.
        trainer_cpu_s: Processor time of one training step, without workers in the same process.
        disturbance: By what factor other programs lengthen processor time; 1 if they do not.
    """

    def __init__(self, recorded: RecordedWork, setup: Setup) -> None:
        self.recorded, self.setup = recorded, setup
        self._is_tiny = recorded.batch_s < TINY_S
        self._work = recorded.work
        is_inside = setup.backend == "thread" or not setup.num_workers or setup.is_sliced
        inside_s = recorded.cpu_s if is_inside else 0.0
        self.trainer_cpu_s = max(recorded.trainer_cpu_s - inside_s, 0.0)
        self.disturbance = 1.0
        if not setup.is_sliced and recorded.cpu_s > 0.0:
            measured = (recorded.cpu_s + recorded.queued_s) / recorded.cpu_s
            self.disturbance = max(1.0, measured / self._stretched(max(setup.num_workers, 1)))
        self._arrangement = self._arranged(setup)
        self.depth = self._arrangement.depth

    # ---- as it is ------------------------------------------------------------------------------

    @cached_property
    def present(self) -> SimulationResult:
        """What the present settings come to in the simulation."""
        return simulate(self._work, self._arrangement)

    def capacity(self) -> float:
        """Return the batches per second that the loader could make if training took no time."""
        recorded, work = self.recorded, self._work
        num_workers = 0 if self.setup.is_sliced else self.setup.num_workers
        if not num_workers:
            return 1.0 / max(recorded.batch_s, 1e-9)
        at_once = [0.0] * len(work.step_s)
        busy = replace(work, step_s=at_once, epochs={}, batch_s=self._batches(num_workers), ready=0)
        return simulate(busy, self._arrangement).rate

    def helps(self, change: Change) -> bool:
        """Tell whether a change is worth it."""
        return change.result.rate >= self.present.rate * GAIN or self.removes_waits(change)

    def removes_waits(self, change: Change) -> bool:
        """Tell whether most of the waits would be gone."""
        return change.result.wait_share <= self.present.wait_share * LEFT

    def limit_after(self, change: Change) -> str:
        """Return what would limit training after a change, as the end of a sentence."""
        recorded, cores, result = self.recorded, self.setup.cores, change.result
        if result.wait_share < 0.1:
            return f"{self.setup.step} is the limit"
        used = (recorded.cpu_s + self.trainer_cpu_s) * result.rate
        if cores is not None and used > 0.85 * cores:
            return f"the {counted(cores, 'core')} are the limit"
        return f"{self.setup.consumer} still waits {result.wait_share:.0%} of the time"

    @property
    def cores_needed(self) -> float:
        """How many cores training would use if it did not wait."""
        return (self.recorded.cpu_s + self.trainer_cpu_s) / max(self.recorded.step_s, 1e-9)

    # ---- changes -------------------------------------------------------------------------------

    def more_workers(self) -> Change | None:
        """Return the smallest number of workers that gives nearly all that workers can."""
        recorded, now = self.recorded, self.setup.num_workers
        needed = math.ceil(recorded.batch_s / max(recorded.step_s, 1e-6))
        most = min(max(2 * needed, now + 2, 4), MOST_WORKERS)
        if most <= now:
            return None
        results: dict[int, SimulationResult] = {}

        def rate(num_workers: int) -> float:
            if num_workers not in results:
                most = self.setup.most_workers and max(self.setup.most_workers, num_workers)
                setup = replace(self.setup, num_workers=num_workers, most_workers=most)
                work = self._work.in_rounds(num_workers, self._batches(num_workers))
                results[num_workers] = self._within_cores(simulate(work, self._arranged(setup)))
            return results[num_workers].rate

        best = max(rate(most), rate(min(max(needed, now + 1), most)))
        found = _least(now + 1, most, lambda number: rate(number) >= NEARLY * best)
        return Change({"num_workers": found}, results[found], found)

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
        return Change({}, self._within_cores(simulate(work, self._arrangement)), count)

    def without_slow_samples(self) -> Change | None:
        """Return what it would be if the slowest 1 % of the samples took what others take.

        None if no sample is much slower than others.
        """
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
        result = simulate(replace(self._work, batch_s=even), self._arrangement)
        return Change({}, result, self.setup.num_workers)

    def deeper(self) -> Change | None:
        """Return the smallest number of outstanding batches that gives nearly all that any can.

        None if there are no workers to make them.
        """
        if not self.setup.num_workers:
            return None
        return self._with_depth(self._arrangement, self.depth + 1, in_buffer=self.setup.has_buffer)

    def no_epochs(self) -> Change | None:
        """Return the smallest change that lets epochs begin without a wait."""
        setup, now = self.setup, self._arrangement
        if not now.waits_for_epoch:
            return None
        takes_turns = setup.takes_turns and setup.is_iterable
        through = replace(
            now, waits_for_epoch=False, restarts=False, start_s=0.0, takes_turns=takes_turns
        )
        buffered = self._with_depth(through, max(self.depth, 1), in_buffer=True)
        if setup.keeps_workers:
            return buffered
        result = simulate(self._work, replace(now, restarts=False, start_s=0.0))
        kept = Change({"persistent_workers": True}, result, setup.num_workers)
        gained = kept.result.rate - self.present.rate
        is_nearly_all = gained >= 0.8 * (buffered.result.rate - self.present.rate)
        return kept if is_nearly_all else buffered

    # ---- parts of these ------------------------------------------------------------------------

    def _arranged(self, setup: Setup) -> Arrangement:
        if setup.is_sliced:
            setup = replace(setup, num_workers=0)
        recorded = self.recorded
        return setup.arrangement(recorded.nbytes, recorded.start_s, is_tiny=self._is_tiny)

    def _with_depth(self, arrangement: Arrangement, least: int, *, in_buffer: bool) -> Change:
        setup, nbytes, most = self.setup, self.recorded.nbytes, len(self._work.step_s) + 1
        results: dict[int, SimulationResult] = {}

        def rate(depth: int) -> float:
            if depth not in results:
                deep = replace(arrangement, depth=depth, refill_below=None)
                results[depth] = simulate(self._work, deep)
            return results[depth].rate

        most = max(most, least)
        best = rate(most)
        depth = _least(least, most, lambda each: rate(each) >= NEARLY * best)
        each = setup.prefetching(depth)
        if not in_buffer and each <= MOST_PREFETCHED:
            rate(depth := replace(setup, prefetch_factor=each).depth(nbytes))
            return Change({"prefetch_factor": each}, results[depth], setup.num_workers)
        advice = {"buffer": _rounded_bytes(depth * BUFFER_ROOM * max(nbytes, 1024.0))}
        return Change(advice, results[depth], setup.num_workers)

    def _within_cores(self, result: SimulationResult) -> SimulationResult:
        """Return a result limited to the processor time that the cores can give."""
        cpu_s, cores = self.recorded.cpu_s + self.trainer_cpu_s, self.setup.cores
        if cores is None or result.rate * cpu_s <= cores:
            return result
        share = (1.0 - result.wait_share) * cores / (cpu_s * result.rate)
        return replace(result, rate=cores / cpu_s, wait_share=1.0 - share)

    def _stretched(self, num_workers: int) -> float:
        """Return by what factor the loader's own processes lengthen processor time."""
        recorded, cores = self.recorded, self.setup.cores
        if cores is not None and recorded.cpu_s > 0.0:  # where all are used, training uses a part
            cores *= recorded.cpu_s / (recorded.cpu_s + self.trainer_cpu_s)
        return stretched(num_workers, cores, recorded.cpu_s, recorded.other_s)

    def _batches(self, num_workers: int, disturbance: float | None = None) -> list[float]:
        """Return the seconds of each batch if this many workers are all busy."""
        recorded = self.recorded
        factor = self.disturbance if disturbance is None else disturbance
        cpu_s = recorded.cpu_s * self._stretched(num_workers) * factor
        change = (recorded.other_s + cpu_s) / max(recorded.batch_s, 1e-9)
        return [seconds * change for seconds in self._work.batch_s]


def _least(low: int, high: int, is_enough: Callable[[int], bool]) -> int:
    """Return the smallest number from `low` to `high` that is enough; `high` is assumed to be."""
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    is_enough(low)  # so that it was simulated
    return low


def _rounded_bytes(nbytes: float) -> str:
    """Return a size as a string, rounded up to two digits."""
    units = ("kB", 1e3), ("MB", 1e6), ("GB", 1e9)
    name, unit = next((each for each in reversed(units) if nbytes >= each[1]), units[0])
    number = nbytes / unit
    digits = 10 ** max(math.floor(math.log10(number)) - 1, -1)
    return f"{math.ceil(number / digits) * digits:g}{name}"
