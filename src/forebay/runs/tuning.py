"""`num_workers="auto"` of `preprocess` and `cache`: as many workers as make the run faster.

    run ── trace, CPU times ──> RunTuning.update ── totals ──> Tuner ── number ──> Engine.resize

No trainer takes the results, so everything waits for workers. More of them than cores help only
where the function waits, for storage or a network.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from forebay.base.machine import ProcessTimes
from forebay.observe.progress import RunTrace, log
from forebay.observe.tuner import Totals, Tuner
from forebay.options import whole_cores

# The shortest time between two decisions.
EVERY_S = 1.0
KEPT_DECISIONS = 256


class RunTuning(Tuner):
    """Reads what a run did at intervals, and changes the number of workers.

    Args:
        times: What the workers did, up to each update; None if they are threads of this process.
        at_once: Inputs that each worker processes at once.
        began: When the run began, in seconds of a monotonic clock.
    """

    def __init__(
        self, most: int, times: ProcessTimes | None, began: float, at_once: int = 1
    ) -> None:
        super().__init__(min(whole_cores(), most), most, whole_cores(), "inputs")
        self.decisions: deque[str] = deque(maxlen=KEPT_DECISIONS)
        self._times, self._at_once = times, at_once
        self._due = began
        self._began = self._since = began  # `_since`: when the present number was set
        self._worker_s = 0.0  # of all workers before `_since`

    def mean_workers(self, now: float) -> int:
        """Return how many workers there were on average, rounded."""
        worker_s = self._worker_s + self.num_workers * (now - self._since)
        return max(round(worker_s / max(now - self._began, 1e-9)), 1)

    def update(self, now: float, trace: RunTrace, resize: Callable[[int], None]) -> None:
        """Decide on the number of workers; call `resize` if it is to change."""
        if now < self._due or not trace.tasks:  # before the first input, workers are starting
            return
        self._due = now + EVERY_S
        present = self.num_workers
        decision = self.decide(self._totals(now, trace))
        if decision is not None:
            self._worker_s += present * (now - self._since)
            self._since = now
            resize(decision.num_workers)
            self.decisions.append(decision.reason)
            log.info("num_workers=%d: %s", decision.num_workers, decision.reason)

    def _totals(self, now: float, trace: RunTrace) -> Totals:
        if self._times is None:
            driver_s = time.thread_time()
            cpu_s, queued_s = time.process_time() - driver_s, 0.0
        else:
            driver_s = time.process_time()
            cpu_s, queued_s = self._times.cpu_s, self._times.queued_s
        return Totals(
            at=now,
            waited_s=now,
            steps=0,
            steps_s=0.0,
            made=trace.tasks,
            made_s=trace.busy_s / self._at_once,
            cpu_s=cpu_s,
            queued_s=queued_s,
            trainer_cpu_s=driver_s,
        )
