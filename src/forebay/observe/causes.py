"""Why training waits: try changes in a simulation, the smallest first. PURE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from forebay.errors import shortened
from forebay.observe.changes_to_try import Change, SimulatedLoader
from forebay.observe.loader_setup import Setup
from forebay.observe.recorded_work import SHARED_RATE
from forebay.observe.trace import SlowSample
from forebay.units import counted, duration, short_number

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
# The simulated rate of the present settings may differ from the measured one by this share.
TOLERANCE = 0.15
# Steps that wait for a core for a larger share of their time are slowed down by other programs.
QUEUEING_STEPS = 0.1
# Training is the limit if the loader could make this many times as many batches as it takes.
AMPLE = 2.0
# The cores are the limit if more than this share of them is used.
BUSY_CORES = 0.85
# Python code in threads, with the trainer, does not use much more than one core.
ONE_CORE = 0.8
# Other programs are the cause if they lengthen processor time by this factor.
DISTURBED = 1.3
STOP_OTHERS = "Stop those programs, or move them to other cores"


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause, what shows it, and what helps.

    Attributes:
        cause: Its name.
        why: What shows it, in sentences.
        change: The change that helps; None if none does.
        remedy: What helps besides arguments of the loader.
        is_expected: Whether the rate after the change can be told.
    """

    cause: Cause
    why: str
    change: Change | None = None
    remedy: str = ""
    is_expected: bool = True


class Causes:
    """Finds the cause of the waits.

    Args:
        simulated: The loader, as it was recorded.
        slowest: The slowest sample; None if it is not known.
    """

    def __init__(self, simulated: SimulatedLoader, slowest: SlowSample | None = None) -> None:
        self._slowest = slowest
        self._simulated, self._setup, self._recorded = (
            simulated,
            simulated.setup,
            simulated.recorded,
        )

    def finding(self) -> Finding:
        """Return the cause."""
        recorded, simulated, present = self._recorded, self._simulated, self._simulated.present
        if recorded.wait_share < HEALTHY_SHARE:
            return self._steps_contend() or self._enough()
        if abs(present.rate / recorded.rate - 1.0) > TOLERANCE:
            return Finding(
                "unknown",
                "The cause cannot be told: by the recorded times the present settings would come "
                f"to {short_number(present.rate)} batches/s, and it was "
                f"{short_number(recorded.rate)}.",
            )
        judges: tuple[Callable[[], Finding | None], ...] = (
            self._in_trainer,
            self._startup,
            self._contention,
            self._skew,
            self._buffer,
            self._threads,
            self._storage_rate,
            self._workers,
            self._cpu,
        )
        for judge in judges:
            if (finding := judge()) is not None:
                return finding
        if recorded.wait_share < SMALL_SHARE:
            return Finding("healthy", "No single change would remove that.")
        return self._skew(is_enough=simulated.helps) or Finding(
            "unknown", "No single change would remove the waits."
        )

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

    def _enough(self) -> Finding:
        capacity, wanted = self._simulated.capacity(), 1.0 / max(self._recorded.step_s, 1e-9)
        could = f"the loader could make {short_number(capacity)} batches/s"
        if capacity >= AMPLE * wanted:
            return Finding("consumer", f"{sentence_case(self._setup.step)} is the limit: {could}.")
        return Finding("healthy", f"There is nothing to change: {could}.")

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
                f"{made}each, by slicing tensors in memory: sending them from a worker would take "
                "longer.",
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
        if deeper is not None and simulated.helps(deeper):
            return Finding("skew", why, deeper)
        return Finding("skew", why, remedy="Make these samples as fast as the others.")

    def _buffer(self) -> Finding | None:
        deeper = self._simulated.deeper()
        if deeper is None or not self._simulated.removes_waits(deeper):
            return None
        return Finding(
            "buffer",
            "On average batches are made fast enough, but steps or batches come in bursts, and "
            f"only {self._simulated.depth:,} batches are prefetched.",
            deeper,
        )

    def _threads(self) -> Finding | None:
        recorded, setup = self._recorded, self._setup
        busy = (recorded.cpu_s + self._simulated.trainer_cpu_s) * recorded.rate
        if setup.backend != "thread" or busy < ONE_CORE or busy > 2 * ONE_CORE:
            return None
        return Finding(
            "cpu",
            f"The threads and {self._setup.consumer} use {busy:.1f} cores together: Python runs "
            "its code in one thread at a time, so more threads do not help.",
            Change({"backend": "process"}, self._simulated.present, setup.num_workers),
            is_expected=False,
        )

    def _storage_rate(self) -> Finding | None:
        recorded = self._recorded
        if not self._waits_for_storage or (recorded.slowdown or 0.0) < SHARED_RATE:
            return None
        return Finding(
            "storage",
            f"Workers wait for storage {self._storage_share:.0%} of the time that they spend on "
            "batches, and the longer the more of them wait: it gives a fixed rate, which more "
            "workers do not raise.",
            remedy="Read less, or from faster storage: forebay.cache() on a local disk, for "
            "example.",
        )

    def _workers(self) -> Finding | None:
        recorded, simulated, setup = self._recorded, self._simulated, self._setup
        change = simulated.more_workers()
        if change is None or not simulated.helps(change):
            return None
        need = (
            f"A worker takes {duration(recorded.batch_s)} for a batch, and a step takes "
            f"{duration(recorded.step_s)}: too much for {counted(setup.num_workers, 'worker')}"
        )
        if not self._waits_for_storage:
            return Finding("workers", f"{need}.", change)
        waits = f"{need}; {self._storage_share:.0%} of a batch is waiting for storage."
        if recorded.slowdown is not None:
            return Finding("storage", waits, change)
        return Finding(
            "storage",
            f"{waits} Whether storage serves more workers as fast cannot be told from workers that "
            "are busy all the time.",
            change,
            is_expected=False,
        )

    def _cpu(self) -> Finding | None:
        recorded, cores = self._recorded, self._setup.cores
        if cores is None:
            return None
        used = (recorded.cpu_s + self._simulated.trainer_cpu_s) * recorded.rate
        needed = self._simulated.cores_needed
        is_queueing = needed > cores and not self._waits_for_storage
        if used < BUSY_CORES * cores and not is_queueing:
            return None
        return Finding(
            "cpu",
            f"{sentence_case(self._setup.consumer)} and its workers need {needed:.1f} cores at "
            f"full speed and have {_cores(self._setup)}: no number of workers helps.",
            remedy="Spend less on each sample: forebay.cache() for what is the same in every "
            "epoch, smaller samples, or decoding on the GPU.",
        )

    @property
    def _is_disturbed(self) -> bool:
        """Whether other programs lengthen the processor time of batches noticeably."""
        recorded = self._recorded
        return (
            self._simulated.disturbance >= DISTURBED and recorded.queued_s >= recorded.batch_s / 5
        )

    @property
    def _storage_share(self) -> float:
        return self._recorded.other_s / max(self._recorded.batch_s, 1e-9)

    @property
    def _waits_for_storage(self) -> bool:
        """Whether workers wait for neither a processor nor a request, most of the time."""
        return self._storage_share > 0.5


def sentence_case(words: str) -> str:
    """Return words as the beginning of a sentence."""
    return words[:1].upper() + words[1:]


def _cores(setup: Setup) -> str:
    return "cores" if setup.cores is None else counted(setup.cores, "core")
