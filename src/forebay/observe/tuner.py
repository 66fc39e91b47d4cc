"""How many workers `num_workers="auto"` should have. PURE.

    trace, run ── totals ──> Tuner.decide ──> Decision(num_workers, reason)

With T the trainer's own seconds for a step, and S the seconds that a worker takes for a batch,
S/T workers make batches as fast as the trainer takes them (Little's law); more where batches
differ so much that the trainer still waits. If a batch takes C seconds of processor time, K cores
keep at most K*S/C workers busy. The tuner aims at the smaller of the two. Where more workers turn
out not to help, for example because storage limits the bytes per second, it goes back and does
not try again for a while.

A run of `preprocess` has no trainer: T is 0, and the cores and the largest number are the limits.
"""

from __future__ import annotations

import math
from collections import deque
from operator import sub
from typing import NamedTuple

from forebay.base.formatting import duration

# A decision needs a window of at least this many seconds, and this many batches of each worker.
WINDOW_S = 1.0
WINDOW_BATCHES = 2
# Where batches are slower than that, this many seconds and batches are enough.
PATIENT_S = 5.0
FEWEST_BATCHES = 4
# The trainer counts as waiting if it waits for more than this share of its time.
WAITING = 0.02
# Workers are idle if they are busy for less than this share of their time.
BUSY = 0.75
# More of them cannot even out batches that differ if they are busy for less than this share.
HALF_BUSY = 0.5
# At first, aim at this many times the workers that are needed on average.
HEADROOM = 1.1
# Where that is not enough, try this many times as many.
UNEVEN = 1.5
# How many windows in a row have to agree before the number is lowered.
WINDOWS_BEFORE_FEWER = 5
# The load has changed if a batch takes this many times as long as before, or is that much faster.
SAME_LOAD = 1.25
# More workers have helped if they make this many times as many batches as before, or if the trainer
# waits for less than half as much of its time.
HELPED = 1.05
# How long not to try what did not help; twice as long each time.
PAUSE_AFTER_FAILURE_S = 30.0


class Totals(NamedTuple):
    """What a loader, or a run without a trainer, has done up to a moment."""

    at: float  # seconds of a monotonic clock
    waited_s: float
    steps: int
    steps_s: float
    made: int
    made_s: float
    cpu_s: float
    queued_s: float
    trainer_cpu_s: float


class Decision(NamedTuple):
    """A new number of workers, and why, as a sentence."""

    num_workers: int
    reason: str


class _Window(NamedTuple):
    """What happened between two decisions, per batch or per second."""

    rate: float  # batches made per second
    waiting: float  # share of the trainer's time
    has_steps: bool  # whether a trainer took any step
    step_s: float  # the trainer's own seconds for a step; T above
    batch_s: float  # a worker's seconds for a batch, without waiting for a core; S above
    cpu_s: float  # processor time for a batch; C above
    busy: float  # share of the workers' time
    trainer_cores: float  # cores that the trainer's process uses


class _BeforeGrowth(NamedTuple):
    """What there was before the number was raised."""

    num_workers: int
    headroom: float
    window: _Window


