"""What the tests predict with, also by the command line and in workers of their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import torch


class Numbers:
    """Sample k is four times k."""

    def __init__(self, count=100, bad=()):
        self.count = count
        self.bad = tuple(bad)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"no sample {index}")
        return torch.full((4,), float(index))


class Noise(Numbers):
    """Sample k is drawn at random."""

    def __getitem__(self, index):
        return torch.rand(4)


class Half(torch.nn.Module):
    """Halves the sum; remembers how it was called."""

    def __init__(self, factor=0.5):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(factor))
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, batch):
        assert not self.training
        assert torch.is_inference_mode_enabled()
        return self.dropout(batch).sum(1) * self.weight


class Tired(Half):
    """Is killed, with its process, at the sample that the environment names, once."""

    def forward(self, batch):
        mark = Path(os.environ.get("TIRED_MARK", "/nowhere"))
        if not mark.exists() and (batch[:, 0] == float(os.environ.get("TIRED_AT", "-1"))).any():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with open(os.environ["TIRED_SEEN"], "a") as seen:
            seen.writelines(f"{int(row[0])}\n" for row in batch)
        return super().forward(batch)


class Deadly(Half):
    """At the sample that the environment names, in a worker, kills the driver, once, and hangs.

    Not before the parts that come first are in their place.
    """

    def forward(self, batch):
        mark, output = Path(os.environ["TIRED_MARK"]), Path(os.environ["TIRED_OUTPUT"])
        if not mark.exists() and (batch[:, 0] == float(os.environ["TIRED_AT"])).any():
            for part in range(3):
                while not (output / f"part-{part:05d}.parquet").exists():
                    time.sleep(0.005)
            mark.touch()
            os.kill(int(os.environ["TIRED_DRIVER"]), signal.SIGKILL)
            signal.pause()
        with open(os.environ["TIRED_SEEN"], "a") as seen:
            seen.writelines(f"{int(row[0])}\n" for row in batch)
        return super().forward(batch)


class Lethal(Half):
    """At the sample that the environment names, in a worker, kills the driver, once, and hangs."""

    def forward(self, batch):
        mark = Path(os.environ["TIRED_MARK"])
        if not mark.exists() and (batch[:, 0] == float(os.environ["TIRED_AT"])).any():
            mark.touch()
            os.kill(int(os.environ["TIRED_DRIVER"]), signal.SIGKILL)
            signal.pause()
        with open(os.environ["TIRED_SEEN"], "a") as seen:
            seen.writelines(f"{int(row[0])}\n" for row in batch)
        return super().forward(batch)


class Both(NamedTuple):
    """Two outputs."""

    total: torch.Tensor
    rows: torch.Tensor


class Factory:
    """A model that leaves a file for each time it is made."""

    def __init__(self):
        folder = os.environ.get("FACTORY_FOLDER")
        if folder:
            Path(folder, str(os.getpid())).touch(exist_ok=False)

    def __call__(self, batch):
        return batch.sum(1)


def total(batch):
    """Return the sum of each sample."""
    return batch.sum(1)


def sample_of(row):
    """Make a sample of a table's row."""
    return torch.full((4,), float(row["start_s"]))


def sample_of_file(path):
    """Make a sample of a file."""
    return torch.full((4,), float(path.read_text()))


numbers = Numbers(50)
some_bad = Numbers(50, bad=(7,))
half = Half()
tired = Tired()
