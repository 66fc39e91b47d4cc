"""A batch is its holder's, for as long as a part of it is held, whatever else is made meanwhile."""

from __future__ import annotations

import os
import queue
import threading

import pytest
import torch
from datasets import Squares
from torch.utils.data import default_collate

import forebay

# A machine of one core is warned of two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")

# Of a batch of two; more than what travels without a slot.
WIDE = 10_000


class Wide(Squares):
    """A row of the sample's own number."""

    def __getitem__(self, index):
        return torch.full((WIDE,), float(index))


LIVES = {
    "torch's": {},
    "persistent": {"persistent_workers": True},
    "seed": {"seed": 0},
    "two batches": {"buffer": forebay.Buffer(max_batches=2)},
    "one byte": {"buffer": forebay.Buffer(max_bytes=1)},
    "bytes": {"buffer": "1MB"},
}
every_life = pytest.mark.parametrize("options", LIVES.values(), ids=LIVES)


def wide_loader(count, options):
    return forebay.DataLoader(Wide(count), batch_size=2, num_workers=2, **options)


def expected_batch(number):
    return default_collate([Wide(0)[2 * number], Wide(0)[2 * number + 1]])


@pytest.mark.slow
@every_life
def test_what_is_kept_is_never_overwritten(options):
    """The first fifty batches, and a slice of each later one, while hundreds come and go."""
    with wide_loader(600, options) as loader:
        batches = iter(loader)
        kept = [next(batches) for _ in range(50)]
        slices = [batch[1, 100:110] for batch in batches]
    assert all(torch.equal(batch, expected_batch(n)) for n, batch in enumerate(kept))
    assert torch.equal(torch.stack(slices)[:, 3], torch.arange(101.0, 600, 2))


@pytest.mark.slow
@every_life
def test_batches_may_be_read_and_dropped_in_other_threads(options):
    """Three threads hold some, drop them when they like, and never see one change."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    wrong = []

    def read():
        held = []
        while (item := waiting.get()) is not None:
            held.append(item)
            if len(held) > 5:
                wrong.extend(n for n, batch in held if not torch.equal(batch, expected_batch(n)))
                held.clear()

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        with wide_loader(240, options) as loader:
            for item in enumerate(loader):
                waiting.put(item)
                del item
    finally:
        for _ in readers:
            waiting.put(None)
        for reader in readers:
            reader.join()
    assert wrong == []


@every_life
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_batch_that_a_fork_works_on_is_not_overwritten(options):
    """It may write images to a disk, for example, while training goes on and drops the batch."""
    with wide_loader(40, options) as loader:
        batches = iter(loader)
        batch, expected = next(batches), expected_batch(0).numpy().tobytes()
        gate, ours = os.pipe()
        child = os.fork()
        if not child:
            os.close(ours)
            os.read(gate, 1)  # until the parent closes its end
            os._exit(batch.numpy().tobytes() != expected)
        os.close(gate)
        del batch
        assert sum(1 for _ in batches) == 19
        os.close(ours)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(next(iter(loader)), expected_batch(0))  # in the memory that is free now
