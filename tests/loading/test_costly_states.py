"""States that are too large for every batch: taken now and then, and exact after every batch."""

from __future__ import annotations

import json
import mmap
import pickle
import time

import numpy as np
import pytest
import torch
from datasets import Squares
from streams import taken
from torch.utils.data import IterableDataset, get_worker_info

from forebay import Buffer, DataLoader

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Large:
    """What a state has in it: of a terabyte, no test takes long enough for a second one."""

    def __init__(self, nbytes):
        self.nbytes = nbytes


class Calls:
    """Counts calls in any process."""

    def __init__(self):
        self.counts = mmap.mmap(-1, 8)

    def __call__(self):
        worker = 0 if get_worker_info() is None else get_worker_info().id
        self.counts[worker] = min(self.counts[worker] + 1, 255)


class Drawn(IterableDataset):
    """Numbers that are drawn by a generator of its own, on from epoch to epoch."""

    def __init__(self, given=6, raises_at=None):
        self.random, self.at, self.given = torch.Generator().manual_seed(3), 0, given
        self.raises_at, self.calls, self.pause_s = raises_at, Calls(), 0.0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.given:
            self.at = 0
            raise StopIteration
        self.at += 1
        time.sleep(8 * self.pause_s)
        if self.at == self.raises_at:
            raise ValueError("bad")
        worker = 0 if get_worker_info() is None else get_worker_info().id
        return 10**6 * worker + int(torch.randint(10**6, (), generator=self.random))

    def state_dict(self):
        self.calls()
        time.sleep(self.pause_s)
        large = 10**5 if self.pause_s else 10**12
        return {"at": self.at, "random": self.random.get_state(), "large": Large(large)}

    def load_state_dict(self, state):
        assert isinstance(state["large"], Large)
        self.at = state["at"]
        self.random.set_state(state["random"])


class Counting(Squares):
    """Samples with the number of samples that this copy was asked for."""

    def __init__(self, count=14):
        super().__init__(count)
        self.asked, self.calls, self.pause_s = 0, Calls(), 0.0

    def __getitem__(self, index):
        self.asked += 1
        time.sleep(8 * self.pause_s)
        return torch.tensor([index, self.asked])

    def state_dict(self):
        self.calls()
        time.sleep(self.pause_s)
        return {"asked": self.asked, "large": Large(10**5 if self.pause_s else 10**12)}

    def load_state_dict(self, state):
        self.asked = state["asked"]


WAYS = {
    "workers": {"num_workers": 2},
    "here": {},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "now and then": {"num_workers": 2},
    "now and then, persistent": {"num_workers": 2, "persistent_workers": True},
    "buffer": {"num_workers": 2, "buffer": "1MB"},
}


def paced(dataset, way):
    """Return a dataset, with a state that is taken now and then if the way says so."""
    dataset.pause_s = 0.001 if way.startswith("now and then") else 0.0
    return dataset


def resumed(state, make):
    """Return a new loader that goes on from a state, which travels as bytes."""
    loader = make()
    loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    return loader


def lists(batches):
    """Return batches as lists."""
    return [batch.tolist() for batch in batches]


def check_any_batch(make, epochs, every=1):
    """Go on from states within an epoch; compare the rest of it, and the next epoch."""
    with make() as loader:
        iterator, found = taken(loader, epochs, 0)
        states = [loader.state_dict()]
        for batch in iterator:
            found.append(batch.tolist())
            states.append(loader.state_dict())
        following = lists(loader)
        del iterator
    for batch in range(0, len(found), every):
        with resumed(states[batch], make) as again:
            assert [lists(again), lists(again)] == [found[batch:], following], batch


CUTS = [
    (0, "workers"),
    (0, "here"),
    (0, "now and then"),
    (1, "persistent"),
    (1, "buffer"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "way"), CUTS)
def test_a_stream_with_a_large_state_goes_on_from_any_batch(epochs, way):
    """Also of a generator in its state, and into the epoch after it."""

    def make():
        return DataLoader(paced(Drawn(), way), batch_size=2, **WAYS[way])

    check_any_batch(make, epochs)


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "way"), [cut for cut in CUTS if "buffer" not in str(cut)])
def test_a_dataset_with_a_large_state_goes_on_from_any_batch(epochs, way):
    """What each worker read since its last state is read again by the worker in its place."""

    def make():
        return DataLoader(paced(Counting(), way), batch_size=2, **WAYS[way])

    check_any_batch(make, epochs, every=2)


def test_a_state_of_a_state_that_was_loaded_is_exact():
    """What was read before both is counted."""

    def make():
        return DataLoader(Counting(), batch_size=2, num_workers=2)

    with make() as loader:
        expected = lists(loader)
    state = None
    for batch in range(7):
        with make() as loader:
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            assert next(iterator).tolist() == expected[batch]
            state = loader.state_dict()
            del iterator


