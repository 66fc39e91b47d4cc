"""Classes that other libraries derive from torch's, over forebay's: stand-ins, and the real ones.

Some skip batches by reading the iterator over the sampler, some never end an epoch, some replace
methods of torch's iterators. They are right if torch's class and forebay's give the same batches.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from forebay import Buffer, DataLoader

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT, SIZE = 26, 4
STEPS = 7


class Numbers(torch.utils.data.Dataset):
    """Each sample is its index."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.tensor(index)


DATASETS = {"samples": Numbers, "slices": lambda: TensorDataset(torch.arange(COUNT))}


def numbers(batches):
    """Return the samples of batches as lists."""
    return [(each[0] if isinstance(each, list) else each).tolist() for each in batches]


# ---- a library that skips ------------------------------------------------------------------------


@pytest.fixture
def skips(monkeypatch):
    """Have iterators skip `loader.skip_to` batches of their first epoch, as SpeechBrain's do."""
    init = _BaseDataLoaderIter.__init__

    def begin(self, loader, *args, **options):
        init(self, loader, *args, **options)
        skip, loader.skip_to = getattr(loader, "skip_to", None) or 0, None
        for number in range(skip):
            next(self._sampler_iter)
            self._num_yielded = number + 1

    def reset(self, loader, first_iter=False, *args, **options):
        if not first_iter:
            self._sampler_iter = iter(self._index_sampler)
            self._num_yielded = 0

    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", begin)
    monkeypatch.setattr(_BaseDataLoaderIter, "_reset", reset)


# Of forebay's class; the order is that of the seed, of a generator or of the dataset.
SKIPPING = {
    "torch's arguments": {},
    "shuffled": {"shuffle": True, "generator": 3},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 1, "persistent_workers": True},
    "a seed": {"seed": 1, "shuffle": True},
    "a seed and workers": {"seed": 1, "shuffle": True, "num_workers": 2},
    "a buffer": {"seed": 1, "shuffle": True, "num_workers": 1, "buffer": Buffer(max_batches=20)},
    "a sampler and a seed": {"seed": 1, "sampler": range(COUNT - 1, -1, -1)},
    "ranks": {"world_size": 2, "rank": 1},
}


def made(kind, arguments):
    """Return a loader; a generator is made of its seed."""
    arguments = dict(arguments)
    if "generator" in arguments:
        arguments["generator"] = torch.Generator().manual_seed(arguments["generator"])
    return DataLoader(DATASETS[kind](), batch_size=SIZE, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [3, 6])
@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("arguments", SKIPPING.values(), ids=SKIPPING)
def test_batches_that_a_library_skips_are_not_returned(arguments, kind, skip, skips):
    """Neither the batches before nor others are missing, and the next epoch is whole."""
    whole = made(kind, arguments)
    first, second = numbers(whole), numbers(whole)
    whole.close()
    skip = min(skip, len(first) - 1)
    loader = made(kind, arguments)
    loader.skip_to = skip
    iterator = iter(loader)
    rest = numbers([next(iterator)])
    assert (loader.epoch, loader.state_dict()["batch"]) in ((0, skip + 1), (1, 0))
    assert iterator._num_yielded == skip + 1
    rest += numbers(iterator)
    assert rest == first[skip:]
    assert numbers(loader) == second
    loader.close()


@pytest.mark.parametrize("kind", DATASETS)
def test_a_state_after_a_skip_names_the_batch_of_the_epoch(kind, skips):
    """It resumes where the loader is, not as many batches after the epoch's begin."""
    whole = numbers(made(kind, {"seed": 1, "shuffle": True}))
    loader = made(kind, {"seed": 1, "shuffle": True})
    loader.skip_to = 2
    next(iter(loader))
    state = loader.state_dict()
    assert (state["batch"], state["sample"]) == (3, 3 * SIZE)
    other = made(kind, {"seed": 1, "shuffle": True})
    other.load_state_dict(state)
    assert numbers(other) == whole[3:]


def test_an_iterator_that_a_library_puts_in_place_is_read(monkeypatch):
    """Also where batches are slices of what is in memory, whose order torch's sampler gives."""
    init = _BaseDataLoaderIter.__init__

    def begin(self, loader):
        init(self, loader)
        self._sampler_iter = iter([[5, 1], [2]])

    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", begin)
    for kind in DATASETS:
        assert numbers(made(kind, {})) == [[5, 1], [2]]


# ---- libraries that never end an epoch -----------------------------------------------------------


class Repeat:
    """A sampler that begins again at its end."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


def endless(base):
    """Return a class whose one iterator serves all epochs, as ultralytics' and timm's do."""

    class Endless(base):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self):
            return len(self.batch_sampler.sampler)

        def __iter__(self):
            for _ in range(len(self)):
                yield next(self.iterator)

        def reset(self):
            self.iterator = self._get_iterator()

    return Endless


ENDLESS = {
    "here": {},
    "workers": {"num_workers": 2},
    "a buffer": {"num_workers": 1, "buffer": "1MB"},
    "a small buffer": {"num_workers": 2, "buffer": Buffer(max_batches=9)},
}


def history(arguments, epochs=5, reset_at=3, save_at=4):
    """Return the batches of epochs, before one of which the iterator is replaced, and a state."""
    loader, seen, state = endless(DataLoader)(Numbers(), SIZE, True, seed=0, **arguments), [], None
    with loader:
        for epoch in range(epochs):
            if epoch == reset_at:
                loader.reset()
            seen.append(numbers(loader))
            if epoch == save_at - 1:
                state = loader.state_dict()
    return seen, state


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ENDLESS.values(), ids=ENDLESS)
def test_a_loader_whose_epochs_never_end_is_a_function_of_its_seed(arguments):
    """After a reset too, however far its workers were ahead by then."""
    expected, _ = history({})
    assert sorted(number for batch in expected[4] for number in batch) == list(range(COUNT))
    assert history(arguments)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ENDLESS.values(), ids=ENDLESS)
def test_a_loader_whose_epochs_never_end_resumes(arguments):
    """Its state counts batches of all epochs of its iterator; the next ones follow."""
    expected, state = history(arguments)
    again = endless(DataLoader)(Numbers(), SIZE, True, seed=0, **arguments)
    with again:
        again.load_state_dict(state)
        again.reset()
        assert numbers(again) == expected[4]


def test_a_loader_whose_epochs_never_end_is_torchs_with_its_arguments():
    """Batches are those of the same class over torch's."""
    seen = []
    for base in (TorchLoader, DataLoader):
        generator = torch.Generator().manual_seed(2)
        loader = endless(base)(Numbers(), SIZE, True, generator=generator)
        seen.append([numbers(loader) for _ in range(3)])
        loader.reset()
        seen[-1].append(numbers(loader))
    assert seen[0] == seen[1]
