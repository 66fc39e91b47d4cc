"""`num_workers="auto"` of `preprocess` and `cache`: as many workers as make the run faster.

    run ── finished inputs ──> RunTuning.look ── totals ──> Tuner ── number ──> Engine.resize

No trainer takes the results, so everything waits for workers. More of them than cores help only
where the function waits, for storage or a network.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from forebay.observe.event_log import log
from forebay.observe.process_times import ProcessTimes
from forebay.options import usable_cores
from forebay.tuning import Totals, Tuner

# How often to look, at most: each look reads two files per worker.
EVERY_S = 1.0
KEPT_DECISIONS = 256


class RunTuning:
    """Looks at a run now and then, and decides on the number of workers.

    Args:
        most: The largest number.
        pids: Returns the processes of the living workers; None if they are threads of this one.

    Attributes:
        decisions: Why the number was changed, the last 256 times.
    """

    def __init__(self, most: int, pids: Callable[[], list[int]] | None) -> None:
        self.decisions: deque[str] = deque(maxlen=KEPT_DECISIONS)
        self._pids, self._times = pids, ProcessTimes()
        self._tuner = Tuner(min(usable_cores(), most), most, usable_cores(), "inputs")
        self._due = 0.0
        self._done, self._done_s = 0, 0.0

    @property
    def num_workers(self) -> int:
        """The number of workers that there should be."""
        return self._tuner.num_workers

    def finished(self, seconds: float) -> None:
        """Count an input that succeeded after so many seconds."""
        self._done += 1
        self._done_s += seconds

    def look(self, now: float, resize: Callable[[int], None]) -> None:
        """Decide on the number of workers, and have it changed if it is another one.

        Args:
            now: Seconds of a monotonic clock.
            resize: Called with the new number.
        """
        if now < self._due or not self._done:  # before the first input, workers are starting
            return
        self._due = now + EVERY_S
        decision = self._tuner.look(self._totals(now))
        if decision is not None:
            resize(decision.num_workers)
            self.decisions.append(decision.reason)
            log.info("num_workers=%d: %s", decision.num_workers, decision.reason)

    def _totals(self, now: float) -> Totals:
        if self._pids is None:
            driver_s = time.thread_time()
            cpu_s, queued_s = time.process_time() - driver_s, 0.0
        else:
            self._times.add(self._pids())
            driver_s = time.process_time()
            cpu_s, queued_s = self._times.cpu_s, self._times.queued_s
        return Totals(
            at=now,
            waited_s=now,
            steps=0,
            steps_s=0.0,
            made=self._done,
            made_s=self._done_s,
            cpu_s=cpu_s,
            queued_s=queued_s,
            trainer_cpu_s=driver_s,
        )
