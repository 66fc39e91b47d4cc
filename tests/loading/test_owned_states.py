"""What users' samplers and datasets own, and what a program does between epochs."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter

import numpy
import pytest
import torch
from stream_kinds import COUNT, Forgetful, Plain, WithArguments, own_part
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    Sampler,
    StackDataset,
    get_worker_info,
)

import forebay
from forebay import DataLoader, OptionError, WorkerDiedError

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WAYS = {
    "torch": {},
    "torch, workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "seed": {"seed": 0},
    "buffer": {"seed": 0, "num_workers": 2, "buffer": "1MB"},
}


def epoch_of(loader):
    """Return an epoch as lists."""
    return [batch.tolist() for batch in loader]


def through_json(state):
    """Return a state as a file returns it."""
    return json.loads(json.dumps(state))


# ---- generators of samplers ----------------------------------------------------------------------

GENERATORS = {
    "numpy": lambda: numpy.random.default_rng(0),
    "RandomState": lambda: numpy.random.RandomState(0),
    "random": lambda: random.Random(0),
    "torch": lambda: torch.Generator().manual_seed(0),
    "Philox": lambda: numpy.random.Generator(numpy.random.Philox(0)),
}


class Balanced(Sampler):
    """Draws its order from a generator of its own, when its iterator is made."""

    def __init__(self, kind):
        self.parts = {"rng": [GENERATORS[kind]()]}

    def __len__(self):
        return COUNT

    def __iter__(self):
        (rng,) = self.parts["rng"]
        if isinstance(rng, torch.Generator):
            return iter(torch.randperm(COUNT, generator=rng).tolist())
        items = list(range(COUNT))
        rng.shuffle(items)
        return iter(items)


class BalancedBatches(Balanced):
    """The same, of whole batches."""

    def __len__(self):
        return COUNT // 4

    def __iter__(self):
        items = list(super().__iter__())
        return iter([items[at : at + 4] for at in range(0, COUNT, 4)])


def balanced(kind, way, *, batches):
    """A loader of such a sampler."""
    if batches:
        return DataLoader(range(COUNT), batch_sampler=BalancedBatches(kind), **WAYS[way])
    return DataLoader(range(COUNT), 4, sampler=Balanced(kind), **WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("way", ["persistent", "buffer", "torch", "seed", "torch, workers"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_the_generators_that_a_sampler_owns_belong_to_the_state(kind, way, batches):
    """Under any name: in the middle of the second epoch, and at the end of the first."""
    with balanced(kind, way, batches=batches) as loader:
        expected = [epoch_of(loader) for _ in range(3)]
    assert expected[0] != expected[1] != expected[2]
    with balanced(kind, way, batches=batches) as loader:
        epoch_of(loader)
        states = [through_json(loader.state_dict())]
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(2)] == expected[1][:2]
        states.append(through_json(loader.state_dict()))
        del iterator
    for state, begun in zip(states, (0, 2), strict=True):
        with balanced(kind, way, batches=batches) as loader:
            loader.load_state_dict(state)
            assert [epoch_of(loader), epoch_of(loader)] == [expected[1][begun:], expected[2]]


def test_replay_refuses_an_epoch_that_a_sampler_cannot_go_back_to():
    """Its generator has moved on, or has not yet."""
    with pytest.raises(
        OptionError, match=r"^the sampler has a state, and its state before epoch 1"
    ):
        balanced("numpy", "seed", batches=False).replay(epoch=1, batch=0)


class OwnIterator(Sampler):
    """Is its own iterator, and goes on from a state in the next `__iter__` only."""

    def __init__(self):
        self.at, self.is_resumed = 0, False

    def __len__(self):
        return COUNT

    def __iter__(self):
        self.at, self.is_resumed = (self.at if self.is_resumed else 0), False
        return self

    def __next__(self):
        if self.at >= COUNT:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.is_resumed = state["at"], True


@pytest.mark.parametrize("way", ["torch", "seed"])
def test_a_sampler_that_is_its_own_iterator_is_iterated_once(way):
    """A second `iter()` would begin the epoch anew."""
    loader = DataLoader(range(COUNT), None, sampler=OwnIterator(), **WAYS[way])
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    again = DataLoader(range(COUNT), None, sampler=OwnIterator(), **WAYS[way])
    again.load_state_dict(loader.state_dict())
    assert first + list(again) == list(range(COUNT))
    assert list(again) == list(range(COUNT))


# ---- a state that nobody asked for ---------------------------------------------------------------


class SamplerWithArguments(Sampler):
    """Has a state with an argument."""

    def __len__(self):
        return COUNT

    def __iter__(self):
        return iter(range(COUNT))

    def state_dict(self, rank):
        return {"rank": rank}

    def load_state_dict(self, state):
        raise AssertionError("nobody asked for it")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["stream", "sampler"])
def test_a_state_with_arguments_is_an_error_only_if_it_is_asked_for(what, way):
    """Batches are torch's."""

    def make():
        if what == "stream":
            return DataLoader(WithArguments(), 4, **WAYS[way])
        return DataLoader(range(COUNT), 4, sampler=SamplerWithArguments(), **WAYS[way])

    with make() as loader:
        iterator = iter(loader)
        first = [next(iterator).tolist() for _ in range(3)]
        if what == "sampler" or "seed" not in WAYS[way]:
            with pytest.raises(OptionError, match=r"^no state can be made: \w+.state_dict\(\) r"):
                loader.state_dict()
        else:  # it is read again
            with make() as again:
                again.load_state_dict(loader.state_dict())
                assert epoch_of(again) == epoch_of(make())[3:]
        assert len(first) + len(epoch_of(iterator)) == len(epoch_of(loader)) == 6


