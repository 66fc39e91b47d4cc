"""The loader as an object: what may be set, copied and closed, and what it holds on to."""

from __future__ import annotations

import copy
import os
import pickle
import warnings

import pytest
import torch
from datasets import Squares, Stream
from streams import until
from torch.utils.data import Dataset, Sampler

from forebay import Buffer, DataLoader, OptionError

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize("name", ["buffer", "seed", "backend", "on_error", "batch_size"])
def test_what_is_under_way_cannot_be_changed(name):
    """torch says so of its own arguments, and in the same words."""
    loader = DataLoader(Squares(4))
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader"):
        setattr(loader, name, "2MB")


@pytest.mark.parametrize(
    ("dataset", "num_workers", "words"),
    [
        (
            Stream(4),
            2,
            r"^an iterable dataset cannot have backend='ray': only a map-style dataset can be "
            r"divided among nodes\n.*Use a map-style dataset",
        ),
        (Squares(4), 0, r"^backend='ray' with num_workers=0"),
    ],
    ids=["iterable", "no workers"],
)
def test_what_a_cluster_cannot_do_is_refused(dataset, num_workers, words):
    """Before there is anything to do with one."""
    with pytest.raises(OptionError, match=words):
        DataLoader(dataset, num_workers=num_workers, backend="ray")


def test_the_cores_of_this_machine_do_not_matter_to_a_cluster():
    """torch's warning of too many workers is for those that are here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataLoader(Squares(4), num_workers=512, backend="ray")
        assert caught == []
        DataLoader(Squares(4), num_workers=512)
        assert "will create 512 worker processes" in str(caught[0].message)


@pytest.mark.slow
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
@pytest.mark.parametrize(
    "arguments", [{"buffer": "1MB"}, {"seed": 1}, {}], ids=["buffer", "seed", "torch's alone"]
)
def test_a_copy_of_a_used_loader_begins_anew(copied, arguments):
    """It has no workers yet, and the original keeps its own."""
    with DataLoader(list(range(12)), batch_size=4, num_workers=1, **arguments) as loader:
        expected = [batch.tolist() for batch in loader]
        iterator = iter(loader)
        next(iterator)
        with copied(loader) as other:
            assert [batch.tolist() for batch in other] == expected
        del other
        assert len(list(iterator)) == 2


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_a_copy_of_a_resumed_loader_resumes_too(copied):
    """A state that was loaded and not used yet is copied."""
    loader, other = (DataLoader(list(range(12)), batch_size=4, seed=1) for _ in range(2))
    first, *rest = [batch.tolist() for batch in loader]
    iterator = iter(loader)
    assert next(iterator).tolist() == first
    other.load_state_dict(loader.state_dict())
    again = copied(other)
    assert again.epoch == 1
    assert [batch.tolist() for batch in again] == rest
    assert [batch.tolist() for batch in other] == rest


def test_an_epoch_that_cannot_begin_leaves_no_workers():
    """Those of the epoch before end with it, and the next attempt has new ones."""
    with DataLoader(Squares(8), num_workers=1, buffer="1MB", seed=0) as loader:
        list(loader)
        (worker,) = iter(loader)._workers
        pid = worker.pid
        loader.generator = "not a generator"
        with pytest.raises(TypeError):
            iter(loader)
        until(lambda: not os.path.exists(f"/proc/{pid}"))
        loader.generator = None
        assert sum(1 for _ in loader) == 8


class Wrapping:
    """A loader in an object that forwards what it lacks, and is pickled as Accelerate's are."""

    def __init__(self, dataset=range(3)):
        self.loader = DataLoader(dataset, batch_size=4)

    def __getattr__(self, name):
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __reduce__(self):
        return Wrapping, (), self.__dict__


