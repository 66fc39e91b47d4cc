"""Which samples make which batch: datasets, samplers, batch samplers, and the random generators."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from datasets import AskedInGroups, Draws, Squares, as_it_is, numbers
from same import assert_same
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

# A machine of one core is warned of two workers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker"),
    pytest.mark.usefixtures("_generators"),
]


class Named(Squares):
    """Samples under keys of any kind; each gives its key and the key's type back."""

    def __getitem__(self, key):
        return f"{type(key).__name__} {key}"


class Growing(Sampler):
    """Batches of 1, 2, 3 indices."""

    def __iter__(self):
        yield [0]
        yield [1, 2]
        yield (3, 4, 5)

    def __len__(self):
        return 3


class Epochs(Sampler):
    """A sampler that counts its epochs and starts from the number of each."""

    epoch = -1

    def __iter__(self):
        self.epoch += 1
        return iter(range(self.epoch, self.epoch + 3))

    def __len__(self):
        return 3


class AtOnce(Sampler):
    """Batches; draws their order when iteration begins, not when the first one is read."""

    def __iter__(self):
        return iter(torch.randperm(12).reshape(4, 3).tolist())

    def __len__(self):
        return 4


# ---- datasets -----------------------------------------------------------------------------------


def seven():
    return TensorDataset(torch.arange(7), torch.arange(14.0).reshape(7, 2))


DATASETS = {
    "own": Squares(7),
    "list": [3, 1, 4, 1, 5, 9, 2],
    "list of dicts": [{"a": n, "b": str(n)} for n in range(7)],
    "tuple": (3, 1, 4, 1, 5, 9, 2),
    "range": range(10, 17),
    "text": "forebay",
    "array": numpy.arange(14.0).reshape(7, 2),
    "tensor": torch.arange(14).reshape(7, 2),
    "dict with numbers": {n: n * n for n in range(7)},
    "TensorDataset": seven(),
    "Subset": Subset(Squares(20), [19, 0, 3, 3, 7, 1, 2]),
    "Subset of TensorDataset": Subset(seven(), [6, 0, 3, 3, 1, 2, 5]),
    "Subset of Subset": Subset(Subset(Squares(20), range(10, 20)), range(7)),
    "ConcatDataset": ConcatDataset([range(3), range(10, 14)]),
    "sum of datasets": Squares(3) + Squares(4),
    "StackDataset": StackDataset(range(7), Squares(7)),
    "StackDataset by name": StackDataset(number=range(7), square=Squares(7)),
    "with __getitems__": AskedInGroups(7),
    "Subset with __getitems__": Subset(AskedInGroups(20), [19, 0, 3, 3, 7, 1, 2]),
    "empty": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS)
def test_a_dataset_is_read_in_order(loader_class, num_workers, dataset):
    """Anything with `__getitem__` and `__len__` gives the batches that torch gives."""
    batches = list(loader_class(dataset, batch_size=3, num_workers=num_workers))
    assert_same(batches, list(TorchDataLoader(dataset, batch_size=3)))
    assert len(batches) == (3 if len(dataset) else 0)


def test_getitems_is_asked_with_the_list_of_indices(loader_class, num_workers):
    """One call a batch, with the very list that the batch sampler made."""
    loader = loader_class(
        AskedInGroups(5), batch_size=2, num_workers=num_workers, collate_fn=as_it_is
    )
    asked = [[0, 1], [2, 3], [4]]
    assert list(loader) == [[(n, str(batch), "list") for n in batch] for batch in asked]


def test_getitems_is_not_asked_without_batches(loader_class, num_workers):
    """With batch_size=None each sample is asked for alone."""
    loader = loader_class(AskedInGroups(2), batch_size=None, num_workers=num_workers)
    assert_same(list(loader), [list(AskedInGroups(2)[n]) for n in range(2)])


def test_getitems_of_none_is_no_getitems(loader_class, num_workers):
    """A dataset may say that it has none after all."""

    class Undecided(Squares):
        __getitems__ = None

    loader = loader_class(Undecided(4), batch_size=4, num_workers=num_workers)
    assert_same(list(loader), [default_collate([Squares(4)[n] for n in range(4)])])


def test_getitems_may_give_more_or_fewer_than_it_was_asked_for(loader_class, num_workers):
    """Whatever it returns is what is collated."""

    class Odd(Squares):
        def __getitems__(self, indices):
            return [n for n in indices if n % 2] * 2

    loader = loader_class(Odd(6), batch_size=3, num_workers=num_workers)
    assert numbers(loader) == [[1, 1], [3, 5, 3, 5]]


# ---- samplers -----------------------------------------------------------------------------------


ITERABLES = {
    "list": lambda: [3, 1, 1],
    "range": lambda: range(5, 0, -2),
    "tensor": lambda: torch.tensor([2, 0]),
    "array": lambda: numpy.array([1, 4]),
    "dict": lambda: {7: None},
}


