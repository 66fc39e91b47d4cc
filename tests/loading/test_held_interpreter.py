"""A training loop that keeps the interpreter to itself: with a buffer, workers go on."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import time

import pytest
import torch
from streams import until
from torch.utils.data import Dataset

from forebay import DataLoader

HELD_S = 30  # how long the interpreter is kept at most; the workers need a hundredth
AHEAD = 25  # batches; on a busy machine they take much longer


class PollDescriptor(ctypes.Structure):
    """What poll(2) takes."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class Counted(Dataset):
    """Samples that take 2 ms; the one that makes a number of them full writes to a pipe."""

    def __init__(self):
        self.counts = mmap.mmap(-1, 24)  # the samples of each of two workers, and the number
        self.full, self.write = os.pipe()

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.002)
        worker_id = torch.utils.data.get_worker_info().id
        counts = struct.unpack_from("3q", self.counts)
        struct.pack_into("q", self.counts, 8 * worker_id, counts[worker_id] + 1)
        if 0 < counts[2] <= counts[0] + counts[1]:
            os.write(self.write, b"x")
        return index

    def made(self):
        """Return how many samples were made."""
        return sum(struct.unpack_from("2q", self.counts))

    def close(self):
        """Close the pipe."""
        os.close(self.full)
        os.close(self.write)


@pytest.fixture
def dataset():
    made = Counted()
    yield made
    made.close()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_loop_that_keeps_the_interpreter_does_not_stop_the_workers(dataset):
    """They hold up to a second of work, so they need nothing from this process meanwhile.

    poll(2) is called without giving up the interpreter, as a C extension, a sort or a large pickle.
    """
    held = ctypes.PyDLL(None).poll
    waits_for = PollDescriptor(dataset.full, select.POLLIN, 0)
    with DataLoader(dataset, batch_size=1, seed=0, num_workers=2, buffer="64MB") as loader:
        batches = iter(loader)
        first = next(batches)
        until(lambda: dataset.made() >= 4 * AHEAD)
        struct.pack_into("q", dataset.counts, 16, dataset.made() + AHEAD)
        assert held(ctypes.byref(waits_for), 1, HELD_S * 1000) == 1
        found = [first, *(next(batches) for _ in range(5 * AHEAD))]
    assert torch.cat(found).tolist() == list(range(5 * AHEAD + 1))