def test_a_wrapped_loader_can_be_pickled():
    """The state is the wrapper's, and the wrapper takes it."""
    other = pickle.loads(pickle.dumps(Wrapping(range(8))))
    assert [batch.tolist() for batch in other.loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Megabytes(Squares):
    """Samples of one megabyte."""

    def __getitem__(self, index):
        return torch.full((250_000,), float(index))


def test_a_kept_batch_keeps_its_own_memory_alone():
    """What was ready goes back to the system with the workers."""
    loader = DataLoader(Megabytes(100), num_workers=1, buffer=Buffer(max_batches=20))
    iterator = iter(loader)
    kept = next(iterator)
    until(lambda: loader.statistics().ready_batches >= 15)
    descriptor = os.dup(loader._loader_progress.pipeline.feed._slots.slab.fileno())
    try:
        assert os.fstat(descriptor).st_blocks * 512 > 10e6
        loader.close()
        assert os.fstat(descriptor).st_blocks * 512 < 2e6
        assert kept[0, 0].item() == 0.0
        del kept
        assert os.fstat(descriptor).st_blocks == 0
    finally:
        os.close(descriptor)


class Forwarding:
    """A wrapper that has nothing of its own but what it wraps."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __iter__(self):
        return iter(self._inner)

    def __len__(self):
        return len(self._inner)


class Turned(Sampler):
    """Begins at its epoch."""

    def __init__(self, count):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(self.epoch + each) % self.count for each in range(self.count)])

    def __len__(self):
        return self.count


@pytest.mark.parametrize("arguments", [{"seed": 0}, {"num_workers": 1, "buffer": "1MB"}], ids=repr)
def test_set_epoch_may_be_forwarded(arguments):
    """By a wrapper that does not know that there is such a thing."""
    sampler = Forwarding(Turned(5))
    with DataLoader(range(5), sampler=sampler, **arguments) as loader:
        for epoch in (0, 3, 4):
            sampler.set_epoch(epoch)
            order = [(epoch + each) % 5 for each in range(5)]
            assert [batch.item() for batch in loader] == order


class Anything(Dataset):
    """Answers to any name, as mocks and tables with lazy columns do."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

    def __getattr__(self, name):
        return lambda *args: f"column {name}"


class Nothing(Anything):
    """Answers None to any name."""

    def __getattr__(self, name):
        return None


class Items(dict):
    """Its attributes are its items."""

    __getattr__, __setattr__ = dict.get, dict.__setitem__


class Around:
    """Has another dataset, or itself."""

    def __init__(self):
        self.dataset = self

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


def each_other():
    """Return one of two wrappers that refer to each other."""
    one, other = Around(), Around()
    one.dataset, other.dataset = other, one
    return one


ODD = {
    "answers to any name": Anything,
    "answers None": Nothing,
    "attributes are items": lambda: Items({index: index for index in range(4)}),
    "its own dataset": Around,
    "two of each other": each_other,
}
WAYS = [{}, {"seed": 0}, {"seed": 0, "num_workers": 1}, {"num_workers": 1, "buffer": "1MB"}]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", WAYS, ids=repr)
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_a_dataset_may_answer_to_any_name_or_refer_to_itself(make, arguments):
    """A protocol is what its class defines; nothing is written into it, and it has a state."""
    dataset = make()
    before = dict(dataset) if isinstance(dataset, dict) else dict(vars(dataset))
    with DataLoader(dataset, batch_size=2, **arguments) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        assert loader.state_dict()["epoch"] == 1
        assert loader.state_dict()["kind_state"]["dataset"] is None
    assert (dict(dataset) if isinstance(dataset, dict) else vars(dataset)) == before


class Stopping(Sampler):
    """Raises after so many indices."""

    def __init__(self, good):
        self.good = good

    def __iter__(self):
        yield from range(self.good)
        raise KeyError("no more")


@pytest.mark.parametrize(
    "arguments",
    [{"seed": 0}, {"num_workers": 1, "seed": 0}, {"num_workers": 1, "buffer": "1MB"}],
    ids=repr,
)
def test_what_a_sampler_gave_before_it_raised_comes(arguments):
    """Then its exception does."""
    with DataLoader(range(9), sampler=Stopping(5), **arguments) as loader:
        iterator = iter(loader)
        assert [next(iterator).item() for _ in range(5)] == list(range(5))
        with pytest.raises(KeyError, match="no more"):
            next(iterator)


# ---- subclasses ---------------------------------------------------------------------------------


class Named(DataLoader):
    """A subclass with an attribute of its own, set before or after torch's."""

    def __init__(self, name, *, is_before, **arguments):
        if is_before:
            setattr(self, name, "own")
        super().__init__(range(4), **arguments)
        setattr(self, name, "own")


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((name, (OptionError, ValueError)) for name in ("seed", "rank", "device", "backend")),
        *((name, AttributeError) for name in ("epoch", "mask", "failures")),
    ],
)
def test_a_subclass_is_told_of_an_attribute_that_forebay_has(name, error, is_before):
    """Instead of reading another value than it set."""
    with pytest.raises(error, match=f"^{name} attribute (.|\n)*use another name there"):
        Named(name, is_before=is_before)


def test_a_subclass_may_pass_on_an_argument_that_it_has_set():
    """It has the value that it wants."""

    class Seeded(DataLoader):
        def __init__(self, seed):
            self.seed = seed
            super().__init__(range(4), shuffle=True, seed=self.seed)

    assert Seeded(3).seed == 3


def test_a_subclass_may_have_a_class_attribute_of_its_own():
    """It replaces forebay's, which the loader does not need."""

    class Counting(DataLoader):
        epoch = 0

        def __iter__(self):
            self.epoch += 1
            return super().__iter__()

    loader = Counting(range(4), batch_size=2, seed=0)
    assert [len(list(loader)), len(list(loader)), loader.epoch] == [2, 2, 2]
    assert loader.state_dict()["epoch"] == 2


class Chained(DataLoader):
    """Several loaders in turn, itself never initialized."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        for loader in self.loaders:
            yield from loader

    def __len__(self):
        return sum(map(len, self.loaders))


def test_a_subclass_need_not_call_init():
    """It can be shown, copied and pickled, as with torch's class."""
    chained = Chained(DataLoader(range(2)), DataLoader(range(3)))
    assert "Chained object" in repr(chained)
    for other in (chained, copy.copy(chained), pickle.loads(pickle.dumps(chained))):
        assert torch.cat(list(other)).tolist() == [0, 1, 0, 1, 2]


def test_a_loader_may_have_a_name():
    """In its repr, which `forebay top` shows, and in its report; a subclass keeps its own."""
    loader = DataLoader([1, 2, 3], name="train")
    assert loader.name == "train"
    assert repr(loader).startswith("train: DataLoader(list(3), batch_size=1,")
    assert repr(DataLoader([1, 2, 3])).startswith("DataLoader(")
    with pytest.raises(OptionError, match="name=3 is not valid; it must be a string, or None"):
        DataLoader([1], name=3)

    class Own(DataLoader):
        @property
        def name(self):
            return 7

    assert repr(Own([1])).startswith("Own(")