@pytest.mark.parametrize("dataset", [Drawn, Counting])
def test_workers_ask_once_for_a_state_that_takes_long(dataset):
    """That call shows how large it is; the next one is due when it is a small share of the time."""
    with DataLoader(dataset(40), batch_size=1, num_workers=2) as loader:
        list(loader)
        assert list(loader.dataset.calls.counts[:3]) == [1, 1, 0]


def test_workers_that_live_on_are_asked_at_the_end_of_their_epoch():
    """The next epoch begins where this one ends; the first call shows how long a state takes."""

    class Slow(Drawn):
        def state_dict(self):
            time.sleep(0.2)
            return super().state_dict()

    with DataLoader(Slow(40), num_workers=1, persistent_workers=True) as loader:
        for _ in range(3):
            list(loader)
        assert loader.dataset.calls.counts[0] == 4


def test_after_an_epoch_that_was_left_early_the_first_batch_has_a_state():
    """A worker may have read batches that nobody took."""

    def make():
        return DataLoader(Counting(), batch_size=2, num_workers=1, persistent_workers=True)

    with make() as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        expected = lists(iterator)
        del iterator
    with resumed(state, make) as again:
        assert lists(again) == expected


def test_a_batch_that_raised_is_read_again_like_any_other():
    """It counts as returned, and what follows it is the same."""

    def make():
        return DataLoader(Drawn(12, raises_at=4), batch_size=3, num_workers=1)

    with make() as loader:
        iterator, _ = taken(loader, 0, 1)
        with pytest.raises(ValueError, match="bad"):
            next(iterator)
        state = loader.state_dict()
        assert state["batch"] == 2
        expected = lists(iterator)
        del iterator
    assert len(expected) == 3
    with resumed(state, make) as again:
        assert lists(again) == expected


def test_without_strict_a_stream_goes_on_in_other_batches():
    """What was read since a state is counted in samples."""
    with DataLoader(Drawn(), batch_size=2, num_workers=1) as loader:
        iterator, _ = taken(loader, 0, 2)
        state = loader.state_dict()
        expected = torch.cat(list(iterator)).tolist()
        del iterator
    with DataLoader(Drawn(), batch_size=1, num_workers=1) as again:
        again.load_state_dict(state, strict=False)
        assert torch.cat(list(again)).tolist() == expected


# ---- samplers ------------------------------------------------------------------------------------


class Ordered:
    """An order that is drawn when an epoch begins, and kept in the state with the position."""

    def __init__(self, count=22):
        self.count, self.at, self.order, self.calls = count, 0, None, Calls()

    def __len__(self):
        return self.count

    def __iter__(self):
        while self.at < self.count:
            if self.order is None:
                self.order = torch.randperm(self.count).tolist()
            self.at += 1
            yield self.order[self.at - 1]
        self.at, self.order = 0, None

    def state_dict(self):
        self.calls()
        return {"at": self.at, "order": self.order, "large": Large(10**12)}

    def load_state_dict(self, state):
        assert isinstance(state["large"], Large)
        self.at, self.order = state["at"], state["order"]


class Pairs:
    """Batches of two, as arrays, counted on from epoch to epoch."""

    def __init__(self, count=8):
        self.count, self.epoch, self.at = count, 0, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield np.array([2 * self.at, 2 * self.at + 1]) + self.epoch
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch, "large": Large(10**12)}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


def of_order(**arguments):
    """A loader of numbers in an order of `Ordered`."""
    return DataLoader(
        list(torch.arange(22)), **{"batch_size": 4, "sampler": Ordered(), **arguments}
    )


SAMPLED = {
    "workers": {"num_workers": 2},
    "here": {},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "seed": {"seed": 0},
    "seed, workers": {"num_workers": 2, "seed": 0},
    "buffer": {"num_workers": 1, "buffer": "1MB"},
    "few ready": {"num_workers": 1, "buffer": Buffer(max_batches=3)},
    "short batches dropped": {"num_workers": 2, "drop_last": True},
    "single": {"num_workers": 2, "batch_size": None},
}


@pytest.mark.slow
@pytest.mark.usefixtures("_generators")
@pytest.mark.parametrize("way", SAMPLED)
def test_a_sampler_with_a_large_state_goes_on_from_any_batch(way):
    """Its order is one that was drawn, and what it drew ahead is in the state of the loader."""
    torch.manual_seed(4)
    with of_order(**SAMPLED[way]) as loader:
        iterator, found, states = iter(loader), [], [loader.state_dict()]
        for batch in iterator:
            found.append(batch.tolist())
            states.append(loader.state_dict())
        del iterator
    assert len(states) == len(found) + 1
    for batch in range(0, len(found), 5 if way == "single" else 1):
        torch.manual_seed(90 + batch)  # the order does not depend on it
        with resumed(states[batch], lambda: of_order(**SAMPLED[way])) as again:
            assert lists(again) == found[batch:], batch
            assert sum(1 for _ in again) == len(found)
    assert states[-1]["epoch"] == 1
    assert states[-1]["kind_state"]["drawn"] is None


