"""Generators that a dataset owns: batches are functions of the seed, however they are made."""

from __future__ import annotations

import ast
import functools
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

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


class LateInThreads(Late):
    """The same, for threads: of two that find none at once, one makes it."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def __getitem__(self, index):
        with self.lock:
            if self.rng is None:
                self.rng = np.random.default_rng()
        return index + self.rng.random()


class LateBatches(Late):
    """The same, for whole batches."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Late, LateInThreads, LateBatches])
def test_a_generator_that_is_made_when_it_is_needed_is_seeded_at_once(kind):
    """In the first epoch already, in each worker; and in threads that fetch samples."""
    want = [batch.tolist() for batch in DataLoader(kind(), batch_size=4, seed=3)]
    way = {"num_workers": 1, "concurrency": 2} if kind is LateInThreads else {"num_workers": 2}
    with DataLoader(kind(), batch_size=4, seed=3, **way) as loader:
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
