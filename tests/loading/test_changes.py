"""What the user changes between epochs, where a buffer has made batches of the next ones."""

from __future__ import annotations

import mmap
import multiprocessing
from itertools import chain

import numpy
import pytest
import torch
from datasets import Marked, Squares
from streams import Asked, PositionSampler, until
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

from forebay import Buffer, DataLoader, OptionError

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

# Deep enough for several epochs of the datasets here.
DEPTH = 30
COUNT = 8
# Batches that were taken are reported to the engine a few at a time, so that much may be missing.
UNREPORTED = 4


@pytest.fixture(autouse=True)
def _tasks_stay_with_their_worker(monkeypatch):
    """A worker that stalls for a second, on a busy machine, has its tasks made by others, too."""
    monkeypatch.setattr("forebay.engine.tasks.RECLAIM_S", 600.0)


BACKENDS = pytest.mark.parametrize("backend", ["process", "thread"])


def ahead(dataset, **arguments):
    """A loader of single samples that makes several epochs ahead."""
    buffer = Buffer(max_batches=DEPTH, refill_below=DEPTH)
    return DataLoader(dataset, num_workers=2, buffer=buffer, **arguments)


def epoch_of(loader):
    """Return the numbers of an epoch; come back when later epochs are ready."""
    found = [int(number) for batch in loader for number in batch.reshape(-1)]
    until(lambda: loader.statistics().ready_batches >= DEPTH - UNREPORTED)
    return found


# ---- samplers -----------------------------------------------------------------------------------


def only(number):
    """Return weights by which one number is drawn, and no other."""
    return torch.nn.functional.one_hot(torch.tensor(number), COUNT).double()


def assign(sampler, number):
    """Give a sampler new weights, as many examples do."""
    sampler.weights = only(number)


def write(sampler, number):
    """Write to the weights of a sampler in place."""
    sampler.weights.copy_(only(number))


def put(sampler, number):
    """Write to single weights."""
    sampler.weights[:] = 0
    sampler.weights[number] = 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "backend", "in_batches"),
    [
        (assign, "process", False),
        (assign, "thread", True),
        (write, "process", True),
        (write, "thread", False),
        (put, "process", False),
    ],
)
def test_new_weights_count_from_the_next_epoch_on(change, backend, in_batches):
    """Return whether the tensor is another one or was written to, and whoever reads the sampler."""
    sampler = WeightedRandomSampler(only(1), COUNT)
    arguments = {"sampler": sampler}
    if in_batches:
        arguments = {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)}
    with ahead(range(COUNT), backend=backend, **arguments) as loader:
        assert epoch_of(loader) == [1] * COUNT
        for number in (5, 2):
            change(sampler, number)
            assert epoch_of(loader) == [number] * COUNT
            assert epoch_of(loader) == [number] * COUNT


class From(Sampler):
    """Numbers from an attribute on."""

    def __init__(self, first):
        self.first = first

    def __iter__(self):
        return iter([(self.first + each) % COUNT for each in range(COUNT)])

    def __len__(self):
        return COUNT


class FromWithin(From):
    """The same, from an attribute of an object that it holds, or from an array of that object."""

    class Options:
        def __init__(self, first):
            self.array = numpy.array([first])

    def __init__(self, first):
        self.options = self.Options(first)

    @property
    def first(self):
        return int(self.options.array[0])


def numbers_from(first):
    """Return what such a sampler gives."""
    return [(first + each) % COUNT for each in range(COUNT)]


@BACKENDS
def test_an_attribute_that_a_sampler_reads_counts_from_the_next_epoch_on(backend):
    """Changed while the loader rests, and in the middle of an epoch."""
    sampler = From(0)
    with ahead(range(COUNT), sampler=sampler, backend=backend) as loader:
        assert epoch_of(loader) == numbers_from(0)
        sampler.first = 3
        assert epoch_of(loader) == numbers_from(3)
        iterator = iter(loader)
        first = [int(next(iterator)) for _ in range(2)]
        sampler.first = 5
        assert first + [int(batch) for batch in iterator] == numbers_from(3)
        assert epoch_of(loader) == numbers_from(5)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["array", "object"])
def test_what_cannot_be_seen_in_a_sampler_counts_after_refresh(change):
    """An array that an object of the sampler's holds, written to in place or replaced."""
    sampler = FromWithin(0)
    with ahead(range(COUNT), sampler=sampler) as loader:
        assert epoch_of(loader) == numbers_from(0)
        if change == "array":
            sampler.options.array[0] = 4
        else:
            sampler.options.array = numpy.array([4])
        assert epoch_of(loader) == numbers_from(0)  # made before: this is what refresh() is for
        loader.refresh()
        assert epoch_of(loader) == numbers_from(4)


