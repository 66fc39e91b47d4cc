"""What was recorded of batches and steps, as the simulation needs it. PURE."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from itertools import accumulate, pairwise
from statistics import fmean, median

from forebay.observe.measurements import MadeRecord, StepRecord
from forebay.observe.simulation import (
    Work,
)

# At most this many of the last steps are simulated: one takes about 2 microseconds.
MAX_STEPS = 2048
# Handing over a batch, and sending the next request to a worker, takes less than this. What is
# measured beyond it is something else.
MAX_HANDOFF_S = 0.0002
MAX_MESSAGE_S = 0.0005
# Batches that take less than this are prefetched in larger numbers.
TINY_BATCH_S = 0.001
# Batches share a rate if the time of each grows with more than this power of the number that are
# made at the same time. The measured power must be this many standard errors away from that.
SHARED_RATE = 0.4
ERRORS = 2.0
# The least mean and the least spread that the logarithm of that number must have.
LEAST_LOAD = 0.2
LEAST_SPREAD = 0.03
# The cores are not the limit if they are idle for more than this share of the time.
IDLE_CORES = 0.15
# Batches are read from a disk if that many bytes per second are, and workers wait for it so long.
READING_RATE = 1e6
READING_SHARE = 0.1


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

    @property
    def has_idle_cores(self) -> bool:
        """Return whether the cores are known to be idle part of the time: none is missing."""
        return (self.idle_share or 0.0) > IDLE_CORES

    @property
    def storage_share(self) -> float:
        """The part of a worker's time for which it waits for storage, or for a lock."""
        # Workers that get data at once then wait for a core at once, also if there are enough.
        queued_s = self.queued_s if self.read_rate >= READING_RATE else 0.0
        return self.other_s / max(self.batch_s - queued_s, 1e-9)

    @property
    def is_reading(self) -> bool:
        """Return whether batches are read from storage, not the page cache, and that takes time."""
        return self.read_rate >= READING_RATE and self.storage_share >= READING_SHARE

    @property
    def waits_for_storage(self) -> bool:
        """Return whether workers wait for neither a processor nor a request, most of the time."""
        return self.storage_share > 0.5


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
        nbytes=fmean(each.nbytes for each in batches),
        start_s=median(begins) if begins else 0.0,
        is_tiny=mean_s < TINY_BATCH_S,
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
        gap_s = after.asked_at - (before.asked_at + before.waited_s) - between_s
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


def extra_threads_s(threads_s: float, busy_s: float, cpu_s: float, queued_s: float) -> float:
    """Return the processor time of threads that computed beside the one that does the work.

    Args:
        threads_s: Processor time of all other threads.
        busy_s: Time that the work took; `cpu_s` of it that one thread computed, and `queued_s` of
            it that it waited for a core. The rest it may have waited for another thread.
    """
    return threads_s - max(busy_s - cpu_s - queued_s, 0.0)
