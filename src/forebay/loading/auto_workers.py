"""`num_workers="auto"`: adjusts the number of workers to the training while it runs.

    Feed.take ──> WorkerTuning.look ── totals of the trace ──> Tuner ── number ──> Feed.resize

A batch does not depend on the worker that makes it, so changing their number changes no batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Self

from forebay.errors import OptionError
from forebay.observe.event_log import log
from forebay.observe.trace import Trace
from forebay.options import usable_cores
from forebay.tuning import Totals, Tuner

# How often to look, at most.
EVERY_S = 0.25
# The most workers, where the user names no number: waiting for storage takes more than cores.
MOST_AT_LEAST, MOST_AT_MOST = 8, 64


class AutoWorkers(int):
    """`num_workers="auto"` with a limit of the user's choice: `num_workers=AutoWorkers(max=16)`.

    The loader starts with one worker per core, and adds or removes workers while it is iterated, so
    that training does not wait and no worker is idle. Its value as an integer is the largest
    number of workers, because other libraries read `loader.num_workers`.

    Args:
        max: The largest number of workers; None for twice the cores that this process may use,
            but at least 8 and at most 64.

    Raises:
        OptionError: `max` is not a positive integer.
    """

    def __new__(cls, max: int | None = None) -> Self:
        """Check the limit."""
        if max is None:
            max = sorted((MOST_AT_LEAST, 2 * usable_cores(), MOST_AT_MOST))[1]
        if type(max) is not int or max < 1:
            raise OptionError(f"AutoWorkers(max={max!r}) is not valid; it must be 1, 2, 3, …")
        return super().__new__(cls, max)

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"AutoWorkers(max={int(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the limit."""
        return AutoWorkers, (int(self),)


def checked_workers(num_workers: Any) -> Any:
    """Return `AutoWorkers` for "auto", and any other value unchanged, for torch to check."""
    return AutoWorkers() if isinstance(num_workers, str) and num_workers == "auto" else num_workers


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
        cores = math.inf if is_remote else usable_cores()
        self._tuner = Tuner(min(usable_cores(), most), most, cores)

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