# ---- datasets -----------------------------------------------------------------------------------


class InOrder(Sampler):
    """The indices of a dataset, as many as it has now."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(range(len(self.dataset)))

    def __len__(self):
        return len(self.dataset)


class Rows(Squares):
    """Numbers, as many as an attribute says."""

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        return index


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "shuffle", "backend"),
    [
        (False, False, "process"),
        (False, True, "process"),
        (False, True, "thread"),
        (True, False, "process"),
        (True, True, "process"),
        (True, True, "thread"),
    ],
)
@pytest.mark.parametrize("counts", [(8, 4), (4, 9)], ids=["shrank", "grew"])
def test_another_length_counts_from_the_next_epoch_on(counts, sampler, shuffle, backend):
    """No sample is asked for that is not there any more, and none that is new is left out."""
    before, after = counts
    dataset = Rows(before)
    arguments = {"shuffle": shuffle}
    if sampler:
        arguments = {"sampler": RandomSampler(dataset) if shuffle else InOrder(dataset)}
    with ahead(dataset, backend=backend, **arguments) as loader:
        assert sorted(epoch_of(loader)) == list(range(before))
        dataset.count = after
        assert len(loader) == after
        assert sorted(epoch_of(loader)) == list(range(after))
        assert sorted(epoch_of(loader)) == list(range(after))


@pytest.mark.slow
def test_an_attribute_of_a_dataset_counts_from_the_next_epoch_on():
    """Workers that have an older copy are replaced, and what they made is dropped."""
    dataset = Marked(COUNT)
    dataset.mark = 1
    with ahead(dataset) as loader:
        assert epoch_of(loader) == [1] * COUNT
        dataset.mark = 2
        assert epoch_of(loader) == [2] * COUNT
        assert epoch_of(loader) == [2] * COUNT
        dataset.mark = torch.tensor(3)
        assert epoch_of(loader) == [3] * COUNT
        dataset.mark[()] = 4
        assert epoch_of(loader) == [4] * COUNT


@pytest.mark.slow
def test_persistent_workers_keep_their_copies_until_refresh():
    """As torch has it, nothing that changes on the trainer's copy reaches them by itself."""
    dataset = Marked(COUNT)
    dataset.mark = 1
    with ahead(dataset, persistent_workers=True) as loader:
        assert epoch_of(loader) == [1] * COUNT
        dataset.mark = 2
        assert epoch_of(loader) == [1] * COUNT
        loader.refresh()
        assert epoch_of(loader) == [2] * COUNT


class MarkedStream(IterableDataset):
    """A stream of the attribute `mark`."""

    mark = 1

    def __iter__(self):
        return iter([self.mark] * COUNT)


@pytest.mark.slow
def test_workers_that_persist_keep_their_copies_of_a_stream_until_refresh():
    """As torch's do; refresh() replaces them."""
    dataset = MarkedStream()
    with DataLoader(dataset, num_workers=1, persistent_workers=True) as loader:
        assert [int(batch) for batch in loader] == [1] * COUNT
        dataset.mark = 2
        assert [int(batch) for batch in loader] == [1] * COUNT
        loader.refresh()
        assert [int(batch) for batch in loader] == [2] * COUNT


SHARED = multiprocessing.Value("i", 0)  # here, as the module's memory for it is never freed


class Epochs(Squares):
    """Samples that show what is changed between epochs, in different places."""

    def __init__(self, count):
        super().__init__(count)
        self.shared, self.settings = SHARED, {"sizes": [0, 0]}
        self.table, self.tensor = Deep.Table(1), torch.zeros(1).share_memory_()

    def set(self, number):
        """Change all of it."""
        self.shared.value = self.settings["sizes"][1] = self.table.array[0] = number
        self.tensor.fill_(number)

    def __getitem__(self, index):
        seen = self.shared.value, self.settings["sizes"][1], self.table.array[0], self.tensor[0]
        return torch.tensor([int(each) for each in seen])


class EpochStream(IterableDataset):
    """The same as a stream."""

    def __init__(self, count):
        self.samples = Epochs(count)
        self.set = self.samples.set

    def __iter__(self):
        return (self.samples[index] for index in range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Epochs, EpochStream])