@pytest.mark.slow
@pytest.mark.parametrize("make", ITERABLES.values(), ids=ITERABLES)
def test_a_sampler_is_anything_that_can_be_iterated(loader_class, num_workers, make):
    """Any iterable of keys, as often as it is iterated; the keys keep their types."""
    arguments = {"sampler": make(), "batch_size": None}
    dataset = Named(8)
    loader = loader_class(dataset, num_workers=num_workers, **arguments)
    expected = list(TorchDataLoader(dataset, **arguments))
    assert_same([list(loader), list(loader)], [expected, expected])


KEYS = ["a", ("b", 2), (), None, 2.5, True, b"a", frozenset({1}), ...]


@pytest.mark.parametrize("batch_size", [None, 5])
def test_keys_need_not_be_numbers(loader_class, num_workers, batch_size):
    """`__getitem__` gets just what the sampler gave."""
    loader = loader_class(
        Named(8), sampler=KEYS, batch_size=batch_size, num_workers=num_workers, collate_fn=as_it_is
    )
    named = [f"{type(key).__name__} {key}" for key in KEYS]
    assert list(loader) == (named if batch_size is None else [named[:5], named[5:]])


def test_without_batches_a_sampler_may_give_whole_lists(loader_class, num_workers):
    """batch_size=None and a BatchSampler as sampler: the dataset gets the list."""
    sampler = BatchSampler(SequentialSampler(range(5)), batch_size=2, drop_last=False)
    loader = loader_class(Named(5), sampler=sampler, batch_size=None, num_workers=num_workers)
    assert list(loader) == ["list [0, 1]", "list [2, 3]", "list [4]"]
    data = torch.arange(10.0).reshape(5, 2)
    loader = loader_class(data, sampler=sampler, batch_size=None, num_workers=num_workers)
    assert_same(list(loader), [data[:2], data[2:4], data[4:]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_sampler", "batches"),
    [
        ([[0, 1], [5], [2, 2, 2]], [[0, 1], [5], [2, 2, 2]]),
        (Growing(), [[0], [1, 2], [3, 4, 5]]),
        (BatchSampler(range(5), 2, drop_last=True), [[0, 1], [2, 3]]),
        (BatchSampler(SequentialSampler(range(5)), 4, drop_last=False), [[0, 1, 2, 3], [4]]),
        ([range(2), (3, 4), {5: 0}], [[0, 1], [3, 4], [5]]),
    ],
    ids=["list", "own", "full batches", "torch's", "of other iterables"],
)
def test_a_batch_sampler_says_which_samples_go_together(
    loader_class, num_workers, batch_sampler, batches
):
    """Batches of any size, the same in every epoch that the sampler gives them."""
    loader = loader_class(range(6), batch_sampler=batch_sampler, num_workers=num_workers)
    assert [numbers(loader) for _ in range(2)] == [batches, batches]


def test_a_sampler_that_can_be_iterated_once_gives_one_epoch(loader_class, num_workers):
    """A generator is empty afterwards, and so is the second epoch."""
    once = (n for n in [[0, 1], [2]])
    loader = loader_class(range(4), batch_sampler=once, num_workers=num_workers)
    assert [numbers(loader) for _ in range(2)] == [[[0, 1], [2]], []]


def test_an_endless_sampler_is_asked_only_as_far_as_needed(loader_class, num_workers):
    """Five batches of an endless stream of keys, and then the loop ends."""

    class Endless:
        def __iter__(self):
            number = 0
            while True:
                yield number % 4
                number += 1

    loader = loader_class(range(4), sampler=Endless(), batch_size=3, num_workers=num_workers)
    batches = [batch.tolist() for batch, _ in zip(loader, range(5), strict=False)]
    assert batches == [[0, 1, 2], [3, 0, 1], [2, 3, 0], [1, 2, 3], [0, 1, 2]]


@pytest.mark.slow
def test_a_sampler_with_state_is_iterated_once_an_epoch(loader_class, num_workers):
    """Each epoch starts the sampler once; making the loader and its length do not."""
    sampler = Epochs()
    loader = loader_class(range(9), sampler=sampler, num_workers=num_workers)
    assert (len(loader), sampler.epoch) == (3, -1)
    assert [numbers(loader) for _ in range(3)] == [[[e], [e + 1], [e + 2]] for e in range(3)]
    assert sampler.epoch == 2


def test_a_sampler_runs_in_the_main_process(loader_class, num_workers):
    """What it notes while it is iterated is there for the user to see."""

    class Noting:
        def __init__(self):
            self.given = []

        def __iter__(self):
            for n in (2, 0, 1):
                self.given.append(n)
                yield n

        def __len__(self):
            return 3

    sampler = Noting()
    assert numbers(loader_class(range(3), sampler=sampler, num_workers=num_workers)) == [
        [2],
        [0],
        [1],
    ]
    assert sampler.given == [2, 0, 1]


SAMPLERS = {
    "RandomSampler": lambda g: RandomSampler(range(50), generator=g),
    "with replacement": lambda g: RandomSampler(range(50), True, 70, generator=g),
    "more than there are": lambda g: RandomSampler(range(20), num_samples=50, generator=g),
    "WeightedRandomSampler": lambda g: WeightedRandomSampler([1, 2, 0] * 9, 40, generator=g),
    "without replacement": lambda g: WeightedRandomSampler([1] * 27, 20, False, generator=g),
    "SubsetRandomSampler": lambda g: SubsetRandomSampler(range(9, 29), generator=g),
}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_random_samplers_give_the_order_that_torch_gets(loader_class, num_workers, sampler):
    """Equal seeds give equal orders in both classes, over two epochs."""
    loaded = []
    for kind, workers in ((TorchDataLoader, 0), (loader_class, num_workers)):
        generator = torch.Generator().manual_seed(5)
        loader = kind(range(50), batch_size=8, sampler=sampler(generator), num_workers=workers)
        loaded.append([numbers(loader), numbers(loader)])
    assert loaded[0] == loaded[1]
    assert loaded[0][0] != loaded[0][1]


# ---- the random generators ----------------------------------------------------------------------


def test_an_own_generator_leaves_torchs_alone(loader_class, num_workers):
    """With `generator=` the order and the workers' seeds come from it, and only from it."""
    generator = torch.Generator().manual_seed(3)
    before = torch.get_rng_state(), generator.get_state()
    list(loader_class(range(4), shuffle=True, generator=generator, num_workers=num_workers))
    assert_same(torch.get_rng_state(), before[0])
    assert not generator.get_state().equal(before[1])


GENERATED = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "no batches": {"batch_size": None},
    "persistent": {"persistent_workers": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", GENERATED.values(), ids=GENERATED)
def test_the_global_generators_are_left_as_torch_leaves_them(loader_class, num_workers, arguments):
    """After two epochs, one of them cut short, all three generators stand where torch's do."""
    if not num_workers:
        arguments = {**arguments, "persistent_workers": False}
    states = []
    for kind in (TorchDataLoader, loader_class):
        torch.manual_seed(4)
        random.seed(4)
        numpy.random.seed(4)
        loader = kind(Draws(6), num_workers=num_workers, **arguments)
        list(loader)
        next(iter(loader))
        states.append((torch.get_rng_state(), random.getstate(), numpy.random.get_state()))
    assert_same(*states)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "persistent"), [(True, False), (False, True)], ids=["own generator", "persistent"]
)
def test_random_numbers_of_samples_are_torchs(loader_class, num_workers, own, persistent):
    """torch, random and numpy give each sample the numbers that they give it in torch."""
    loaded = []
    for kind in (TorchDataLoader, loader_class):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        loader = kind(
            Draws(22),
            batch_size=2,
            shuffle=True,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(6) if own else None,
            persistent_workers=persistent and num_workers > 0,
        )
        loaded.append([list(loader), list(loader)])
    assert_same(*loaded)


