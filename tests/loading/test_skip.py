"""Samples that cannot be had: named exactly, or left out and listed, alike everywhere."""

from __future__ import annotations

import pytest
import torch
from datasets import Failing, Squares
from same import assert_same
from streams import WAYS, Noisy, resumed, until
from torch.utils.data import TensorDataset

from forebay import Buffer, DataLoader, FailuresError, OptionError

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SOME = ["2 workers", "here", "persistent", "threads", "bytes ahead"]


class Patchy(Noisy):
    """Noisy samples, of which each fifth cannot be had."""

    def __getitem__(self, index):
        if index % 5 == 2:
            raise ValueError(f"no sample {index}")
        return super().__getitem__(index)


class PatchyGroups(Patchy):
    """The same in groups; a group with a bad sample cannot be had at all."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def loader_of(way="here", dataset=None, **arguments):
    """A loader that skips."""
    arguments = {"batch_size": 4, "shuffle": True, "seed": 1, **WAYS[way], **arguments}
    return DataLoader(dataset or Patchy(22), on_error="skip", **arguments)


def described(failures):
    """Return what does not differ in their tracebacks."""
    return [(each.index, each.epoch, each.batch, each.error, each.message) for each in failures]


# ---- left out -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_bad_samples_are_left_out_alike_everywhere():
    """The same batches, bit for bit, and the same list of failures."""
    expected = None
    for way in SOME:
        with loader_of(way) as loader:
            epochs = [list(loader) for _ in range(2)]
        found = epochs, described(loader.failures)
        expected = expected or found
        assert_same(found, expected)
    epochs, failures = expected
    for number, epoch in enumerate(epochs):
        assert sorted(torch.cat([batch[0] for batch in epoch]).tolist()) == [
            index for index in range(22) if index % 5 != 2
        ]
        assert sorted(failure[0] for failure in failures if failure[1] == number) == [2, 7, 12, 17]


def test_failures_say_what_there_is_to_say():
    """Index, epoch, batch, the error's type and words, and where it was raised; in order."""
    with loader_of("2 workers", shuffle=False) as loader:
        assert loader.failures == []
        list(loader)
        list(loader)
        failures = loader.failures
        assert [(each.index, each.epoch, each.batch) for each in failures] == [
            (index, epoch, index // 4) for epoch in (0, 1) for index in (2, 7, 12, 17)
        ]
        first = failures[0]
        assert (first.error, first.message) == ("ValueError", "no sample 2")
        assert 'raise ValueError(f"no sample {index}")' in first.traceback
        assert loader.statistics().failures == len(failures)
        failures.clear()
        assert len(loader.failures) == 8


def test_they_are_listed_when_their_batch_is_returned():
    """Not when it was made ahead."""
    with loader_of("2 workers", shuffle=False, buffer=Buffer(max_batches=9)) as loader:
        iterator = iter(loader)
        until(lambda: loader.statistics().ready_batches == 9)
        assert loader.failures == []
        next(iterator)
        assert [failure.index for failure in loader.failures] == [2]


def test_a_good_sample_does_not_depend_on_bad_neighbours():
    """It draws what it would have drawn beside good ones."""
    whole = list(DataLoader(Noisy(22), batch_size=4, seed=1))
    for batch, patchy in zip(whole, loader_of(shuffle=False), strict=True):
        good = [place for place, index in enumerate(batch[0].tolist()) if index % 5 != 2]
        assert_same(patchy[1], batch[1][good])


@pytest.mark.slow
@pytest.mark.parametrize("way", SOME)
def test_a_batch_of_nothing_but_bad_samples_is_left_out(way):
    """The next one comes in its place; numbers, states and replays count it all the same."""
    bad = (0, 4, 5, 6, 7, 11)
    with loader_of(way, Failing(12, KeyError("x"), bad), shuffle=False) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [1, 2, 3]
        state = loader.state_dict()
        assert next(iterator).tolist() == [8, 9, 10]
        assert loader.state_dict()["epoch"] == 1  # batch 2 was the last
        assert next(iterator, None) is None
        assert [failure.batch for failure in loader.failures] == [0, 1, 1, 1, 1, 2]
    dataset = Failing(12, KeyError("x"), bad)
    with resumed(state, lambda: loader_of("here", dataset, shuffle=False)) as again:
        assert again.state_dict()["batch"] == 1
    loader = loader_of("here", Failing(12, KeyError("x"), bad), shuffle=False)
    assert loader.replay(epoch=0, batch=2).tolist() == [8, 9, 10]
    with pytest.raises(IndexError, match="every sample of epoch 0, batch 1 is bad"):
        loader.replay(epoch=0, batch=1)


@pytest.mark.slow
@pytest.mark.parametrize("way", SOME)
def test_nothing_but_bad_samples(way):
    """An epoch of nothing is an error; so is the next."""
    with loader_of(way, Failing(6, OSError("gone"), tuple(range(6)))) as loader:
        for epoch in range(2):
            with pytest.raises(FailuresError, match=f"every sample of epoch {epoch} raised"):
                list(loader)
        assert len(loader.failures) == 12


@pytest.mark.slow
@pytest.mark.parametrize("way", SOME)
def test_single_samples_are_left_out(way):
    """With batch_size=None each is a batch of its own."""
    dataset = Failing(6, KeyError("x"), (0, 3))
    with loader_of(way, dataset, batch_size=None, shuffle=False) as loader:
        assert list(loader) == [1, 2, 4, 5]
    assert [failure.index for failure in loader.failures] == [0, 3]


def test_an_index_that_a_tensor_does_not_have_is_left_out():
    """Where whole batches are sliced, too."""
    dataset = TensorDataset(torch.arange(4))
    with loader_of("here", dataset, shuffle=None, sampler=[0, 9, 3]) as loader:
        assert [batch[0].tolist() for batch in loader] == [[0, 3]]
    assert [(failure.index, failure.error) for failure in loader.failures] == [(9, "IndexError")]


def test_what_collation_raises_is_no_bad_sample():
    """It is raised: nobody can say whose fault it is."""

    def collate(samples):
        raise TypeError("cannot")

    for way in ("here", "2 workers"):
        with loader_of(way, collate_fn=collate) as loader:
            with pytest.raises(TypeError, match="cannot"):
                list(loader)


def test_an_iterable_dataset_cannot_skip():
    """Its iterator is at its end where it raises."""
    with pytest.raises(OptionError, match="an iterable dataset cannot"):
        DataLoader(iterable(), on_error="skip")


def iterable():
    """An iterable dataset."""

    class Empty(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    return Empty()


# ---- named --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", SOME)
@pytest.mark.parametrize("load", ["samples", "group", "collate_fn"])
def test_an_error_says_where_it_is_from(way, load):
    """Its notes name sample, epoch, batch, worker, and the call that makes the batch again."""
    dataset = {"samples": Patchy, "group": PatchyGroups, "collate_fn": Noisy}[load](8)
    arguments = {"collate_fn": torch.stack} if load == "collate_fn" else {}
    with DataLoader(dataset, batch_size=2, seed=3, **WAYS[way], **arguments) as loader:
        with pytest.raises((ValueError, TypeError)):
            list(loader)
        iterator, batch = iter(loader), 0 if load == "collate_fn" else 1
        for _ in range(batch):
            next(iterator)
        with pytest.raises((ValueError, TypeError)) as caught:
            next(iterator)
    what = {"samples": "sample 2", "group": "samples [2, 3]", "collate_fn": "samples [0, 1]"}
    first, second = caught.value.__notes__
    epoch = int(batch > 0)  # an iteration that no batch came of is no epoch
    assert first.startswith(f"forebay: {what[load]}, epoch {epoch}, batch {batch}, ")
    where = {"here": "in this process", "threads": "worker thread "}.get(way, "worker process ")
    assert where in first
    assert second.startswith(f"forebay: loader.replay(epoch={epoch}, batch={batch}) makes the same")


def test_replay_raises_what_was_really_raised():
    """The very exception, from the user's own frame, wherever the batch was made before."""
    error = ValueError("bad")
    loader = DataLoader(Failing(8, error, (5,)), batch_size=2, num_workers=2, seed=3)
    with pytest.raises(ValueError, match=r"^bad$") as caught:
        loader.replay(epoch=4, batch=2)
    assert caught.value is error
    assert caught.traceback[-1].name == "__getitem__"


def test_an_error_made_here_is_the_very_error():
    """Nothing is wrapped where nothing has to be sent; and it is not noted twice."""
    error = ValueError("bad")
    loader = DataLoader(Failing(4, error, (1, 2)), seed=3)
    for _ in range(2):
        iterator = iter(loader)
        next(iterator)
        for _ in range(2):
            with pytest.raises(ValueError, match="bad") as caught:
                next(iterator)
            assert caught.value is error
        assert next(iterator).item() == 3
    assert len(error.__notes__) == len(set(error.__notes__)) == 8


def test_without_a_seed_there_is_no_call_to_replay():
    """The note does not promise what cannot be."""
    loader = DataLoader(Failing(4, ValueError("bad"), (1,)), num_workers=1)
    with pytest.raises(ValueError, match="bad") as caught:
        list(loader)
    assert caught.value.__notes__ == ["forebay: sample 1, epoch 0, batch 1, worker process 0"]
    loader.close()


class Emptying(Squares):
    """Its `__getitems__` takes the indices out of the list, and has one bad sample."""

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("bad")
        return index

    def __getitems__(self, indices):
        return [self[indices.pop()] for _ in range(len(indices))][::-1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_may_change_the_list_of_indices(num_workers):
    """Only the bad sample is left out, and a state counts all the others."""

    def make():
        return DataLoader(Emptying(8), batch_size=4, on_error="skip", num_workers=num_workers)

    with make() as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        state = loader.state_dict()
        assert next(batches).tolist() == [4, 6, 7]
        assert [failure.source for failure in loader.failures] == [5]
    with resumed(state, make) as loader:
        assert [batch.tolist() for batch in loader] == [[4, 6, 7]]
