"""Why training waits, from what was recorded: `loader.diagnose()`. PURE.

    steps, batches ──> RecordedWork ──> SimulatedLoader: simulations of single changes
    settings ────────> Setup ───────────┘ └──> Causes ──> Diagnosis

The simulation of the present settings must come to the measured rate; otherwise the cause is
unknown. Then single changes are tried: the smallest one that removes the waits names the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.observe.causes import Cause, Causes, Finding, sentence_case
from forebay.observe.changes_to_try import SimulatedLoader
from forebay.observe.loader_setup import Setup
from forebay.observe.notebook_html import summary
from forebay.observe.recorded_work import recorded_work
from forebay.observe.trace import MadeRecord, SlowSample, StepRecord
from forebay.units import short_number

# Fewer steps are too few to judge by.
LEAST_STEPS = 20


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
) -> Diagnosis:
    """Return why training waits.

    Args:
        steps: The steps of a trace, in order.
        batches: The batches of the same trace, in order.
        setup: The settings of the loader.
        slowest: The slowest sample, if it is known.
        extra: Further numbers for the evidence; they do not affect the diagnosis.
        since: What the records begin after, such as " since a change"; "" for the beginning.
    """
    recorded = recorded_work(steps, batches, setup.num_workers)
    if recorded is None or recorded.steps < LEAST_STEPS:
        count = 0 if recorded is None else recorded.steps
        why = (
            f"There is too little to judge by: {count} steps were measured{since}, and "
            f"{LEAST_STEPS} are needed. Ask again later."
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
        verdict=_verdict(simulated, finding, expected),
    )


def _evidence(simulated: SimulatedLoader) -> dict[str, float]:
    recorded, setup = simulated.recorded, simulated.setup
    step_s = max(recorded.step_s, 1e-9)
    found: dict[str, float | None] = {
        "steps": recorded.steps,
        "step_s": recorded.step_s,
        "trainer_cpu_s": recorded.trainer_cpu_s,
        "batch_s": recorded.batch_s,
        "cpu_s": recorded.cpu_s,
        "queued_s": recorded.queued_s,
        "trainer_queued_s": recorded.trainer_queued_s,
        "threads_s": recorded.threads_s,
        "system_s": recorded.system_s,
        "faults": recorded.faults,
        "other_s": recorded.other_s,
        "nbytes": recorded.nbytes,
        "read_bytes": recorded.read_bytes,
        "read_rate": recorded.read_rate,
        "read_limit": setup.read_limit,
        "idle_share": recorded.idle_share,
        "num_workers": setup.num_workers,
        "workers_needed": recorded.batch_s / step_s,
        "cores": setup.cores,
        "cores_needed": simulated.cores_needed,
        "depth": simulated.depth,
        "epoch_wait_share": recorded.epoch_wait_share,
        "slowdown": recorded.slowdown,
        "simulated_rate": simulated.present.rate,
    }
    return {name: value for name, value in found.items() if value is not None}


def _verdict(simulated: SimulatedLoader, finding: Finding, expected: float | None) -> str:
    rate, change, remedy = simulated.recorded.rate, finding.change, finding.remedy
    waits = f"{sentence_case(simulated.setup.consumer)} waits {simulated.recorded.wait_share:.0%}"
    sentences = [f"{waits} of the time. {finding.why}"]
    if change is not None and change.advice:
        values = ", ".join(f"{name}={value!r}" for name, value in change.advice.items())
        remedy = f"{'Use' if finding.is_expected else 'Try'} {values}"
    if change is not None and expected is not None:
        gain = f"{short_number(expected)} batches/s instead of {short_number(rate)}"
        sentences.append(f"{remedy}, for {gain}; then {simulated.limit_after(change)}.")
    elif remedy:
        sentences.append(remedy + "." * (not remedy.endswith(".")))
    return " ".join(sentences)