class Tuner:
    """Decides the number of workers, again and again."""

    def __init__(self, start: int, most: int, cores: float, unit: str = "batches") -> None:
        self.num_workers = start
        self.rates: dict[int, float] = {}  # by workers: made per second while training waited
        self._unit = unit
        self._most, self._cores = most, cores
        self._before: Totals | None = None
        self._needed: deque[int] = deque(maxlen=WINDOWS_BEFORE_FEWER)
        self._before_growth: _BeforeGrowth | None = None  # until the growth is judged
        self._headroom = HEADROOM
        self._ceiling, self._until, self._pause_s = most, 0.0, PAUSE_AFTER_FAILURE_S

    def decide(self, now: Totals) -> Decision | None:
        """Return a decision to change the number, if any."""
        before = self._before
        if before is None or now.made < before.made:
            self._before = now
            return None
        window = self._window(before, now)
        if window is None:
            return None
        self._before = now
        decision = self._decision(window, now.at)
        if decision is None or decision.num_workers == self.num_workers:
            return None
        self.num_workers = decision.num_workers
        return decision

    def _window(self, before: Totals, now: Totals) -> _Window | None:
        passed = Totals(*map(sub, now, before))
        wanted = max(WINDOW_BATCHES * self.num_workers, FEWEST_BATCHES)
        is_enough = passed.at >= WINDOW_S and passed.made >= wanted
        if not is_enough and (passed.at < PATIENT_S or passed.made < FEWEST_BATCHES):
            return None
        batch_s = max(passed.made_s - passed.queued_s, 1e-9) / passed.made
        return _Window(
            rate=passed.made / passed.at,
            waiting=passed.waited_s / max(passed.waited_s + passed.steps_s, 1e-9),
            has_steps=passed.steps > 0,
            step_s=max(passed.steps_s, 1e-9) / max(passed.steps, 1),
            batch_s=batch_s,
            cpu_s=min(passed.cpu_s / passed.made, batch_s),
            busy=passed.made_s / (passed.at * self.num_workers),
            trainer_cores=passed.trainer_cpu_s / passed.at,
        )

    def _decision(self, window: _Window, at: float) -> Decision | None:
        if at >= self._until:
            self._ceiling = self._most
        present, before = self.num_workers, self._before_growth
        self._before_growth = None
        is_waiting = window.waiting > WAITING
        if is_waiting:
            change = window.rate / self.rates.get(present, window.rate)
            if not 1 / SAME_LOAD <= change <= SAME_LOAD:
                self.rates.clear()  # of another load
            self.rates[present] = window.rate
        if before is not None and is_waiting:
            more = present / before.num_workers
            is_same = _is_same_load(before.window, window, more)
            if is_same and not _has_helped(before.window, window):
                return self._go_back(before, window, at)
        bound = min(self._by_cores(window), self._ceiling)
        on_average, headroom = window.batch_s / window.step_s, self._headroom
        needed = max(min(math.ceil(on_average * headroom), self._most), 1)
        # At most the trainer's waiting can be gained. While new workers start, it still waits as
        # before.
        is_busy = window.busy >= HALF_BUSY
        can_gain = before is None and is_busy and window.waiting > 1 - 1 / HELPED
        if can_gain and on_average <= present < bound:
            needed = max(needed, min(math.ceil(present * UNEVEN), bound))
            self._headroom = max(headroom, needed / on_average)
        self._needed.append(needed)
        target = min(needed, bound)
        if is_waiting and target > present and (is_busy or on_average * HEADROOM > present):
            self._before_growth = _BeforeGrowth(present, headroom, window)
            self._needed.clear()
            return Decision(target, self._more(window, present, target))
        enough = max(self._needed)
        is_settled = len(self._needed) == WINDOWS_BEFORE_FEWER and enough < present
        if is_settled and not is_waiting and window.busy < BUSY:
            self._needed.clear()
            return Decision(enough, self._fewer(window, present, enough))
        return None

    def _by_cores(self, window: _Window) -> int:
        """Return how many workers the cores can keep busy, besides the trainer."""
        if math.isinf(self._cores) or window.cpu_s <= 0:
            return self._most
        free = max(self._cores - window.trainer_cores, 1.0)
        return max(math.ceil(min(free * window.batch_s / window.cpu_s, self._most)), 1)

    def _go_back(self, before: _BeforeGrowth, window: _Window, at: float) -> Decision:
        fewer, self._headroom, earlier = before
        self._ceiling, self._until = fewer, at + self._pause_s
        self._pause_s *= 2
        self._needed.clear()
        return Decision(
            fewer,
            f"{self.num_workers} workers make {window.rate:.3g} {self._unit}/s and {fewer} made "
            f"{earlier.rate:.3g}: more do not help, so there are {fewer} again",
        )

    def _more(self, window: _Window, present: int, target: int) -> str:
        if not window.has_steps:
            return (
                f"{self._unit} take {duration(window.batch_s)} of a worker each, and "
                f"{duration(window.cpu_s)} of that on a core, so there are {target} workers "
                f"instead of {present}"
            )
        durations = (
            f"a step takes {duration(window.step_s)} and a batch {duration(window.batch_s)} of a "
            "worker"
        )
        if window.batch_s / window.step_s <= present:
            durations += f" on average, for which {present} are enough, but batches differ"
        return (
            f"training waits {window.waiting:.0%} of the time: {durations}, so there are {target} "
            f"workers instead of {present}"
        )

    def _fewer(self, window: _Window, present: int, target: int) -> str:
        return (
            f"workers are busy {window.busy:.0%} of the time and training waits "
            f"{window.waiting:.0%}: {target} workers are enough instead of {present}"
        )


def _is_same_load(before: _Window, window: _Window, more: float) -> bool:
    """Return whether batches take as much as before, or what so many times the workers explain."""
    batch, cpu = window.batch_s / before.batch_s, window.cpu_s / max(before.cpu_s, 1e-9)
    is_bound_to_cpu = max(window.cpu_s, before.cpu_s) > window.batch_s / 4
    if is_bound_to_cpu and not 1 / SAME_LOAD <= cpu <= SAME_LOAD:
        return False
    return 1 / SAME_LOAD <= batch <= more * SAME_LOAD


def _has_helped(before: _Window, window: _Window) -> bool:
    return window.rate >= before.rate * HELPED or window.waiting < before.waiting / 2
