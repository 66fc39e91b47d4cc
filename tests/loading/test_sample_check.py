"""`loader.check()`: samples that are not functions of the seed are named."""

from __future__ import annotations

import copy
import io
import os
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
)

import forebay


class Parts(NamedTuple):
    """A sample with fields."""

    index: int
    noise: object
    image: object


class Odd(Dataset):
    """Samples of which a part is not a function of the seed, in some way."""

    def __init__(self, noise, count=50):
        self.noise, self.count, self.calls = noise, count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.calls += 1
        return Parts(index, self.noise(self), [np.full(3, np.nan), {"a": torch.ones(2)}])


class Stream(IterableDataset):
    """Yields nothing."""

    def __iter__(self):
        return iter(())


def counted(dataset):
    """Return a number that depends on the calls before."""
    return dataset.calls


def drawn(dataset):
    """Draw from the generators that are seeded."""
    return torch.rand(3), np.random.rand(), {"deep": torch.randn(2).to_sparse()}


def made_anew(dataset):
    """Draw from a generator that nobody can reach."""
    return np.random.default_rng().random()


def of_process(dataset):
    """Return what differs between processes."""
    return os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "between"),
    [
        (made_anew, "two results in one process"),
        (counted, "two results in one process"),
        (of_process, "the results of two processes"),
        (lambda _: object(), None),
        (drawn, None),
    ],
)
def test_what_is_no_function_of_the_seed_is_named(noise, between):
    """By sample, field, and the two results that differ."""
    found = forebay.DataLoader(Odd(noise), batch_size=5, seed=1).check(samples=3)
    assert found.samples == 3
    assert bool(found) == (between is None)
    if between is None:
        assert "were the same." in str(found)
        return
    assert [each.index for each in found.differences] == [0, 24, 49]
    assert {each.field for each in found.differences} == {".noise"}
    assert {each.between for each in found.differences} == {between}
    assert f"sample 24, .noise: {between} differ" in str(found)
    assert "cannot reach" in str(found)


def test_without_a_seed_it_says_what_is_random():
    """And what to set."""
    found = forebay.DataLoader(Odd(drawn), batch_size=5).check()
    assert not found
    assert ".noise[0]" in {each.field for each in found.differences}
    assert "Set seed=" in str(found)


class Graph:
    """An object that has no equality."""

    def __init__(self, number):
        self.number = number


class Objects(Dataset):
    """Samples with an object."""

    def __init__(self, make):
        self.make, self.calls = make, 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.calls += 1
        return {"graph": self.make(self.calls)}


def test_samples_with_an_object_are_compared_by_its_state():
    """Though two objects of its class are never equal; one without a state to read is named."""
    assert forebay.DataLoader(Objects(lambda _: Graph(0)), seed=1).check()
    found = forebay.DataLoader(Objects(Graph), seed=1).check(samples=1)
    assert [(each.index, each.field) for each in found.differences] == [(0, "['graph'].number")]


def numbered(samples, calls=[0]):  # noqa: B006 - it counts
    """Add how often it was called."""
    calls[0] += 1
    return torch.tensor(samples), calls[0]


def test_what_collate_fn_does_is_seen():
    """Here it depends on how many batches the process has made."""
    found = forebay.DataLoader(range(16), 4, seed=1, collate_fn=numbered).check(samples=16)
    assert {each.field for each in found.differences} == {"[1]"}


def test_impossible_checks_are_refused():
    """Of a stream, and of nothing."""
    with pytest.raises(forebay.OptionError, match="map-style"):
        forebay.DataLoader(Stream(), batch_size=1, seed=0).check()
    with pytest.raises(forebay.OptionError, match="at least 1; got 0"):
        forebay.DataLoader(Odd(drawn), batch_size=1, seed=0).check(samples=0)
    with pytest.raises(forebay.OptionError, match="with samples"):
        forebay.DataLoader(Odd(drawn, 0), batch_size=1, seed=0).check()


class Named(Dataset):
    """Looks its samples up by name."""

    def __init__(self):
        self.samples = {f"name {each}": torch.tensor(float(each)) for each in range(6)}

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, name):
        return self.samples[name]


NAMES = [*Named().samples]


