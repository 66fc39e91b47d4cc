"""With a seed the batches are the same everywhere, whoever makes them, when, and where."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
import torch.utils.data
from datasets import Squares
from same import assert_same
from streams import (
    WAYS,
    DrawingSampler,
    Noisy,
    NoisyGroups,
    assert_same_epochs,
    epochs_of,
    noisy_collate,
    noisy_convert,
)
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from forebay import DataLoader, OptionError

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT = 23

# What a loader may load.
LOADS = {
    "shuffled": lambda: {"dataset": Noisy(COUNT), "batch_size": 3, "shuffle": True},
    "in order": lambda: {"dataset": Noisy(COUNT), "batch_size": 4, "drop_last": True},
    "collate_fn": lambda: {
        "dataset": Noisy(COUNT),
        "batch_size": 3,
        "shuffle": True,
        "collate_fn": noisy_collate,
    },
    "sampler that draws": lambda: {
        "dataset": Noisy(COUNT),
        "batch_size": 2,
        "sampler": DrawingSampler(COUNT),
    },
    "batch_sampler": lambda: {
        "dataset": Noisy(COUNT),
        "batch_sampler": BatchSampler(RandomSampler(range(COUNT)), 5, drop_last=False),
    },
    "sampler of its own generator": lambda: {
        "dataset": Noisy(COUNT),
        "batch_size": 3,
        "sampler": RandomSampler(
            range(COUNT), replacement=True, generator=torch.Generator().manual_seed(4)
        ),
    },
    "__getitems__": lambda: {"dataset": NoisyGroups(COUNT), "batch_size": 3, "shuffle": True},
    "no batches": lambda: {
        "dataset": Noisy(COUNT),
        "batch_size": None,
        "shuffle": True,
        "collate_fn": noisy_convert,
    },
    "few that draw": lambda: {"dataset": Rarely(97), "batch_size": 8, "shuffle": True},
    "what reads the seed": lambda: {"dataset": ReadsSeed(97), "batch_size": 8, "shuffle": True},
    "tensors": lambda: {
        "dataset": TensorDataset(torch.rand(COUNT, 3)),
        "batch_size": 3,
        "shuffle": True,
    },
}


class Rarely(Squares):
    """Every twentieth sample draws, so that the first batch of a worker may not."""

    def __getitem__(self, index):
        return index, torch.rand(2) if index % 20 == 7 else torch.zeros(2)


class ReadsSeed(Squares):
    """Samples with a generator of their own, seeded as torch is: nothing is drawn from torch's."""

    def __getitem__(self, index):
        seed = torch.initial_seed() if index % 10 == 7 else 0
        return index, numpy.random.default_rng(seed).random()


