"""`state_dict` of loaders without a seed: by torch's arguments alone, and of iterable datasets."""

from __future__ import annotations

import json
import random

import numpy
import pytest
import torch
from datasets import Shards, Squares, Stream
from same import assert_same
from streams import (
    BATCHES,
    CARRYING,
    COUNT,
    DrawingSampler,
    assert_same_epochs,
    epochs_of,
    rest_of,
    resumed,
    taken,
)
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from forebay import Buffer, DataLoader, OptionError

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# ---- with torch's arguments alone ---------------------------------------------------------------


def plain(**arguments):
    """A loader by torch's arguments alone, whose samples draw nothing: 7 batches."""
    return DataLoader(Squares(COUNT), batch_size=3, **arguments)


def in_memory(**arguments):
    """The same, of tensors that are sliced."""
    return DataLoader(TensorDataset(torch.arange(COUNT)), batch_size=3, **arguments)


def in_own_batches(shuffle, **arguments):
    """The same, by a batch sampler of the user."""
    order = RandomSampler(range(COUNT)) if shuffle else SequentialSampler(range(COUNT))
    return DataLoader(Squares(COUNT), batch_sampler=BatchSampler(order, 3, False), **arguments)


def drawn_at_once(shuffle, **arguments):
    """The same, of a batch sampler that draws its order when iteration begins."""
    assert shuffle
    return DataLoader(Squares(COUNT), batch_sampler=DrawnAtOnce(), **arguments)


class DrawnAtOnce(Sampler):
    """Batches of three in a random order."""

    def __iter__(self):
        return iter([each.tolist() for each in torch.randperm(COUNT).split(3)])

    def __len__(self):
        return BATCHES


@pytest.mark.slow
@pytest.mark.usefixtures("_generators")
@pytest.mark.parametrize(
    ("make", "shuffle", "num_workers", "persistent"),
    [
        (plain, False, 0, False),
        (plain, True, 0, False),
        (in_memory, False, 0, False),
        (in_memory, True, 0, False),
        (plain, True, 2, False),
        (plain, False, 2, True),
        (in_memory, True, 2, True),
        (in_own_batches, False, 0, False),
        (in_own_batches, True, 0, False),
        (in_own_batches, True, 2, False),
        (drawn_at_once, True, 0, False),
        (drawn_at_once, True, 2, False),
        (drawn_at_once, True, 2, True),
    ],
)
def test_without_a_seed_the_rest_of_the_epoch_follows(make, shuffle, num_workers, persistent):
    """At any batch, in the first epoch and in the second."""
    arguments = {
        "shuffle": shuffle,
        "num_workers": num_workers,
        "persistent_workers": persistent,
    }
    for epochs in (0, 1):
        states, expected = [], []
        with make(**arguments) as loader:
            iterator, _ = taken(loader, epochs, 0)
            states.append(loader.state_dict())
            for batch in iterator:
                states.append(loader.state_dict())
                expected.append(batch)
        assert [state["batch"] for state in states] == [*range(BATCHES), 0]
        assert {state["epoch"] for state in states[:-1]} == {epochs}
        for state in states if not num_workers else states[1 :: 3 - epochs]:
            with resumed(state, lambda: make(**arguments)) as again:
                if state["batch"]:
                    assert_same(list(again), expected[state["batch"] :])
                    assert again.state_dict()["epoch"] == epochs + 1
                assert len(list(again)) == BATCHES


@pytest.mark.slow
@pytest.mark.usefixtures("_generators")
@pytest.mark.parametrize(
    ("make", "num_workers"),
    [
        *((make, 0) for make in (plain, in_memory, *CARRYING.values())),
        (plain, 2),
        (CARRYING["generator"], 2),
        (CARRYING["position"], 2),
    ],
)
def test_without_a_seed_a_generator_makes_all_epochs_follow(make, num_workers):
    """The loader's own, or the sampler's, goes on as it would have."""

    def made():
        if make not in (plain, in_memory):
            return make(num_workers=num_workers, collate_fn=indices)
        generator = torch.Generator().manual_seed(2)
        return make(shuffle=True, generator=generator, num_workers=num_workers)

    expected = epochs_of(made(), 3)
    for epochs, batches in ((1, 2), (1, 7)):
        with made() as loader:
            iterator, _ = taken(loader, epochs, batches)
            state = loader.state_dict()
            del iterator
        again = resumed(state, made)
        rest = rest_of(expected, epochs, batches)
        assert_same_epochs(epochs_of(again, len(rest)), rest)
    with made() as loader:
        list(loader)
        state = loader.state_dict()
    assert_same_epochs(epochs_of(resumed(state, made), 2), expected[1:])


