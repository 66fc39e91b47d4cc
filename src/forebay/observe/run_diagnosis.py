"""What a run of preprocess waited for, from a few sums: `report.diagnosis`. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.observe.causes import BUSY_CORES, Cause
from forebay.observe.diagnosis import Diagnosis
from forebay.units import counted

# Fewer inputs, or seconds, are too few to judge by.
LEAST_INPUTS = 20
LEAST_S = 1.0
# Workers that are idle for less than this share of the time count as busy.
IDLE_SHARE = 0.2
# Whatever takes more than this share of the time is what workers wait for.
LARGE_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Sums of one run. Times are in seconds.

    Attributes:
        inputs: Inputs that ended.
        committed: How many of them were recorded.
        elapsed_s: The whole run.
        num_workers: How many worked at once; the mean, rounded, if the number changed.
        busy_s: Of all workers together, on inputs.
        cpu_s: Processor time of the workers; None if not known.
        flush_s: Flushing outputs to the disk.
        record_s: Recording results and renaming outputs, in this process.
        cores: Cores that the workers may use; None if not known.
        decisions: Of `num_workers="auto"`: why the number was changed, the last 256 times.
    """

    inputs: int
    committed: int
    elapsed_s: float
    num_workers: int
    busy_s: float
    cpu_s: float | None
    flush_s: float
    record_s: float
    cores: float | None
    decisions: tuple[str, ...] = ()


def diagnose_run(times: RunTimes) -> Diagnosis:
    """Return what the workers of a run waited for.

    `wait_share` is the part of the time that they were idle; `rate` is in inputs per second.
    """
    elapsed_s = max(times.elapsed_s, 1e-9)
    idle = max(1.0 - times.busy_s / (times.num_workers * elapsed_s), 0.0)
    cause, verdict = _cause(times, elapsed_s, idle)
    evidence = {
        "inputs": times.inputs,
        "elapsed_s": times.elapsed_s,
        "num_workers": times.num_workers,
        "busy_s": times.busy_s,
        "cpu_s": times.cpu_s,
        "flush_s": times.flush_s,
        "record_s": times.record_s,
        "cores": times.cores,
    }
    known = {name: float(value) for name, value in evidence.items() if value is not None}
    return Diagnosis(cause, idle, {}, times.inputs / elapsed_s, None, known, verdict)


def _cause(times: RunTimes, elapsed_s: float, idle: float) -> tuple[Cause, str]:
    if times.inputs < LEAST_INPUTS or elapsed_s < LEAST_S:
        return "unknown", (
            f"There is too little to judge by: {times.inputs:,} inputs in {elapsed_s:.1f} s. At "
            f"least {LEAST_INPUTS} inputs and {LEAST_S:g} s are needed."
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
    if used >= BUSY_CORES * times.cores:
        return "cpu", f"{idled}, and used {used:.1f} of {cores}: no number of workers helps."
    if times.cpu_s < LARGE_SHARE * times.busy_s:
        return "storage", (
            f"{idled}, and waited for a disk, the network or a core for "
            f"{1 - times.cpu_s / times.busy_s:.0%} of their work. More than "
            f"num_workers={times.num_workers} may help, as long as storage serves them."
        )
    if times.num_workers < times.cores:
        return "workers", (
            f"{idled}, and used {used:.1f} of {cores}. Use num_workers={math.ceil(times.cores)}."
        )
    return "healthy", f"{idled}, and used {used:.1f} of {cores}."
