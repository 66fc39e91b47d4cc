"""The constructor, the attributes and the object itself are those of torch's DataLoader."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from datasets import SizedStream, Squares, Stream, as_it_is, mark_copy, numbers
from same import assert_same
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchDataLoader

from forebay import DataLoader

# A machine of one core is warned of two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")

# Which warnings this version of torch has.
TORCHS_SOURCE = inspect.getsource(torch.utils.data.dataloader)
FORKSERVER = torch.multiprocessing.get_context("forkserver")
GENERATOR = torch.Generator()
SAMPLER = SequentialSampler(range(4))
BATCHES = [[0, 3], [1], [2, 2, 2]]


# ---- arguments that do not go together ----------------------------------------------------------

EXCLUSIVE = (
    "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last"
)
INVALID = {
    "negative workers": ({"num_workers": -1}, ValueError, "num_workers option should be non-neg"),
    "negative timeout": ({"timeout": -1}, ValueError, "timeout option should be non-negative"),
    "prefetch without workers": (
        {"prefetch_factor": 2},
        ValueError,
        "prefetch_factor option could only be specified in multiprocessing",
    ),
    "prefetch of 0 without workers": (
        {"prefetch_factor": 0},
        ValueError,
        "prefetch_factor option could only be specified in multiprocessing",
    ),
    "negative prefetch": (
        {"prefetch_factor": -1, "num_workers": 2},
        ValueError,
        "prefetch_factor option should be non-negative",
    ),
    "persistent without workers": (
        {"persistent_workers": True},
        ValueError,
        "persistent_workers option needs num_workers > 0",
    ),
    "sampler and shuffle": (
        {"sampler": SAMPLER, "shuffle": True},
        ValueError,
        "sampler option is mutually exclusive with shuffle",
    ),
    **{
        f"batch_sampler and {name}": (
            {"batch_sampler": BATCHES, name: value},
            ValueError,
            EXCLUSIVE,
        )
        for name, value in [
            ("batch_size", 2),
            ("batch_size", None),
            ("shuffle", True),
            ("sampler", SAMPLER),
            ("drop_last", True),
        ]
    },
    "no batches and drop_last": (
        {"batch_size": None, "drop_last": True},
        ValueError,
        "batch_size=None option disables auto-batching and is mutually exclusive with drop_last",
    ),
    "batches of 0": ({"batch_size": 0}, ValueError, "batch_size should be a positive integer"),
    "negative batches": ({"batch_size": -2}, ValueError, "batch_size should be a positive integer"),
    "batch size as text": ({"batch_size": "2"}, ValueError, "batch_size should be a positive int"),
    "batch size of a half": ({"batch_size": 0.5}, ValueError, "batch_size should be a positive"),
    "drop_last as text": ({"drop_last": "yes"}, ValueError, "drop_last should be a boolean value"),
    "generator as number": (
        {"generator": 7, "shuffle": True},
        TypeError,
        "[Gg]enerator",
    ),
    "context without workers": (
        {"multiprocessing_context": "fork"},
        ValueError,
        r"multiprocessing_context can only be used with multi-process loading \(num_workers > 0\)",
    ),
    "unknown context": (
        {"multiprocessing_context": "teleport", "num_workers": 2},
        ValueError,
        r"should specify a valid start method in \['fork', .*'teleport'",
    ),
    "context of a wrong type": (
        {"multiprocessing_context": 7, "num_workers": 2},
        TypeError,
        "should be a valid context object or a string specifying the start method, but got .*=7",
    ),
    "unknown argument": ({"number_of_workers": 2}, TypeError, "number_of_workers"),
}
INVALID_FOR_STREAMS = {
    "shuffle": ({"shuffle": True}, "expected unspecified shuffle option, but got shuffle=True"),
    "shuffle of 1": ({"shuffle": 1}, "expected unspecified shuffle option, but got shuffle=1"),
    "sampler": ({"sampler": SAMPLER}, "expected unspecified sampler option, but got sampler="),
    "batch_sampler": ({"batch_sampler": BATCHES}, r"batch_sampler option, but got .*=\[\[0, 3\]"),
    "sampler and shuffle": ({"sampler": SAMPLER, "shuffle": True}, "unspecified shuffle option"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), INVALID.values(), ids=INVALID)
def test_arguments_that_make_no_sense_are_refused_in_torchs_words(
    loader_class, arguments, error, message
):
    """Each wrong argument or combination raises torch's exception with torch's message."""
    with pytest.raises(error, match=message) as caught:
        iter(loader_class(range(4), **arguments))
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("arguments", "message"), INVALID_FOR_STREAMS.values(), ids=INVALID_FOR_STREAMS
)
def test_a_stream_takes_no_order(loader_class, arguments, message):
    """An IterableDataset with shuffle, sampler or batch_sampler is refused, shuffle first."""
    with pytest.raises(ValueError, match=f"DataLoader with IterableDataset: .*{message}"):
        loader_class(Stream(4), **arguments)


@pytest.mark.parametrize("shuffle", [False, None, 0])
def test_a_stream_may_be_told_not_to_shuffle(loader_class, shuffle):
    """Only a wish to shuffle is refused."""
    assert numbers(loader_class(Stream(3), shuffle=shuffle)) == [[0], [1], [2]]


def test_a_timeout_without_workers_is_refused_when_iterated(loader_class):
    """The main process cannot time itself out, and torch says so only at iter()."""
    loader = loader_class(range(4), timeout=5)
    assert len(loader) == 4
    with pytest.raises(AssertionError, match="requires timeout == 0"):
        iter(loader)


def test_shuffling_what_has_no_length_is_refused_at_once(loader_class):
    """RandomSampler wants the length when it is made; SequentialSampler only when it is used."""
    source = (number for number in range(4))
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        loader_class(source, shuffle=True)
    loader = loader_class(source)
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        next(iter(loader))


def test_too_many_workers_are_warned_of(loader_class):
    """More workers than cores: torch's warning, when the loader is made."""
    with pytest.warns(UserWarning, match="This DataLoader will create 1000 worker processes"):
        loader_class(range(4), num_workers=1000)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a device is here to pin for")
