"""One process of a training program: `python -m benchmarks.exactness.life DRIVER RANK TASK`.

RANK is "prepare" for the process that writes a driver's files.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.exactness.record import Record, Task


class Loader(Protocol):
    """What a driver makes of a library's loader."""

    def batches(self) -> Iterator[Any]:
        """Yield the batches of all epochs that are left, as arrays of samples."""

    def state(self) -> Any:
        """Return the state after the last batch, as the library's documentation says."""

    def load(self, states: list[Any]) -> None:
        """Continue from the states of all ranks of an earlier life."""


def train(make: Any, task: Task, record: Record, saves: bool) -> None:
    """Train as scripts do: restore, and for each batch a step and a checkpoint."""
    loader: Loader = make(task)
    if task.states:
        loader.load(task.loaded())
    for rows in loader.batches():
        record.batch(rows)
        if saves:
            record.save(loader.state())


def main(driver: str, rank: str, given: str) -> None:
    """Do what one process of a life does, and end without waiting for what others left."""
    module = import_module(f"benchmarks.exactness.drivers.{driver}")
    if rank == "prepare":
        module.prepare(Path(given))
        print("done")
        return
    task = Task(**json.loads(given) | {"rank": int(rank)})
    # As at the top of a training script.
    random.seed(task.seed)
    np.random.seed(task.seed)
    torch.manual_seed(task.seed)
    if task.ranks > 1 and not getattr(module, "OWN_RANKS", False):
        torch.distributed.init_process_group("gloo", rank=task.rank, world_size=task.ranks)
    record = Record(task)
    try:
        if hasattr(module, "run"):
            module.run(task, record)
        else:
            saves = "resume" not in module.LACKS and not task.fault
            train(module.Loader, task, record, saves)
    except Exception as error:  # noqa: BLE001 - whatever the library says is what is reported
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".replace("\n", " "))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(3)
    print("done")
    sys.stdout.flush()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
