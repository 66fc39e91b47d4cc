"""Why training waits, from what was recorded: `loader.diagnose()`. PURE.

    steps, batches ──> RecordedWork ──> SimulatedLoader: simulations of single changes
    settings ────────> Setup ───────────┘ └──> Causes ──> Diagnosis

The simulation of the present settings must come to the measured rate; otherwise the cause is
unknown. Then single changes are tried: the smallest one that removes the waits names the cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from forebay.base.formatting import counted, duration, short_number, summary
from forebay.observe.causes import (
    BUSY_CORES,
    LIBRARY_THREADS,
    ONE_THREAD_EACH,
    STOP_OTHERS,
    Cause,
    Causes,
    Finding,
    sentence_case,
)
from forebay.observe.figures import numbers_in
from forebay.observe.processor_time import extra_threads_s, system_time
from forebay.observe.record import MadeRecord, SlowSample, StepRecord
from forebay.observe.recorded_work import MOST_CONCURRENCY, SimulatedLoader, recorded_work
from forebay.observe.run_times import RunTimes
from forebay.observe.simulation import Setup

# Fewer steps are too few to judge by.
LEAST_STEPS = 20
# A report shows the rate of the whole run: if it differs by this share, a verdict says so.
OTHER_RATE = 0.05


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
        rate: Batches per second that training took, in the last 2,048 steps and without pauses
            between epochs; a report shows the rate of the whole run.
        expected_rate: Batches per second after following the advice; for "contention", without the
            other programs. None if that cannot be told.
        evidence: The numbers that the diagnosis is based on, by name.
        verdict: The diagnosis in sentences.
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

    def _repr_html_(self) -> str:
        """Return the verdict and what it says as a table, for a notebook."""
        advice = ", ".join(f"{name}={value!r}" for name, value in self.advice.items())
        facts: dict[str, object] = {
            "cause": self.cause,
            "wait_share": f"{self.wait_share:.0%}",
            "advice": advice or "-",
            "rate": self.rate,
            "expected_rate": "-" if self.expected_rate is None else self.expected_rate,
        }
        return summary("Diagnosis", facts, text=self.verdict)


def diagnose(
    steps: Sequence[StepRecord],
    batches: Sequence[MadeRecord],
    setup: Setup,
    slowest: SlowSample | None = None,
    extra: Mapping[str, float] | None = None,
    since: str = "",
    run_rate: float | None = None,
) -> Diagnosis:
    """Return why training waits; `run_rate` is that of the whole run, pauses included."""
    recorded = recorded_work(steps, batches, setup.num_workers)
    if recorded is None or recorded.steps < LEAST_STEPS:
        count = 0 if recorded is None else recorded.steps
        why = (
            f"There is too little to judge by: {count} steps were measured{since}, and "
            f"{LEAST_STEPS} are needed. Ask again {_later(steps, max(setup.num_workers, 1))}."
        )
        rate, share = (0.0, 0.0) if recorded is None else (recorded.rate, recorded.wait_share)
        return Diagnosis("unknown", share, {}, rate, None, {"steps": count}, why)
    simulated = SimulatedLoader(recorded, setup)
    finding = Causes(simulated, slowest).finding()
    change, expected = finding.change, None
    if finding.cause in ("healthy", "consumer"):
        expected = recorded.rate
    elif change is not None and finding.is_expected:
        expected = change.result.rate
    return Diagnosis(
        cause=finding.cause,
        wait_share=recorded.wait_share,
        advice={} if change is None else dict(change.advice),
        rate=recorded.rate,
        expected_rate=expected,
        evidence=_evidence(simulated) | dict(extra or {}),
        verdict=_verdict(simulated, finding, expected, run_rate),
    )


def _later(steps: Sequence[StepRecord], num_workers: int) -> str:
    """Return after how many more steps there is enough to judge by, and how long they take."""
    known = steps[-1].taken - steps[0].taken if steps else 0
    # The first ones are the workers' start: one for each worker, or half of them.
    left = max(LEAST_STEPS + min(num_workers, LEAST_STEPS) - known, 1)
    if not known:
        return f"after {counted(left, 'more step')}"
    took_s = (steps[-1].asked_at - steps[0].got_at) / known
    return f"after {counted(left, 'more step')}, in about {duration(left * took_s, digits=2)}"


def _evidence(simulated: SimulatedLoader) -> dict[str, float]:
    recorded, setup = simulated.recorded, simulated.setup
    known = {each.name: getattr(recorded, each.name) for each in fields(recorded)}
    others = {
        "other_s": recorded.other_s,
        "read_limit": setup.read_limit,
        "num_workers": setup.num_workers,
        "workers_needed": recorded.batch_s / max(recorded.step_s, 1e-9),
        "cores": setup.cores,
        "cores_needed": simulated.cores_needed,
        "depth": simulated.depth,
        "simulated_rate": simulated.present.rate,
    }
    return numbers_in(known | others)


def _verdict(
    simulated: SimulatedLoader, finding: Finding, expected: float | None, run_rate: float | None
) -> str:
    rate, change, remedy = simulated.recorded.rate, finding.change, finding.remedy
    waits = f"{sentence_case(simulated.setup.consumer)} waits {simulated.recorded.wait_share:.0%}"
    sentences = [f"{waits} of the time. {finding.why}"]
    if change is not None and change.advice:
        values = ", ".join(f"{name}={value!r}" for name, value in change.advice.items())
        remedy = f"{'Use' if finding.is_expected else 'Try'} {values}"
    if change is not None and expected is not None:
        gain = f"{short_number(expected)} batches/s instead of {short_number(rate)}"
        if run_rate is not None and abs(run_rate - rate) > OTHER_RATE * rate:
            gain += f" ({short_number(run_rate)} over the whole run, start and pauses included)"
        sentences.append(f"{remedy}, for {gain}; then {simulated.limit_after(change)}.")
    elif remedy:
        sentences.append(remedy + "." * (not remedy.endswith(".")))
    return " ".join(sentences)


# ---- run diagnosis -------------------------------------------------------------------------------
# What a run of preprocess waited for, from a few sums: `report.diagnosis`. PURE.

# Fewer inputs, or seconds, are too few to judge by.
LEAST_INPUTS = 20
LEAST_S = 1.0
# Workers that are idle for less than this share of the time count as busy.
IDLE_SHARE = 0.2
# Whatever takes more than this share of the time is what workers wait for.
LARGE_SHARE = 0.5
# Workers wait for cores if they do so for that share of the time that they spend on inputs.
QUEUED_SHARE = 0.25


def diagnose_run(times: RunTimes) -> Diagnosis:
    """Return what the workers of a run waited for.

    `wait_share` is the part of the time that they were idle; `rate` is in inputs per second.
    """
    elapsed_s = max(times.elapsed_s, 1e-9)
    idle = max(1.0 - times.busy_s / (times.num_workers * times.at_once * elapsed_s), 0.0)
    cause, verdict = _cause(times, elapsed_s, idle)
    known = numbers_in({each.name: getattr(times, each.name) for each in fields(times)})
    return Diagnosis(cause, idle, {}, times.inputs / elapsed_s, None, known, verdict)


def _cause(times: RunTimes, elapsed_s: float, idle: float) -> tuple[Cause, str]:
    if times.inputs < LEAST_INPUTS or elapsed_s < LEAST_S:
        return "unknown", (
            f"There is too little to judge by: {times.inputs:,} inputs in {elapsed_s:.1f} s. At "
            f"least {LEAST_INPUTS} inputs and {LEAST_S:g} s are needed{_enough(times, elapsed_s)}."
        )
    idled = f"Workers were idle {idle:.0%} of the time"
    if idle >= IDLE_SHARE:
        if times.flush_s >= LARGE_SHARE * elapsed_s:
            return "storage", (
                f"{idled}, and flushing outputs took {times.flush_s / elapsed_s:.0%} of the "
                "time. Write less, or to a faster disk."
            )
        if times.record_s >= LARGE_SHARE * elapsed_s:
            return "consumer", (
                f"{idled}: recording results and renaming outputs took "
                f"{times.record_s / elapsed_s:.0%} of the time. Make larger inputs, or fewer "
                "outputs of each."
            )
        return "unknown", f"{idled}, and neither the disk nor the recording of results was busy."
    if times.cpu_s is None or times.cores is None:
        return "healthy", f"{idled}: more of them would process more, if there are cores for them."
    used = times.cpu_s / elapsed_s
    cores = counted(times.cores, "core")
    use = f"{idled}, and used {used:.1f} of {cores}"
    is_busy = used >= BUSY_CORES * times.cores
    waits_for_core = times.queued_s >= QUEUED_SHARE * times.busy_s
    own_s = times.cpu_s - times.threads_s
    extra_s = extra_threads_s(times.threads_s, times.busy_s, own_s, times.queued_s)
    if (is_busy or waits_for_core) and extra_s >= max(LIBRARY_THREADS * own_s, 1e-9):
        share = times.threads_s / max(times.cpu_s, 1e-9)
        return "cpu", (
            f"{use}: libraries compute in threads of their own, "
            f"for {min(share, 1.0):.0%} of the processor time, and threads beyond the cores wait "
            f"for each other. {ONE_THREAD_EACH.format('function')}."
        )
    if is_busy:
        return "cpu", f"{use}{_busy(times)}"
    if waits_for_core:
        return "contention", (
            f"{idled}, used {used:.1f} of {cores}, and waited for a core for "
            f"{times.queued_s / times.busy_s:.0%} of their work: other programs use the cores. "
            f"{STOP_OTHERS}."
        )
    ran_s = times.cpu_s + times.queued_s
    if ran_s < LARGE_SHARE * times.busy_s:
        return "storage", (
            f"{idled}, and waited for a disk, the network or a lock for "
            f"{1 - ran_s / times.busy_s:.0%} of their work. More than "
            f"num_workers={times.num_workers} may help, as long as storage serves them"
            f"{_at_once(times, ran_s)}."
        )
    if times.num_workers < times.cores:
        return "workers", f"{use}. Use num_workers={math.ceil(times.cores)}."
    return "healthy", f"{use}."


def _at_once(times: RunTimes, ran_s: float) -> str:
    """Return that workers can process more inputs at once, as the end of a sentence, if so."""
    most = min(math.ceil(times.busy_s / max(ran_s, 1e-9)), MOST_CONCURRENCY)
    if not times.keeps_freed or most <= times.at_once:  # threads are workers themselves
        return ""
    return f"; or concurrency={most}, for inputs at once in threads of each worker"


def _enough(times: RunTimes, elapsed_s: float) -> str:
    """Return how many inputs it takes, if there were some, as part of a sentence."""
    if not times.inputs:
        return ""
    enough = max(math.ceil(times.inputs * LEAST_S / elapsed_s), LEAST_INPUTS)
    took = duration(enough * elapsed_s / times.inputs, digits=2)
    return f": a run of about {enough:,} inputs, which take {took}"


def _busy(times: RunTimes) -> str:
    """Return what keeps the cores busy and what helps, as the end of a sentence and more."""
    cpu_s = times.cpu_s or 0.0
    system = system_time(
        times.system_s, cpu_s, times.faults, of="in all", keeps_freed=times.keeps_freed
    )
    if system is not None:
        return f". {' '.join(system)}."
    return ": no number of workers helps. Spend less on each input, or use more machines."
