"""`set_epoch`, of samplers and of datasets: it is heeded, and nothing of the user's is changed."""

from __future__ import annotations

import pytest
import torch
from datasets import Squares
from streams import Asked, Epochal, until
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Subset

from forebay import Buffer, DataLoader

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def distributed(**arguments):
    """A loader with a distributed sampler: 5 batches an epoch."""
    sampler = DistributedSampler(range(20), num_replicas=2, rank=1, seed=3)
    return DataLoader(Squares(20), batch_size=2, sampler=sampler, **arguments)


def orders(loader, said):
    """Return the samples of epochs before which `set_epoch` is called, or is not (None)."""
    epochs = []
    with loader:
        for epoch in said:
            if epoch is not None:
                loader.sampler.set_epoch(epoch)
            epochs.append([index for batch, _ in loader for index in batch.tolist()])
    return epochs


def expected_order(epoch):
    """Return what the sampler gives by itself."""
    sampler = DistributedSampler(range(20), num_replicas=2, rank=1, seed=3)
    sampler.set_epoch(epoch)
    return list(sampler)


SAID = {
    "counting": [0, 1, 2],
    "a jump": [0, 1, 7, 8],
    "backwards": [3, 1, 0],
    "never": [None, None, None],
    "once": [4, None, None],
    "late": [None, 1, 2],
}


@pytest.mark.slow
@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("way", ["persistent", "here", "ahead", "threads"])
def test_set_epoch_on_a_sampler_is_honoured(said, way):
    """Whatever was guessed and made ahead; never called, the order is the same each time."""
    arguments = {
        "here": {"seed": 0},
        "persistent": {"seed": 0, "num_workers": 1, "persistent_workers": True},
        "ahead": {"num_workers": 2, "buffer": Buffer(max_batches=14)},
        "threads": {"num_workers": 2, "buffer": Buffer(max_batches=14), "backend": "thread"},
    }[way]
    now, expected = 0, []
    for epoch in said:
        now = now if epoch is None else epoch
        expected.append(expected_order(now))
    assert orders(distributed(**arguments), said) == expected


def test_a_sampler_keeps_the_epoch_that_the_user_gave_it():
    """However far ahead the plan is: whoever counts by it counts right."""
    with distributed(num_workers=1, buffer=Buffer(max_batches=20)) as loader:
        for epoch in range(3):
            assert loader.sampler.epoch == epoch
            assert [i for batch, _ in loader for i in batch.tolist()] == expected_order(epoch)
            loader.sampler.set_epoch(loader.sampler.epoch + 1)


def test_a_right_guess_keeps_what_was_made():
    """Counting up by one, or by another step: what was made ahead is handed out."""
    for step in (1, 3):
        dataset = Asked(20)
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
        # By default the buffer may rest at 80 %, and the last batches taken count as part of that.
        deep = Buffer(max_batches=30, refill_below=30)
        with DataLoader(dataset, sampler=sampler, num_workers=2, buffer=deep) as loader:
            for turn in range(4):
                loader.sampler.set_epoch(step * turn)
                assert len(list(loader)) == 20
                if turn >= 1:
                    until(lambda: loader.statistics().ready_batches >= 24)
            before = dataset.total()
            loader.sampler.set_epoch(step * 4)
            iterator = iter(loader)
            assert loader.statistics().ready_batches >= 20
            assert dataset.total() - before <= 10
            del iterator


def test_set_epoch_on_a_batch_sampler_that_passes_it_on():
    """It is called by the user alone; the next epoch is read when it begins."""

    class Passing(BatchSampler):
        def set_epoch(self, epoch):
            self.sampler.set_epoch(epoch)

    def make(**arguments):
        sampler = DistributedSampler(range(20), num_replicas=2, rank=1, seed=3)
        return DataLoader(Squares(20), batch_sampler=Passing(sampler, 2, False), **arguments)

    with make(num_workers=1, buffer=Buffer(max_batches=14)) as loader:
        for epoch in (0, 1, 5, None, 6):
            if epoch is not None:
                loader.batch_sampler.set_epoch(epoch)
            seen = [index for batch, _ in loader for index in batch.tolist()]
            assert seen == expected_order(5 if epoch is None else epoch)


@pytest.mark.slow
@pytest.mark.parametrize("within", [False, True], ids=["dataset", "subset"])
@pytest.mark.parametrize("way", ["workers", "here", "persistent", "ahead", "threads", "spawn"])
def test_set_epoch_on_a_dataset_reaches_live_workers(way, within):
    """Before the first epoch, and between others: workers get copies of the dataset as it is."""
    arguments = {
        "here": {"seed": 0},
        "workers": {"seed": 0, "num_workers": 2},
        "persistent": {"seed": 0, "num_workers": 2, "persistent_workers": True},
        "ahead": {"num_workers": 2, "buffer": Buffer(max_batches=14)},
        "threads": {"num_workers": 2, "buffer": Buffer(max_batches=14), "backend": "thread"},
        "spawn": {"num_workers": 1, "buffer": "1MB", "multiprocessing_context": "forkserver"},
    }[way]
    dataset = Epochal(8)
    loaded = Subset(dataset, range(2, 8)) if within else dataset
    with DataLoader(loaded, batch_size=2, **arguments) as loader:
        for said in (None, 4, 5, 7, None, 6):
            if said is not None:
                dataset.set_epoch(said)
            for _, epochs in loader:
                assert epochs.unique().tolist() == [dataset.epoch]
        assert dataset.epoch == 6


@pytest.mark.parametrize("arguments", [{"seed": 0}, {"num_workers": 1, "buffer": "1MB"}], ids=str)
def test_nothing_is_written_into_what_has_set_epoch(arguments):
    """Neither into a sampler nor into a dataset; their methods are called by the user alone."""
    dataset = Epochal(4)
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
    before = set(vars(sampler)), set(vars(dataset))
    with DataLoader(dataset, sampler=sampler, **arguments) as loader:
        list(loader)
        assert (set(vars(sampler)), set(vars(dataset))) == before
        assert (sampler.epoch, dataset.epoch) == (0, -1)


def test_shuffling_goes_by_set_epoch_if_that_is_called():
    """On the loader's own sampler as on any other."""
    with DataLoader(range(30), shuffle=True, seed=0, num_workers=1, buffer="1MB") as loader:
        first = [batch.item() for batch in loader]
        second = [batch.item() for batch in loader]
        assert first != second
        loader.sampler.set_epoch(0)
        assert [batch.item() for batch in loader] == first
        loader.sampler.set_epoch(1)
        assert [batch.item() for batch in loader] == second


@pytest.mark.slow
def test_a_sampler_with_a_generator_beside_a_dataset_with_set_epoch():
    """It is read no further than its epoch."""

    def epochs(**arguments):
        dataset = Epochal(6)
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(1))
        with DataLoader(dataset, sampler=sampler, seed=0, **arguments) as loader:
            seen = []
            for said in (0, 5, 2):
                dataset.set_epoch(said)
                seen.append([index.item() for index, _ in loader])
            return seen

    assert epochs(num_workers=2, buffer="1MB") == epochs()