@pytest.mark.skipif(
    "no accelerator is found" not in TORCHS_SOURCE, reason="torch 2.6 does not warn of it"
)
def test_pinning_without_a_device_is_warned_of_and_loads(loader_class, num_workers):
    """`pin_memory` on a machine without a device warns at iter() and changes nothing else."""
    loader = loader_class(range(4), pin_memory=True, num_workers=num_workers, batch_size=2)
    with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerat"):
        batches = list(loader)
    assert numbers(batches) == [[0, 1], [2, 3]]
    assert not batches[0].is_pinned()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a device is here to pin for")
@pytest.mark.skipif(
    "pin_memory_device is deprecated" not in TORCHS_SOURCE,
    reason="torch until 2.8 pins for the device that is named",
)
def test_the_device_to_pin_for_is_called_deprecated(loader_class):
    """`pin_memory_device` is taken, warned of and ignored."""
    loader = loader_class(range(2), pin_memory=True, pin_memory_device="cuda")
    with pytest.warns(UserWarning, match="pin_memory_device is deprecated"):
        with pytest.warns(UserWarning, match="no accelerator is found"):
            iter(loader)


# ---- attributes ---------------------------------------------------------------------------------

PLAIN = [
    "batch_size",
    "drop_last",
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "persistent_workers",
    "in_order",
    "worker_init_fn",
    "collate_fn",
    "generator",
    "dataset",
    "multiprocessing_context",
    "_auto_collation",
    "_dataset_kind",
    "_iterator",
    "_IterableDataset_len_called",
]
DATASET, STREAM = Squares(8), Stream(8)
GIVEN = {
    "nothing": {},
    "batch_size": {"batch_size": 3},
    "shuffle": {"shuffle": True},
    "shuffle with a generator": {"shuffle": True, "generator": GENERATOR},
    "no batches": {"batch_size": None},
    "no batches, own collate_fn": {"batch_size": None, "collate_fn": as_it_is},
    "drop_last": {"batch_size": 3, "drop_last": True},
    "sampler": {"sampler": SAMPLER},
    "list as sampler": {"sampler": [3, 1]},
    "batch_sampler": {"batch_sampler": BATCHES},
    "workers": {"num_workers": 2},
    "all of workers": {
        "num_workers": 2,
        "prefetch_factor": 5,
        "persistent_workers": True,
        "timeout": 7.5,
        "worker_init_fn": mark_copy,
        "in_order": False,
    },
    "context object": {"num_workers": 1, "multiprocessing_context": FORKSERVER},
    "collate_fn": {"collate_fn": as_it_is},
    "pin_memory": {"pin_memory": True, "pin_memory_device": "cuda"},
}


