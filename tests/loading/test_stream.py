"""With a seed the batches are the same everywhere, whoever makes them, when, and where."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress

import numpy
import pytest
import torch
import torch.utils.data
from datasets import Draws, Squares
from same import assert_same
from streams import (
    WAYS,
    DrawingSampler,
    Lethal,
    Noisy,
    NoisyGroups,
    assert_same_epochs,
    epochs_of,
    noisy_collate,
    noisy_convert,
    resumed,
    until,
)
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from forebay import Buffer, DataLoader, OptionError

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


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS)
def test_whatever_is_loaded_is_the_same(load):
    """Samplers, batch samplers, `__getitems__`, samples, tensors; with and without buffer."""
    expected = epochs_of(loader_of(load), 2)
    deep = Buffer(max_batches=5, refill_below=2)
    for way in ({"num_workers": 2}, {"num_workers": 2, "buffer": deep}):
        assert_same_epochs(epochs_of(loader_of(load, **way), 2), expected)


@pytest.mark.parametrize("load", LOADS)
def test_each_epoch_is_different_and_has_the_samples_it_should(load):
    """In what is drawn, and in the order unless there is none."""
    if load == "tensors":
        pytest.skip("nothing is drawn")
    first, second = epochs_of(loader_of(load), 2)
    assert repr(first) != repr(second)


def test_every_draw_of_an_epoch_is_different():
    """No two samples have the same numbers, and no two generators give the same ones."""
    (batches,) = epochs_of(DataLoader(Draws(200), batch_size=8, seed=1), 1)
    rows = [torch.cat([r, p[:, None], n[:, None]], 1).double() for _, r, p, n in batches]
    drawn = torch.cat(rows)
    assert len(drawn.unique()) == drawn.numel()
    assert abs(torch.corrcoef(drawn.T) - torch.eye(4)).max() < 0.3


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


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2 workers", "persistent", "bytes ahead"])
def test_a_worker_that_kills_itself_changes_nothing(way, tmp_path):
    """Its batch is made once more, with the same seeds."""
    (expected,) = epochs_of(DataLoader(Noisy(COUNT), batch_size=2, shuffle=True, seed=9), 1)
    dataset = Lethal(COUNT, 11, tmp_path)
    with DataLoader(dataset, batch_size=2, shuffle=True, seed=9, **WAYS[way]) as loader:
        assert_same(list(loader), expected)
        assert dataset.trace.exists()
        until(lambda: loader.statistics().restarts == 1)  # the batch may be of the next epoch


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2 workers", "persistent", "bytes ahead"])
def test_workers_killed_between_batches_change_nothing(way):
    """Two of them in each epoch, wherever they are."""
    expected = epochs_of(DataLoader(Noisy(60), batch_size=2, shuffle=True, seed=9), 2)
    loader = DataLoader(Noisy(60), batch_size=2, shuffle=True, seed=9, **WAYS[way])
    epochs = []
    with loader:
        for _ in range(2):
            iterator, batches = iter(loader), []
            for number, batch in enumerate(iterator):
                batches.append(batch)
                if number == 3:
                    kill_one(iterator)
                if number == 20:  # a batch that is hit twice is given up
                    until(lambda: not loader.statistics().in_flight)
                    kill_one(iterator)
            epochs.append(batches)
    assert_same_epochs(epochs, expected)


def kill_one(iterator):
    """Kill a worker that is alive."""
    for pid in reversed(list(iterator.pipeline.feed.pool.pids.values())):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError("no worker is alive")


@pytest.mark.slow
def test_after_a_resume_elsewhere_the_rest_is_the_same():
    """Other workers, other backend, other buffer: from the middle on, and the epoch after."""
    expected = epochs_of(loader_of("collate_fn"), 3)
    names = ["here", "2 workers", "threads", "bytes ahead", "threads ahead"]
    for way, other in zip(names, names[1:] + names[:1], strict=True):
        with loader_of("collate_fn", **WAYS[way]) as loader:
            assert len(list(loader)) == 8
            iterator = iter(loader)
            for _ in range(3):
                next(iterator)
            state = loader.state_dict()
        again = resumed(state, lambda other=other: loader_of("collate_fn", **WAYS[other]))
        assert_same_epochs(epochs_of(again, 2), [expected[1][3:], expected[2]])


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


def test_replay_with_a_drawn_seed():
    """Once it has begun, a buffered loader has one."""
    loader = DataLoader(Noisy(COUNT), batch_size=4, shuffle=True, num_workers=1, buffer="1MB")
    batches = list(loader)
    assert_same(loader.replay(epoch=0, batch=3), batches[3])


def test_samplers_may_be_anything_that_can_be_iterated():
    """A list, and one without a length."""
    for sampler in ([3, 1, 2], iter_only(range(3, 0, -1)), SequentialSampler(range(4))):
        loader = DataLoader(list("abcd"), batch_size=None, sampler=sampler, seed=0)
        first, second = epochs_of(loader, 2)
        assert first == second == [list("abcd")[index] for index in sampler]


def iter_only(items):
    """Something that can be iterated again and again, and does nothing else."""

    class Only:
        def __iter__(self):
            return iter(items)

    return Only()


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


def test_without_workers_the_rest_of_an_iterable_dataset_has_the_same_numbers():
    """It is read again from its beginning, with the seed of its epoch."""
    _, whole = drawn_after(1)
    state, first = drawn_after(2, batches=4)
    assert_same(first, whole[:4])
    _, rest = drawn_after(3, state=state)
    assert_same(rest[:2], whole[4:])


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
