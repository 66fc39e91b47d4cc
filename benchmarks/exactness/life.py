"""One process of a training program, and the process that forks it.

`python -m benchmarks.exactness.life DRIVER serve` forks one for each task that it is given;
`… DRIVER prepare FOLDER` writes a driver's files.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.exactness.record import ENDED_BY, SERVER, Record, Task

# A line that ends a quoted traceback.
QUOTED = re.compile(r"[\w.]*(Error|Exception|Died)\b.*")


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
        if saves and record.saves:
            record.save(loader.state())


def said(error: Exception) -> str:
    """Return an error's type and message in a line; those of a worker's error if it quotes one."""
    message = str(error)
    if "Traceback (most recent call last)" in message:
        quoted = [line for line in message.splitlines() if QUOTED.match(line)]
        if quoted:
            return quoted[-1]
    return f"{type(error).__name__}: {message}".replace("\n", " ")


def seed(task: Task) -> None:
    """Seed all generators, as at the top of a training script."""
    random.seed(task.seed)
    np.random.seed(task.seed)
    torch.manual_seed(task.seed)


def main(driver: str, task: Task) -> None:
    """Do what one process of a life does, and end without waiting for what others left."""
    module = import_module(f"benchmarks.exactness.drivers.{driver}")
    seed(task)
    if task.ranks > 1 and not getattr(module, "OWN_RANKS", False):
        torch.distributed.init_process_group("gloo", rank=task.rank, world_size=task.ranks)
    record = Record(task)
    try:
        if hasattr(module, "run"):
            module.run(task, record)
        else:
            train(module.Loader, task, record, "resume" not in module.LACKS)
    except Exception as error:  # noqa: BLE001 - whatever the library says is what is reported
        traceback.print_exc()
        print(f"\n{ENDED_BY}{said(error)}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(3)


def serve(driver: str) -> None:
    """Fork a process for each rank that standard input asks for; answer on standard output.

    An import of torch takes longer than most lives. This process imports it, and the library, once.
    """
    import_module(f"benchmarks.exactness.drivers.{driver}")
    os.environ[SERVER] = str(os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print("answer", os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        task = Task(**order["task"] | {"rank": order["rank"]})
        pid = os.fork()
        if not pid:
            _become(task, order["settings"])
            main(driver, task)
            # As a program ends: threads are joined and handlers of `atexit` run.
            sys.exit()
        print("answer", pid, flush=True)


def _become(task: Task, settings: dict[str, str]) -> None:
    """Be a rank of a life: with its settings, and its output in a file."""
    os.environ.update(settings)
    tempfile.tempdir = None
    output = os.open(
        Path(task.record) / f"output-{task.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, place in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, place)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[2] == "serve":
        serve(sys.argv[1])
    else:
        import_module(f"benchmarks.exactness.drivers.{sys.argv[1]}").prepare(Path(sys.argv[3]))
        print("done")
