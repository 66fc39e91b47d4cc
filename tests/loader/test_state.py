"""`state_dict`: where the loader stands; and the epochs that follow from it."""

from __future__ import annotations

import json
import random

import numpy
import pytest
import torch
from datasets import Shards, Squares, Stream
from same import assert_same
from streams import (
    WAYS,
    Asked,
    DrawingSampler,
    Epochal,
    Noisy,
    PositionSampler,
    assert_same_epochs,
    epochs_of,
    resumed,
    until,
)
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from forebay import Buffer, DataLoader, OptionError

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT, BATCHES = 20, 7


def shuffled(**way):
    """A shuffled loader of a seed: 7 batches."""
    return DataLoader(Noisy(COUNT), batch_size=3, shuffle=True, seed=5, **way)


def taken(loader, epochs, batches):
    """Iterate for so many epochs, and then so many batches; return the last iterator, too."""
    for _ in range(epochs):
        list(loader)
    iterator = iter(loader)
    return iterator, [next(iterator) for _ in range(batches)]


# ---- with a seed --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ["here", "2 workers", "persistent", "bytes ahead", "threads ahead"])
def test_a_state_may_be_taken_at_any_batch(way):
    """At each of them the rest of the epoch follows, and then the next epoch; none is touched."""
    expected = epochs_of(shuffled(), 2)
    states = []
    with shuffled(**WAYS[way]) as loader:
        states.append(loader.state_dict())
        iterator = iter(loader)
        states.append(loader.state_dict())
        for _ in range(BATCHES):
            next(iterator)
            states.append(loader.state_dict())
        assert next(iterator, None) is None
        states.append(loader.state_dict())
    places = [(state["epoch"], state["batch"]) for state in states]
    assert places == [(0, 0), *((0, batch) for batch in range(BATCHES + 1)), (1, 0)]
    for state in states[:-1]:
        again = resumed(state, shuffled)
        assert_same_epochs(epochs_of(again, 2), [expected[0][state["batch"] :], expected[1]])
    assert_same_epochs(epochs_of(resumed(states[-1], shuffled), 1), expected[1:])


def test_a_state_is_the_same_for_all_ways():
    """It knows nothing of workers, backends and buffers; and is small."""
    states = set()
    for way in ("here", "2 workers", "bytes ahead", "threads"):
        with shuffled(**WAYS[way]) as loader:
            iterator, _ = taken(loader, 1, 2)
            states.add(json.dumps(loader.state_dict()))
            del iterator
    (state,) = states
    assert len(state) < 300


def test_a_state_that_was_loaded_is_the_state():
    """Before the first batch, and after each further one."""
    loader = shuffled()
    taken(loader, 1, 3)
    again = resumed(loader.state_dict(), shuffled)
    assert again.state_dict() == loader.state_dict()
    assert (again.statistics().epoch, again.statistics().batch) == (1, 3)
    iterator = iter(again)
    assert again.state_dict() == loader.state_dict()
    next(iterator)
    assert (again.state_dict()["epoch"], again.state_dict()["batch"]) == (1, 4)


