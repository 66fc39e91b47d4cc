"""What a trace says about batches and steps, as the simulation needs it. PURE."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import nlargest, nsmallest
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

from forebay.base.formatting import byte_unit, counted
from forebay.observe.processor_time import extra_threads_s
from forebay.observe.record import MadeRecord, StepRecord
from forebay.observe.simulation import (
    Arrangement,
    Setup,
    SimulationResult,
    Work,
    simulate,
    stretched,
)

# At most this many of the last steps are simulated: one takes about 2 microseconds.
MAX_STEPS = 2048
# Handing over a batch, and sending the next request to a worker, takes less than this. What is
# measured beyond it is something else.
MAX_HANDOFF_S = 0.0002
MAX_MESSAGE_S = 0.0005
# Batches share a rate if the time of each grows with more than this power of the number that are
# made at the same time. The measured power must be this many standard errors away from that.
SHARED_RATE = 0.4
ERRORS = 2.0
# The least mean and the least spread that the logarithm of that number must have.
LEAST_LOAD = 0.2
LEAST_SPREAD = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWork:
    """Consecutive steps and batches. Times are means in seconds, if nothing else is said."""

    work: Work
    steps: int
    rate: float  # batches per second that the trainer took, without pauses between epochs
    wait_share: float
    epoch_wait_share: float
    step_s: float
    batch_s: float
    cpu_s: float
    queued_s: float
    trainer_cpu_s: float
    trainer_queued_s: float
    start_s: float
    nbytes: float
    slowest_s: Sequence[float]  # for each batch: of its slowest sample; 0 if not known
    # By what power of the number of batches that are made at the same time a batch takes longer: 0
    # if they do not disturb each other, 1 if they share a fixed rate. None if that cannot be told.
    slowdown: float | None
    read_bytes: float = 0.0
    read_rate: float = 0.0  # bytes per second
    idle_share: float | None = None  # of the cores; None if the system does not tell
    threads_s: float = 0.0
    system_s: float = 0.0
    faults: float = 0.0
    most_ready: int = 0  # batches, when the trainer asked for one
    slow_batch_s: float = 0.0  # of the slowest tenth
    quick_step_s: float = 0.0  # of the faster half

    @property
    def extra_threads_s(self) -> float:
        """Processor time of other threads of a worker for one batch, beside its own thread."""
        used = extra_threads_s(self.threads_s, self.batch_s, self.cpu_s, self.queued_s)
        return max(used, 0.0)

    @property
    def core_s(self) -> float:
        """How long a worker uses one core for one batch: its thread, and those it waits for."""
        return self.cpu_s + self.threads_s - self.extra_threads_s

    @property
    def other_s(self) -> float:
        """A worker's time for one batch that is neither processor time nor waiting for a core."""
        # While its other threads compute, it waits for these.
        return max(self.batch_s - self.cpu_s - self.queued_s - self.threads_s, 0.0)


