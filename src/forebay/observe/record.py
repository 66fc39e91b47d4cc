"""Record what a loader's workers and its trainer do, and when, in bounded memory.

    feed ── made, taken ──> Trace ──> diagnosis, report, `forebay top`

A trace keeps two things: the last `KEPT` batches and steps one by one, for `diagnose`, and totals.
Where batches take less than `FINEST_S`, only some are kept one by one, and the totals in each
record account for the others, so that tracing costs next to nothing on tiny batches.

Times are seconds of `time.perf_counter()`, which all processes of a machine share.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import repeat
from operator import itemgetter
from typing import Any, Generic, TypeVar

from forebay.base.machine import cores_idle_s, queued_s
from forebay.observe.measurements import (
    Fetched,
    MadeRecord,
    Measured,
    SlowSample,
    StepRecord,
    Timing,
    Transfers,
    WorkerMemory,
    recent_work,
)

# ---- bounded -------------------------------------------------------------------------------------
# Parts of a record that stay small however long a run is: slowest entries, a histogram.

KEPT_SLOWEST = 20
# Bin `k` of a histogram counts durations below 2**k microseconds that are not in bin `k - 1`.
DURATION_BINS = 64

SlowEntry = TypeVar("SlowEntry", bound=tuple[Any, ...])


class Slowest(Generic[SlowEntry]):
    """The `KEPT_SLOWEST` entries that took longest, slowest first; each begins with its seconds."""

    def __init__(self) -> None:
        self.least = -1.0  # the seconds that an entry has to exceed to be kept
        self._kept: list[SlowEntry] = []

    def add(self, entry: SlowEntry) -> None:
        """Keep an entry if it is one of the slowest; of equally slow ones, the first."""
        if entry[0] <= self.least:
            return
        # A new list: another thread may read the present one.
        self._kept = sorted([*self._kept, entry], key=itemgetter(0), reverse=True)[:KEPT_SLOWEST]
        if len(self._kept) == KEPT_SLOWEST:
            self.least = self._kept[-1][0]

    def __iter__(self) -> Iterator[SlowEntry]:
        """Return an iterator over the entries."""
        return iter(self._kept)


def duration_bin(seconds: float) -> int:
    """Return the bin of a duration in a histogram; see `DURATION_BINS`."""
    return int(seconds * 1e6).bit_length()


# ---- record --------------------------------------------------------------------------------------
# What the records of loaders and runs share: who shows them to other processes.

# A record is shown about once a second, while something is recorded.
PUBLISH_S = 1.0


class BaseTrace:
    """What a loader or a run did, in bounded memory."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.num_workers = 0
        self.publish_due = math.inf
        self._new_page: Callable[[], Any] | None = None
        self._page: Any = None  # a `LivePage`, once something was shown
        self._page_lock = threading.Lock()  # two threads may record at a time

    def publish_from(self, at: float, new_page: Callable[[], Any]) -> None:
        """Show the record to other processes from a moment on.

        Args:
            new_page: Returns a `LivePage`, which is called in the thread that records.
        """
        if self._new_page is None:
            self._new_page, self.publish_due = new_page, at

    def show(self, now: float) -> None:
        """Show the present state to other processes."""
        self.publish_due = now + PUBLISH_S
        with self._page_lock:
            if self._page is None and self._new_page is not None:
                self._page = self._new_page()
        if self._page is not None:
            self._page(self)

    def hide(self) -> None:
        """Show nothing until something is recorded again."""
        if self._page is not None:
            self._page.remove()


# ---- trace ---------------------------------------------------------------------------------------