@pytest.mark.slow
def test_what_is_ready_is_not_handed_out():
    """Behind a deep buffer, the state is that of the batches that the loop has seen."""
    expected = epochs_of(shuffled(), 3)
    with shuffled(num_workers=2, buffer=Buffer(max_batches=15)) as loader:
        iterator, _ = taken(loader, 0, 2)
        until(lambda: loader.statistics().ready_batches >= 13)
        assert loader.statistics().ready_to >= (1, 5)
        state = loader.state_dict()
        del iterator
    assert (state["epoch"], state["batch"]) == (0, 2)
    assert_same_epochs(epochs_of(resumed(state, shuffled), 2), [expected[0][2:], expected[1]])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"seed": 0}, {}], ids=["seed", "no seed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_loading_a_state_touches_no_data(workers, arguments):
    """At batch 900 of 1000, only what is handed out from there on is asked for."""
    loader = DataLoader(Asked(2000), batch_size=2, shuffle=True, **arguments)
    iterator, _ = taken(loader, 0, 900)
    state, expected = loader.state_dict(), [batch.tolist() for batch in iterator]
    dataset = Asked(2000)

    def make():
        return DataLoader(dataset, batch_size=2, shuffle=True, num_workers=workers, **arguments)

    with resumed(state, make) as again:
        assert dataset.total() == 0
        assert [batch.tolist() for batch in again] == expected
    assert dataset.total() == 200
    assert len(expected) == 100


def test_a_state_may_be_loaded_in_the_middle_of_an_epoch():
    """The loop that was under way is told to end, and the loader is elsewhere."""
    expected = epochs_of(shuffled(), 2)
    for way in ("here", "2 workers", "bytes ahead"):
        with shuffled(**WAYS[way]) as loader:
            iterator, _ = taken(loader, 1, 2)
            state = loader.state_dict()
            next(iterator)
            loader.load_state_dict(state)
            with pytest.raises(RuntimeError, match="ended by"):
                next(iterator)
            assert_same(list(loader), expected[1][2:])
            loader.load_state_dict({**state, "epoch": 0, "batch": 6})
            assert_same(list(loader), expected[0][6:])


def test_after_a_break_the_state_is_where_it_broke_off():
    """For whoever stops at a number of steps."""
    expected = epochs_of(shuffled(), 2)
    loader = shuffled()
    for number, _ in enumerate(loader):
        if number == 2:
            break
    state = loader.state_dict()
    assert_same_epochs(epochs_of(resumed(state, shuffled), 2), [expected[0][3:], expected[1]])


def test_a_drawn_seed_is_in_the_state():
    """A buffered loader that has none of its own goes on with the one it drew."""

    def make():
        return DataLoader(Noisy(COUNT), batch_size=3, shuffle=True, buffer="1MB")

    loader = make()
    iterator, _ = taken(loader, 1, 2)
    state = loader.state_dict()
    expected = [list(iterator), list(loader)]
    assert_same_epochs(epochs_of(resumed(state, make), 2), expected)


REFUSED = {
    "version": ({"version": 99}, "^the state has version 99, this forebay reads 1\n"),
    "no version": ({"version": None}, "^the state has version None"),
    "seed": ({"seed": 6}, "^the state is of seed=6, the loader of seed=5\n"),
    "kind": ({"kind": "pass"}, "^the state is of a loader without seed=, .* this one is with\n"),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_a_state_of_something_else_is_refused(changes, words):
    """And changes nothing."""
    loader = shuffled()
    taken(loader, 1, 2)
    before = loader.state_dict()
    with pytest.raises(OptionError, match=words) as caught:
        loader.load_state_dict({**before, **changes})
    assert "Nothing was changed." in str(caught.value)
    assert loader.state_dict() == before


def test_a_state_with_a_seed_is_refused_by_a_loader_by_torchs_arguments_alone():
    """It could not keep the promise."""
    with pytest.raises(OptionError, match=r"^the state is of a loader with seed=, .* is without\n"):
        DataLoader(Noisy(COUNT)).load_state_dict(shuffled().state_dict())


# ---- samplers and datasets that have something to carry -----------------------------------------


def with_generator(replacement):
    """A loader whose sampler has a generator of its own."""

    def make(**way):
        generator = torch.Generator().manual_seed(77)
        sampler = RandomSampler(range(COUNT), replacement=replacement, generator=generator)
        return DataLoader(Noisy(COUNT), batch_size=3, sampler=sampler, **way)

    return make


def with_position(**way):
    """A loader whose sampler holds its own position."""
    return DataLoader(Noisy(COUNT), batch_size=3, sampler=PositionSampler(COUNT), **way)


def with_batches_of_positions(**way):
    """A loader whose batch sampler is a plain one over such a sampler."""
    inner = BatchSampler(PositionSampler(COUNT), 3, drop_last=False)
    return DataLoader(Noisy(COUNT), batch_sampler=inner, **way)


def weighted(**way):
    """A loader with a weighted sampler and its generator."""
    weights = torch.arange(COUNT) + 1.0
    sampler = WeightedRandomSampler(weights, COUNT, generator=torch.Generator().manual_seed(7))
    return DataLoader(Noisy(COUNT), batch_size=3, sampler=sampler, **way)


CARRYING = {
    "generator": with_generator(False),
    "generator, drawn from step by step": with_generator(True),
    "weights": weighted,
    "position": with_position,
    "batch sampler": with_batches_of_positions,
}


@pytest.mark.slow
@pytest.mark.parametrize("make", CARRYING.values(), ids=CARRYING)
@pytest.mark.parametrize("way", ["here", "2 workers", "ahead"])
def test_a_sampler_with_something_to_carry_goes_on(make, way):
    """In the first epoch, in a later one, and between two; whatever was read ahead."""
    deep = {"num_workers": 2, "buffer": Buffer(max_batches=12)}
    way = {"seed": 3, **(deep if way == "ahead" else WAYS[way])}
    expected = epochs_of(make(seed=3), 4)
    assert_same_epochs(epochs_of(make(**way), 4), expected)
    for epochs, batches in ((0, 0), (0, 4), (1, 2), (1, 7)):
        with make(**way) as loader:
            iterator, _ = taken(loader, epochs, batches)
            state = loader.state_dict()
            del iterator
        again = resumed(state, lambda: make(seed=3))
        rest = [expected[epochs][batches:], *expected[epochs + 1 :]]
        assert_same_epochs(epochs_of(again, 4 - epochs), rest)
    with make(**way) as loader:
        list(loader)
        state = loader.state_dict()
    assert_same_epochs(epochs_of(resumed(state, lambda: make(seed=3)), 3), expected[1:])


@pytest.mark.slow
@pytest.mark.parametrize("make", CARRYING.values(), ids=CARRYING)
def test_after_a_break_a_sampler_goes_on_alike_everywhere(make):
    """How far it was read ahead is no part of what it carries on."""
    epochs = []
    for way in ("here", "3 workers", "bytes ahead"):
        with make(seed=3, **WAYS[way]) as loader:
            _, first = taken(loader, 0, 2)
            epochs.append([first, list(loader)])
    for other in epochs[1:]:
        assert_same_epochs(other, epochs[0])


class Curriculum(Squares):
    """A dataset with a state."""

    level = 0

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]

    def __getitem__(self, index):
        return index, self.level


@pytest.mark.parametrize("arguments", [{"seed": 0}, {}], ids=["seed", "no seed"])
def test_a_dataset_with_a_state_is_carried(arguments, num_workers):
    """The trainer's copy of it, before workers get theirs."""
    dataset = Curriculum(4)
    loader = DataLoader(dataset, **arguments)
    iter(loader)
    dataset.level = 3
    state = loader.state_dict()
    again = resumed(state, lambda: DataLoader(Curriculum(4), num_workers=num_workers, **arguments))
    with again:
        assert [tuple(map(int, batch)) for batch in again] == [(number, 3) for number in range(4)]


def test_what_set_epoch_said_is_carried():
    """A program that resumes may say it again, or not."""

    def make():
        sampler = DistributedSampler(range(COUNT), 2, 1)
        return DataLoader(Epochal(COUNT), batch_size=3, sampler=sampler, seed=0)

    loader = make()
    loader.sampler.set_epoch(4)
    loader.dataset.set_epoch(9)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    again = resumed(state, make)
    assert (again.sampler.epoch, again.dataset.epoch) == (4, 9)
    assert_same(list(again), rest)
    again = resumed(state, make)
    again.dataset.set_epoch(10)
    assert [batch[1].unique().tolist() for batch in again] == [[10]] * 3


# ---- with torch's arguments alone ---------------------------------------------------------------


def plain(**arguments):
    """A loader by torch's arguments alone, whose samples draw nothing: 7 batches."""
    return DataLoader(Squares(COUNT), batch_size=3, **arguments)


def in_memory(**arguments):
    """The same, of tensors that are sliced."""
    return DataLoader(TensorDataset(torch.arange(COUNT)), batch_size=3, **arguments)


@pytest.mark.slow
@pytest.mark.usefixtures("_generators")
@pytest.mark.parametrize("make", [plain, in_memory])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_without_a_seed_the_rest_of_the_epoch_follows(make, persistent, shuffle, num_workers):
    """At any batch, in the first epoch and in the second."""
    arguments = {"shuffle": shuffle, "num_workers": num_workers}
    arguments["persistent_workers"] = persistent and num_workers > 0
    for epochs in (0, 1):
        states, expected = [], []
        with make(**arguments) as loader:
            iterator, _ = taken(loader, epochs, 0)
            states.append(loader.state_dict())
            for batch in iterator:
                states.append(loader.state_dict())
                expected.append(batch)
        assert [state["batch"] for state in states] == list(range(BATCHES + 1))
        assert {state["epoch"] for state in states} == {epochs}
        for state in states if not num_workers else states[1 :: 3 - epochs]:
            with resumed(state, lambda: make(**arguments)) as again:
                if state["batch"]:
                    assert_same(list(again), expected[state["batch"] :])
                    assert again.state_dict()["epoch"] == epochs + 1
                assert len(list(again)) == BATCHES


@pytest.mark.slow
@pytest.mark.usefixtures("_generators")
@pytest.mark.parametrize("make", [plain, in_memory, *CARRYING.values()])
def test_without_a_seed_a_generator_makes_all_epochs_follow(make, num_workers):
    """The loader's own, or the sampler's, goes on as it would have."""

    def made():
        if make not in (plain, in_memory):
            return make(num_workers=num_workers, collate_fn=indices)
        generator = torch.Generator().manual_seed(2)
        return make(shuffle=True, generator=generator, num_workers=num_workers)

    expected = epochs_of(made(), 3)
    for epochs, batches in ((0, 0), (1, 2), (1, 7)):
        with made() as loader:
            iterator, _ = taken(loader, epochs, batches)
            state = loader.state_dict()
            del iterator
        again = resumed(state, made)
        rest = [expected[epochs][batches:], *expected[epochs + 1 :]]
        assert_same_epochs(epochs_of(again, 3 - epochs), rest)
    with made() as loader:
        list(loader)
        state = loader.state_dict()
    assert_same_epochs(epochs_of(resumed(state, made), 2), expected[1:])


def indices(samples):
    """Leave out what is random."""
    return [sample[0] for sample in samples]


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


def test_with_no_order_there_is_no_place():
    """With in_order=False it depends on the workers which batches were handed out."""
    loader = plain(num_workers=2, in_order=False)
    with pytest.raises(OptionError, match=r"^state_dict\(\) is not possible with in_order=False"):
        loader.state_dict()


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
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("sizes", "persistent"),
    [((9,), False), ((9, 8), False), ((9, 2, 6), True), ((0, 5, 5), False)],
)
def test_iterable_datasets_with_a_state_go_on_in_each_worker(sizes, drop_last, persistent):
    """At every batch, without walking again what was walked; and the next epoch is whole."""
    workers = len(sizes) if len(sizes) > 1 else 0

    def make():
        return DataLoader(
            Walk(*sizes),
            batch_size=2,
            num_workers=workers,
            drop_last=drop_last,
            persistent_workers=persistent and workers > 0,
        )

    expected = [firsts(epoch) for epoch in epochs_of(make(), 2)]
    states = []
    with make() as loader:
        for _ in loader:
            states.append(loader.state_dict())
    for batches, state in enumerate(states, 1):
        with resumed(state, make) as again:
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
    with pytest.raises(OptionError, match=r"^the state is of num_workers=2, .* num_workers=1\n"):
        other.load_state_dict(state)
    other.load_state_dict(after)
    assert other.state_dict()["epoch"] == 1
