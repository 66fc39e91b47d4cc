"""Why training waits, from what was recorded: `loader.diagnose()`. PURE.

    steps, batches ──> RecordedWork ──> simulations of single changes ──> Diagnosis
    settings ────────> Setup ───────────┘

The simulation of the present settings must come to the measured rate; otherwise nothing is said.
Then the cause is what the smallest change that removes the waits changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from forebay.observe.changes_to_try import Change, Trial
from forebay.observe.loader_setup import Setup
from forebay.observe.recorded_work import recorded_work
from forebay.observe.trace import MadeRecord, StepRecord

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

# Fewer steps are too few to judge by.
LEAST_STEPS = 20
# Less waiting is not worth a change.
HEALTHY_SHARE = 0.03
# The simulation of the present settings must be that close to what was measured.
TOLERANCE = 0.15
# A loader that could do so many times what training takes leaves training as the limit.
AMPLE = 2.0
# Of the cores: used so far, they are the limit.
BUSY_CORES = 0.85
# Python code in threads, with the trainer, does not use much more than one core.
ONE_CORE = 0.8
# By so much must other programs lengthen processor time to be the cause.
DISTURBED = 1.3
# Batches that take longer by more than this power of their number at the same time share a rate.
SHARED_RATE = 0.5


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why training waits, and what to change: `loader.diagnose()`. Its `str` is the verdict.

    Attributes:
        cause: What the waits are due to:
            "healthy": training hardly waits;
            "consumer": training hardly waits, and the loader could do twice as much;
            "workers": there are too few workers;
            "cpu": the cores are the limit, or one core for Python code in threads;
            "contention": other programs use the cores;
            "storage": workers wait for a disk, the network or a lock;
            "buffer": too few batches are prefetched to cover bursts;
            "skew": a few slow samples hold up the others;
            "startup": epochs begin slowly;
            "unknown": there is too little to judge by, or it contradicts itself.
        wait_share: The part of the time that training waited, from 0 to 1.
        advice: Arguments of the loader to change, and their values. Empty if no argument helps.
        rate: Batches per second that training took.
        expected_rate: Batches per second after following the advice; for "contention", without the
            other programs. None if that cannot be told.
        evidence: The numbers that this rests on, by name.
        verdict: It in sentences.
    """

    cause: Cause
    wait_share: float
    advice: Mapping[str, Any]
    rate: float
    expected_rate: float | None
    evidence: Mapping[str, float] = field(repr=False)
    verdict: str = field(repr=False)

    def __str__(self) -> str:
        """Return the verdict."""
        return self.verdict


@dataclass(frozen=True, slots=True)
class _Finding:
    """A cause, why it is that, and the change that helps."""

    cause: Cause
    why: str
    change: Change | None = None
    remedy: str = ""
    is_expected: bool = True


def diagnose(
    steps: Sequence[StepRecord],
    batches: Sequence[MadeRecord],
    setup: Setup,
    witnesses: Mapping[str, float] | None = None,
) -> Diagnosis:
    """Return why training waits.

    Args:
        steps: Of a trace, in order.
        batches: Of the same trace, in order.
        setup: How the loader that they are from is set up.
        witnesses: Further numbers for the evidence; they decide nothing.
    """
    recorded = recorded_work(steps, batches, setup.num_workers)
    if recorded is None or recorded.steps < LEAST_STEPS:
        count = 0 if recorded is None else recorded.steps
        why = (
            f"There is too little to judge by: {count} steps were measured, and it takes "
            f"{LEAST_STEPS}. Ask again later."
        )
        rate, share = (0.0, 0.0) if recorded is None else (recorded.rate, recorded.wait_share)
        return Diagnosis("unknown", share, {}, rate, None, {"steps": count}, why)
    return _Judge(Trial(recorded, setup)).diagnosis(dict(witnesses or {}))


