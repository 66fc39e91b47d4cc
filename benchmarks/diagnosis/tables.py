"""How often `loader.diagnose()` is right, and whether its advice comes true."""

from __future__ import annotations

import json
import os
import random
import statistics
from collections import Counter
from dataclasses import dataclass

from benchmarks.diagnosis.planted import KINDS, Measured
from benchmarks.diagnosis.training import train
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

# Runs of each kind.
RUNS, QUICK_RUNS = 20, 1
# All is on so many cores, as the planted causes need it.
CORES = 2
# Causes that are no alarm.
FINE = ("healthy", "consumer")
# An expected rate counts as met if it is off by no more than this.
NEAR = 0.15
# Baselines: a median step that waits for so large a part of it, and batches ready for less of the
# time than this.
WAITING = 0.1
READY = 0.9


@dataclass(frozen=True)
class Run:
    """One run: what was planted, what came of it, and the rate after following the advice."""

    kind: str
    cause: str
    measured: Measured
    after: float | None

    @property
    def error(self) -> float | None:
        """How far the expected rate was off; None if there was none."""
        expected = self.measured.diagnosis.expected_rate
        return None if self.after is None or expected is None else expected / self.after - 1.0


def diagnose(ground: Ground, quick: bool) -> None:
    """Print what was planted and what was said, and the expected rates."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:CORES])
    try:
        runs = [_run(kind, seed) for seed in range(QUICK_RUNS if quick else RUNS) for kind in KINDS]
        _confusion(runs)
        print(flush=True)
        _alarms(runs)
        print(flush=True)
        _expectations(runs)
    finally:
        os.sched_setaffinity(0, allowed)
    _keep(ground, runs)


def _run(kind: str, seed: int) -> Run:
    planting = KINDS[kind](random.Random(f"{kind} {seed}"))
    measured = train(planting, seed)
    found = measured.diagnosis
    after = None
    if found.expected_rate is not None and found.cause not in FINE:
        after = train(planting, seed, found.advice).rate
    return Run(kind, planting.cause, measured, after)


def _confusion(runs: list[Run]) -> None:
    said = [run.measured.diagnosis.cause for run in runs]
    columns = sorted({run.cause for run in runs} | set(said))
    counts = Counter((run.kind, cause) for run, cause in zip(runs, said, strict=True))
    right = sum(run.cause == cause for run, cause in zip(runs, said, strict=True))
    print(f"causes: planted (rows) and said (columns), {len(runs)} runs on {CORES} cores")
    show(
        ("", *columns),
        [(kind, *(str(counts[kind, each] or "") for each in columns)) for kind in KINDS],
    )
    print(f"{right / len(runs):.1%} of the causes are right.")


def _alarms(runs: list[Run]) -> None:
    ways = {
        "forebay": lambda run: run.measured.diagnosis.cause not in (*FINE, "unknown"),
        f"median step waits >= {WAITING:.0%}": lambda run: _median_share(run) >= WAITING,
        f"SPDL's readiness < {READY:.0%}": lambda run: run.measured.readiness < READY,
    }
    rows = Rows()
    for name, is_alarmed in ways.items():
        fine = [is_alarmed(run) for run in runs if run.cause in FINE]
        waits = [is_alarmed(run) for run in runs if run.cause not in FINE]
        rows.append((name, f"{sum(waits)} of {len(waits)}", f"{sum(fine)} of {len(fine)}"))
    print("alarms, in the same runs")
    show(("", "where training waits", "where it does not"), rows)
    print("The right number is all of the former, and none of the latter.")


def _median_share(run: Run) -> float:
    """Return the part of the median step that is waiting."""
    pairs = zip(run.measured.waits, run.measured.steps, strict=False)
    return statistics.median(wait / (wait + step) for wait, step in pairs)


def _expectations(runs: list[Run]) -> None:
    rows, every = [], []
    for kind in KINDS:
        errors = [abs(run.error) for run in runs if run.kind == kind and run.error is not None]
        every += errors
        if errors:
            rows.append((kind, *_errors(errors)))
    print("the rate after following the advice, beside the one expected")
    if every:
        rows.append(("all", *_errors(every)))
    show(("", "with an expectation", f"within {NEAR:.0%}", "median error", "largest"), rows)
    print(
        "For contention the advice is to stop the other programs. Runs whose diagnosis expects\n"
        "no rate are left out: a fixed rate of storage, too few cores, or what cannot be told."
    )


def _errors(errors: list[float]) -> tuple[str, ...]:
    near = sum(each <= NEAR for each in errors)
    return (
        str(len(errors)),
        f"{near / len(errors):.0%}",
        f"{statistics.median(errors):.1%}",
        f"{max(errors):.0%}",
    )


def _keep(ground: Ground, runs: list[Run]) -> None:
    """Write what each run came to beside the other results, while they last."""
    lines = [
        json.dumps(
            {
                "kind": run.kind,
                "said": run.measured.diagnosis.cause,
                "verdict": str(run.measured.diagnosis),
                "evidence": dict(run.measured.diagnosis.evidence),
                "after": run.after,
                "error": run.error,
            }
        )
        for run in runs
    ]
    path = ground.root.parent / "diagnose.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"Each run stands in {path.parent.name}/{path.name}.")