ORDERS = {"shuffle", "sampler", "batch_sampler"}
ACCEPTED = {f"map, {name}": (DATASET, arguments) for name, arguments in GIVEN.items()} | {
    f"stream, {name}": (STREAM, arguments)
    for name, arguments in GIVEN.items()
    if not ORDERS & set(arguments)
}


@pytest.mark.parametrize(("dataset", "arguments"), ACCEPTED.values(), ids=ACCEPTED)
def test_attributes_are_torchs(loader_class, dataset, arguments):
    """Every attribute has the value that torch gives it, samplers the same type and contents."""
    loader, torchs = loader_class(dataset, **arguments), TorchDataLoader(dataset, **arguments)
    values = {name: getattr(loader, name) for name in PLAIN}
    assert values == {name: getattr(torchs, name) for name in PLAIN}
    for name in ("sampler", "batch_sampler", "_index_sampler"):
        one, other = getattr(loader, name), getattr(torchs, name)
        assert type(one) is type(other), name
        if name in arguments:
            assert one is arguments[name]
        elif isinstance(one, BatchSampler):
            assert (one.batch_size, one.drop_last) == (other.batch_size, other.drop_last)
            assert one.sampler is loader.sampler
        elif isinstance(one, RandomSampler):
            assert one.generator is arguments.get("generator")
            assert one.data_source is dataset


@pytest.mark.parametrize("method", torch.multiprocessing.get_all_start_methods())
def test_a_context_by_name_becomes_a_context(loader_class, method):
    """The attribute holds a context of that start method, torch's own kind."""
    loader = loader_class(range(4), num_workers=1, multiprocessing_context=method)
    assert loader.multiprocessing_context is torch.multiprocessing.get_context(method)


@pytest.mark.parametrize(
    "name",
    ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"],
)
def test_what_shapes_the_batches_cannot_be_set_afterwards(loader_class, name):
    """Once made, a loader keeps its dataset, samplers and sizes."""
    loader = loader_class(range(4))
    message = f"^{name} attribute should not be set after DataLoader is initialized"
    with pytest.raises(ValueError, match=message):
        setattr(loader, name, getattr(loader, name))


def test_the_context_is_checked_when_it_is_set_afterwards(loader_class):
    """`multiprocessing_context` may change, and follows the same rules then."""
    loader = loader_class(range(4), num_workers=1)
    loader.multiprocessing_context = "spawn"
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    with pytest.raises(ValueError, match="should specify a valid start method"):
        loader.multiprocessing_context = "teleport"
    with pytest.raises(TypeError, match="should be a valid context object"):
        loader.multiprocessing_context = 7


def test_other_attributes_may_be_set_and_count_from_the_next_epoch(loader_class, num_workers):
    """A new collate_fn or num_workers is used by the next iterator."""
    loader = loader_class(range(4), batch_size=2)
    assert numbers(loader) == [[0, 1], [2, 3]]
    loader.prefetch_factor = 2 if num_workers else None
    loader.num_workers = num_workers
    loader.collate_fn = as_it_is
    loader.anything = "else"
    assert list(loader) == [[0, 1], [2, 3]]