def test_the_generator_of_an_iterable_dataset_goes_on():
    """Its workers are seeded from it, in the epoch after the state, too."""

    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(DrawingStream(), num_workers=1, generator=generator)

    loader = made(2)
    list(loader)
    again = made(3)
    again.load_state_dict(loader.state_dict())
    assert_same(list(again), list(loader))


class DrawingStream(IterableDataset):
    """Three random numbers."""

    def __iter__(self):
        return iter(torch.rand(3))


def indices(samples):
    """Leave out what is random."""
    return [sample[0] for sample in samples]


@pytest.mark.slow
@pytest.mark.usefixtures("_generators")
def test_a_resume_leaves_the_trainers_generators_alone(num_workers):
    """Whoever restored them goes on with the numbers they give, and the next order comes from them.

    So with torch's global generator, too, all later epochs follow.
    """
    torch.manual_seed(1)
    with plain(shuffle=True, num_workers=num_workers) as loader:
        iterator, _ = taken(loader, 0, 3)
        state, generators = loader.state_dict(), torch.get_rng_state()
        expected = [list(iterator), torch.rand(3), list(loader), list(loader)]
    torch.manual_seed(99)
    random.seed(4)
    numpy.random.seed(4)
    with resumed(state, lambda: plain(shuffle=True, num_workers=num_workers)) as again:
        torch.set_rng_state(generators)
        rest = list(again)
        assert_same([rest, torch.rand(3), list(again), list(again)], expected)
    drawn = random.random(), numpy.random.rand()
    random.seed(4)
    numpy.random.seed(4)
    assert drawn == (random.random(), numpy.random.rand())