DRAWING_AT_ONCE = {
    "batches": lambda: {"dataset": Squares(12), "batch_sampler": AtOnce()},
    "tensors": lambda: {"dataset": TensorDataset(torch.arange(12)), "batch_sampler": AtOnce()},
    "datapipe": lambda: {"dataset": IterableWrapper(range(12)).shuffle().sharding_filter()},
}


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("make", DRAWING_AT_ONCE.values(), ids=DRAWING_AT_ONCE)
def test_what_is_drawn_when_an_epoch_begins_is_drawn_as_often_as_in_torch(
    loader_class, num_workers, persistent, make
):
    """With workers twice, in the first epoch of an iterator: torch reads a sampler again there."""
    results = []
    for kind in (TorchDataLoader, loader_class):
        torch.manual_seed(5)
        loader = kind(
            **make(),
            num_workers=num_workers,
            persistent_workers=persistent and num_workers > 0,
        )
        results.append([list(loader), torch.rand(1), list(loader), torch.rand(1)])
    assert_same(*results)


class WithoutLength(torch.utils.data.Dataset):
    """A dataset whose length is not known, which only a sampler of torch's own would ask."""

    def __getitem__(self, index):
        return index * index

    def __len__(self):
        raise NotImplementedError


class Replicated(Sampler):
    """Has a number of replicas that is no number."""

    num_replicas = None

    def __iter__(self):
        return iter([1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"sampler": [1, 2, 3], "batch_size": 2},
        {"batch_sampler": [[1, 2], [3]]},
        {"sampler": Replicated(), "batch_size": 2},
    ],
    ids=["sampler", "batch sampler", "replicas"],
)
def test_a_dataset_has_no_length_to_give_if_a_sampler_decides(loader_class, num_workers, arguments):
    """Whatever its `__len__` raises."""
    loader = loader_class(WithoutLength(), num_workers=num_workers, **arguments)
    assert numbers(loader) == [[1, 4], [9]]