def test_what_is_changed_between_epochs_is_in_the_next_one(kind, caplog):
    """Also in shared memory, and deep inside; what was made before is dropped, and that is said."""
    dataset = kind(COUNT)
    is_stream = isinstance(dataset, IterableDataset)
    whole = dataset if is_stream else Subset(dataset, range(COUNT))
    with DataLoader(whole, num_workers=1, buffer="1MB") as loader:
        for epoch in range(4):
            dataset.set(epoch)
            batches = list(loader)
            assert torch.cat(batches).tolist() == [[epoch] * 4] * COUNT
            until(lambda: loader.statistics().ready_batches)
    said = [each.getMessage() for each in caplog.records]
    assert sum("the dataset has changed since" in each for each in said) == 1


class Deep(Squares):
    """Samples that show an element of an array of an object of the dataset's."""

    class Table:
        def __init__(self, size=1000):
            self.array = numpy.ones(size, int)

    def __init__(self, count):
        super().__init__(count)
        self.table = self.Table()

    def __getitem__(self, index):
        return int(self.table.array[0])


@pytest.mark.slow
@BACKENDS
def test_what_cannot_be_seen_in_a_dataset_counts_after_refresh(backend):
    """A large array within an object within the dataset, also behind a subset."""
    for wrap in (lambda dataset: dataset, lambda dataset: Subset(dataset, range(COUNT))):
        dataset = Deep(COUNT)
        with ahead(wrap(dataset), backend=backend) as loader:
            assert epoch_of(loader) == [1] * COUNT
            dataset.table.array[0] = 2
            assert epoch_of(loader)[:1] == [1]
            loader.refresh()
            assert epoch_of(loader) == [2] * COUNT


# ---- nothing is dropped when nothing changed ----------------------------------------------------


class Caching(Asked):
    """A dataset that keeps what it read, and counts, so that its own copies change all the time."""

    def __init__(self, count):
        super().__init__(count)
        self.kept = {}
        self.reads = 0

    def __getitem__(self, index):
        self.kept[index] = self.reads = self.reads + 1
        return super().__getitem__(index)


class Busy(Sampler):
    """A sampler that counts and keeps what it gave."""

    def __init__(self, count):
        self.count, self.epochs, self.given = count, 0, []

    def __iter__(self):
        self.epochs += 1
        for number in range(self.count):
            self.given.append(number)
            yield number

    def __len__(self):
        return self.count


SAMPLERS = {
    "none": lambda dataset: {},
    "shuffle": lambda dataset: {"shuffle": True},
    "generator": lambda dataset: {
        "sampler": RandomSampler(dataset, generator=torch.Generator().manual_seed(1))
    },
    "weights": lambda dataset: {"sampler": WeightedRandomSampler(torch.ones(COUNT), COUNT)},
    "ranks": lambda dataset: {"sampler": DistributedSampler(dataset, 1, 0)},
    "state": lambda dataset: {"sampler": PositionSampler(COUNT)},
    "counting": lambda dataset: {"sampler": Busy(COUNT)},
    "batches": lambda dataset: {"batch_sampler": BatchSampler(Busy(COUNT), 1, drop_last=False)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_nothing_is_made_twice_when_nothing_changed(name):
    """The next epochs are made ahead, and each batch that was handed out, or is ready, once."""
    dataset = Caching(COUNT)
    with ahead(dataset, **SAMPLERS[name](dataset)) as loader:
        for epoch in range(4):
            if name == "ranks":
                loader.sampler.set_epoch(epoch)
            assert len(epoch_of(loader)) == COUNT
            returned = (epoch + 1) * COUNT
            assert returned < dataset.total() <= returned + DEPTH


@pytest.mark.parametrize("name", ["none", "shuffle", "state"])
def test_threads_make_nothing_twice_when_nothing_changed(name):
    """They share the dataset, whose own changes while it is read are no changes of the user's."""
    dataset = Caching(COUNT)
    with ahead(dataset, backend="thread", **SAMPLERS[name](dataset)) as loader:
        for epoch in range(4):
            assert len(epoch_of(loader)) == COUNT
            returned = (epoch + 1) * COUNT
            assert returned < dataset.total() <= returned + DEPTH


def test_a_change_costs_only_what_was_made_ahead():
    """What was handed out is not made again."""
    dataset, sampler = Asked(COUNT), From(0)
    with ahead(dataset, sampler=sampler) as loader:
        epoch_of(loader)
        sampler.first = 1
        assert epoch_of(loader) == numbers_from(1)
        assert 2 * COUNT + DEPTH < dataset.total() <= 2 * (COUNT + DEPTH)
        epoch_of(loader)
        assert dataset.total() <= 2 * (COUNT + DEPTH) + COUNT


def test_a_memory_map_in_a_dataset_is_no_change():
    """What has a length of its own and is written to by workers is compared by that alone."""
    dataset = Asked(COUNT)
    assert isinstance(dataset.asked, mmap.mmap)
    with ahead(dataset) as loader:
        epoch_of(loader)
        iterator = iter(loader)
        pids = {worker.pid for worker in iterator._workers}
        list(iterator)
        assert {worker.pid for worker in iter(loader)._workers} == pids


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_a_dataset_may_hold_a_nested_tensor():
    """It has no shape."""
    dataset = Marked(COUNT)
    dataset.mark = 1
    dataset.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with ahead(dataset) as loader:
        assert epoch_of(loader) == [1] * COUNT


class Touchy:
    """Counts how often its length and its shape are asked for, as by a lazily opened file."""

    asked = 0

    def __len__(self):
        self.asked += 1
        return 3

    @property
    def shape(self):
        self.asked += 1
        return (3,)


class Holding(Squares):
    """Has a `set_epoch`, and an attribute whose `__len__` is Python code."""

    def __init__(self, count):
        super().__init__(count)
        self.held = Touchy()

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2}, {"num_workers": 2, "buffer": "1MB"}])
def test_the_code_of_an_attribute_of_a_dataset_is_not_called(arguments):
    """It may have side effects: MONAI's `Compose.__len__` seeds all random transforms."""
    dataset = Holding(COUNT)
    with DataLoader(dataset, **arguments) as loader:
        for epoch in range(2):
            dataset.set_epoch(epoch)
            assert len(list(loader)) == COUNT
    assert dataset.held.asked == 0


