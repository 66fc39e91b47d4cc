"""Iterable datasets with a buffer: epochs made ahead, and the same batches as without."""

from __future__ import annotations

import functools
import json
import os
import signal

import pytest
import torch
from datasets import CountingStream, Shards, numbers
from streams import until
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

from forebay import Buffer, DataLoader

# A machine of few cores is warned of the workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create . worker")


class Told(IterableDataset):
    """A stream of six numbers that tell what `set_epoch` said, and the part they are of."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(6):
            yield 1000 * self.epoch + 100 * get_worker_info().id + number


class Drawn(IterableDataset):
    """A stream of random numbers."""

    def __iter__(self):
        for _ in range(5):
            yield torch.rand(())


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


SIZES = [(6, 6), (1, 7), (30, 2), (0, 5), (0, 0), (9, 0, 1)]
FEW, MANY = Buffer(max_batches=2), Buffer(max_batches=50)
BUFFERS = ["1MB", Buffer(max_bytes=20), MANY, Buffer(max_batches=8, refill_below=3)]


@functools.cache
def epoch_of_torch(sizes, **arguments):
    """Return the numbers of an epoch as torch gives them; its workers take long to start."""
    return numbers(TorchDataLoader(Shards(*sizes), **arguments))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "buffer"),
    [(sizes, FEW) for sizes in SIZES] + [((1, 7), buffer) for buffer in BUFFERS],
    ids=str,
)
def test_epochs_are_those_of_torch(sizes, buffer):
    """However unequal the workers' parts are, and with nothing in some of them."""
    arguments = {"batch_size": 2, "num_workers": len(sizes), "drop_last": len(sizes) == 3}
    with DataLoader(Shards(*sizes), buffer=buffer, **arguments) as loader:
        epochs = [numbers(loader) for _ in range(3)]
    assert epochs == [epoch_of_torch(sizes, **arguments)] * 3


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


@pytest.mark.slow
@pytest.mark.parametrize("said", [(0, 1, 2, 3), (5, 5, 9, 2), (0, 2, 4, 6)], ids=str)
def test_set_epoch_is_honoured(said):
    """Whatever it says: a dataset that has it is not read beyond its epoch."""
    dataset = Told()
    with DataLoader(dataset, batch_size=3, num_workers=2, buffer="1MB") as loader:
        for epoch in said:
            dataset.set_epoch(epoch)
            first = 1000 * epoch
            assert numbers(loader) == [
                [first + 100 * lane + start + each for each in range(3)]
                for start in (0, 3)
                for lane in (0, 1)
            ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 7])
def test_after_a_break_the_next_epoch_is_whole(count):
    """Return whether it was begun already or not."""
    with DataLoader(Shards(4, 4), num_workers=2, buffer="1MB") as loader:
        for _ in range(3):
            taken = [batch.item() for batch, _ in zip(loader, range(count), strict=False)]
            assert taken == [0, 100, 1, 101, 2, 102, 3, 103][:count]
        assert loader.statistics().epoch == 2


def test_a_worker_that_dies_in_an_epoch_made_ahead_is_replaced(tmp_path):
    """Its successor reads on in that epoch, with a copy of the dataset that is new."""
    with DataLoader(Lethal(tmp_path / "died"), num_workers=1, buffer="1MB") as loader:
        assert [numbers(loader) for _ in range(3)] == [[[n] for n in range(5)]] * 3
        assert loader.statistics().restarts == 1


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [None, "1MB"])
@pytest.mark.parametrize("persistent", [False, True])
def test_with_a_seed_each_epoch_is_drawn_by_its_number(buffer, persistent):
    """So a resumed run draws what the first one would have."""
    arguments = {
        "num_workers": 2,
        "seed": 7,
        "buffer": buffer,
        "persistent_workers": persistent,
    }
    with DataLoader(Drawn(), **arguments) as loader:
        epochs = [torch.cat(list(loader)) for _ in range(2)]
        state = json.loads(json.dumps(loader.state_dict()))
        epochs.append(torch.cat(list(loader)))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
    with DataLoader(Drawn(), **arguments) as loader:
        loader.load_state_dict(state)
        assert torch.equal(torch.cat(list(loader)), epochs[2])


def test_a_forgotten_loader_takes_its_workers_along():
    """Nothing but the loader keeps them, also in the middle of an epoch."""
    loader = DataLoader(Shards(9, 9), num_workers=2, buffer="1MB")
    next(iter(loader))
    del loader  # the leak check of every test sees to the rest
