"""Generators that a dataset owns: batches are functions of the seed, however they are made."""

from __future__ import annotations

import ast
import functools
import os
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import forebay
from forebay import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Transform:
    """Has a generator, as transforms of libraries have."""

    def __init__(self, kind):
        self.rng = kind()

    def __call__(self, value):
        if isinstance(self.rng, torch.Generator):
            return value + torch.rand((), generator=self.rng).item()
        return value + self.rng.random()


class Augmented(Dataset):
    """Samples with a number from each of four generators, of which one is shared."""

    def __init__(self):
        kinds = (np.random.default_rng, np.random.RandomState, random.Random, torch.Generator)
        self.transforms = [Transform(kind) for kind in kinds]
        self.again = Transform(lambda: self.transforms[0].rng)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        drawn = [each(index) for each in (*self.transforms, self.again)]
        return torch.tensor(drawn, dtype=torch.float64)


class Streamed(IterableDataset):
    """A stream with numbers of the global generators, half of it in each of two workers."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in self.order()[first::step][self.read :]:
            self.read += 1
            yield index + torch.tensor(
                [random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64
            )
        self.read = 0

    def order(self):
        """Return an order for all workers, or for each."""
        return np.random.permutation(24)


class Stateful(Streamed):
    """The same, with a state, and an order that does not depend on where it begins."""

    def order(self):
        """Return the order of each epoch."""
        return np.random.default_rng(0).permutation(24)

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


class Shards(IterableDataset):
    """Divides shards that it shuffles with a generator of its own, which all workers have."""

    def __init__(self, kind):
        self.rng = kind(0)

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        order = list(range(10))
        self.rng.shuffle(order)
        for shard in order[first::step]:
            yield from range(shard * 4, shard * 4 + 4)


def epochs_of(loader, count=2):
    """Return all batches of some epochs."""
    with loader:
        return [torch.cat(list(loader)) for _ in range(count)]


def loader_of(**options):
    """Return a loader of a new dataset, whose generators are seeded by the system."""
    return DataLoader(Augmented(), batch_size=4, shuffle=True, seed=3, **options)


WAYS = {
    "again": {},
    "1 worker": {"num_workers": 1},
    "2 workers": {"num_workers": 2},
    "5 workers": {"num_workers": 5},
    "a buffer": {"num_workers": 2, "buffer": "1MB"},
    "threads": {"num_workers": 3, "backend": "thread"},
    "spawned": {"num_workers": 1, "multiprocessing_context": "spawn"},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_batches_are_the_same_however_they_are_made(way):
    """Each number differs from all others, and each epoch from the one before."""
    expected = epochs_of(loader_of())
    assert all(map(torch.equal, epochs_of(loader_of(**WAYS[way])), expected))
    fractions = torch.cat(expected).frac().flatten()
    assert len(fractions.unique()) == len(fractions)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2 workers", "a buffer", "spawned"])
def test_a_killed_worker_changes_nothing(way):
    """Its batch is made once more, by another that starts as it did."""
    expected = epochs_of(loader_of(), 1)[0]
    with loader_of(**WAYS[way]) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        for pid in list(iterator.pipeline.feed.pool.pids.values())[:1]:
            os.kill(pid, signal.SIGKILL)
        batches += list(iterator)
    assert torch.equal(torch.cat(batches), expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["again", "5 workers", "a buffer", "threads"])
def test_a_resume_and_a_replay_change_nothing(way):
    """Whichever process draws, and however far others were ahead."""
    expected = epochs_of(loader_of())
    with loader_of(**WAYS[way]) as loader:
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(3)]
        state = loader.state_dict()
        replayed = loader.replay(epoch=1, batch=2)
    with loader_of(num_workers=1) as other:
        other.load_state_dict(state)
        batches += list(other)
        again = other.replay(epoch=0, batch=1)
    assert torch.equal(torch.cat(batches), expected[0])
    assert torch.equal(replayed, expected[1][8:12])
    assert torch.equal(again, expected[0][4:8])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["again", "2 workers", "threads"])
def test_three_ranks_have_the_same_batches(way):
    """Each has its part of the global batch."""
    expected = epochs_of(loader_of(), 1)[0]
    options = {"batch_size": 2, "shuffle": True, "seed": 3, "world_size": 3, **WAYS[way]}
    parts = []
    for rank in range(3):
        with DataLoader(Augmented(), rank=rank, **options) as loader:
            parts.append(list(loader))
    found = [torch.cat(batches) for batches in zip(*parts, strict=True)]
    assert torch.equal(torch.cat(found), expected)


def test_without_workers_the_generators_are_left_as_they_were():
    """What the user draws from them between batches is the user's."""
    dataset = Augmented()
    rng = dataset.transforms[0].rng
    state = rng.bit_generator.state
    iterator = iter(DataLoader(dataset, batch_size=4, seed=3))
    next(iterator)
    next(iterator)
    assert rng.bit_generator.state == state


def test_without_a_seed_they_keep_theirs():
    """What the user seeded by hand keeps its meaning."""

    def numbers():
        dataset = Augmented()
        for each in dataset.transforms[:1]:
            each.rng = np.random.default_rng(5)
        dataset.again.rng = dataset.transforms[0].rng
        return torch.cat(list(DataLoader(dataset, batch_size=4)))[:, 0]

    assert torch.equal(numbers(), numbers())
    assert numbers()[0] == np.random.default_rng(5).random()


def test_a_transform_that_is_replaced_between_epochs_is_seeded_too():
    """Its path is the same, and so are its numbers."""
    dataset = Augmented()
    loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=3)
    first = torch.cat(list(loader))
    dataset.transforms[1] = Transform(np.random.RandomState)
    assert torch.equal(torch.cat([first, *loader]), torch.cat(epochs_of(loader_of())))


