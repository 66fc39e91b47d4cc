"""A load that does not depend on the machine: for tests of what `num_workers="auto"` does.

The decisions are the real ones; what they are based on is computed instead of measured. How well
they fit a real load is measured by `python -m benchmarks auto`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from forebay.observe.tuner import Decision, Totals, Tuner

CORES = 2


def know_load(
    patch: pytest.MonkeyPatch, module: ModuleType, *, step_s: float | None, batch_s: float
) -> None:
    """Make every tuner of a module find this load, at each look a second of it.

    Args:
        patch: Undoes it.
        module: `forebay.loading.workers` or `forebay.runs.run`.
        step_s: Seconds that the trainer takes for a step; None if there is no trainer.
        batch_s: Seconds that a worker waits for each batch, without using a core.
    """

    decide, nothing = Tuner.decide, Totals(0.0, 0.0, 0, 0.0, 0, 0.0, 0.0, 0.0, 0.0)

    def decide_on_known(self: Any, now: Totals) -> Decision | None:
        """Go on by a second, whatever was measured."""
        made = self.num_workers / batch_s
        busy_s = 0.0
        if step_s is not None:
            made = min(made, 1 / step_s)
            busy_s = made * step_s
        known = getattr(self, "known", nothing)
        self.known = known._replace(
            at=known.at + 1,
            waited_s=known.waited_s + 1 - busy_s,
            steps=known.steps + (0 if step_s is None else round(made)),
            steps_s=known.steps_s + busy_s,
            made=known.made + round(made),
            made_s=known.made_s + made * batch_s,
            cpu_s=known.cpu_s + made * 1e-4,
        )
        return decide(self, self.known)

    patch.setattr(Tuner, "decide", decide_on_known)
    patch.setattr(module, "whole_cores", lambda: CORES)
    patch.setattr(module, "EVERY_S", 0.0)