def loader_of(load, **way):
    """A loader of a seed, of one of the loads, by one of the ways."""
    torch.manual_seed(3)  # for what a load draws when it is made
    return DataLoader(**LOADS[load](), seed=5, **way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_batches_do_not_depend_on_who_makes_them(way):
    """Two shuffled epochs, everything drawing: equal, bit for bit, to those made here."""
    expected = epochs_of(loader_of("collate_fn"), 2)
    assert_same_epochs(epochs_of(loader_of("collate_fn", **WAYS[way]), 2), expected)


@pytest.mark.parametrize("load", LOADS)
def test_each_epoch_is_different_and_has_the_samples_it_should(load):
    """In what is drawn, and in the order unless there is none."""
    if load == "tensors":
        pytest.skip("nothing is drawn")
    first, second = epochs_of(loader_of(load), 2)
    assert repr(first) != repr(second)


def test_the_generators_of_a_sample_are_not_one_and_the_same():
    """numpy's and torch's are of one kind: from one seed they would give the same bits."""

    class Words(Squares):
        def __getitem__(self, index):
            words = [numpy.random.randint(2**32, dtype=numpy.uint32).item() for _ in range(8)]
            return words, torch.randint(2**32, (8,)).tolist()

    (samples,) = epochs_of(DataLoader(Words(4), batch_size=None, seed=2), 1)
    for words, others in samples:
        assert not set(words) & set(others)


def test_another_seed_gives_other_batches():
    """And none gives other ones each time."""
    noisy = Noisy(COUNT)
    batches = [
        repr(list(DataLoader(noisy, batch_size=3, shuffle=True, seed=seed))) for seed in (0, 1, -1)
    ]
    assert len(set(batches)) == 3
    loaders = [DataLoader(noisy, shuffle=True, on_error="skip") for _ in range(2)]
    assert len({repr(list(loader)) for loader in loaders}) == 2


@pytest.mark.usefixtures("_generators")
def test_without_a_seed_it_comes_from_torchs():
    """`torch.manual_seed`, or `generator`, makes a buffered loader repeat itself."""
    for own in (False, True):
        drawn = []
        for workers in (0, 2):
            torch.manual_seed(8)
            generator = torch.Generator().manual_seed(8) if own else None
            deep = "1MB" if workers else None
            loader = DataLoader(
                *(Noisy(COUNT), 4, True),
                num_workers=workers,
                buffer=deep,
                on_error="skip",
                generator=generator,
            )
            drawn.append(epochs_of(loader, 2))
        assert_same_epochs(*drawn)


# ---- the trainer's own generators ---------------------------------------------------------------


def drawn_next():
    """Return what the global generators give next."""
    return torch.rand(2).tolist(), random.random(), numpy.random.rand(2).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "shuffle"),
    [
        pytest.param(way, shuffle, marks=() if shuffle == at % 2 else pytest.mark.thorough)
        for at, way in enumerate(["here", "2 workers", "persistent", "threads", "bytes ahead"])
        for shuffle in (False, True)
    ],
)
@pytest.mark.usefixtures("_generators")
def test_the_trainers_generators_are_left_as_torch_leaves_them(way, shuffle):
    """What the user draws after each epoch is what it would be with torch's loader."""
    way = WAYS[way]
    plain = {key: way[key] for key in ("num_workers", "persistent_workers") if key in way}
    drawn = []
    for kind, arguments in ((torch.utils.data.DataLoader, plain), (DataLoader, {"seed": 4, **way})):
        torch.manual_seed(6)
        random.seed(6)
        numpy.random.seed(6)
        dataset = Noisy(COUNT) if arguments.get("num_workers") else Squares(COUNT)
        loader = kind(dataset, batch_size=4, shuffle=shuffle, **arguments)
        drawn.append([])
        for _ in range(3):
            assert len(list(loader)) == 6
            drawn[-1].append(drawn_next())
        del loader
    assert drawn[0] == drawn[1]


@pytest.mark.usefixtures("_generators")
def test_samples_made_here_leave_the_generators_alone():
    """They draw from their own seeds, and the loop goes on with its own numbers."""
    torch.manual_seed(1)
    expected = [torch.rand(1).item() for _ in range(6)]
    torch.manual_seed(1)
    iterator = iter(DataLoader(Noisy(6), seed=0))
    torch.manual_seed(1)
    drawn = []
    for _ in iterator:
        drawn.append(torch.rand(1).item())
    assert drawn == expected


@pytest.mark.usefixtures("_generators")
def test_a_sampler_that_draws_leaves_the_generators_alone():
    """It has its own, however far ahead it is read."""
    loader = DataLoader(Squares(COUNT), sampler=DrawingSampler(COUNT), seed=0)
    iterator = iter(loader)
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate()
    assert len(list(iterator)) == COUNT
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


# ---- replay -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS)
def test_replay_gives_the_very_batch(load):
    """Of this epoch while it runs; of others, on a loader that made nothing, in any order."""
    expected = epochs_of(loader_of(load), 3)
    with loader_of(load, num_workers=2, buffer="1MB") as loader:
        assert len(list(loader)) == len(expected[0])
        rest = iter(loader)
        next(rest)
        for batch in (4, 0, 1):
            assert_same(loader.replay(epoch=1, batch=batch), expected[1][batch])
        assert_same(list(rest), expected[1][1:])
        assert_same(list(loader), expected[2])
        if load == "sampler of its own generator":
            with pytest.raises(OptionError, match="before epoch 0, batch 0 is not known"):
                loader.replay(epoch=0, batch=0)
            return
        assert_same(loader.replay(epoch=0, batch=2), expected[0][2])
    assert_same(loader_of(load).replay(epoch=2, batch=3), expected[2][3])


