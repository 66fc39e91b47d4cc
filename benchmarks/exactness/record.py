"""What a life of a training program notes: a line for each batch, and states in files beside it."""

from __future__ import annotations

import json
import os
import pickle
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.call import own_processes
from benchmarks.exactness.histories import CUT_AGAIN, CUT_LAST, KILL_AT, SIGNAL_AT, SIGNAL_MORE

# What a process of the training prints before the error that ended it.
ENDED_BY = "ended by: "
# The process that forked this one, and that is no process of the training.
SERVER = "EXACTNESS_SERVER"


def training_processes() -> list[int]:
    """Return this process and all others of its training."""
    return [pid for pid in own_processes() if str(pid) != os.environ.get(SERVER)]


@dataclass(frozen=True, slots=True)
class Task:
    """What one process of a life has to do.

    Attributes:
        kind: What is read: "map", "stream" or "mixture".
        folder: Where the driver's files are.
        record: The folder for what is noted.
        workers: Worker processes.
        rank: Which of the ranks this process is.
        ranks: How many there are.
        batch: Samples in a batch of one rank.
        epochs: Epochs of the whole training.
        states: Files with the states of all ranks that the life begins from; empty for none.
        last: After how many batches the process is killed; None if it ends by itself.
        fault: As in `Life`.
        seed: The seed of the training.
    """

    kind: str
    folder: str
    record: str
    workers: int
    rank: int
    ranks: int
    batch: int
    epochs: int
    states: tuple[str, ...] = ()
    last: int | None = None
    fault: str = ""
    seed: int = 11

    def loaded(self) -> list[Any]:
        """Return the states of all ranks; the files are this benchmark's own."""
        return [pickle.loads(Path(each).read_bytes()) for each in self.states]


class Record:
    """The file in which a rank notes what it got."""

    def __init__(self, task: Task) -> None:
        self._task, self.count, self._more = task, 0, SIGNAL_MORE
        self._file = os.open(
            Path(task.record) / f"rank-{task.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        if task.fault == "tree":
            signal.signal(signal.SIGTERM, lambda *_: self._write({"handler": os.getpid()}))

    def batch(self, rows: Any) -> None:
        """Note a batch of samples as `data.sample` makes them; then do what the task says.

        Args:
            rows: An integer array of shape (samples, 6).
        """
        rows = np.asarray(rows)
        self.count += 1
        self._write({"ids": rows[:, 0].tolist(), "bits": rows[:, 1:5].tolist()})
        if self._task.fault == "worker" and self.count == KILL_AT:
            pid = int(rows[0, 5])
            if pid == os.getpid():
                self.end("no worker process")
            os.kill(pid, signal.SIGKILL)
        if self._task.fault == "tree":
            if self.count == SIGNAL_AT:
                for pid in training_processes():
                    os.kill(pid, signal.SIGTERM)
            elif self.count == SIGNAL_AT + SIGNAL_MORE:
                self.end("")

    @property
    def saves(self) -> bool:
        """Whether the program saves a state now: after each batch that a life may begin after."""
        first = CUT_AGAIN if self._task.states else CUT_LAST
        return not self._task.fault and self.count <= first

    def save(self, state: Any) -> None:
        """Write a state after the last batch that was noted; then die, if the task says so."""
        path = Path(self._task.record) / f"state-{self.count}.{self._task.rank}"
        path.write_bytes(pickle.dumps(state))
        if self.count == self._task.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, reason: str) -> None:
        """Note that this is the end, and end the process with all that it started."""
        self._write({"end": reason})
        for pid in training_processes():
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())