# ---- set_epoch within --------------------------------------------------------------------------


class Named(Dataset):
    """Samples that tell the epoch."""

    epoch = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch


class NamedStream(Named, IterableDataset):
    """The same, one after the other."""

    def __iter__(self):
        for _ in range(8):
            yield self.epoch


class Wrapped(IterableDataset):
    """Refers to a stream by another name."""

    def __init__(self, source):
        self.sources = {"one": [source]}

    def __iter__(self):
        yield from self.sources["one"][0]


class WrappedSampler(Sampler):
    """Refers to a sampler by another name."""

    def __init__(self, base):
        self.base = base

    def __iter__(self):
        yield from self.base

    def __len__(self):
        return 8


class NamedSampler(Named, Sampler):
    """Yields the epoch as index."""

    def __iter__(self):
        return iter([self.epoch] * 8)


WITHIN = {
    "concat": (Named, lambda part: {"dataset": ConcatDataset([part, part])}),
    "stack": (Named, lambda part: {"dataset": StackDataset(part, part)}),
    "mix": (Named, lambda part: {"dataset": forebay.mix({"a": (part, 1)})}),
    "chain": (NamedStream, lambda part: {"dataset": ChainDataset([part])}),
    "wrapped": (NamedStream, lambda part: {"dataset": Wrapped(part)}),
    "sampler": (NamedSampler, lambda part: {"dataset": range(9), "sampler": WrappedSampler(part)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("within", WITHIN)
def test_set_epoch_is_heeded_wherever_it_is(within):
    """Of parts of datasets, and of samplers under another name, though a buffer prefetches."""
    make, around = WITHIN[within]
    part = make()
    with DataLoader(**around(part), batch_size=4, num_workers=1, buffer="1MB") as loader:
        for epoch in range(3):
            part.set_epoch(epoch)
            batches = [batch[0] if within == "stack" else batch for batch in loader]
            found = {int(each) for batch in batches for each in batch}
            assert found == {epoch}


# ---- a worker that dies --------------------------------------------------------------------------


class Lethal(Plain):
    """Kills its worker once, at a sample of worker 1, and shuffles by fresh entropy if told to."""

    def __init__(self, folder, *, is_random):
        self.trace, self.is_random = folder / "died", is_random

    def __iter__(self):
        items = own_part(self.order())
        if self.is_random:
            random.Random(os.urandom(8)).shuffle(items)
        for at, number in enumerate(items):
            if at == 7 and get_worker_info().id == 1 and not self.trace.exists():
                self.trace.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield number


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"seed": 0, "buffer": "1MB"}], ids=str)
@pytest.mark.parametrize("is_random", [True, False])
def test_a_stream_whose_worker_died_goes_on_or_is_an_error(is_random, options, tmp_path):
    """It is read again up to where it was: the same, or an error that says so."""
    found = []
    with DataLoader(Lethal(tmp_path, is_random=is_random), 3, num_workers=2, **options) as loader:
        iterator = iter(loader)
        if is_random:
            with pytest.raises(WorkerDiedError, match=r"^a worker died, and its part of Lethal"):
                found += [number for batch in iterator for number in batch.tolist()]
        found += [number for batch in iterator for number in batch.tolist()]
    assert max(Counter(found).values()) == 1
    assert is_random or sorted(found) == list(range(COUNT))


