"""Why training waits: try changes in a simulation, the smallest first. PURE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from forebay.base.formatting import counted, duration, short_number
from forebay.errors import shortened
from forebay.observe.measurements import SlowSample
from forebay.observe.recorded_work import IDLE_CORES, READING_SHARE
from forebay.observe.simulated_loader import (
    BUSY_CORES,
    MARGIN,
    Cause,
    Change,
    Claim,
    Finding,
    SimulatedLoader,
)
from forebay.observe.storage_causes import fixed_storage, read_rates, slow_bucket, uneven_storage

# Waiting for less than this share of the time is not worth a change.
HEALTHY_SHARE = 0.03
# Up to this share counts as healthy if no single change would help.
SMALL_SHARE = 0.1
# The simulated rate of the present settings may differ from the measured one by this share, and
# training has to wait in the simulation for at least this share of what it waited for.
TOLERANCE = 0.15
EXPLAINED = 0.5
# Steps that wait for a core for a larger share of their time are slowed down by other programs.
QUEUEING_STEPS = 0.1
# Training is the limit if the loader could make this many times as many batches as it takes.
AMPLE = 2.0
# A rate is expected of up to so many workers for each core: more of them, which read from memory,
# made 15 to 25 % less than was expected.
WORKERS_PER_CORE = 8
# Python code in threads, with the trainer, does not use much more than one core.
ONE_CORE = 0.8
# Threads of libraries are the cause if they use that much processor time, as a share of a batch's,
# beside the worker: one thread that it waits for is none too many.
LIBRARY_THREADS = 0.25
# Waiting for a core is the cause if it takes that share of the time that workers spend on batches.
QUEUEING_WORKERS = 0.5
# The system is the cause if it takes this share of the processor time.
SYSTEM_SHARE = 0.5
# A page fault takes less: 1 to 8 us were measured, and pages of 2 MiB take longer. Where there are
# fewer faults, the system does something else.
LONGEST_FAULT_S = 200e-6
STOP_OTHERS = "Stop those programs, or move them to other cores"
ONE_THREAD_EACH = (
    "Let each library use one thread: leave OMP_NUM_THREADS and the like unset, so that forebay "
    "does it, or set it to 1; and start no threads in the {}"
)


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
        if self._setup.fetched is not None:
            yield slow_bucket(self._simulated, self._setup.fetched)
        yield self._library_threads()
        is_off = abs(present.rate / recorded.rate - 1.0) > TOLERANCE
        if is_off or present.wait_share < EXPLAINED * recorded.wait_share:
            if recorded.is_reading and recorded.waits_for_storage:
                yield uneven_storage(self._simulated)
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
        if recorded.is_reading or recorded.waits_for_storage:
            yield fixed_storage(self._simulated)
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
        recorded, is_disturbed = self._recorded, self._simulated.is_disturbed
        if is_disturbed and recorded.queued_s > recorded.batch_s / 2:
            share = recorded.queued_s / recorded.batch_s
            why = (
                f"{made}each, and waits for a core {share:.0%} of that time: other programs use "
                f"the {self._simulated.cores}."
            )
            return Finding("contention", why, self._simulated.undisturbed(), STOP_OTHERS)
        change = self._simulated.more_workers()
        if change is None:
            return None
        if self._recorded.is_reading:
            why = f"{made}each.{read_rates(self._simulated)}"
            return Finding("workers", why, self._simulated.tried_out(change), is_expected=False)
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
        if not self._simulated.is_disturbed:
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
            f"than by their own number: other programs use the {self._simulated.cores}.",
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
        setup, busy = self._setup, self._simulated.cores_used
        if setup.backend != "thread" or busy < ONE_CORE or busy > 2 * ONE_CORE:
            return None
        return Finding(
            "cpu",
            f"The threads and {self._setup.consumer} use {busy:.1f} cores together: Python runs "
            "its code in one thread at a time, so more threads do not help.",
            Change({"backend": "process"}, self._simulated.present, setup.num_workers),
            is_expected=False,
        )

    def _workers(self) -> Finding | None:
        simulated, setup = self._simulated, self._setup
        change = simulated.more_workers()
        if change is None or not simulated.helps(change):
            return None
        need = self._need()
        if not need:
            return None
        cause: Cause = "storage" if self._recorded.waits_for_storage else "workers"
        if self._recorded.storage_share >= READING_SHARE and (
            self._recorded.is_reading or cause == "storage"
        ):
            need += f"; {self._recorded.storage_share:.0%} of a batch is waiting for storage"
        if cause == "workers" and not self._recorded.is_reading:
            return Finding("workers", f"{need}.", change)
        why = f"{need}.{read_rates(self._simulated)}"
        # How many reads a disk serves at once is not known: there, workers are tried.
        is_remote = cause == "storage" and not self._recorded.is_reading
        at_once = simulated.more_at_once() if is_remote else None
        if at_once is not None and simulated.helps(at_once):
            why += " A worker can wait for several samples at once, if the dataset allows it."
            return Finding(cause, why, at_once)
        if self._simulated.slowdown is not None:
            most = math.inf if setup.cores is None else WORKERS_PER_CORE * setup.cores
            return Finding(cause, why, change, is_expected=change.num_workers <= most)
        why += " Whether storage serves more workers as fast cannot be told beforehand"
        if setup.most_workers is not None and setup.num_workers < setup.most_workers:
            return Finding(cause, f'{why}; num_workers="auto" tries it.')
        return Finding(cause, f"{why}.", self._simulated.tried_out(change), is_expected=False)

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

    def _cpu(self) -> Finding | None:
        cores = self._setup.cores
        if cores is None:
            return None
        is_queueing = self._simulated.cores_needed > cores and not self._recorded.waits_for_storage
        if is_queueing and not self._recorded.has_idle_cores:
            return self._too_few_cores()
        return self._busy_cores()

    def _busy_cores(self) -> Finding | None:
        cores = self._setup.cores
        is_busy = cores is not None and self._simulated.cores_used >= BUSY_CORES * cores
        return self._too_few_cores() if is_busy else None

    def _library_threads(self) -> Finding | None:
        """Handle workers whose libraries compute in more threads than there are cores for."""
        recorded, setup = self._recorded, self._setup
        if setup.cores is None or recorded.extra_threads_s < LIBRARY_THREADS * recorded.batch_s:
            return None
        if self._recorded.has_idle_cores:
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
        used = min(self._simulated.cores_used, cores)
        return Finding(
            "contention",
            f"Batches would be ready in time, but the cores are idle only {idle:.0%} of the time, "
            f"and {self._setup.consumer} and its workers use {used:.1f} of "
            f"{self._simulated.cores}: other programs use the rest.",
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
        if cores is None or self._recorded.has_idle_cores:
            return None
        used = min(self._simulated.cores_used, cores)
        return Finding(
            "contention",
            f"Workers wait for a core {recorded.queued_s / max(recorded.batch_s, 1e-9):.0%} of the "
            f"time that they spend on batches, although {self._setup.consumer} and its workers use "
            f"{used:.1f} of {self._simulated.cores}: other programs, or a limit of processor time, "
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
        too_few = f"{both} need {needed:.1f} cores at full speed and have {self._simulated.cores}"
        claim = Claim(needed, setup.cores or math.inf)
        if not claim.holds:
            used = min(self._simulated.cores_used, setup.cores or 0.0)
            too_few = f"{both} use {used:.1f} of {self._simulated.cores}"
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


def sentence_case(words: str) -> str:
    """Return words as the beginning of a sentence."""
    return words[:1].upper() + words[1:]


def system_time(
    system_s: float, cpu_s: float, faults: float, *, of: str, keeps_freed: bool
) -> tuple[str, str] | None:
    """Return what the system did in most of workers' processor time, and a remedy, or None."""
    if system_s < SYSTEM_SHARE * cpu_s or cpu_s <= 0.0:
        return None
    took = (
        f"The system takes {min(system_s / cpu_s, 1.0):.0%} of the workers' processor time, "
        f"{duration(system_s)} {of}"
    )
    if system_s > LONGEST_FAULT_S * faults:
        return (
            f"{took}, for calls such as reading and opening files or starting programs.",
            "Read fewer and larger parts, and keep files open; forebay.cache() has samples in "
            "large files that are mapped",
        )
    why = (
        f"{took}, for {faults:,.0f} page faults: memory that was given back to the system is taken "
        "and cleared again, or a mapped file is read."
    )
    if keeps_freed:
        return (
            why,
            "Reuse arrays, for example with out=, or make each smaller than 32 MiB: a worker keeps "
            "the memory of those for the next ones, unless LD_PRELOAD loads another allocator",
        )
    return (
        why,
        "Use workers that are processes: they keep the memory of arrays below 32 MiB for the next "
        "ones. Or reuse arrays, for example with out=",
    )