ANY_ORDER = {"num_workers": 2, "in_order": False}
OUT_OF_ORDER = {
    "map-style": lambda **options: DataLoader(range(20), 2, **options),
    "sampler": CARRYING["position"],
    "iterable": lambda **options: DataLoader(Walk(9, 8), 2, **options),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", OUT_OF_ORDER.values(), ids=OUT_OF_ORDER)
def test_out_of_order_the_position_in_an_epoch_is_not_known(make):
    """Batches that others have overtaken may be left; before and after an epoch none is."""
    with make(**ANY_ORDER) as loader:
        before = loader.state_dict()
        iterator, first = taken(loader, 0, 1)
        with pytest.raises(OptionError, match=r"not known with in_order=False(.*\n)+.*in_order="):
            loader.state_dict()
        whole = [*first, *iterator]
        after = loader.state_dict()
    assert (before["epoch"], after["epoch"]) == (0, 1)
    for state in (before, after):
        with resumed(json.loads(json.dumps(state)), lambda: make(**ANY_ORDER)) as again:
            assert len(list(again)) == len(whole)


def test_a_state_of_batches_in_order_can_continue_in_any_order():
    """Those that are left come, and until the first of them the position is known."""
    loader = DataLoader(range(20), 2)
    taken(loader, 0, 3)
    state = json.loads(json.dumps(loader.state_dict()))
    with resumed(state, lambda: DataLoader(range(20), 2, **ANY_ORDER)) as again:
        iterator = iter(again)
        assert again.state_dict()["batch"] == 3
        rest = [batch.tolist() for batch in iterator]
    assert sorted(rest) == [[number, number + 1] for number in range(6, 20, 2)]


@pytest.mark.usefixtures("_generators")
def test_a_sampler_that_draws_by_torch_alone_follows():
    """torch's generator is in the state; other generators are the user's to restore."""

    class Drawing(DrawingSampler):
        def __iter__(self):
            for _ in range(self.count):
                yield int(torch.randint(self.count, (1,)))

    loader = plain(sampler=Drawing(COUNT))
    iterator, _ = taken(loader, 0, 3)
    state = loader.state_dict()
    rest = list(iterator)
    again = resumed(state, lambda: plain(sampler=Drawing(COUNT)))
    first = next(iter(again))
    assert_same(first, rest[0])


# ---- iterable datasets --------------------------------------------------------------------------


class Walk(IterableDataset):
    """Numbers of which each worker has its own, with a position that can be kept.

    `sizes` says how many worker w has. What was walked in all is counted, so that nobody can read
    on without its being seen.
    """

    def __init__(self, *sizes):
        self.sizes = sizes
        self.position = 0
        self.walked = 0

    def __iter__(self):
        info = get_worker_info()
        worker = 0 if info is None else info.id
        while self.position < self.sizes[worker]:
            self.position += 1
            self.walked += 1
            yield torch.tensor([100 * worker + self.position, self.walked])
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def firsts(batches):
    """Return the numbers of batches, without what tells how far was walked for them."""
    return [batch[:, 0].tolist() for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "arguments"),
    [
        ((9,), {}),
        ((9,), {"drop_last": True}),
        ((9, 8), {}),
        ((9, 2, 6), {"persistent_workers": True, "drop_last": True}),
        ((0, 5, 5), {}),
        ((9, 2, 6), {"buffer": "1MB"}),
        ((0, 5, 5), {"buffer": Buffer(max_batches=3), "drop_last": True}),
    ],
    ids=str,
)
def test_iterable_datasets_with_a_state_go_on_in_each_worker(sizes, arguments):
    """At any batch, without walking again what was walked; and the next epoch is whole."""
    workers = len(sizes) if len(sizes) > 1 else 0

    def make():
        return DataLoader(Walk(*sizes), batch_size=2, num_workers=workers, **arguments)

    expected = [firsts(epoch) for epoch in epochs_of(make(), 2)]
    states = []
    with make() as loader:
        for _ in loader:
            states.append(loader.state_dict())
    for batches in {1, len(states) // 2, len(states) - 1, len(states)}:
        with resumed(states[batches - 1], make) as again:
            rest = list(again)
            assert firsts(rest) == expected[0][batches:]
            assert all(batch[0, 1] <= sum(sizes) - 2 for batch in rest)
            assert firsts(again) == expected[1]
            if rest:
                assert int(rest[0][0, 1]) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_generators")
def test_iterable_datasets_without_a_state_are_read_on(num_workers):
    """What was handed out is made again, with the same seeds, and left out."""

    class Drawing(Stream):
        def __iter__(self):
            for number in range(self.count):
                yield torch.tensor([number, torch.randint(10**9, (1,)).item()])

    def make():
        return DataLoader(Drawing(9), batch_size=2, num_workers=num_workers)

    with make() as loader:
        iterator, _ = taken(loader, 1, 3)
        state = loader.state_dict()
        rest = list(iterator)
    before = torch.get_rng_state()
    with resumed(state, make) as again:
        iterator = iter(again)
        assert torch.equal(torch.get_rng_state(), before)
        if num_workers:
            assert_same(list(iterator), rest)
        else:  # what is drawn here from now on comes from the user's own generators
            assert firsts(iterator) == firsts(rest)
        assert len(list(again)) == 5 * max(num_workers, 1)


def test_the_parts_of_an_iterable_dataset_stay_as_many():
    """Within an epoch; between two of them it does not matter."""
    loader = DataLoader(Shards(4, 4), num_workers=2)
    with loader:
        iterator, _ = taken(loader, 0, 3)
        state = loader.state_dict()
        list(iterator)
        after = loader.state_dict()
    other = DataLoader(Shards(4, 4), num_workers=1)
    with pytest.raises(OptionError, match=r"^the state has num_workers=2, .* num_workers=1\n"):
        other.load_state_dict(state)
    other.load_state_dict(after)
    assert other.state_dict()["epoch"] == 1