# ---- the object ---------------------------------------------------------------------------------


def test_it_is_a_torch_data_loader(loader_class):
    """`isinstance` and `issubclass` hold, and the class can be written with its item type."""
    assert issubclass(loader_class, TorchDataLoader)
    assert isinstance(loader_class(range(4)), TorchDataLoader)
    assert numbers(loader_class[torch.Tensor](range(2))) == [[0], [1]]
    assert "DataLoader" in repr(loader_class(range(4)))


def test_arguments_come_in_torchs_order_with_torchs_defaults(loader_class):
    """The signature starts with torch's, name by name; what is forebay's own comes by name."""
    ours = list(inspect.signature(loader_class.__init__).parameters.values())
    torchs = list(inspect.signature(TorchDataLoader.__init__).parameters.values())
    shared = [one for one in ours if one.name in {other.name for other in torchs}]
    assert [(one.name, one.kind, one.default) for one in shared] == [
        (other.name, other.kind, other.default) for other in torchs
    ]
    own = [one for one in ours if one not in shared]
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in own)


def test_arguments_may_be_given_by_position(loader_class):
    """Thirteen of them, as torch numbers them."""
    given = (range(8), 3, False, None, None, 1, as_it_is, False, True, 60, mark_copy, "fork")
    loader = loader_class(*given, GENERATOR)
    assert (loader.batch_size, loader.num_workers, loader.collate_fn) == (3, 1, as_it_is)
    assert (loader.drop_last, loader.timeout, loader.worker_init_fn) == (True, 60, mark_copy)
    assert loader.multiprocessing_context.get_start_method() == "fork"
    assert loader.generator is GENERATOR
    with pytest.raises(TypeError, match="positional argument"):
        loader_class(*given, GENERATOR, 2)


LENGTHS = {
    "one by one": (range(10), {}, 10),
    "batches": (range(10), {"batch_size": 4}, 3),
    "full batches": (range(10), {"batch_size": 4, "drop_last": True}, 2),
    "no batches": (range(10), {"batch_size": None}, 10),
    "batch_sampler": (range(10), {"batch_sampler": BATCHES}, 3),
    "sampler": (range(10), {"sampler": [1, 2, 3], "batch_size": 2}, 2),
    "nothing": ([], {"batch_size": 4}, 0),
    "stream": (SizedStream(10, 10), {"batch_size": 4}, 3),
    "stream, full batches": (SizedStream(10, 10), {"batch_size": 4, "drop_last": True}, 2),
    "stream, no batches": (SizedStream(10, 10), {"batch_size": None}, 10),
}


@pytest.mark.parametrize(("dataset", "arguments", "length"), LENGTHS.values(), ids=LENGTHS)
def test_the_length_is_the_number_of_batches(loader_class, dataset, arguments, length):
    """len() counts batches, of the loader and of what comes out."""
    loader = loader_class(dataset, **arguments)
    assert (len(loader), len(list(loader))) == (length, length)


def test_an_iterator_has_the_length_of_a_whole_epoch(loader_class, num_workers):
    """What has been taken does not count down."""
    iterator = iter(loader_class(range(10), batch_size=4, num_workers=num_workers))
    next(iterator)
    assert len(iterator) == 3


def test_what_has_no_length_says_so(loader_class):
    """A stream without `__len__`, and a sampler without one."""
    with pytest.raises(TypeError, match=r"type 'Stream' has no len\(\)"):
        len(loader_class(Stream(4)))
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(loader_class(range(4), batch_sampler=iter(BATCHES)))


def through_pickle(loader):
    return pickle.loads(pickle.dumps(loader))