# How many of the last batches, and of the last steps, are kept one by one.
KEPT = 2048
# Steps that follow each other faster, and batches that take less, are not all kept one by one.
FINEST_S = 0.002
# Of those, one is kept in each interval of this length.
SAMPLED_S = 0.01
# At most this many such steps share one reading of the clock, unless the trainer waits.
MAX_STEPS_AT_ONCE = 16
# The shortest interval over which processor time is measured: a call takes several microseconds.
MEASURED_S = 0.01
# How often the trainer's thread measures its wait for a core, which takes even longer.
TRAINER_MEASURED_S = 0.1
KEPT_EPOCHS = 256
# How many of the last waits are kept, for percentiles.
KEPT_WAITS = 4096
# Attributes of a trace that its snapshot has by the same name.
_TOTALS = (
    *("waited_s", "fetch_s", "collate_s", "cpu_s", "queued_s", "idle_s"),
    *("restarts", "num_workers", "held_bytes"),
)
# Attributes of `Fetched` that it has with "fetch_" before them.
_FETCHED = ("requests", "hits", "rate", "p50_s", "p95_s")


class Trace(BaseTrace):
    """Records what a loader does, in bounded memory, over all its epochs.

    `made` may be called in a background thread while the trainer's thread calls `taken`: nothing is
    written by both.
    """

    def __init__(self) -> None:
        super().__init__(time.perf_counter())
        self.steps: deque[StepRecord] = deque(maxlen=KEPT)
        self.batches: deque[MadeRecord] = deque(maxlen=KEPT)
        self.epochs: deque[tuple[int, float]] = deque(maxlen=KEPT_EPOCHS)
        self.wait_bins = [0] * DURATION_BINS
        self.held_bytes = 0
        self.restarts = 0
        self.waits: deque[float] = deque(maxlen=KEPT_WAITS)
        self.fetch_s = self.collate_s = self.idle_s = 0.0
        self.made_s = self.cpu_s = self.queued_s = self.waited_s = self.steps_s = 0.0
        self.made_count = self.step_count = 0
        self._taken_count = 0
        self._group = self._left = 1  # of batches taken at once; only the last one is timed
        self.decisions: deque[tuple[float, str]] = deque(maxlen=KEPT_EPOCHS)
        self.tried: dict[int, float] = {}  # by number of workers: batches per second
        self.read_bytes, self.threads_s = 0, 0.0
        self.system_s, self.faults = 0.0, 0
        self.slowest = Slowest[SlowSample]()
        self._made_at, self._step_due = -math.inf, 0.0  # no record before
        self.busy_s: dict[int, float] = {}  # by worker
        self._taken_before = 0  # at the last record
        self._waited_before = self._got_before = self._timed_before = 0.0
        self._is_first, self._began_s = True, 0.0
        self._queued_due, self._queued_s = 0.0, 0.0
        self._cores_idle_s: float | None = None
        self.transfers = Transfers()
        self.fetched = Fetched()
        self.memory: WorkerMemory | None = None  # once some was measured

    # ---- the workers ---------------------------------------------------------------------------

    def made(self, timing: Timing, nbytes: int) -> None:
        """Record a batch that a worker made, and those before it that have no timing."""
        self.made_count += timing.batches
        self.made_s += timing.busy_s
        self.fetch_s += timing.fetch_s  # not in a loop over names, which takes four times as long
        self.collate_s += timing.collate_s
        self.cpu_s += timing.cpu_s
        self.queued_s += timing.queued_s
        self.idle_s += timing.idle_s
        self.read_bytes += timing.read_bytes
        self.threads_s += timing.threads_s
        self.system_s += timing.system_s
        self.faults += timing.faults
        if timing.private_bytes:
            self._add_memory(timing)
        slowest, slowest_s = timing.slowest, 0.0
        if slowest is not None:
            slowest_s = slowest.seconds
            self.slowest.add(slowest)
        ended_at, worker_id, busy_s = timing.ended_at, timing.worker_id, self.busy_s
        busy_s[worker_id] = busy_s.get(worker_id, 0.0) + timing.busy_s
        # Batches come in the sampler's order: after a slow one follow some that were ready earlier.
        seconds = timing.seconds
        if seconds < FINEST_S and abs(ended_at - self._made_at) < FINEST_S:
            return
        self._made_at = ended_at
        totals = (self.made_count, self.made_s, self.cpu_s, self.queued_s)
        more = (self.read_bytes, self.threads_s, self.system_s, self.faults)
        own = (ended_at, seconds, timing.idle_s, nbytes, slowest_s)
        self.batches.append(MadeRecord(*own, *totals, *more, worker_id))
        if ended_at >= self.publish_due:
            self.show(ended_at)

    def _add_memory(self, timing: Timing) -> None:
        """Record the memory of a worker's own; most workers have little, which is not measured."""
        if self.memory is None:
            self.memory = WorkerMemory()
        at, nbytes = timing.ended_at, timing.private_bytes
        self.memory.add(timing.worker_id, at, nbytes, self.began_at)

    def restarted(self) -> None:
        """Record that an attempt at a batch ended with the death of a worker."""
        self.restarts += 1

    # ---- the trainer ---------------------------------------------------------------------------

    def begin(self, at: float) -> None:
        """Begin the record when the first epoch does; what is before that is not training."""
        if not self.epochs and not self.made_count:
            self.began_at = at

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

        If steps are tiny, the clock is read for only one in `MAX_STEPS_AT_ONCE`.
        """
        self._left -= 1
        if self._left:
            return
        now, count, self._left = time.perf_counter(), self._group, 1
        is_tiny = (
            now - self._timed_before < count * FINEST_S / MAX_STEPS_AT_ONCE and not self._is_first
        )
        self.taken(now, 0.0, ready)
        self._group = self._left = min(2 * count, MAX_STEPS_AT_ONCE) if is_tiny else 1

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
        if not is_first:
            between_s = asked_at - self._got_before - (total - waited_s - self._waited_before)
            self.steps_s += max(between_s, 0.0)
            self.step_count += count - self._taken_before
        self._taken_before, self._waited_before = count, total
        self._got_before = asked_at + waited_s
        if asked_at >= self.publish_due:
            self.show(asked_at)

    def measured(self) -> Measured:
        """Return what was measured with the present number of workers."""
        steps, batches = list(self.steps), list(self.batches)  # another thread may add to them
        since = ""
        if self.decisions:  # with another number of workers before
            since, began = " since the number of workers changed", self.decisions[-1][0]
            steps = [each for each in steps if each.asked_at >= began]
            batches = [each for each in batches if each.ended_at - each.seconds >= began]
        return Measured(steps, batches, next(iter(self.slowest), None), since, self.rate)

    # ---- the whole run -------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Seconds up to the last batch that was made or taken."""
        ends = [step.asked_at + step.waited_s for step in list(self.steps)[-1:]]
        ends += [batch.ended_at for batch in list(self.batches)[-1:]]
        return max([self.began_at, *ends]) - self.began_at

    @property
    def rate(self) -> float:
        """Batches per second that the trainer took."""
        seconds = self.seconds
        return self.taken_count / seconds if seconds else 0.0

    def snapshot(self) -> dict[str, Any]:
        """Return the totals up to the last batch that was made or taken."""
        seconds = self.seconds
        waits, fetched = sorted(self.waits) or [0.0], self.fetched
        return {
            "seconds": seconds,
            "made": self.made_count,
            "taken": self.taken_count,
            "rate": self.rate,
            "wait_share": min(self.waited_s / seconds, 1.0) if seconds else 0.0,
            **recent_work(list(self.steps)),
            **{f"wait_p{part}_s": waits[part * len(waits) // 100] for part in (50, 95, 99)},
            **{name: getattr(self, name) for name in _TOTALS},
            **asdict(self.transfers),
            **{f"fetch_{name}": getattr(fetched, name) for name in _FETCHED},
            "fetched_bytes": fetched.nbytes,
            "disk_bytes": fetched.on_disk,
            "worker_bytes": 0 if self.memory is None else self.memory.nbytes,
            "worker_growth": 0.0 if self.memory is None else self.memory.rate,
            "decisions": tuple(reason for _, reason in list(self.decisions)),
        }
