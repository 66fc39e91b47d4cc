"""Why training waits, from what was recorded: `loader.diagnose()`. PURE.

    steps, batches ──> RecordedWork ──> SimulatedLoader: simulations of single changes
    settings ────────> Setup ───────────┘ └──> Causes ──> Diagnosis

The simulation of the present settings must come to the measured rate; otherwise the cause is
unknown. Then single changes are tried: the smallest one that removes the waits names the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from forebay.base.formatting import counted, duration, short_number, summary
from forebay.observe.causes import Causes, sentence_case
from forebay.observe.measurements import Measured, Setup, StepRecord
from forebay.observe.recorded_work import recorded_work
from forebay.observe.simulated_loader import Cause, Finding, SimulatedLoader

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


def diagnose(found: Measured, setup: Setup, extra: Mapping[str, float] | None = None) -> Diagnosis:
    """Return why training waits; `extra` is added to the evidence."""
    steps = found.steps
    recorded = recorded_work(steps, found.batches, setup.num_workers)
    if recorded is None or recorded.steps < LEAST_STEPS:
        count = 0 if recorded is None else recorded.steps
        why = (
            f"There is too little to judge by: {count} steps were measured{found.since}, and "
            f"{LEAST_STEPS} are needed. Ask again {_later(steps, max(setup.num_workers, 1))}."
        )
        rate, share = (0.0, 0.0) if recorded is None else (recorded.rate, recorded.wait_share)
        return Diagnosis("unknown", share, {}, rate, None, {"steps": count}, why)
    simulated = SimulatedLoader(recorded, setup)
    finding = Causes(simulated, found.slowest).finding()
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
        verdict=_verdict(simulated, finding, expected, found.run_rate),
    )


def _later(steps: Sequence[StepRecord], num_workers: int) -> str:
    """Return after how many more steps there is enough to judge by, and how long they take."""
    known = steps[-1].taken - steps[0].taken if steps else 0
    # The first ones are the workers' start: one for each worker, or half of them.
    left = max(LEAST_STEPS + min(num_workers, LEAST_STEPS) - known, 1)
    if not known:
        return f"after {counted(left, 'more step')}"
    took_s = (steps[-1].asked_at - steps[0].asked_at - steps[0].waited_s) / known
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
    return {
        name: value for name, value in (known | others).items() if isinstance(value, int | float)
    }


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
