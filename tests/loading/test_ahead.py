"""Iterable datasets with a buffer: epochs made ahead, and the same batches as without."""

from __future__ import annotations

import os
import signal

import pytest
from datasets import CountingStream, Shards, numbers
from streams import until
from torch.utils.data import IterableDataset

from forebay import Buffer, DataLoader

# A machine of few cores is warned of the workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create . worker")


class Lethal(IterableDataset):
    """A stream whose second epoch kills its worker, once."""

    epochs = 0

    def __init__(self, trace):
        self.trace = trace

    def __iter__(self):
        self.epochs += 1
        for number in range(5):
            if self.epochs == 2 and number == 3 and not self.trace.exists():
                self.trace.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield number


FEW, MANY = Buffer(max_batches=2), Buffer(max_batches=50)


def test_workers_go_on_with_their_copies_of_the_dataset():
    """As with persistent_workers: a copy is started again for each epoch."""
    with DataLoader(CountingStream(2), batch_size=2, num_workers=2, buffer="1MB") as loader:
        assert [numbers(loader) for _ in range(3)] == [[[n, n]] * 2 for n in (1, 2, 3)]


def test_the_next_epochs_are_made_while_this_one_is_not_taken():
    """Up to the high mark, over as many epochs as that takes."""
    dataset, buffer = Shards(100, 100), Buffer(max_batches=600, refill_below=600)
    with DataLoader(dataset, num_workers=2, buffer=buffer) as loader:
        batches, first = iter(loader), []

        def reaches_the_third_epoch():
            first.append(next(batches).item())
            return (loader.statistics().ready_to or (0, 0))[0] >= 2

        until(reaches_the_third_epoch)
        ready = loader.statistics()
        assert ready.ready_from == (0, len(first))
        assert ready.ready_batches <= 600
        in_turn = [number + lane for number in range(100) for lane in (0, 100)]
        assert first + [batch.item() for batch in batches] == in_turn
        assert [batch.item() for batch in loader] == in_turn


def test_a_worker_that_dies_in_an_epoch_made_ahead_is_replaced(tmp_path):
    """Its successor reads on in that epoch, with a copy of the dataset that is new."""
    with DataLoader(Lethal(tmp_path / "died"), num_workers=1, buffer="1MB") as loader:
        assert [numbers(loader) for _ in range(3)] == [[[n] for n in range(5)]] * 3
        assert loader.statistics().restarts == 1


def test_a_forgotten_loader_takes_its_workers_along():
    """Nothing but the loader keeps them, also in the middle of an epoch."""
    loader = DataLoader(Shards(9, 9), num_workers=2, buffer="1MB")
    next(iter(loader))
    del loader  # the leak check of every test sees to the rest
