"""Datasets to be cached, and the killed run: `cached.py DIRECTORY NUMBER_OF_WORKERS`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils.data import Dataset

import forebay

# At this sample the driver whose process id the environment has is killed, once.
KILLED_AT = 600
DRIVER = "CACHE_TEST_DRIVER"


class Point(NamedTuple):
    """A NamedTuple that can be imported."""

    x: Any
    y: Any


class Made(Dataset):
    """Samples that a function makes of their index."""

    def __init__(self, make, count):
        self._make, self._count = make, count

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        return self._make(index)


class Pictures(Dataset):
    """Small pictures with a label and a name."""

    def __init__(self, count=40, shift=0):
        self.count, self.shift = count, shift

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image = torch.full((3, 4, 4), (index + self.shift) % 256, dtype=torch.uint8)
        return {"image": image, "label": index, "name": f"picture {index}", "at": Point(index, 0.5)}


class Asked(Pictures):
    """Pictures that keep a list of what they were asked for, outside of what they are."""

    asked: ClassVar[list[int]] = []

    def __getitem__(self, index):
        self.asked.append(index)
        return super().__getitem__(index)


class Deadly(Pictures):
    """Pictures of which one takes its worker along, and one does not end."""

    def __getitem__(self, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 7:
            time.sleep(1000)
        return super().__getitem__(index)


class Noise(Dataset):
    """Waves of various lengths, drawn at random; the driver is killed on the way."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == KILLED_AT and DRIVER in os.environ:
            os.kill(int(os.environ[DRIVER]), signal.SIGKILL)
        return torch.rand(1 + index % 5), index


def shift_at_random(sample):
    """Change a sample in place, at random."""
    sample["image"] += torch.randint(0, 100, (1,)).to(torch.uint8)
    return sample


if __name__ == "__main__":
    os.environ[DRIVER] = str(os.getpid())
    folder, workers = sys.argv[1:]
    forebay.cache(Noise(), Path(folder), num_workers=int(workers), progress=False)