def recorded_work(
    steps: Sequence[StepRecord], batches: Sequence[MadeRecord], num_workers: int
) -> RecordedWork | None:
    """Return what was recorded last; None if there are fewer than two steps or no batches."""
    steps = _last(steps)
    if len(steps) < 2 or len(batches) < 2:
        return None
    step_s, waited, epochs = _expanded_steps(steps)
    count = len(step_s)
    warmup = min(max(num_workers, 1), count // 2)
    counted = range(warmup + 1, count)
    wait_s = sum(waited[number] for number in counted)
    blocked = sum(waited[number] > MAX_HANDOFF_S for number in counted)
    first_s = sum(waited[number] for number in counted if number in epochs)
    elapsed = wait_s + sum(step_s[number - 1] for number in counted)
    if elapsed <= 0.0:
        return None
    batch_s, slowest_s = _expanded_batches(batches, count)
    first, last = batches[0], batches[-1]
    made = last.made - first.made
    mean_s = (last.total_s - first.total_s) / made
    message_s = _message_s(batches) if num_workers else 0.0
    later = [waited[number] for number in range(1, count) if number not in epochs]
    begins = [max(waited[number] - mean_s, 0.0) for number in epochs if number > 0]
    work = Work(
        batch_s=[seconds + message_s for seconds in batch_s],
        step_s=step_s,
        epochs=epochs,
        handoff_s=min(*later, MAX_HANDOFF_S) if later and num_workers else 0.0,
        ready=steps[0].ready,
        warmup=warmup,
    )
    taken = steps[-1].taken - steps[0].taken
    trainer_queued_s = (steps[-1].trainer_queued_s - steps[0].trainer_queued_s) / taken
    return RecordedWork(
        work=work,
        steps=len(counted),
        rate=len(counted) / elapsed,
        wait_share=wait_s / elapsed,
        epoch_wait_share=first_s / elapsed,
        step_s=fmean(step_s),
        batch_s=mean_s,
        cpu_s=min((last.total_cpu_s - first.total_cpu_s) / made, mean_s),
        queued_s=min((last.total_queued_s - first.total_queued_s) / made, mean_s),
        trainer_cpu_s=(steps[-1].trainer_cpu_s - steps[0].trainer_cpu_s) / taken,
        # A trainer that waited for its batch also waited for a core when the batch was ready.
        trainer_queued_s=max(trainer_queued_s, 0.0) / (1.0 + blocked / len(counted)),
        start_s=median(begins) if begins else 0.0,
        nbytes=fmean(each.nbytes for each in batches),
        slowest_s=slowest_s,
        slowdown=slowdown(batches, num_workers),
        read_bytes=(last.total_read_bytes - first.total_read_bytes) / made,
        read_rate=_read_rate(batches),
        idle_share=_idle_share(steps),
        threads_s=(last.total_threads_s - first.total_threads_s) / made,
        system_s=(last.total_system_s - first.total_system_s) / made,
        faults=(last.total_faults - first.total_faults) / made,
        most_ready=max(each.ready for each in steps),
        slow_batch_s=fmean(nlargest(math.ceil(count / 10), batch_s)),
        quick_step_s=fmean(nsmallest(math.ceil(count / 2), step_s)),
    )


def _read_rate(batches: Sequence[MadeRecord]) -> float:
    """Return the bytes per second that workers read from storage."""
    first, last = batches[0], batches[-1]
    nbytes, began = last.total_read_bytes - first.total_read_bytes, first.ended_at
    if first.made == 1:  # from the beginning, when all workers read at once
        nbytes, began = last.total_read_bytes, first.ended_at - first.seconds
    return nbytes / max(last.ended_at - began, 1e-9)


def _idle_share(steps: Sequence[StepRecord]) -> float | None:
    """Return the part of the time that the cores were idle, between two measurements of it."""
    known = [(at.asked_at, at.cores_idle_s) for at in steps if at.cores_idle_s is not None]
    # A record may have the measurement of an earlier one.
    fresh = [
        after for before, after in pairwise(known) if after[0] > before[0] and after[1] != before[1]
    ]
    if len(fresh) < 2:
        return None
    (began, idle_before), (ended, idle_s) = fresh[0], fresh[-1]
    return min((idle_s - idle_before) / (ended - began), 1.0)


def _last(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the last records, of at most `MAX_STEPS` steps."""
    kept = list(steps)
    since = kept[-1].taken - MAX_STEPS if kept else 0
    return [each for each in kept if each.taken > since]


def _expanded_steps(
    steps: Sequence[StepRecord],
) -> tuple[list[float], list[float], dict[int, float]]:
    """Return the seconds of each step and of the wait before it, and where epochs begin."""
    # One record may stand for several steps; these get equal parts of what it has.
    # None for the last step of an epoch: only its sum with the pause after it is known.
    spent: list[float | None] = []
    waited = [steps[0].waited_s]
    epochs: dict[int, float] = {0: 0.0} if steps[0].is_first else {}
    gaps: dict[int, float] = {}
    for before, after in pairwise(steps):
        count = after.taken - before.taken
        between_s = after.total_waited_s - after.waited_s - before.total_waited_s
        gap_s = after.asked_at - before.got_at - between_s
        if after.is_first:
            gaps[len(spent) + count] = gap_s
            spent += [None] * count
        else:
            spent += [max(gap_s, 0.0) / count] * count
        waited += [max(between_s, 0.0) / max(count - 1, 1)] * (count - 1) + [after.waited_s]
    known = [each for each in spent if each is not None]
    usual = median(known) if known else 0.0
    for number, gap_s in gaps.items():
        last = number - 1
        while last >= 0 and spent[last] is None:
            spent[last] = min(usual, max(gap_s, 0.0))
            last -= 1
        epochs[number] = max(gap_s - usual * (number - 1 - last), 0.0)
    return [*(each or 0.0 for each in spent), usual], waited, epochs


def _expanded_batches(batches: Sequence[MadeRecord], count: int) -> tuple[list[float], list[float]]:
    """Return the seconds and the slowest samples' of `count` batches: the last ones, repeated."""
    seconds, slowest = [batches[0].seconds], [batches[0].slowest_s]
    for before, after in pairwise(batches):
        between = after.made - before.made
        each = after.seconds if between == 1 else (after.total_s - before.total_s) / between
        seconds += [max(each, 0.0)] * between
        slowest += [0.0] * (between - 1) + [after.slowest_s]
        if len(seconds) > 2 * count:  # no more than needed
            del seconds[:-count], slowest[:-count]
    seconds, slowest = seconds[-count:], slowest[-count:]
    times = math.ceil(count / len(seconds))
    return (seconds * times)[:count], (slowest * times)[:count]


def _message_s(batches: Sequence[MadeRecord]) -> float:
    """Return the time between two batches of a worker that has the next request already."""
    idle = sorted(each.idle_s for each in batches)
    return min(idle[len(idle) // 10], MAX_MESSAGE_S)


def slowdown(batches: Sequence[MadeRecord], num_workers: int) -> float | None:
    """Return by what power of the batches made at the same time each takes longer; see above.

    It is the slope of a line through logarithms. Batches that are made next to fewer others are
    those at the beginning and the end of an epoch, and those before a worker had nothing to do.
    """
    if any(after.made - before.made != 1 for before, after in pairwise(batches)):
        return None
    # Next to the first and the last ones, others were made that are not recorded.
    inner = _loads(batches)[2 * num_workers : -num_workers or None]
    points = [(math.log(load), math.log(seconds)) for load, seconds in inner]
    if len(points) < 2:
        return None
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if mean_x < LEAST_LOAD or math.sqrt(spread / len(points)) < LEAST_SPREAD:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    off = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points) / len(points)
    return slope if abs(slope - SHARED_RATE) > ERRORS * math.sqrt(off / spread) else None


def _loads(batches: Sequence[MadeRecord]) -> list[tuple[float, float]]:
    """Return how many batches were made at the same time as each, on average, and its seconds."""
    spans = [(each.ended_at - each.seconds, each.ended_at) for each in batches if each.seconds > 0]
    changes = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    times = [at for at, _ in changes]
    counts = list(accumulate(change for _, change in changes))
    steps = zip(counts, pairwise(times), strict=False)
    areas = [0.0, *accumulate(count * (later - at) for count, (at, later) in steps)]

    def area(at: float) -> float:
        """Return the integral of the number of batches until a moment."""
        index = max(bisect_left(times, at), 1) - 1
        return areas[index] + counts[index] * max(at - times[index], 0.0)

    loads = [
        ((area(ended) - area(began)) / (ended - began), ended - began) for began, ended in spans
    ]
    return [(load, seconds) for load, seconds in loads if load > 0.0]


# ---- changes to try ------------------------------------------------------------------------------
# Single changes of a loader's settings, tried in the simulation. PURE.

# A change is worth it if it gives this many times the rate, or leaves this share of the waits.
GAIN = 1.1
LEFT = 0.4
# Prefetching is limited by its depth if at least this share of that was ready at some time.
FILLED = 0.6
# The smallest value is advised that gives this share of the rate with the largest.
NEARLY = 0.98
MOST_WORKERS = 512
MOST_CONCURRENCY = 64
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
    """A change of the settings, and what it gave in the simulation."""

    advice: Mapping[str, Any]
    result: SimulationResult
    num_workers: int


class SimulatedLoader:
    """Simulates a loader as it is, and with changes."""

    def __init__(self, recorded: RecordedWork, setup: Setup) -> None:
        self.recorded, self.setup = recorded, setup
        self._is_tiny = recorded.batch_s < TINY_S
        self._work = recorded.work
        is_inside = setup.backend == "thread" or not setup.num_workers or setup.is_sliced
        inside_s = recorded.core_s if is_inside else 0.0
        self.trainer_cpu_s = max(recorded.trainer_cpu_s - inside_s, 0.0)
        self.disturbance = 1.0
        if not setup.is_sliced and recorded.core_s > 0.0:
            measured = (recorded.core_s + recorded.queued_s) / recorded.core_s
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

    # ---- changes -------------------------------------------------------------------------------

    def more_workers(self) -> Change | None:
        """Return the smallest number of workers that gives nearly all that workers can."""
        recorded, now = self.recorded, self.setup.num_workers
        needed = math.ceil(recorded.batch_s / max(recorded.step_s, 1e-6))
        most = min(max(2 * needed, now + 2, 4), MOST_WORKERS)
        if most <= now:
            return None

        def result(num_workers: int) -> SimulationResult:
            most = self.setup.most_workers and max(self.setup.most_workers, num_workers)
            setup = replace(self.setup, num_workers=num_workers, most_workers=most)
            work = self._work.in_rounds(num_workers, self._batches(num_workers))
            return self._within_cores(simulate(work, self._arranged(setup)))

        found, given = _smallest(now + 1, most, result, min(max(needed, now + 1), most))
        return Change({"num_workers": found}, given, found)

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
            return self._within_cores(simulate(work, self._arrangement))

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
        return Change({}, self._within_cores(simulate(work, self._arrangement)), count)

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
        result = simulate(replace(self._work, batch_s=even), self._arrangement)
        return Change({}, result, self.setup.num_workers)

    def deeper(self) -> Change | None:
        """Return the smallest number of outstanding batches that gives nearly all that any can."""
        # Without workers nobody makes them; and what is never full is not too small.
        is_filled = self.recorded.most_ready + 1 >= FILLED * self.depth
        if not self.setup.num_workers or not is_filled:
            return None
        return self._with_depth(self._arrangement, self.depth + 1, in_buffer=self.setup.has_buffer)

    def no_epochs(self) -> Change | None:
        """Return the smallest change that lets epochs begin without a wait."""
        setup, now = self.setup, self._arrangement
        if not now.waits_for_epoch:
            return None
        at_once = replace(now, restarts=False, start_s=0.0)
        takes_turns = setup.takes_turns and setup.is_iterable
        through = replace(at_once, waits_for_epoch=False, takes_turns=takes_turns)
        buffered = self._with_depth(through, max(self.depth, 1), in_buffer=True)
        if setup.keeps_workers:
            return buffered
        result = simulate(self._work, at_once)
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

        def result(depth: int) -> SimulationResult:
            return simulate(self._work, replace(arrangement, depth=depth, refill_below=None))

        depth, given = _smallest(least, max(most, least), result)
        each = setup.prefetching(depth)
        if not in_buffer and each <= MOST_PREFETCHED:
            deep = result(replace(setup, prefetch_factor=each).depth(nbytes))
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
