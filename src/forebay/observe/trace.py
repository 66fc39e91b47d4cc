"""Record what a loader's workers and its trainer do, and when, in bounded memory.

    feed ── made, taken ──> Trace ──> diagnosis, report, `forebay top`

A trace keeps three things: the last `KEPT` batches and steps one by one, for `diagnose`; the whole
run in `Spans` of equal length, for the report; and totals. Where batches take less than `FINEST_S`,
only some are kept one by one, and the totals in each record account for the others, so that tracing
costs next to nothing on tiny batches.

Long because each record is documented beside the code that fills it.

Times are seconds of `time.perf_counter()`, which all processes of a machine share.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from forebay.observe.bounded import DURATION_BINS, Slowest, Spans, duration_bin
from forebay.observe.publication import Publication
from forebay.observe.run_queue import queued_s
from forebay.observe.storage import cores_idle_s
from forebay.observe.transfers import Transfers

# How many of the last batches, and of the last steps, are kept one by one.
KEPT = 2048
# Steps that follow each other faster, and batches that take less, are not all kept one by one.
FINEST_S = 0.002
# Of those, one is kept in each interval of this length.
SAMPLED_S = 0.01
# At most this many such steps share one reading of the clock, unless the trainer waits.
MAX_GROUP = 16
# The shortest interval over which processor time is measured: a call takes several microseconds.
MEASURED_S = 0.01
# How often the trainer's thread measures its wait for a core, which takes even longer.
TRAINER_MEASURED_S = 0.1
# Length of each span of a run to begin with.
FIRST_SPAN_S = 0.25
KEPT_EPOCHS = 256
# How many of the last waits are kept, for percentiles.
KEPT_WAITS = 4096


class SlowSample(NamedTuple):
    """A sample that took long.

    Attributes:
        seconds: How long, in wall time.
        index: The sample's index, from the sampler.
        epoch: The epoch of its batch.
        batch: The number of that batch in the epoch.
    """

    seconds: float
    index: Any
    epoch: int
    batch: int


class Timing(NamedTuple):
    """The time that a worker spent on a batch, and on those before it that have no timing.

    Where batches take less than `FINEST_S`, one in `SAMPLED_S` has a timing: making and sending one
    takes some microseconds. Processor time and waiting for a core are measured over at least
    `MEASURED_S`: the last timing in that time has the sum, and the others have 0.

    Attributes:
        worker_id: Which worker.
        ended_at: When the batch was ready.
        seconds: Wall time of this batch.
        batches: How many batches the following sums are of, this one included.
        busy_s: Wall time of these batches.
        fetch_s: Seconds getting samples, in wall time.
        collate_s: Seconds collating and packing them, in wall time.
        cpu_s: Seconds of processor time.
        queued_s: Seconds that the worker could have run but waited for a core; 0 where the system
            does not tell (it is in /proc/<pid>/schedstat on Linux).
        idle_s: Seconds that the worker had nothing to do before.
        slowest: The slowest sample; None if samples were too fast to be timed one by one.
        read_bytes: Bytes read from storage; measured with the processor time.
        threads_s: Seconds of processor time of the worker's other threads, those of libraries.
        system_s: Of `cpu_s`, seconds in the system: page faults and system calls.
        faults: Page faults in that which needed no disk.
    """

    worker_id: int
    ended_at: float
    seconds: float
    batches: int
    busy_s: float
    fetch_s: float = 0.0
    collate_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    idle_s: float = 0.0
    slowest: SlowSample | None = None
    read_bytes: int = 0
    threads_s: float = 0.0
    system_s: float = 0.0
    faults: int = 0


class MadeRecord(NamedTuple):
    """One batch that was made, and the totals up to and with it.

    Attributes:
        ended_at: When it was ready.
        seconds: Seconds its worker spent on it, by the clock.
        worker_id: Which worker.
        cpu_s: Seconds of processor time in that; see `Timing`.
        queued_s: Seconds in that for which the worker waited for a core; see `Timing`.
        idle_s: Seconds that the worker had nothing to do before.
        nbytes: Its bytes.
        slowest_s: Seconds of its slowest sample; 0 if not known.
        made: Batches made so far.
        total_s: Seconds that workers spent on them.
        total_cpu_s: Seconds of processor time in that.
        total_queued_s: Seconds of waiting for a core in that.
        total_read_bytes: Bytes read from storage for them.
        total_threads_s: Seconds of processor time of the workers' other threads.
        total_system_s: Of `total_cpu_s`, seconds in the system.
        total_faults: Page faults in that.
    """

    ended_at: float
    seconds: float
    worker_id: int
    cpu_s: float
    queued_s: float
    idle_s: float
    nbytes: int
    slowest_s: float
    made: int
    total_s: float
    total_cpu_s: float
    total_queued_s: float
    total_read_bytes: int = 0
    total_threads_s: float = 0.0
    total_system_s: float = 0.0
    total_faults: int = 0


class StepRecord(NamedTuple):
    """One batch that the trainer took, and the totals up to and with it.

    Attributes:
        asked_at: When the trainer asked for it.
        waited_s: Seconds until it had the batch.
        is_first: Whether it is the first batch of an epoch, or the first after a resume.
        ready: Batches that were ready then.
        taken: Steps so far.
        total_waited_s: Seconds waited in all of them.
        trainer_cpu_s: Processor time of the trainer's process so far.
        trainer_queued_s: Seconds that the trainer's thread waited for a core so far; measured at
            most once in `TRAINER_MEASURED_S`.
        cores_idle_s: Seconds that the cores were idle so far, on average; measured with that. None
            if the system does not tell.
    """

    asked_at: float
    waited_s: float
    is_first: bool
    ready: int
    taken: int
    total_waited_s: float
    trainer_cpu_s: float
    trainer_queued_s: float
    cores_idle_s: float | None = None

    @property
    def got_at(self) -> float:
        """When the trainer had the batch."""
        return self.asked_at + self.waited_s


@dataclass(slots=True)
class Span:
    """What happened in one part of the run.

    Attributes:
        made: Batches made.
        taken: Batches that the trainer took.
        waited_s: Seconds that it waited for them.
        least_ready: Fewest batches ready when the trainer asked for one; None if it did not ask.
        most_ready: Most batches ready then.
        held_bytes: Bytes of batches that were ready or in use at the end.
        num_workers: Workers at the end.
        busy_s: By worker: seconds it spent on batches.
        restarts: Attempts at batches that ended with the death of a worker.
    """

    made: int = 0
    taken: int = 0
    waited_s: float = 0.0
    least_ready: int | None = None
    most_ready: int | None = None
    held_bytes: int = 0
    num_workers: int = 0
    busy_s: dict[int, float] = field(default_factory=dict)
    restarts: int = 0

    def add(self, later: Span) -> None:
        """Merge the span that follows into this one."""
        self.made += later.made
        self.taken += later.taken
        self.waited_s += later.waited_s
        least = [each.least_ready for each in (self, later) if each.least_ready is not None]
        most = [each.most_ready for each in (self, later) if each.most_ready is not None]
        self.least_ready, self.most_ready = min(least, default=None), max(most, default=None)
        self.held_bytes, self.num_workers = later.held_bytes, later.num_workers
        for worker_id, seconds in later.busy_s.items():
            self.busy_s[worker_id] = self.busy_s.get(worker_id, 0.0) + seconds
        self.restarts += later.restarts

    def following(self) -> Span:
        """Return the span that follows, in which nothing has happened yet."""
        return Span(held_bytes=self.held_bytes, num_workers=self.num_workers)


class Trace:
    """Records what a loader does, in bounded memory, over all its epochs.

    `made` may be called in a background thread while the trainer's thread calls `taken`: only the
    spans are written by both.

    Attributes:
        began_at: When the first epoch began; until then, when the trace was made.
        steps: The last steps, in order.
        batches: The last batches made, in the order in which they were ready to be taken.
        epochs: The last epochs: number, and when it began.
        wait_bins: How many waits were how long; see `DURATION_BINS`. Steps without a wait are not
            included.
        spans: The whole run, from `began_at` on.
        num_workers: Workers at present.
        held_bytes: Bytes of the batches that are ready or in use.
        waits: Seconds waited in each of the last steps, 0 for most.
        steps_s: Seconds that the trainer itself spent on steps: from one batch until it asked for
            the next of the same epoch.
        step_count: The number of steps in `steps_s`.
        fetch_s: Seconds that workers spent getting samples; see `Statistics` for this and others.
        restarts: Attempts at batches that ended with the death of a worker.
        busy_s: By worker: seconds it spent on batches.
        decisions: The last decisions about `num_workers="auto"`: when, and a sentence.
        tried: By number of workers that `num_workers="auto"` tried: batches per second.
        read_bytes: Bytes that workers read from storage.
        threads_s: Seconds of processor time of their other threads.
        system_s: Of `cpu_s`, seconds in the system.
        faults: Page faults in that.
        transfers: What was copied to a device.
        publication: Shows the trace to `forebay top`.
    """

    def __init__(self) -> None:
        self.began_at = time.perf_counter()
        self.steps: deque[StepRecord] = deque(maxlen=KEPT)
        self.batches: deque[MadeRecord] = deque(maxlen=KEPT)
        self.epochs: deque[tuple[int, float]] = deque(maxlen=KEPT_EPOCHS)
        self.wait_bins = [0] * DURATION_BINS
        self.spans = Spans(self.began_at, FIRST_SPAN_S, Span())
        self.num_workers = 0
        self.held_bytes = 0
        self.restarts = 0
        self.waits: deque[float] = deque(maxlen=KEPT_WAITS)
        self.fetch_s = self.collate_s = self.idle_s = 0.0
        self.made_s = self.cpu_s = self.queued_s = self.waited_s = self.steps_s = 0.0
        self.made_count = self.step_count = 0
        self._taken_count = 0
        self._group = self._left = 1  # of batches taken at once; only the last one is timed
        self.decisions: deque[tuple[float, str]] = deque(maxlen=KEPT_EPOCHS)
        self.tried: dict[int, float] = {}
        self.read_bytes, self.threads_s = 0, 0.0
        self.system_s, self.faults = 0.0, 0
        self._slowest = Slowest[SlowSample]()
        self._made_at, self._step_due = -math.inf, 0.0  # no record before
        self.busy_s: dict[int, float] = {}
        self._busy_s: dict[int, float] = {}  # since the last record
        self._made_before = self._taken_before = 0  # at the last record
        self._waited_before = self._got_before = self._timed_before = 0.0
        self._is_first, self._began_s = True, 0.0
        self._queued_due, self._queued_s = 0.0, 0.0
        self._cores_idle_s: float | None = None
        self._spans_lock = threading.Lock()
        self.transfers = Transfers()
        self.publication = Publication()

    # ---- the workers ---------------------------------------------------------------------------

    def made(self, timing: Timing, nbytes: int) -> None:
        """Record a batch that a worker made, and those before it that have no timing."""
        self.made_count += timing.batches
        self.made_s += timing.busy_s
        self.fetch_s += timing.fetch_s
        self.collate_s += timing.collate_s
        self.cpu_s += timing.cpu_s
        self.queued_s += timing.queued_s
        self.read_bytes += timing.read_bytes
        self.threads_s += timing.threads_s
        self.system_s += timing.system_s
        self.faults += timing.faults
        self.idle_s += timing.idle_s
        slowest, slowest_s = timing.slowest, 0.0
        if slowest is not None:
            slowest_s = slowest.seconds
            self._slowest.add(slowest_s, slowest)
        ended_at, worker_id, busy_s = timing.ended_at, timing.worker_id, self._busy_s
        busy_s[worker_id] = busy_s.get(worker_id, 0.0) + timing.busy_s
        # Batches come in the sampler's order: after a slow one follow some that were ready earlier.
        seconds = timing.seconds
        if seconds < FINEST_S and abs(ended_at - self._made_at) < FINEST_S:
            return
        self._made_at = ended_at
        times = (ended_at, seconds, worker_id, timing.cpu_s, timing.queued_s, timing.idle_s)
        totals = (self.made_count, self.made_s, self.cpu_s, self.queued_s)
        more = (self.read_bytes, self.threads_s, self.system_s, self.faults)
        self.batches.append(MadeRecord(*times, nbytes, slowest_s, *totals, *more))
        count, self._made_before = self.made_count - self._made_before, self.made_count
        with self._spans_lock:
            span = self._span(ended_at)
            span.made += count
            for each in busy_s:
                span.busy_s[each] = span.busy_s.get(each, 0.0) + busy_s[each]
                self.busy_s[each] = self.busy_s.get(each, 0.0) + busy_s[each]
            busy_s.clear()
        if ended_at >= self.publication.due:
            self.publication.renew(self, ended_at)

    def restarted(self) -> None:
        """Record that an attempt at a batch ended with the death of a worker."""
        self.restarts += 1
        with self._spans_lock:
            self._span(time.perf_counter()).restarts += 1

    # ---- the trainer ---------------------------------------------------------------------------

    def begin(self, at: float) -> None:
        """Begin the record when the first epoch does; what is before that is not training."""
        if not self.epochs and not self.made_count:
            self.began_at, self.spans = at, Spans(at, FIRST_SPAN_S, Span())

    def began_epoch(self, epoch: int, at: float, seconds: float) -> None:
        """Record that an epoch began, and the seconds that `iter(loader)` took.

        They count as a wait for the first batch. What the trainer does between epochs counts
        neither as a step nor as a wait.
        """
        self.epochs.append((epoch, at))
        self._is_first, self._began_s = True, seconds
        self._group, self._left = self._group - self._left + 1, 1

    @property
    def taken_count(self) -> int:
        """Batches that the trainer took."""
        return self._taken_count + self._group - self._left

    def taken_at_once(self, ready: int) -> None:
        """Record that the trainer took a batch without a wait, with so many ready.

        If steps are tiny, the clock is read for only one in `MAX_GROUP`.
        """
        self._left -= 1
        if self._left:
            return
        now, count, self._left = time.perf_counter(), self._group, 1
        is_tiny = now - self._timed_before < count * FINEST_S / MAX_GROUP and not self._is_first
        self.taken(now, 0.0, ready)
        self._group = self._left = min(2 * count, MAX_GROUP) if is_tiny else 1

    def taken(self, asked_at: float, waited_s: float, ready: int) -> None:
        """Record that the trainer took a batch, after a wait, with so many ready when it asked."""
        if untimed := self._group - self._left:
            self._left = self._group
            self._taken_count += untimed
            self.waits.extend(repeat(0.0, untimed))
        self._taken_count += 1
        self.waits.append(waited_s)
        is_first = self._is_first
        if is_first:
            asked_at, waited_s = asked_at - self._began_s, waited_s + self._began_s
        if waited_s:
            self.waited_s += waited_s
            self.wait_bins[duration_bin(waited_s)] += 1
        is_quick = asked_at - self._timed_before < FINEST_S and waited_s < FINEST_S
        self._timed_before = asked_at
        if is_quick and asked_at < self._step_due and not is_first:
            return
        self._step_due = asked_at + SAMPLED_S
        self._is_first = False
        if asked_at >= self._queued_due:
            self._queued_due, self._queued_s = asked_at + TRAINER_MEASURED_S, queued_s()
            self._cores_idle_s = cores_idle_s()
        count, total = self._taken_count, self.waited_s
        used = time.process_time(), self._queued_s, self._cores_idle_s
        self.steps.append(StepRecord(asked_at, waited_s, is_first, ready, count, total, *used))
        with self._spans_lock:
            span = self._span(asked_at + waited_s)
            span.taken += count - self._taken_before
            span.waited_s += total - self._waited_before
            span.least_ready = ready if span.least_ready is None else min(span.least_ready, ready)
            span.most_ready = ready if span.most_ready is None else max(span.most_ready, ready)
        if not is_first:
            between_s = asked_at - self._got_before - (total - waited_s - self._waited_before)
            self.steps_s += max(between_s, 0.0)
            self.step_count += count - self._taken_before
        self._taken_before, self._waited_before = count, total
        self._got_before = asked_at + waited_s
        if asked_at >= self.publication.due:
            self.publication.renew(self, asked_at)

    # ---- the whole run -------------------------------------------------------------------------

    @property
    def slowest(self) -> list[SlowSample]:
        """The slowest samples of the run, slowest first."""
        return [sample for _, sample in self._slowest]

    def _span(self, at: float) -> Span:
        """Return the span of a moment, with the present state."""
        span = self.spans.at(at)
        span.num_workers, span.held_bytes = self.num_workers, self.held_bytes
        return span