# ---- streams that cannot be continued ------------------------------------------------------------


class Entropic(Forgetful):
    """Has another order in each process."""

    def order(self):
        items = list(range(COUNT))
        random.Random(os.urandom(8)).shuffle(items)
        return items


def test_a_stream_that_cannot_be_continued_is_refused():
    """What is read again is compared; without the check it goes on."""

    def make():
        return DataLoader(Entropic(), 4, seed=0)

    loader = make()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    with pytest.raises(OptionError, match=r"^the rest of the epoch is not known: Entropic gives"):
        list(again)
    again = make()
    again.load_state_dict(state, strict=False)
    assert len(list(again)) <= 3


# ---- epochs that are left ------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["seed", "torch", "buffer"])
def test_a_look_at_the_first_batch_is_no_epoch(way):
    """Neither before the loop nor after a resume: the loop has all epochs, and the same ones."""

    def make():
        return DataLoader(range(16), 4, **WAYS[way])

    with make() as loader:
        expected = [epoch_of(loader) for _ in range(range(loader.epoch, 3).stop)]
    with make() as loader:
        next(iter(loader))
        found = [epoch_of(loader) for _ in range(loader.epoch, 3)]
        assert found == expected
    with make() as loader:
        epoch_of(loader)
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = loader.state_dict()
        del iterator
    with make() as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        assert [epoch_of(loader) for _ in range(loader.epoch, 3)] == [expected[1][2:], expected[2]]


def test_an_epoch_that_is_left_after_a_state_is_said():
    """A resume finishes it, and the program that goes on does not; there is a way for both."""

    def make():
        return DataLoader(range(16), 4, shuffle=True, seed=0)

    loader = make()
    iterator = iter(loader)
    next(iterator), next(iterator)
    loader.state_dict()
    with pytest.warns(UserWarning, match=r"^epoch 0 was left after batch 2 and state_dict\(\)"):
        iterator = iter(loader)
    again = make()
    again.load_state_dict(loader.state_dict())
    assert [epoch_of(again), epoch_of(again)] == [epoch_of(iterator), epoch_of(loader)]


def test_replay_of_a_mixture_needs_no_batch_before():
    """Each epoch of it continues its sources."""

    def make():
        parts = {"a": (range(21), 1), "b": (range(100, 121), 3)}
        return DataLoader(forebay.mix(parts), 4, shuffle=True, seed=1)

    loader = make()
    expected = [epoch_of(loader) for _ in range(3)]
    for epoch in numpy.arange(3):
        batches = [make().replay(epoch=epoch, batch=at).tolist() for at in numpy.arange(11)]
        assert batches == expected[epoch]


def test_replay_of_a_stream_says_that_it_is_one():
    """And not that it has no seed."""
    with pytest.raises(OptionError, match="needs a dataset whose samples have an index"):
        DataLoader(Plain(), seed=0).replay(epoch=0, batch=0)
