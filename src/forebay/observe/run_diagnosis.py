"""What a run of `preprocess` waited for, from a few sums: `report.diagnosis`. PURE."""

from __future__ import annotations

import math
from dataclasses import fields

from forebay.base.formatting import counted, duration
from forebay.observe.causes import (
    LIBRARY_THREADS,
    ONE_THREAD_EACH,
    STOP_OTHERS,
    system_time,
)
from forebay.observe.diagnosis import Diagnosis
from forebay.observe.figures import numeric_values
from forebay.observe.measurements import RunTimes
from forebay.observe.recorded_work import extra_threads_s
from forebay.observe.simulated_loader import BUSY_CORES, MOST_CONCURRENCY, Cause

# Fewer inputs, or seconds, are too few to judge by.
LEAST_INPUTS = 20
LEAST_S = 1.0
# Workers that are idle for less than this share of the time count as busy.
IDLE_SHARE = 0.2
# Whatever takes more than this share of the time is what workers wait for.
LARGE_RUN_SHARE = 0.5
# Workers wait for cores if they do so for that share of the time that they spend on inputs.
QUEUED_SHARE = 0.25


def diagnose_run(times: RunTimes) -> Diagnosis:
    """Return what the workers of a run waited for.

    `wait_share` is the part of the time that they were idle; `rate` is in inputs per second.
    """
    elapsed_s = max(times.elapsed_s, 1e-9)
    idle = max(1.0 - times.busy_s / (times.num_workers * times.at_once * elapsed_s), 0.0)
    cause, verdict = _cause(times, elapsed_s, idle)
    known = numeric_values({each.name: getattr(times, each.name) for each in fields(times)})
    return Diagnosis(cause, idle, {}, times.inputs / elapsed_s, None, known, verdict)


def _cause(times: RunTimes, elapsed_s: float, idle: float) -> tuple[Cause, str]:
    if times.inputs < LEAST_INPUTS or elapsed_s < LEAST_S:
        return "unknown", (
            f"There is too little to judge by: {times.inputs:,} inputs in {elapsed_s:.1f} s. At "
            f"least {LEAST_INPUTS} inputs and {LEAST_S:g} s are needed{_enough(times, elapsed_s)}."
        )
    idled = f"Workers were idle {idle:.0%} of the time"
    if idle >= IDLE_SHARE:
        if times.flush_s >= LARGE_RUN_SHARE * elapsed_s:
            return "storage", (
                f"{idled}, and flushing outputs took {times.flush_s / elapsed_s:.0%} of the "
                "time. Write less, or to a faster disk."
            )
        if times.record_s >= LARGE_RUN_SHARE * elapsed_s:
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
    if ran_s < LARGE_RUN_SHARE * times.busy_s:
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
