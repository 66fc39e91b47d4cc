"""Accelerate with `use_stateful_dataloader=True`: the position is in `save_state`."""

from __future__ import annotations

from benchmarks.exactness.drivers import accelerated

TITLE = "Accelerate, use_stateful_dataloader"
NEEDS = ("accelerate", "torchdata")
DOCS = accelerated.DOCS
LACKS = accelerated.LACKS
_STATE = "a state is of one number of workers"
UNCLAIMED = accelerated.UNCLAIMED | {"workers-3": _STATE, "workers-0": _STATE}


class Loader(accelerated.Loader):
    STATEFUL = True