@pytest.mark.slow
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, through_pickle])
def test_a_loader_can_be_copied_and_pickled(loader_class, again, num_workers):
    """A copy gives the same batches and has the same class and attributes."""
    loader = loader_class(DATASET, batch_size=3, num_workers=num_workers)
    copied = again(loader)
    assert type(copied) is loader_class
    assert (copied.batch_size, copied.num_workers) == (3, num_workers)
    assert_same(list(copied), list(loader))
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        copied.batch_size = 2


def test_an_iterator_cannot_be_pickled(loader_class, num_workers):
    """torch says so, and nothing is better than half an iterator."""
    iterator = iter(loader_class(range(4), num_workers=num_workers))
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iterator)


def test_making_a_loader_makes_nothing_else(loader_class):
    """No sample is asked for and no worker started before iter()."""
    loader = loader_class(Unasked(), num_workers=2, persistent_workers=True)
    assert len(loader) == 4
    assert get_worker_info() is None
    assert not torch.multiprocessing.active_children()


class Unasked(Squares):
    def __init__(self):
        super().__init__(4)

    def __getitem__(self, index):
        raise AssertionError("asked for a sample")


# ---- subclasses ---------------------------------------------------------------------------------


def test_a_subclass_may_set_attributes_before_torch_does(loader_class):
    """Nothing is fixed before the base class has been initialised."""

    class Own(loader_class):
        kind = "own"
        batch_size = None

        def __init__(self, dataset, **arguments):
            self.extra = 7
            self.dataset = "not yet"
            super().__init__(dataset, **arguments)

    loader = Own(range(4), batch_size=2)
    assert (loader.kind, loader.extra, loader.batch_size) == ("own", 7, 2)
    assert numbers(loader) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="should not be set after Own is initialized"):
        loader.batch_size = 3


def test_a_subclass_may_iterate_in_its_own_way(loader_class, num_workers):
    """An `__iter__` around the base's, and a `__len__` of its own."""

    class Twice(loader_class):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch
                yield -batch

        def __len__(self):
            return 2 * super().__len__()

    loader = Twice(range(1, 4), num_workers=num_workers)
    assert numbers(loader) == [[1], [-1], [2], [-2], [3], [-3]]
    assert len(loader) == 6


def test_a_subclass_may_wrap_the_iterator(loader_class, num_workers):
    """`_get_iterator` is where torch makes one, and where libraries step in."""

    class Wrapped(loader_class):
        def _get_iterator(self):
            return map(torch.neg, super()._get_iterator())

    assert numbers(Wrapped(range(1, 3), num_workers=num_workers)) == [[-1], [-2]]


def test_the_samplers_of_a_loader_may_be_iterated_apart_from_it(loader_class):
    """A sampler belongs to the user: the loader only iterates it."""
    sampler = SubsetRandomSampler([4, 2])
    loader = loader_class(range(5), sampler=sampler)
    assert sorted(sampler) == [2, 4]
    assert sorted(numbers(loader)) == [[2], [4]]
    assert loader.sampler is sampler


class Ending(Sampler):
    """Yields two batches, and counts how often it was read to its end."""

    ended = 0

    def __len__(self):
        return 2

    def __iter__(self):
        yield [0, 1]
        yield [2, 3]
        self.ended += 1


def test_a_sampler_ends_when_the_batch_after_the_last_is_asked_for(loader_class):
    """What it does at its end is not done yet while the last batch is used."""
    sampler = Ending()
    iterator = iter(loader_class(Squares(4), batch_sampler=sampler))
    for _ in range(2):
        next(iterator)
    assert sampler.ended == 0
    with pytest.raises(StopIteration):
        next(iterator)
    assert sampler.ended == 1


def test_a_state_after_the_last_batch_is_that_of_the_next_epoch():
    """To know that it was the last, the sampler is read to its end, once."""
    sampler = Ending()
    loader = DataLoader(Squares(4), batch_sampler=sampler)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    assert (loader.epoch, loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 1, 0)
    assert (sampler.ended, len(list(iterator)), sampler.ended) == (1, 0, 1)
    assert len(list(loader)) == 2