@pytest.mark.slow
@pytest.mark.parametrize("way", ["workers", "here", "persistent", "seed", "buffer"])
def test_a_batch_sampler_with_a_large_state_goes_on_into_later_epochs(way):
    """With batches of its own, which count on from epoch to epoch."""

    def make():
        return DataLoader(range(40), batch_sampler=Pairs(), **SAMPLED[way])

    with make() as loader:
        iterator, _ = taken(loader, 1, 0)
        states = [loader.state_dict(), *(loader.state_dict() for _ in iterator)]
        del iterator
    with make() as loader:
        epochs = [lists(loader) for _ in range(3)]
    assert epochs[1] != epochs[2]
    for batch in (0, 1, 5, 7, 8):
        with resumed(states[batch], make) as again:
            rest = [epochs[1][batch:]] if batch < 8 else []
            assert [lists(again) for _ in range(len(rest) + 1)] == [*rest, epochs[2]]


def test_other_workers_go_on_with_what_a_sampler_drew():
    """With a seed the rest of an epoch does not depend on who makes it."""
    with of_order(**SAMPLED["seed, workers"]) as loader:
        iterator, _ = taken(loader, 0, 2)
        state = loader.state_dict()
        expected = lists(iterator)
        del iterator
    for way in ("seed", "seed, workers"):
        with resumed(state, lambda way=way: of_order(**SAMPLED[way])) as again:
            assert lists(again) == expected
    with of_order(num_workers=1, buffer="1MB", seed=0) as again:
        again.load_state_dict(state)
        iterator = iter(again)
        assert next(iterator).tolist() == expected[0]
        second = again.state_dict()
        assert lists(iterator) == expected[1:]
        del iterator
    with resumed(second, lambda: of_order(**SAMPLED["seed"])) as again:
        assert lists(again) == expected[1:]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["workers", "seed, workers"])
def test_without_strict_what_a_sampler_drew_comes_in_batches_of_another_size(way):
    """No sample is lost or repeated, and a state of that epoch can be saved again."""
    with of_order(**SAMPLED[way]) as loader:
        iterator, _ = taken(loader, 0, 2)
        state = loader.state_dict()
        expected = torch.cat(list(iterator)).tolist()
        del iterator
    for size in (3, 8):
        with of_order(**{**SAMPLED[way], "batch_size": size}) as again:
            again.load_state_dict(state, strict=False)
            iterator = iter(again)
            first = next(iterator).tolist()
            second = again.state_dict()
            rest = torch.cat(list(iterator)).tolist()
            del iterator
            assert (len(first), first + rest) == (size, expected)
        with of_order(**{**SAMPLED[way], "batch_size": size}) as again:
            again.load_state_dict(second)
            assert torch.cat(list(again)).tolist() == rest


@pytest.mark.parametrize("way", ["workers", "here", "seed, workers"])
def test_a_sampler_whose_state_takes_long_is_asked_once_and_for_each_state(way):
    """Once to see how large it is; after that, only who asks for a state pays for it."""
    with of_order(**SAMPLED[way]) as loader:
        iterator = iter(loader)
        next(iterator)
        calls = loader.sampler.calls.counts
        assert calls[0] <= 1
        before = calls[0]
        for _ in iterator:
            pass
        assert calls[0] == before
        loader.state_dict()
        assert calls[0] - before <= 2


def test_what_a_sampler_draws_ahead_of_a_large_state_does_not_grow_with_the_buffer(monkeypatch):
    """It is in the checkpoint, so there is a limit."""
    monkeypatch.setattr("forebay.loading.sampler_kind.MOST_DRAWN", 4 * 80)
    with DataLoader(
        range(4000), 4, sampler=Ordered(4000), seed=0, num_workers=1, buffer="100MB"
    ) as loader:
        for count, _ in enumerate(loader, 1):
            if count % 200 == 100:
                drawn = sum(map(len, loader.state_dict()["kind_state"]["drawn"][0]))
                assert drawn <= 4 * (80 + 1)
        assert count == 1000


def test_numbers_of_numpy_that_a_sampler_drew_can_be_saved_as_json():
    """Like those of Python, which they are equal to."""

    class Numpys(Ordered):
        def __iter__(self):
            return map(np.int64, super().__iter__())

        def state_dict(self):
            return {"at": self.at, "order": self.order, "large": "x" * 10**6}

        def load_state_dict(self, state):
            self.at, self.order = state["at"], state["order"]

    def make():
        return of_order(sampler=Numpys(), num_workers=1)

    with make() as loader:
        iterator, _ = taken(loader, 0, 1)
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["kind_state"]["drawn"][0]
        expected = lists(iterator)
        del iterator
    with resumed(state, make) as again:
        assert lists(again) == expected
