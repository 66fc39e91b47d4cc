"""`set_epoch`, of samplers and of datasets: it is heeded, and nothing of the user's is changed."""

from __future__ import annotations

import pytest
import torch
from datasets import Squares
from streams import Asked, Epochal, Noisy, until
from torch.utils.data import BatchSampler, DistributedSampler, Subset

from forebay import Buffer, DataLoader, mix

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


# ---- what frameworks do --------------------------------------------------------------------------
# Lightning calls `set_epoch` after it has begun to iterate, and may not load the loader's state.


def noisy(way, **arguments):
    """A loader of samples that draw, in epochs of 5 batches."""
    samples = {"shuffle": True}
    if way == "DistributedSampler":
        samples = {"sampler": DistributedSampler(range(20), num_replicas=2, rank=1, seed=3)}
        return DataLoader(Noisy(20), batch_size=2, seed=1, **samples, **arguments)
    return DataLoader(Noisy(20), batch_size=4, seed=1, **samples, **arguments)


def drawn(batches):
    """Return what the samples of batches have drawn."""
    return [batch[1].tolist() for batch in batches]


WAYS = ["plan", "DistributedSampler"]
PLACES = {"here": {}, "ahead": {"num_workers": 1, "buffer": Buffer(max_batches=14)}}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_an_epoch_that_is_named_is_that_epoch(way, place):
    """Its order and its samples' random numbers, whatever was iterated before."""
    with noisy(way, **place) as loader:
        expected = []
        for epoch in range(4):
            loader.sampler.set_epoch(epoch)
            expected.append(drawn(loader))
        assert len(set(map(str, expected))) == 4
        for epoch in (2, 0, 3):
            loader.sampler.set_epoch(epoch)
            assert drawn(loader) == expected[epoch]
            assert loader.epoch == epoch + 1


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_an_epoch_that_is_named_after_iter_is_that_epoch(way, place):
    """Until its first batch; the generators of the process stay as they are."""
    with noisy(way, **place) as loader:
        loader.sampler.set_epoch(3)
        expected = drawn(loader)
    with noisy(way, **place) as loader:
        iterator = iter(loader)
        before = torch.get_rng_state()
        loader.sampler.set_epoch(3)
        assert drawn(iterator) == expected
        assert torch.equal(torch.get_rng_state(), before)
        drawn(loader)
        loader.sampler.set_epoch(2)
        drawn(loader)
        loader.sampler.set_epoch(3)
        iterator = iter(loader)
        first = next(iterator)
        loader.sampler.set_epoch(0)  # for the next one
        assert drawn([first, *iterator]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("late", [False, True], ids=["before iter", "after iter"])
def test_the_rest_of_an_epoch_stays_if_it_is_named_again(way, late):
    """And another epoch than that of the state begins at its beginning."""

    def epoch_of_a_resume(named):
        again = noisy(way)
        again.load_state_dict(state)
        if late:
            iterator = iter(again)
            again.sampler.set_epoch(named)
            return drawn(iterator)
        again.sampler.set_epoch(named)
        return drawn(again)

    loader = noisy(way)
    loader.sampler.set_epoch(2)
    iterator = iter(loader)
    begin = [next(iterator), next(iterator)]
    state = loader.state_dict()
    rest = drawn(iterator)
    loader.sampler.set_epoch(3)
    following = drawn(loader)
    assert len(begin) + len(rest) == 5
    assert epoch_of_a_resume(2) == rest
    assert epoch_of_a_resume(3) == following


def test_a_state_of_an_epochs_end_and_the_next_epochs_number_agree():
    """After the last batch, a state is of the next epoch, which `set_epoch` may name, too."""
    loader = noisy("plan")
    loader.sampler.set_epoch(4)
    drawn(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (5, 0)
    expected = drawn(loader)
    for named in (None, 5):
        again = noisy("plan")
        again.load_state_dict(state)
        iterator = iter(again)
        if named is not None:
            again.sampler.set_epoch(named)
        assert drawn(iterator) == expected


def test_a_mixture_continues_where_a_named_epoch_begins():
    """As if it had been reached by counting."""

    def make():
        sources = {"a": (Noisy(12), 0.5), "b": (Noisy(9), 0.5)}
        return DataLoader(mix(sources), batch_size=4, shuffle=True, seed=2)

    counted = make()
    expected = [drawn(counted) for _ in range(3)]
    for late in (False, True):
        named = make()
        iterator = iter(named) if late else named
        named.sampler.set_epoch(2)
        assert drawn(iterator) == expected[2]