@pytest.mark.usefixtures("_generators")
def test_replay_changes_nothing():
    """Neither the generators nor where the loader stands."""
    loader = loader_of("shuffled")
    iterator = iter(loader)
    first = next(iterator)
    before, state = torch.get_rng_state(), loader.state_dict()
    assert_same(loader.replay(epoch=0, batch=0), first)
    loader.replay(epoch=7, batch=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert loader.state_dict() == state
    assert len(list(iterator)) == 7


@pytest.mark.parametrize(("epoch", "batch"), [(0, 8), (3, 100), (0, -1), (-1, 0)])
def test_replay_of_what_there_is_not(epoch, batch):
    """Both count from 0."""
    with pytest.raises(IndexError, match="epoch"):
        loader_of("shuffled").replay(epoch=epoch, batch=batch)


def test_replay_needs_a_seed():
    """Without one there is nothing to make the batch from."""
    for arguments in ({}, {"buffer": "1MB", "num_workers": 1}, {"num_workers": 2}):
        with pytest.raises(OptionError, match=r"^replay\(\) needs a seed"):
            DataLoader(Squares(3), **arguments).replay(epoch=0, batch=0)


# ---- iterable datasets --------------------------------------------------------------------------


class Drawn(IterableDataset):
    """Random numbers of each of the three generators."""

    def __iter__(self):
        for index in range(6):
            yield index, random.random(), float(numpy.random.rand()), float(torch.rand(()))


def drawn_after(seed, *, batches=0, state=None, **options):
    """Batches of an iterable dataset, where the process's generators have this seed, and a state.

    The training loop draws, too.
    """
    for seeded in (torch.manual_seed, random.seed, numpy.random.seed):
        seeded(seed)
    with DataLoader(Drawn(), batch_size=2, seed=7, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        found, own = [], []
        for _ in range(2):
            for batch in loader:
                found.append(batch)
                own.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
                if batches and len(found) == batches:
                    return loader.state_dict(), found
    return own, found


def test_without_workers_an_iterable_dataset_draws_from_the_seed():
    """As in one worker; what the training loop draws does not change it, nor the other way."""
    own, found = drawn_after(1)
    assert_same(drawn_after(2)[1], found)
    assert_same(drawn_after(3, num_workers=1)[1], found)
    assert not torch.equal(found[0][1], found[3][1]), "the next epoch has other numbers"
    for seeded in (torch.manual_seed, random.seed, numpy.random.seed):
        seeded(1)
    torch.empty((), dtype=torch.int64).random_()  # torch's base seed, of the first epoch
    assert (own[0][0], own[1][0]) == (random.random(), random.random())
    assert (own[0][1], own[1][1]) == tuple(numpy.random.rand(2))
    assert (own[0][2], own[1][2]) == tuple(torch.rand(2).tolist())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_datapipe_is_shuffled_by_the_seed(num_workers):
    """Not by torch's generator."""
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        pipe = IterableWrapper(range(20)).shuffle().sharding_filter()
        loader = DataLoader(pipe, batch_size=20, shuffle=True, seed=7, num_workers=num_workers)
        orders.append([batch.tolist() for _ in range(2) for batch in loader])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


@pytest.mark.parametrize("options", [{"seed": 7}, {"world_size": 1, "rank": 0}])
def test_a_generator_beside_a_seed_is_refused(options):
    """It would have no effect."""
    with pytest.raises(OptionError, match=r"^generator= with seed=\d would have no effect"):
        DataLoader(range(6), generator=torch.Generator(), **options)
