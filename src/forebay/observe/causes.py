"""Why training waits: try changes in a simulation, the smallest first. PURE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from forebay.base.formatting import byte_size, counted, duration, short_number
from forebay.errors import shortened
from forebay.observe.processor_time import system_time
from forebay.observe.record import SlowSample
from forebay.observe.recorded_work import GAIN, SHARED_RATE, Change, SimulatedLoader
from forebay.observe.simulation import Setup, SimulationResult
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

# Waiting for less than this share of the time is not worth a change.
HEALTHY_SHARE = 0.03
# Up to this share counts as healthy if no single change would help.
SMALL_SHARE = 0.1
# The simulated rate of the present settings may differ from the measured one by this share, and
# training has to wait in the simulation for at least this share of what it waited for.
TOLERANCE = 0.15
EXPLAINED = 0.5
# A sentence that compares numbers needs one that is so many times as large: so the numbers differ
# as they are shown, and by more than they vary.
MARGIN = 1.02
# A batch is much longer than others if it takes so many times what they take on average.
MUCH_LONGER = 3.0
# Steps that wait for a core for a larger share of their time are slowed down by other programs.
QUEUEING_STEPS = 0.1
# Training is the limit if the loader could make this many times as many batches as it takes.
AMPLE = 2.0
# The cores are the limit if more than this share of them is used.
BUSY_CORES = 0.85
# They are not if they are idle for more than this share of the time.
IDLE_CORES = 0.15
# Batches are read from a disk if that many bytes per second are, and workers wait for it so long.
READING_RATE = 1e6
READING_SHARE = 0.1
# A limit for reading is reached at this share of it: files are opened and decoded in between.
AT_LIMIT = 0.85
# A rate is expected of up to so many workers for each core: more of them, which read from memory,
# made 15 to 25 % less than was expected.
WORKERS_PER_CORE = 8
# A dataset fits into memory if it takes no more than this share of what is free.
FITTING = 0.8
# Python code in threads, with the trainer, does not use much more than one core.
ONE_CORE = 0.8
# Threads of libraries are the cause if they use that much processor time, as a share of a batch's,
# beside the worker: one thread that it waits for is none too many.
LIBRARY_THREADS = 0.25
# Waiting for a core is the cause if it takes that share of the time that workers spend on batches.
QUEUEING_WORKERS = 0.5
# A bucket is the limit if requests are under way for so large a share of the time.
BUSY_BUCKET = 0.8
# Other programs are the cause if they lengthen processor time by this factor.
DISTURBED = 1.3
STOP_OTHERS = "Stop those programs, or move them to other cores"
ONE_THREAD_EACH = (
    "Let each library use one thread: leave OMP_NUM_THREADS and the like unset, so that forebay "
    "does it, or set it to 1; and start no threads in the {}"
)


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


class Causes:
    """Finds the cause of the waits."""

    def __init__(self, simulated: SimulatedLoader, slowest: SlowSample | None = None) -> None:
        self._slowest = slowest
        self._simulated = simulated
        self._setup, self._recorded = simulated.setup, simulated.recorded

    def finding(self) -> Finding:
        """Return the first cause that the numbers support."""
        return next(each for each in self._findings() if each is not None and self.supports(each))

    def supports(self, finding: Finding) -> bool:
        """Return whether what a finding says is true of its numbers, the promised rate included."""
        change, claims = finding.change, finding.claims
        if change is not None and finding.is_expected:
            claims = (*claims, Claim(change.result.rate, self._recorded.rate))
        return all(claim.holds for claim in claims)

    def _findings(self) -> Iterator[Finding | None]:
        """Yield what may be the cause, the likeliest first; the last one is always true."""
        recorded, present = self._recorded, self._simulated.present
        if recorded.wait_share < HEALTHY_SHARE:
            yield self._steps_contend()
            yield from self._enough()
            return
        yield self._bucket()
        yield self._library_threads()
        is_off = abs(present.rate / recorded.rate - 1.0) > TOLERANCE
        if is_off or present.wait_share < EXPLAINED * recorded.wait_share:
            yield self._uneven_storage()
            yield self._busy_cores()
            yield self._crowded()
            yield self._queueing()
            if self._setup.is_sliced:
                yield self._in_trainer()
            why = f"batches take so little that waits of {present.wait_share:.1%} were expected"
            if is_off:
                rates = f"{short_number(present.rate)} batches/s, but {short_number(recorded.rate)}"
                why = f"simulating the present settings gives {rates} were measured"
            yield Finding("unknown", f"The cause is unknown: {why}.")
            return
        yield self._in_trainer()
        yield self._startup()
        yield self._contention()
        yield self._skew()
        yield self._buffer()
        yield self._threads()
        yield self._storage_rate()
        yield self._workers()
        yield self._cpu()
        if recorded.wait_share < SMALL_SHARE:
            yield Finding("healthy", "No single change would remove that.")
        yield self._skew(is_enough=self._simulated.helps)
        yield Finding("unknown", "No single change would remove the waits.")

    def _steps_contend(self) -> Finding | None:
        """Handle steps that wait for a core, so that batches are ready in time for them."""
        recorded = self._recorded
        share = recorded.trainer_queued_s / max(recorded.step_s, 1e-9)
        found = self._contention() if share >= QUEUEING_STEPS else None
        if found is None:
            return None
        step = sentence_case(self._setup.step)
        return replace(
            found, why=f"{step} itself waits for a core {share:.0%} of its time. {found.why}"
        )

    def _enough(self) -> Iterator[Finding]:
        capacity, recorded = self._simulated.capacity(), self._recorded
        could = f"the loader could make {short_number(capacity)} batches/s"
        slicing = f" {self._slicing()}" if self._setup.is_sliced else ""
        ample = Claim(capacity * recorded.step_s, AMPLE)
        limit = f"{sentence_case(self._setup.step)} is the limit: {could}."
        yield Finding("consumer", f"{limit}{slicing}", claims=(ample,))
        nothing, makes = "There is nothing to change", Claim(capacity, recorded.rate)
        yield Finding("healthy", f"{nothing}: {could}.{slicing}", claims=(makes,))
        yield Finding("healthy", f"{nothing}.{slicing}")

    def _slicing(self) -> str:
        """Return why no workers are started, as a sentence."""
        count = self._setup.num_workers
        unused = f", so num_workers={count} starts none" if count else ""
        return (
            "Batches are slices of tensors or columns in memory, made in this process: to send "
            f"them from workers would take longer{unused}."
        )

    def _in_trainer(self) -> Finding | None:
        """Handle batches that are made in the trainer's process."""
        if self._setup.num_workers and not self._setup.is_sliced:
            return None
        made = (
            f"The trainer's process makes the batches itself, {duration(self._recorded.batch_s)} "
        )
        if self._setup.is_sliced:
            return Finding(
                "cpu",
                f"{made}each. {self._slicing()}",
                remedy="Larger batches take less time per sample.",
            )
        recorded, is_disturbed = self._recorded, self._is_disturbed
        if is_disturbed and recorded.queued_s > recorded.batch_s / 2:
            share = recorded.queued_s / recorded.batch_s
            why = (
                f"{made}each, and waits for a core {share:.0%} of that time: other programs use "
                f"the {_cores(self._setup)}."
            )
            return Finding("contention", why, self._simulated.undisturbed(), STOP_OTHERS)
        change = self._simulated.more_workers()
        if change is None:
            return None
        if self._is_reading:
            why = f"{made}each.{self._reading()}"
            return Finding("workers", why, self._tried_out(change), is_expected=False)
        return Finding("workers", f"{made}each.", change, is_expected=not is_disturbed)

    def _startup(self) -> Finding | None:
        recorded, simulated = self._recorded, self._simulated
        if recorded.epoch_wait_share < recorded.wait_share / 2:
            return None
        change = simulated.no_epochs()
        if change is None or not simulated.helps(change):
            return None
        share = recorded.epoch_wait_share / recorded.wait_share
        return Finding(
            "startup", f"{share:.0%} of that is for the first batches of epochs.", change
        )

    def _contention(self) -> Finding | None:
        recorded, simulated = self._recorded, self._simulated
        if not self._is_disturbed:
            return None
        change = simulated.undisturbed()
        if not simulated.helps(change):
            return None
        deeper = simulated.deeper()
        gives_more = deeper is not None and deeper.result.rate >= change.result.rate
        if deeper is not None and gives_more and simulated.removes_waits(deeper):
            return None  # an argument is easier to change than what else runs
        share = recorded.queued_s / recorded.batch_s
        return Finding(
            "contention",
            f"Workers wait for a core {share:.0%} of the time that they spend on batches, more "
            f"than by their own number: other programs use the {_cores(self._setup)}.",
            change,
            STOP_OTHERS,
        )

    def _skew(self, is_enough: Callable[[Change], bool] | None = None) -> Finding | None:
        simulated = self._simulated
        even = simulated.without_slow_samples()
        if even is None or not (is_enough or simulated.removes_waits)(even):
            return None
        slow, sample = max(self._recorded.slowest_s), self._slowest
        name = "" if sample is None else f", such as sample {shortened(sample.index)}"
        why = (
            f"A few slow samples{name}, of up to {duration(slow)}, hold up the others: with the "
            f"slowest 1% as fast as most, it would come to {short_number(even.result.rate)} "
            "batches/s."
        )
        deeper = simulated.deeper()
        claims = Claim(even.result.rate, self._recorded.rate), Claim(slow, self._recorded.step_s)
        if deeper is not None and simulated.helps(deeper):
            return Finding("skew", why, deeper, claims=claims)
        remedy = "Make these samples as fast as the others."
        return Finding("skew", why, remedy=remedy, claims=claims)

    def _buffer(self) -> Finding | None:
        recorded, deeper = self._recorded, self._simulated.deeper()
        if deeper is None or not self._simulated.removes_waits(deeper):
            return None
        return Finding(
            "buffer",
            "On average batches are made fast enough, but steps or batches come in bursts, and "
            f"only {self._simulated.depth:,} batches are prefetched.",
            deeper,
            claims=(Claim(self._setup.num_workers * recorded.step_s, recorded.batch_s),),
        )

    def _threads(self) -> Finding | None:
        setup, busy = self._setup, self._cores_used
        if setup.backend != "thread" or busy < ONE_CORE or busy > 2 * ONE_CORE:
            return None
        return Finding(
            "cpu",
            f"The threads and {self._setup.consumer} use {busy:.1f} cores together: Python runs "
            "its code in one thread at a time, so more threads do not help.",
            Change({"backend": "process"}, self._simulated.present, setup.num_workers),
            is_expected=False,
        )

    def _bucket(self) -> Finding | None:
        """Handle a bucket that gives the blocks of a cache slower than training takes them."""
        bucket, recorded, setup = self._setup.fetched, self._recorded, self._setup
        if bucket is None or bucket.busy_s < BUSY_BUCKET * bucket.elapsed_s:
            return None
        if not (setup.samples and setup.batch_size and bucket.total and recorded.step_s > 0.0):
            return None
        step = bucket.total / setup.samples * setup.batch_size * bucket.readers / recorded.step_s
        now, needed = bucket.on_disk / bucket.total, 1.0 - bucket.rate / step
        refused = f" It refused {counted(bucket.throttled, 'request')}." if bucket.throttled else ""
        size = math.ceil(needed * bucket.total / 1e9)
        result = SimulationResult(1.0 / recorded.step_s, 0.0, 0.0)
        return Finding(
            "storage",
            f"The bucket gives {byte_size(bucket.rate)}/s, and {setup.consumer} could use "
            f"{byte_size(step * (1.0 - now))}/s, with {now:.0%} of the cache on disk.{refused}",
            Change({}, result, setup.num_workers),
            f"Keep {math.ceil(needed * 100)}% or more of it there, from the second epoch on: "
            f'open_cache(url, disk="{size}GB", directory=...)',
            claims=(Claim(step * (1.0 - now), bucket.rate), Claim(needed, now)),
        )

    def _storage_rate(self) -> Finding | None:
        """Handle storage that gives no more, whatever the number of workers is."""
        if not self._waits_for_storage and not self._is_reading:
            return None
        reason = self._fixed_rate()
        if reason is None:
            return None
        why = (
            f"Workers wait for storage {self._storage_share:.0%} of the time that they spend on "
            f"batches, and more of them would not help: {reason}."
        )
        return Finding("storage", f"{why}{self._reading()}", remedy=self._faster_storage())

    def _uneven_storage(self) -> Finding | None:
        """Handle storage whose rate changes, for example as the page cache fills."""
        setup = self._setup
        if not self._is_reading or not self._waits_for_storage:
            return None
        why = (
            f"Workers wait for storage {self._storage_share:.0%} of the time that they spend on "
            f"batches, and some batches much longer than others.{self._reading()}"
        )
        recorded, longest = self._recorded, max(self._recorded.work.batch_s)
        usual = max(MUCH_LONGER * recorded.batch_s, recorded.step_s)
        found = Finding("storage", why, is_expected=False, claims=(Claim(longest, usual),))
        change = self._simulated.more_workers()
        if change is None or self._fixed_rate() is not None or setup.most_workers is not None:
            return replace(found, remedy=self._faster_storage())
        return replace(found, change=self._tried_out(change))

    def _fixed_rate(self) -> str | None:
        """Return why more workers would get no more from storage; None if that is not known."""
        recorded, setup = self._recorded, self._setup
        if self._waits_for_storage and (self._slowdown or 0.0) >= SHARED_RATE:
            return "the more of them wait, the longer each takes, so it gives a fixed rate"
        limit = setup.read_limit
        if limit is not None and self._is_reading and recorded.read_rate >= AT_LIMIT * limit:
            return f"a control group limits reading to {byte_size(limit)}/s"
        now = max(recorded.rate, setup.tried.get(setup.num_workers, 0.0))
        more = {count: rate for count, rate in setup.tried.items() if count > setup.num_workers}
        if more and max(more.values()) < GAIN * now:
            count = max(more)
            return (
                f"{count} were tried, and made {short_number(more[count])} batches/s instead of "
                f"{short_number(now)}"
            )
        used_s = recorded.cpu_s + self._simulated.trainer_cpu_s
        is_limit = BUSY_CORES * (setup.cores or math.inf) < GAIN * recorded.rate * used_s
        if self._is_reading and is_limit:
            return f"reading takes processor time, and the {_cores(setup)} allow hardly more"
        return None

    def _reading(self) -> str:
        """Return what is read from disks, and what training needs, as a sentence or nothing."""
        if not self._is_reading:
            return ""
        recorded = self._recorded
        needed, given = recorded.read_bytes / max(recorded.step_s, 1e-9), recorded.read_rate
        if not Claim(needed, given).holds:
            return ""
        rates = f"{byte_size(given)}/s, and {self._setup.consumer} could use {byte_size(needed)}/s"
        return f" Storage gives {rates}."

    def _faster_storage(self) -> str:
        recorded, setup = self._recorded, self._setup
        remedy = "Read less, or from faster storage: forebay.cache() on a local disk, for example"
        if not self._is_reading or None in (setup.samples, setup.batch_size, setup.free_memory):
            return remedy
        nbytes = recorded.read_bytes / setup.batch_size * setup.samples  # type: ignore[operator]
        size, free = byte_size(nbytes), byte_size(setup.free_memory or 0)
        if nbytes <= FITTING * (setup.free_memory or 0):
            return (
                f"All samples together are about {size} and fit into the {free} of free memory, "
                "from which the next epochs are read. For the first one: "
                f"{remedy[:1].lower()}{remedy[1:]}"
            )
        if not Claim(nbytes, setup.free_memory or 0).holds:
            return remedy
        return (
            f"All samples together are about {size}, and {free} of memory are free, so they are "
            f"read again in each epoch. {remedy}, with samples that are smaller"
        )

    def _workers(self) -> Finding | None:
        simulated, setup = self._simulated, self._setup
        change = simulated.more_workers()
        if change is None or not simulated.helps(change):
            return None
        need = self._need()
        if not need:
            return None
        cause: Cause = "storage" if self._waits_for_storage else "workers"
        if self._storage_share >= READING_SHARE and (self._is_reading or cause == "storage"):
            need += f"; {self._storage_share:.0%} of a batch is waiting for storage"
        if cause == "workers" and not self._is_reading:
            return Finding("workers", f"{need}.", change)
        why = f"{need}.{self._reading()}"
        # How many reads a disk serves at once is not known: there, workers are tried.
        is_remote = cause == "storage" and not self._is_reading
        at_once = simulated.more_at_once() if is_remote else None
        if at_once is not None and simulated.helps(at_once):
            why += " A worker can wait for several samples at once, if the dataset allows it."
            return Finding(cause, why, at_once)
        if self._slowdown is not None:
            most = math.inf if setup.cores is None else WORKERS_PER_CORE * setup.cores
            return Finding(cause, why, change, is_expected=change.num_workers <= most)
        why += " Whether storage serves more workers as fast cannot be told beforehand"
        if setup.most_workers is not None and setup.num_workers < setup.most_workers:
            return Finding(cause, f'{why}; num_workers="auto" tries it.')
        return Finding(cause, f"{why}.", self._tried_out(change), is_expected=False)

    def _need(self) -> str:
        """Return why the workers are too few, as a sentence without its end; or nothing."""
        recorded, count = self._recorded, self._setup.num_workers
        batch, slow = recorded.batch_s, recorded.slow_batch_s
        step, quick = recorded.step_s, recorded.quick_step_s
        for batch_s, step_s, words in (
            (batch, step, "for a batch, and a step takes {}"),
            (slow, step, "for the slowest tenth of batches, and a step takes {}"),
            (batch, quick, "for a batch, and the faster half of the steps take {} each"),
        ):
            if Claim(batch_s, count * step_s).holds:
                takes = f"A worker takes {duration(batch_s)} {words.format(duration(step_s))}"
                return f"{takes}: too much for {counted(count, 'worker')}"
        return ""

    def _tried_out(self, change: Change) -> Change:
        """Return a change to more workers as an advice to let the loader try it."""
        setup = self._setup
        if setup.is_iterable:
            return change
        value: str | AutoWorkers = "auto"
        if setup.most_workers is not None or change.num_workers > setup.auto_workers:
            value = AutoWorkers(max=change.num_workers)
        return replace(change, advice={"num_workers": value})

    def _cpu(self) -> Finding | None:
        cores = self._setup.cores
        if cores is None:
            return None
        is_queueing = self._simulated.cores_needed > cores and not self._waits_for_storage
        if is_queueing and not self._has_idle_cores:
            return self._too_few_cores()
        return self._busy_cores()

    def _busy_cores(self) -> Finding | None:
        cores = self._setup.cores
        is_busy = cores is not None and self._cores_used >= BUSY_CORES * cores
        return self._too_few_cores() if is_busy else None

    def _library_threads(self) -> Finding | None:
        """Handle workers whose libraries compute in more threads than there are cores for."""
        recorded, setup = self._recorded, self._setup
        if setup.cores is None or recorded.extra_threads_s < LIBRARY_THREADS * recorded.batch_s:
            return None
        if self._has_idle_cores:
            return None
        each = (recorded.cpu_s + recorded.threads_s) / max(recorded.batch_s, 1e-9)
        workers = counted(setup.num_workers, "worker")
        return Finding(
            "cpu",
            f"Libraries compute in threads of their own: each of {workers} uses {each:.1f} cores "
            f"on average, and there are {short_number(setup.cores)}. Threads beyond the cores wait "
            "for each other.",
            remedy=ONE_THREAD_EACH.format("dataset"),
            claims=(Claim(max(setup.num_workers, 1) * each, BUSY_CORES * setup.cores),),
        )

    def _crowded(self) -> Finding | None:
        """Handle waits that batches do not explain, on cores that other programs use."""
        cores, idle = self._setup.cores, self._recorded.idle_share
        if cores is None or idle is None:
            return None
        expected, waited = self._simulated.present.wait_share, self._recorded.wait_share
        used = min(self._cores_used, cores)
        return Finding(
            "contention",
            f"Batches would be ready in time, but the cores are idle only {idle:.0%} of the time, "
            f"and {self._setup.consumer} and its workers use {used:.1f} of {_cores(self._setup)}: "
            "other programs use the rest.",
            remedy=STOP_OTHERS,
            claims=(
                Claim(EXPLAINED * waited, expected),
                Claim(IDLE_CORES, idle),
                Claim(BUSY_CORES * cores, used),
            ),
        )

    def _queueing(self) -> Finding | None:
        """Handle workers that wait for a core most of the time, by the cores that are theirs."""
        cores, recorded = self._setup.cores, self._recorded
        if cores is None or self._has_idle_cores:
            return None
        used = min(self._cores_used, cores)
        return Finding(
            "contention",
            f"Workers wait for a core {recorded.queued_s / max(recorded.batch_s, 1e-9):.0%} of the "
            f"time that they spend on batches, although {self._setup.consumer} and its workers use "
            f"{used:.1f} of {_cores(self._setup)}: other programs, or a limit of processor time, "
            "take the rest.",
            remedy=STOP_OTHERS,
            claims=(
                Claim(recorded.queued_s, QUEUEING_WORKERS * recorded.batch_s),
                Claim(BUSY_CORES * cores, used),
            ),
        )

    def _too_few_cores(self) -> Finding:
        recorded, setup, needed = self._recorded, self._setup, self._simulated.cores_needed
        both = f"{sentence_case(setup.consumer)} and its workers"
        too_few = f"{both} need {needed:.1f} cores at full speed and have {_cores(setup)}"
        claim = Claim(needed, setup.cores or math.inf)
        if not claim.holds:
            used = min(self._cores_used, setup.cores or 0.0)
            too_few = f"{both} use {used:.1f} of {_cores(setup)}"
            claim = Claim(used, BUSY_CORES * (setup.cores or 0.0) / MARGIN)
        system = system_time(
            recorded.system_s,
            recorded.cpu_s,
            recorded.faults,
            of="for each batch",
            keeps_freed=setup.num_workers > 0 and setup.backend != "thread",
        )
        if system is not None:
            why, remedy = system
            return Finding("cpu", f"{too_few}. {why}", remedy=remedy, claims=(claim,))
        return Finding(
            "cpu",
            f"{too_few}: no number of workers helps.",
            remedy="Spend less on each sample: forebay.cache() for what is the same in every "
            "epoch, smaller samples, or decoding on the GPU.",
            claims=(claim,),
        )

    @property
    def _cores_used(self) -> float:
        """How many cores training and its workers use, with the threads of libraries."""
        recorded = self._recorded
        used_s = recorded.core_s + recorded.extra_threads_s + self._simulated.trainer_cpu_s
        return used_s * recorded.rate

    @property
    def _is_disturbed(self) -> bool:
        """Return whether other programs lengthen the processor time of batches noticeably."""
        recorded = self._recorded
        is_lengthened = self._simulated.disturbance >= DISTURBED
        return (
            is_lengthened and recorded.queued_s >= recorded.batch_s / 5 and not self._has_idle_cores
        )

    @property
    def _has_idle_cores(self) -> bool:
        """Return whether the cores are known to be idle part of the time: none is missing."""
        return (self._recorded.idle_share or 0.0) > IDLE_CORES

    @property
    def _slowdown(self) -> float | None:
        """By what power of their number workers slow each other down; None if it is not known."""
        tried, now = self._setup.tried, self._setup.num_workers
        fewer = [count for count in tried if count < now]
        if self._recorded.slowdown is not None or not fewer or now not in tried:
            return self._recorded.slowdown
        before = max(fewer)
        return 1.0 - math.log(tried[now] / tried[before]) / math.log(now / before)

    @property
    def _storage_share(self) -> float:
        """The part of a worker's time for which it waits for storage, or for a lock."""
        recorded = self._recorded
        # Workers that get data at once then wait for a core at once, also if there are enough.
        queued_s = recorded.queued_s if recorded.read_rate >= READING_RATE else 0.0
        return recorded.other_s / max(recorded.batch_s - queued_s, 1e-9)

    @property
    def _is_reading(self) -> bool:
        """Return whether batches are read from storage, not the page cache, and that takes time."""
        return self._recorded.read_rate >= READING_RATE and self._storage_share >= READING_SHARE

    @property
    def _waits_for_storage(self) -> bool:
        """Return whether workers wait for neither a processor nor a request, most of the time."""
        return self._storage_share > 0.5


def sentence_case(words: str) -> str:
    """Return words as the beginning of a sentence."""
    return words[:1].upper() + words[1:]


def _cores(setup: Setup) -> str:
    return "cores" if setup.cores is None else counted(setup.cores, "core")