class _Judge:
    """Tries changes, the smallest first, and words the verdict."""

    def __init__(self, trial: Trial) -> None:
        self._trial, self._setup, self._recorded = trial, trial.setup, trial.recorded

    def diagnosis(self, witnesses: Mapping[str, float]) -> Diagnosis:
        recorded = self._recorded
        finding = self._finding()
        change = finding.change
        expected = change.outcome.rate if change is not None and finding.is_expected else None
        return Diagnosis(
            cause=finding.cause,
            wait_share=recorded.wait_share,
            advice={} if change is None else dict(change.advice),
            rate=recorded.rate,
            expected_rate=expected,
            evidence=self._evidence | witnesses,
            verdict=self._verdict(finding, expected),
        )

    @cached_property
    def _evidence(self) -> dict[str, float]:
        recorded, setup = self._recorded, self._setup
        step_s = max(recorded.step_s, 1e-9)
        found: dict[str, float | None] = {
            "steps": recorded.steps,
            "step_s": recorded.step_s,
            "trainer_cpu_s": recorded.trainer_cpu_s,
            "batch_s": recorded.batch_s,
            "cpu_s": recorded.cpu_s,
            "queued_s": recorded.queued_s,
            "other_s": recorded.other_s,
            "nbytes": recorded.nbytes,
            "num_workers": setup.num_workers,
            "workers_needed": recorded.batch_s / step_s,
            "cores": setup.cores,
            "cores_needed": (recorded.cpu_s + self._trial.trainer_cpu_s) / step_s,
            "depth": self._trial.depth,
            "epoch_wait_share": recorded.epoch_wait_share,
            "slowdown": recorded.slowdown,
            "simulated_rate": self._trial.present.rate,
        }
        return {name: value for name, value in found.items() if value is not None}

    # ---- the cause -----------------------------------------------------------------------------

    def _finding(self) -> _Finding:
        recorded, present = self._recorded, self._trial.present
        if recorded.wait_share < HEALTHY_SHARE:
            return self._enough()
        if abs(present.rate / recorded.rate - 1.0) > TOLERANCE:
            return _Finding(
                "unknown",
                "The recorded times do not add up: with them the present settings would come to "
                f"{present.rate:,.3g} batches/s.",
            )
        judges: tuple[Callable[[], _Finding | None], ...] = (
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
        return _Finding("unknown", "No single change would remove the waits.")

    def _enough(self) -> _Finding:
        change = Change({}, self._trial.present, self._setup.num_workers)
        capacity, wanted = self._trial.capacity(), 1.0 / max(self._recorded.step_s, 1e-9)
        could = f"the loader could make {capacity:,.3g} batches/s"
        if capacity >= AMPLE * wanted:
            return _Finding("consumer", f"The training step is the limit: {could}.", change)
        return _Finding("healthy", f"There is nothing to change: {could}.", change)

    def _in_trainer(self) -> _Finding | None:
        """Handle batches that are made in the trainer's process."""
        if self._setup.num_workers and not self._setup.is_sliced:
            return None
        made = f"The trainer's process makes the batches itself, {_time(self._recorded.batch_s)} "
        if self._setup.is_sliced:
            return _Finding(
                "cpu",
                f"{made}each, by slicing tensors in memory: sending them from a worker would take "
                "longer.",
                remedy="Larger batches take less time per sample.",
            )
        change = self._trial.more_workers()
        return None if change is None else _Finding("workers", f"{made}each.", change)

    def _startup(self) -> _Finding | None:
        recorded, trial = self._recorded, self._trial
        if recorded.epoch_wait_share < recorded.wait_share / 2:
            return None
        change = trial.no_epochs()
        if change is None or not trial.helps(change):
            return None
        share = recorded.epoch_wait_share / recorded.wait_share
        return _Finding(
            "startup", f"{share:.0%} of that is for the first batches of epochs.", change
        )

    def _contention(self) -> _Finding | None:
        recorded, trial = self._recorded, self._trial
        if trial.disturbance < DISTURBED or recorded.queued_s < recorded.batch_s / 5:
            return None
        change = trial.undisturbed()
        if not trial.helps(change):
            return None
        share = recorded.queued_s / recorded.batch_s
        return _Finding(
            "contention",
            f"Workers wait for a core {share:.0%} of the time that they spend on batches, more "
            f"than by their own number: other programs use the {_cores(self._setup)}.",
            change,
            "Stop those programs, or move them to other cores",
        )

    def _skew(self) -> _Finding | None:
        trial = self._trial
        even = trial.without_slow_samples()
        if even is None or not trial.removes_waits(even.outcome):
            return None
        slow = max(self._recorded.slowest_s)
        why = (
            f"A few slow samples, of up to {_time(slow)}, hold up the others: with all as fast as "
            f"most, training would come to {even.outcome.rate:,.3g} batches/s."
        )
        deeper = trial.deeper()
        if deeper is not None and trial.helps(deeper):
            return _Finding("skew", why, deeper)
        return _Finding("skew", why, remedy="Look at these samples: statistics().slowest.")

    def _buffer(self) -> _Finding | None:
        deeper = self._trial.deeper()
        if deeper is None or not self._trial.removes_waits(deeper.outcome):
            return None
        return _Finding(
            "buffer",
            "On average batches are made fast enough, but steps or batches come in bursts, and "
            f"only {self._trial.depth:,} batches are prefetched.",
            deeper,
        )

    def _threads(self) -> _Finding | None:
        recorded, setup = self._recorded, self._setup
        busy = (recorded.cpu_s + self._trial.trainer_cpu_s) * recorded.rate
        if setup.backend != "thread" or busy < ONE_CORE or busy > 2 * ONE_CORE:
            return None
        return _Finding(
            "cpu",
            f"The threads and the training use {busy:.1f} cores together: Python runs its code in "
            "one thread at a time, so more threads do not help.",
            Change({"backend": "process"}, self._trial.present, setup.num_workers),
            is_expected=False,
        )

    def _storage_rate(self) -> _Finding | None:
        recorded = self._recorded
        if not self._waits_for_storage or (recorded.slowdown or 0.0) < SHARED_RATE:
            return None
        return _Finding(
            "storage",
            f"Workers wait for storage {self._storage_share:.0%} of the time that they spend on "
            "batches, and the longer the more of them wait: it gives a fixed rate, which more "
            "workers do not raise.",
            remedy="Read less, or from faster storage: forebay.cache() on a local disk, for "
            "example.",
        )

    def _workers(self) -> _Finding | None:
        recorded, trial, setup = self._recorded, self._trial, self._setup
        change = trial.more_workers()
        if change is None or not trial.helps(change):
            return None
        need = (
            f"{_counted(setup.num_workers, 'worker')} {'needs' if setup.num_workers == 1 else 'need'}"
            f" {_time(recorded.batch_s)} for a batch each, and a step takes "
            f"{_time(recorded.step_s)}"
        )
        if not self._waits_for_storage:
            return _Finding("workers", f"{need}.", change)
        waits = f"{need}; {self._storage_share:.0%} of that time workers wait for storage."
        if recorded.slowdown is not None:
            return _Finding("storage", waits, change)
        return _Finding(
            "storage",
            f"{waits} Whether it serves more workers as fast cannot be told: all were busy all the "
            "time.",
            change,
            is_expected=False,
        )

    def _cpu(self) -> _Finding | None:
        recorded, cores = self._recorded, self._setup.cores
        used = (recorded.cpu_s + self._trial.trainer_cpu_s) * recorded.rate
        if cores is None or used < BUSY_CORES * cores:
            return None
        needed = self._evidence["cores_needed"]
        return _Finding(
            "cpu",
            f"Training needs {needed:.1f} cores at full speed and has {_cores(self._setup)}: no "
            "number of workers helps.",
            remedy="Spend less on each sample: forebay.cache() for what is the same in every "
            "epoch, smaller samples, or decoding on the GPU.",
        )

    @property
    def _storage_share(self) -> float:
        return self._recorded.other_s / max(self._recorded.batch_s, 1e-9)

    @property
    def _waits_for_storage(self) -> bool:
        """Whether workers wait for neither a processor nor a request, most of the time."""
        return self._storage_share > 0.5

    # ---- in sentences --------------------------------------------------------------------------

    def _verdict(self, finding: _Finding, expected: float | None) -> str:
        recorded, change = self._recorded, finding.change
        sentences = [f"Training waits {recorded.wait_share:.0%} of the time. {finding.why}"]
        remedy = finding.remedy
        if change is not None and change.advice:
            values = ", ".join(f"{name}={value!r}" for name, value in change.advice.items())
            remedy = f"{'Use' if finding.is_expected else 'Try'} {values}"
        if expected is None or finding.cause in ("healthy", "consumer"):
            sentences += [remedy + "." * (not remedy.endswith("."))] if remedy else []
            return " ".join(sentences)
        assert change is not None
        limit = self._trial.limit_after(change)
        sentences.append(
            f"{remedy} for {expected:,.3g} batches/s instead of {recorded.rate:,.3g}; then {limit}."
        )
        return " ".join(sentences)


def _time(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1.0 else f"{seconds * 1e3:,.3g} ms"


def _cores(setup: Setup) -> str:
    return "cores" if setup.cores is None else _counted(setup.cores, "core")


def _counted(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'s' * (number != 1)}"