# ---- in mid-epoch -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [{"shuffle": True, "seed": 3}, {"seed": 3, "sampler": None}, {}], ids=str
)
def test_a_state_says_of_how_many_samples_its_epoch_is_though_the_dataset_grew_since(arguments):
    """The rest of the epoch has its samples alone; counted in the new length, they would differ."""
    dataset = Rows(COUNT)
    if "sampler" in arguments:
        arguments = {**arguments, "sampler": RandomSampler(dataset)}
    loader = DataLoader(dataset, batch_size=2, **arguments)
    iterator = iter(loader)
    next(iterator)
    dataset.count = COUNT + 3
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    with pytest.raises(OptionError, match=r"^the state has 8 samples, the loader has 11 samples"):
        loader.load_state_dict(state)
    if "sampler" not in arguments:
        loader.load_state_dict(state, strict=False)
        assert [batch.tolist() for batch in loader] == rest
    assert len(list(loader)) == 6
    assert loader.state_dict()["made_with"]["length"] == COUNT + 3  # of the epoch that comes


def test_a_sampler_that_replaces_another_counts_from_the_next_epoch_on():
    """Libraries replace that within a batch sampler; the epoch in progress ends as it was."""
    loader = DataLoader(range(COUNT), batch_size=2, shuffle=True, backend="thread", seed=3)
    planned, expected = loader.sampler, [batch.tolist() for batch in loader]
    for replaced in (range(COUNT), planned):
        loader.batch_sampler.sampler = replaced
        ordered = [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert loader.state_dict()["kind_state"].keys() >= {"set_epoch"}
        found = [batch.tolist() for batch in loader]
        assert (found == ordered) == (replaced is not planned)
        assert sorted(chain(*found)) == list(range(COUNT))
    assert loader.epoch == 3
    iterator = iter(loader)
    first = next(iterator).tolist()
    loader.batch_sampler.sampler = range(COUNT)
    state = loader.state_dict()  # of an epoch that has the order of a plan
    assert loader.replay(epoch=3, batch=0).tolist() == first
    assert loader.replay(epoch=0, batch=1).tolist() == expected[1]
    with pytest.raises(OptionError, match=r"^the state was saved by a loader .* and no sampler;"):
        loader.load_state_dict(state)
    rest = [batch.tolist() for batch in iterator]
    assert sorted(chain(first, *rest)) == list(range(COUNT))
    assert [batch.tolist() for batch in loader] == ordered
    with pytest.raises(StopIteration):
        next(iterator)
