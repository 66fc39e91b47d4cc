"""Adjust the number of workers to the training while it runs: `num_workers="auto"`.

    Feed.take ──> WorkerTuning.update ── totals of the trace ──> Tuner ── number ──> Feed.resize

A batch does not depend on the worker that makes it, so changing their number changes no batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from forebay.observe.progress import log
from forebay.observe.record import Trace
from forebay.options import whole_cores
from forebay.ranks import ranks_sharing_cores

# The shortest time between two decisions.
EVERY_S = 0.25


class WorkerTuning:
    """Reads a trace at intervals, and changes the number of workers.

    Attributes:
        due: When to decide next, in seconds of `time.perf_counter()`.
    """

    def __init__(self, most: int, is_remote: bool, trace: Trace) -> None:
        self.due = 0.0
        self._trace = trace
        cores = max(1, whole_cores() // ranks_sharing_cores())
        from forebay.observe.tuner import Tuner

        self._tuner = Tuner(min(cores, most), most, math.inf if is_remote else cores)

    @property
    def num_workers(self) -> int:
        """The number of workers that there should be."""
        return self._tuner.num_workers

    def update(self, now: float, resize: Callable[[int], None]) -> None:
        """Decide on the number of workers; call `resize` if it is to change."""
        trace, self.due = self._trace, now + EVERY_S
        from forebay.observe.tuner import Totals

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
        decision = self._tuner.decide(totals)
        trace.tried = self._tuner.rates
        if decision is None:
            return
        resize(decision.num_workers)
        trace.num_workers = decision.num_workers
        trace.decisions.append((now, decision.reason))
        log.info("num_workers=%d: %s", decision.num_workers, decision.reason)