class Late(Augmented):
    """Makes its generator when it first needs one, as many datasets do for their workers."""

    def __init__(self):
        self.rng = None

    def __getitem__(self, index):
        if self.rng is None:
            self.rng = np.random.default_rng()
        return index + self.rng.random()


class LateBatches(Late):
    """The same, for whole batches."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Late, LateBatches])
def test_a_generator_that_is_made_when_it_is_needed_is_seeded_at_once(kind):
    """In the first epoch already, in each worker; and in threads that fetch samples."""
    want = [batch.tolist() for batch in DataLoader(kind(), batch_size=4, seed=3)]
    ways = [{"num_workers": 2}] + [{"num_workers": 1, "concurrency": 2}] * (kind is Late)
    for options in ways:
        with DataLoader(kind(), batch_size=4, seed=3, **options) as loader:
            assert [batch.tolist() for batch in loader] == want


def late_collate(samples, own=[]):  # noqa: B006 - a generator that all calls share
    """Add a number of a generator that the first call makes."""
    own or own.append(np.random.default_rng())
    return [sample + own[0].random() for sample in samples]


def test_a_generator_that_collate_fn_makes_is_seeded_at_once():
    """As that of a dataset is."""
    ways = [{"num_workers": 1}, {}]
    made = [list(DataLoader(range(4), seed=3, collate_fn=late_collate, **way)) for way in ways]
    assert made[0] == made[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [random.Random, np.random.RandomState, np.random.default_rng])
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 3, "buffer": "1MB"}, {}])
def test_a_stream_divides_its_work_by_a_generator_of_its_own(options, kind):
    """It is equal in all workers, as in torch: each sample comes once in each epoch."""
    with DataLoader(Shards(kind), batch_size=4, seed=3, **options) as loader:
        for _ in range(2):
            assert sorted(torch.cat(list(loader)).tolist()) == list(range(40))


def reseed(worker_id):
    """Seed NumPy as torch's documentation advises."""
    np.random.seed(torch.initial_seed() % 2**32)


STREAM_WAYS = {
    "2 workers": {"num_workers": 2},
    "no workers": {},
    "a buffer": {"num_workers": 2, "buffer": "1MB"},
    "workers that persist": {"num_workers": 2, "persistent_workers": True},
    "a function for workers": {"num_workers": 2, "buffer": "1MB", "worker_init_fn": reseed},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Streamed, Stateful])
@pytest.mark.parametrize("way", STREAM_WAYS)
def test_a_stream_draws_on_after_a_resume(way, kind):
    """In the middle of the second epoch, as if it had not been interrupted."""
    options = {"batch_size": 4, "seed": 3, **STREAM_WAYS[way]}
    expected = epochs_of(DataLoader(kind(), **options), 3)
    assert not torch.equal(expected[0], expected[1])
    with DataLoader(kind(), **options) as loader:
        assert torch.equal(torch.cat(list(loader)), expected[0])
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(3)]
        state = loader.state_dict()
    with DataLoader(kind(), **options) as other:
        other.load_state_dict(state)
        assert torch.equal(torch.cat([*batches, *other]), expected[1])
        assert torch.equal(torch.cat(list(other)), expected[2])


class OfWorker(Dataset):
    """Draws from a generator that is seeded as the documentation of torch advises."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        return index + random.Random(info.seed).random()


@pytest.mark.slow
def test_the_seed_of_a_worker_is_that_of_the_sample():
    """`get_worker_info().seed` does not depend on which worker makes a sample, nor on the run."""
    one, two = (
        epochs_of(DataLoader(OfWorker(), batch_size=4, seed=3, num_workers=count))
        for count in (1, 2)
    )
    assert all(map(torch.equal, one, two))
    assert len(torch.cat(one).unique()) == 32


def numbered(samples, source, out):
    """Return random numbers of four generators for an input, and write them to a file."""
    drawn = samples[int(source.name)].tolist()
    out.file(f"{source.name}.txt").write_text(repr(drawn))
    return {"numbers": drawn}


def files_of(folder, pattern):
    """Return the names and the bytes of the files in a folder."""
    files = {each.name: each.read_bytes() for each in folder.rglob(pattern)}
    assert files
    return files


OTHER_WAYS = [{"num_workers": 1}, {"num_workers": 5}, {"backend": "thread"}]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_preprocessing_writes_the_same_bytes(tmp_path):
    """However many workers there are, and whichever input comes first."""
    sources, found = [], []
    for number in range(8):
        (tmp_path / f"{number}").write_text(f"{number}")
        sources.append(tmp_path / f"{number}")
    for at, options in enumerate(OTHER_WAYS):
        work, inputs = functools.partial(numbered, Augmented()), sources[:: (1, -1)[at % 2]]
        report = forebay.preprocess(work, inputs, tmp_path / f"out{at}", **options)
        assert (report.done, report.failed) == (8, 0)
        found.append(files_of(tmp_path / f"out{at}", "*.txt"))
    assert found == [found[0]] * 3
    numbers = [each for content in found[0].values() for each in ast.literal_eval(content.decode())]
    assert len({number % 1 for number in numbers}) == len(numbers)


@pytest.mark.full  # as batches and files, in the two tests beside it
@pytest.mark.slow
def test_caches_have_the_same_bytes(tmp_path):
    """Each shard, whichever worker makes it, and with how many others."""
    shards = []
    for workers in (1, 5):
        forebay.cache(Augmented(), tmp_path / f"{workers}", num_workers=workers, shard_bytes=200)
        shards.append(files_of(tmp_path / f"{workers}", "*.arrow"))
    assert shards[0] == shards[1]
    assert len(shards[0]) > 1
