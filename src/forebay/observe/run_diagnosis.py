"""What a run of preprocess waited for, from a few sums: `report.diagnosis`. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.observe.causes import (
    BUSY_CORES,
    LIBRARY_THREADS,
    ONE_THREAD_EACH,
    STOP_OTHERS,
    Cause,
)
from forebay.observe.diagnosis import Diagnosis
from forebay.observe.system_time import system_time
from forebay.units import counted

# Fewer inputs, or seconds, are too few to judge by.
LEAST_INPUTS = 20
LEAST_S = 1.0
# Workers that are idle for less than this share of the time count as busy.
IDLE_SHARE = 0.2
# Whatever takes more than this share of the time is what workers wait for.
LARGE_SHARE = 0.5
# Workers wait for cores if they do so for that share of the time that they spend on inputs.
QUEUED_SHARE = 0.25


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
        system_s: In that, time in the system.
        faults: Page faults in that which needed no disk.
        threads_s: Processor time of other threads than those that call the function; 0 if not
            known.
        queued_s: Time that workers could have run but waited for a core; 0 if not known.
        keeps_freed: Whether workers keep freed memory.
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
    system_s: float = 0.0
    faults: int = 0
    threads_s: float = 0.0
    queued_s: float = 0.0
    keeps_freed: bool = True


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
        "system_s": times.system_s,
        "faults": times.faults,
        "threads_s": times.threads_s,
        "queued_s": times.queued_s,
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
    is_busy = used >= BUSY_CORES * times.cores
    waits_for_core = times.queued_s >= QUEUED_SHARE * times.busy_s
    own_s = times.cpu_s - times.threads_s
    if (is_busy or waits_for_core) and times.threads_s >= LIBRARY_THREADS * own_s:
        share = times.threads_s / max(times.cpu_s, 1e-9)
        return "cpu", (
            f"{idled}, and used {used:.1f} of {cores}: libraries compute in threads of their own, "
            f"for {min(share, 1.0):.0%} of the processor time, and threads beyond the cores wait "
            f"for each other. {ONE_THREAD_EACH.format('function')}."
        )
    if is_busy:
        return "cpu", f"{idled}, and used {used:.1f} of {cores}{_busy(times)}"
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
            f"num_workers={times.num_workers} may help, as long as storage serves them."
        )
    if times.num_workers < times.cores:
        return "workers", (
            f"{idled}, and used {used:.1f} of {cores}. Use num_workers={math.ceil(times.cores)}."
        )
    return "healthy", f"{idled}, and used {used:.1f} of {cores}."


def _busy(times: RunTimes) -> str:
    """Return what keeps the cores busy and what helps, as the end of a sentence and more."""
    cpu_s = times.cpu_s or 0.0
    system = system_time(
        times.system_s, cpu_s, times.faults, of="in all", keeps_freed=times.keeps_freed
    )
    if system is not None:
        return f". {system.why} {system.remedy}."
    return ": no number of workers helps. Spend less on each input, or use more machines."
