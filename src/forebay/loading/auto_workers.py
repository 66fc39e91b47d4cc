"""`num_workers="auto"`: adjusts the number of workers to the training while it runs.

    Feed.take ──> WorkerTuning.look ── totals of the trace ──> Tuner ── number ──> Feed.resize

A batch does not depend on the worker that makes it, so changing their number changes no batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from forebay.observe.event_log import log
from forebay.observe.trace import Trace
from forebay.options import usable_cores
from forebay.ranks import local_ranks
from forebay.tuning import Totals, Tuner

# How often to look, at most.
EVERY_S = 0.25


class WorkerTuning:
    """Reads a trace at intervals, and changes the number of workers.

    Args:
        most: The largest number.
        is_remote: Whether the workers are on other machines, so that the cores of this one do not
            limit them.
        trace: The trace of the loader.

    Attributes:
        due: When to look next, in seconds of `time.perf_counter()`.
    """

    def __init__(self, most: int, is_remote: bool, trace: Trace) -> None:
        self.due = 0.0
        self._trace = trace
        cores = max(1, usable_cores() // local_ranks())
        self._tuner = Tuner(min(cores, most), most, math.inf if is_remote else cores)

    @property
    def num_workers(self) -> int:
        """The number of workers that there should be."""
        return self._tuner.num_workers

    def look(self, now: float, resize: Callable[[int], None]) -> None:
        """Decide on the number of workers, and have it changed if it is another one."""
        trace, self.due = self._trace, now + EVERY_S
        totals = Totals(
            at=now,
            waited_s=trace.waited_s,
            steps=trace.step_count,
            steps_s=trace.steps_s,
            made=trace.made_count,
            made_s=trace.made_s,
            cpu_s=trace.cpu_s,
            queued_s=trace.queued_s,
            trainer_cpu_s=time.process_time(),
        )
        decision = self._tuner.look(totals)
        if decision is None:
            return
        resize(decision.num_workers)
        trace.num_workers = decision.num_workers
        trace.decisions.append((now, decision.reason))
        log.info("num_workers=%d: %s", decision.num_workers, decision.reason)