class Pairs(Sampler):
    """A batch sampler that counts how often it is iterated."""

    count = 0

    def __iter__(self):
        self.count += 1
        yield from (NAMES[at : at + 2] for at in (4, 0, 2))

    def __len__(self):
        return 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"batch_sampler": Pairs()},
        {"sampler": SubsetRandomSampler(NAMES, torch.Generator().manual_seed(0)), "batch_size": 2},
        {"sampler": NAMES, "batch_size": None, "seed": 0},
    ],
    ids=["batch_sampler", "sampler", "no batches"],
)
def test_the_samples_of_a_sampler_are_checked(options):
    """Keys that are no indices, as torch asks for what its sampler yields; it is read by a copy."""
    untouched = copy.deepcopy(options)
    loader = forebay.DataLoader(Named(), **options)
    found = loader.check(samples=3)
    assert (bool(found), found.samples) == (True, 3)
    assert getattr(loader.batch_sampler, "count", 0) == 0
    expected = DataLoader(Named(), **{n: each for n, each in untouched.items() if n != "seed"})
    assert [*map(torch.Tensor.tolist, loader)] == [*map(torch.Tensor.tolist, expected)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_key_that_a_dataset_does_not_have_is_said_with_what_to_do(num_workers):
    """Without a sampler it is asked for 0, 1, …, as in torch: by iterating and by check()."""
    loader = forebay.DataLoader(Named(), batch_size=2, num_workers=num_workers)
    for read in (lambda: list(loader), loader.check):
        with pytest.raises(KeyError) as caught:
            read()
        last = caught.value.__notes__[-1]
        assert last.startswith("forebay: the dataset has no sample 0. Without a sampler it is ")
        assert "asked for the indices 0 to len(dataset) - 1, as in torch" in last
        assert "torch.utils.data.Subset(dataset, keys), or sampler=keys" in last
    for advised in ({"dataset": Subset(Named(), NAMES)}, {"dataset": Named(), "sampler": NAMES}):
        assert len(list(forebay.DataLoader(**advised, batch_size=2))) == 3


class InOneFile(Dataset):
    """Reads its samples from a file that it opens when it is made, or when it is first read."""

    def __init__(self, path, is_open):
        self.path, self.file = path, io.FileIO(path) if is_open else None

    def __len__(self):
        return 9

    def __getitem__(self, index):
        if self.file is None:
            self.file = io.FileIO(self.path)
        self.file.seek(4 * index)
        return self.file.read(4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # not closed
@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_workers_inherit_has_a_position_in_each(is_open, tmp_path):
    """So nothing is shared, opened before or not; the check leaves none open."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(4 * 9))
    dataset = InOneFile(path, is_open)
    found = forebay.DataLoader(Subset(dataset, range(9)), batch_size=2, seed=0).check()
    assert found.shared_files == () and found
    if is_open:
        dataset.file.close()
    assert is_open or dataset.file is None


class Noisy(Dataset):
    """Draws from a generator of its own, or from one that nobody can reach."""

    def __init__(self, count, *, is_hidden=False):
        self.count, self.is_hidden, self.rng = count, is_hidden, np.random.default_rng()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng() if self.is_hidden else self.rng
        return torch.full((3 + index % 3,), index + rng.random())


def planned_by(way, is_hidden):
    """A loader whose order is its own: of a mixture, of packed rows, of whole batches."""
    dataset = Noisy(20, is_hidden=is_hidden)
    lengths = [3 + index % 3 for index in range(20)]
    if way == "mix":
        mixed = forebay.mix({"a": (dataset, 1.0), "b": (Noisy(9), 2.0)})
        return forebay.DataLoader(mixed, batch_size=4, seed=3, collate_fn=list)
    if way == "packed":
        rows = forebay.pack_sequences(dataset, lengths=lengths, size=20)
        return forebay.DataLoader(rows, batch_size=2, seed=3, collate_fn=list)
    rows = forebay.batch_by_length(dataset, lengths=lengths, max_tokens=20)
    return forebay.DataLoader(rows, batch_size=None, seed=3, collate_fn=list)


@pytest.mark.parametrize("way", ["mix", "packed", "grouped"])
def test_samples_of_a_mixture_and_rows_are_checked(way):
    """Though their order is their own, which no sampler may replace."""
    with planned_by(way, is_hidden=False) as loader:
        assert loader.check(), str(loader.check())
    with planned_by(way, is_hidden=True) as loader:
        assert not loader.check()
