"""What comes out equals what torch's DataLoader gives, type for type and bit for bit."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import re
import types
import typing

import numpy
import pytest
import torch
from datasets import Squares, as_it_is, error_of_next
from same import assert_same
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import default_collate, default_convert

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 2 worker",
    # What torch says of kinds of tensors that are new to it.
    "ignore:Sparse invariant checks are implicitly disabled",
    "ignore:Sparse .* tensor support is in beta",
    "ignore:The PyTorch API of nested tensors is in prototype",
)

NAN, INFINITY = float("nan"), float("inf")


class Point(typing.NamedTuple):
    x: typing.Any
    y: typing.Any


Old = collections.namedtuple("Old", "left right")


class Labelled(dict):
    """A dict with something besides its items."""

    def __init__(self, *items, label="none"):
        super().__init__(*items)
        self.label = label


class Frozen(collections.abc.Mapping):
    """A mapping that cannot be changed, made of another."""

    def __init__(self, items):
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class Stubborn(Frozen):
    """A mapping that cannot be made of another: it comes out as a dict."""

    def __init__(self, first, second):
        super().__init__({"first": first, "second": second})


@dataclasses.dataclass
class Record(collections.abc.Mapping):
    """A dataclass that is a mapping too."""

    image: typing.Any
    label: typing.Any

    def __getitem__(self, key):
        return getattr(self, key)

    def __iter__(self):
        return iter(("image", "label"))

    def __len__(self):
        return 2


class Own(list):
    """A list of one's own kind, with something besides its items."""

    colour = "red"


class Couple(collections.abc.Sequence):
    """A sequence that cannot be changed, made of a list."""

    def __init__(self, items):
        self.items = tuple(items)

    def __getitem__(self, position):
        return self.items[position]

    def __len__(self):
        return len(self.items)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Batch:
    """A batch of one's own kind."""

    data: typing.Any
    names: list[str]
    more: typing.Any = None


class Plain:
    """A batch of a kind with nothing but attributes."""

    def __init__(self, data):
        self.data = data
        self.where = {"deep": [data, data[0]]}


class MyTensor(torch.Tensor):
    """A tensor of one's own kind."""


def three(make):
    """Return three samples, made of the numbers 1, 2 and 3."""
    return [make(1), make(2), make(3)]


def tensor(dtype):
    return three(lambda n: torch.arange(6).reshape(2, 3).mul(n).to(dtype))


def labelled(n):
    sample = Labelled({"a": n}, label="kept")
    sample.more = [n]
    return sample


def own(n):
    sample = Own([n, torch.ones(n and 2)])
    sample.colour = "blue"
    return sample


# ---- default_collate ----------------------------------------------------------------------------

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
ARRAYS = ["f8", "f4", "f2", "u1", "i1", "i2", "i4", "i8", "?", "u2", "u4", "u8", "c8", "c16"]
COLLATED = {
    **{str(dtype): tensor(dtype) for dtype in DTYPES},
    **{f"array {dtype}": three(lambda n, d=dtype: numpy.full((2, 3), n, d)) for dtype in ARRAYS},
    **{f"scalar {dtype}": three(numpy.dtype(dtype).type) for dtype in ARRAYS if dtype != "u8"},
    "tensors without axes": three(torch.tensor),
    "tensors of nothing": three(lambda n: torch.empty(0)),
    "tensors of nothing in one axis": three(lambda n: torch.empty(3, 0, 2)),
    "nan and infinity": three(lambda n: torch.tensor([NAN, -NAN, INFINITY, -INFINITY, -0.0])),
    "transposed": three(lambda n: torch.arange(6.0).reshape(2, 3).t() * n),
    "with gaps": three(lambda n: torch.arange(24.0).reshape(4, 6)[::2, 1::3] * n),
    "expanded": three(lambda n: torch.tensor([[float(n)]]).expand(3, 4)),
    "own tensors": three(lambda n: torch.ones(2).as_subclass(MyTensor)),
    "parameters": three(lambda n: torch.nn.Parameter(torch.ones(2), requires_grad=False)),
    "arrays without axes": three(numpy.array),
    "arrays of nothing": three(lambda n: numpy.zeros((0, 3))),
    "arrays in columns": three(lambda n: numpy.asfortranarray(numpy.ones((2, 3)) * n)),
    "ints": [1, -2, 2**40],
    "bools": [True, False, True],
    "bool and ints": [True, 2, 3],
    "int and float": [1, 2.5, 3],
    "floats": [1.5, NAN, -0.0],
    "enum": [Level.LOW, Level.HIGH, Level.LOW],
    "text": ["a", "", "ü"],
    "bytes": [b"a", b"", b"\xff"],
    "numpy text": [numpy.str_("a"), numpy.str_("b"), numpy.str_("c")],
    "lists": three(lambda n: [n, float(n), str(n)]),
    "tuples": three(lambda n: (n, float(n), str(n))),
    "tuples of nothing": three(lambda n: ()),
    "lists of nothing": three(lambda n: []),
    "ranges": three(lambda n: range(n, n + 2)),
    "deques": three(lambda n: collections.deque([n, torch.ones(2)], maxlen=5)),
    "bytearrays": three(lambda n: bytearray([n, 7])),
    "own lists": three(own),
    "own sequences": three(lambda n: Couple([n, "a"])),
    "NamedTuples": three(lambda n: Point(torch.ones(2) * n, str(n))),
    "old namedtuples": three(lambda n: Old(n, [n])),
    "dicts": three(lambda n: {"b": n, "a": str(n), 3: torch.ones(n and 1)}),
    "dicts of nothing": three(lambda n: {}),
    "OrderedDicts": three(lambda n: collections.OrderedDict(z=n, a=str(n))),
    "defaultdicts": three(lambda n: collections.defaultdict(list, a=n)),
    "Counters": three(lambda n: collections.Counter(a=n)),
    "ChainMaps": three(lambda n: collections.ChainMap({"a": n}, {"b": n})),
    "own dicts": three(labelled),
    "frozen mappings": three(lambda n: Frozen({"a": n})),
    "stubborn mappings": three(lambda n: Stubborn(n, str(n))),
    "dataclasses that are mappings": three(lambda n: Record(torch.ones(2) * n, n)),
    "more keys in later ones": [{"a": 1}, {"a": 2, "b": 3}, {"a": 3, "c": 4}],
    "deep": three(lambda n: {"a": [(n, {"b": Point([str(n)], torch.ones(2, 2) * n)})], "c": b"c"}),
    "many small": three(lambda n: {f"field {k}": torch.full((k % 3,), n * k) for k in range(50)}),
}
# The one cannot be pickled, the other not be stacked by torch in a worker.
ONLY_IN_MAIN = {
    "mapping proxies": three(lambda n: types.MappingProxyType({"a": n})),
    "conjugates": three(lambda n: torch.tensor([complex(n, n)]).conj()),
}


def in_groups(cases):
    """Parametrize by sixteen cases at a time: one loader for them all, for speed."""
    names = list(cases)
    groups = [names[start : start + 16] for start in range(0, len(names), 16)]
    return pytest.mark.parametrize("names", groups, ids=[f"{group[0]}..." for group in groups])


@pytest.mark.slow
@in_groups(COLLATED)
def test_samples_are_collated_by_torchs_rules(loader_class, num_workers, names):
    """Any structure of samples gives the batch that default_collate gives, short ones included."""
    dataset = [sample for name in names for sample in COLLATED[name]]
    sampler = [keys for n in range(0, len(dataset), 3) for keys in ([n, n + 1], [n + 2])]
    batches = list(loader_class(dataset, batch_sampler=sampler, num_workers=num_workers))
    for position, name in enumerate(names):
        samples = COLLATED[name]
        expected = [default_collate(samples[:2]), default_collate(samples[2:])]
        assert_same(batches[2 * position : 2 * position + 2], expected, name)


@pytest.mark.parametrize("samples", ONLY_IN_MAIN.values(), ids=ONLY_IN_MAIN)
def test_what_workers_cannot_give_is_collated_in_the_main_process(loader_class, samples):
    """Without workers nothing has to be sent."""
    assert_same(list(loader_class(samples, batch_size=3)), [default_collate(samples)])


@pytest.mark.slow
@in_groups(COLLATED)
def test_single_samples_are_converted_by_torchs_rules(loader_class, num_workers, names):
    """With batch_size=None, arrays become tensors and tuples lists; all else stays."""
    dataset = [COLLATED[name][0] for name in names]
    loader = loader_class(dataset, batch_size=None, num_workers=num_workers)
    for name, sample, converted in zip(names, dataset, loader, strict=True):
        assert_same(converted, default_convert(sample), name)


LAYOUTS = {
    "channels last": three(
        lambda n: torch.rand(3, 4, 5).unsqueeze(0).contiguous(memory_format=torch.channels_last)[0]
    ),
    "transposed": three(lambda n: torch.rand(3, 4).t()),
}


@pytest.mark.parametrize("samples", LAYOUTS.values(), ids=LAYOUTS)
def test_a_stack_lies_in_memory_as_torchs_does(loader_class, num_workers, samples):
    """Whatever order of axes torch chooses with as many workers, ours is the same."""
    arguments = {"batch_size": 3, "num_workers": num_workers}
    torchs = list(TorchDataLoader(samples, **arguments))
    assert_same(list(loader_class(samples, **arguments)), torchs)


ONLY = "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found"
UNEQUAL = "each element in list of batch should be of equal size"
try:
    torch.tensor([2**70])
except (ValueError, RuntimeError) as error:  # the latter until torch 2.8
    OVERFLOW = type(error)
SPARSE = "Batches of sparse tensors are not currently supported by the default collate_fn"
REFUSED = {
    "None": (lambda: [None, None], TypeError, f"{ONLY} <class 'NoneType'>"),
    "None within": (
        lambda: [(1, None), (2, None)],
        TypeError,
        f"{ONLY} <class 'NoneType'>",
    ),
    "objects": (lambda: [object(), object()], TypeError, f"{ONLY} <class 'object'>"),
    "sets": (lambda: [{1}, {2}], TypeError, f"{ONLY} <class 'set'>"),
    "generators": (
        lambda: [(n for n in "a")] * 2,
        TypeError,
        f"{ONLY} <class 'generator'>",
    ),
    "complex numbers": (lambda: [1j, 2j], TypeError, f"{ONLY} <class 'complex'>"),
    "dataclasses": (lambda: [Batch(1, [])] * 2, TypeError, f"{ONLY} <class '.*Batch'>"),
    "arrays of text": (lambda: [numpy.array(["a"])] * 2, TypeError, f"{ONLY} <U1"),
    "arrays of objects": (lambda: [numpy.array([{}])] * 2, TypeError, f"{ONLY} object"),
    "number, then text": (
        lambda: [1, "a"],
        TypeError,
        "invalid data type 'str'|too many",
    ),
    "unequal lists": (
        lambda: [[1], [1, 2]],
        RuntimeError,
        UNEQUAL,
    ),
    "unequal tensors": (
        lambda: [torch.ones(2), torch.ones(3)],
        RuntimeError,
        r"stack expects each tensor to be equal size, but got \[2\] at entry 0 and \[3\] at",
    ),
    "unequal arrays": (
        lambda: [numpy.ones(2), numpy.ones(3)],
        RuntimeError,
        "stack expects each tensor",
    ),
    "a key missing": (lambda: [{"a": 1}, {"b": 1}], KeyError, "'a'"),
    "sparse": (
        lambda: [torch.eye(2).to_sparse()] * 2,
        RuntimeError,
        SPARSE,
    ),
    "sparse rows": (
        lambda: [torch.eye(2).to_sparse_csr()] * 2,
        RuntimeError,
        SPARSE,
    ),
    "nested": (
        lambda: [torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])] * 2,
        RuntimeError,
        "Batches of nested tensors are not currently supported by the default collate_fn",
    ),
    "an int too long": (lambda: [2**70, 1], OVERFLOW, "Overflow when unpacking long"),
}


@in_groups(REFUSED)
def test_what_cannot_be_collated_is_refused_in_torchs_words(loader_class, num_workers, names):
    """The exception and words of default_collate, whether a worker or the main process meets it."""
    dataset = [sample for name in names for sample in REFUSED[name][0]()]
    iterator = iter(loader_class(dataset, batch_size=2, num_workers=num_workers))
    for position, name in enumerate(names):
        kind, words = error_of_next(iterator)
        _, error, message = REFUSED[name]
        assert kind is error, name
        assert re.search(message, words), name
        where = f"in DataLoader worker process {position % 2}."
        assert (where in words) is (num_workers > 0), name


def test_the_type_of_a_batch_is_that_of_its_first_sample(loader_class, num_workers):
    """Tensors of several dtypes are stacked as torch does it, or refused as torch refuses it."""
    samples = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    arguments = {"batch_size": 2, "num_workers": num_workers}
    outcomes = []
    for kind in (loader_class, TorchDataLoader):
        try:
            outcomes.append(list(kind(samples, **arguments)))
        except RuntimeError as error:
            outcomes.append(str(error).splitlines()[-1])
    assert_same(*outcomes)


def test_samples_that_need_gradients_are_treated_as_torch_treats_them(loader_class, num_workers):
    """In the main process gradients flow through the batch; a worker refuses to stack them."""
    samples = [torch.ones(2, requires_grad=True) for _ in range(2)]
    loader = loader_class(samples, batch_size=2, num_workers=num_workers)
    if num_workers:
        kind, words = error_of_next(iter(loader))
        assert kind is RuntimeError
        assert "don't support automatic differentiation" in words
    else:
        next(iter(loader)).sum().backward()
        assert_same([sample.grad for sample in samples], [torch.ones(2)] * 2)


# ---- a collate_fn of one's own ------------------------------------------------------------------

MADE = {
    "None": lambda n: None,
    "None within": lambda n: (None, [n, None]),
    "number": lambda n: n,
    "float": lambda n: NAN,
    "complex": lambda n: complex(n, -0.0),
    "long number": lambda n: n << 100,
    "bool": lambda n: n > 1,
    "text": lambda n: "ü" * n,
    "long text": lambda n: "ü" * 100_000,
    "bytes": bytes,
    "many bytes": lambda n: b"ab" * 500_000,
    "bytearray": lambda n: bytearray(100_000),
    "array.array": lambda n: array.array("d", [n, NAN]),
    "set": lambda n: {n, "a"},
    "frozenset": lambda n: frozenset({n}),
    "range": range,
    "slice": lambda n: [slice(n, None, 2), Ellipsis],
    "tuple": lambda n: (n, [torch.ones(n)], ("a",)),
    "tuples of nothing": lambda n: ((), [], {}),
    "NamedTuple": lambda n: Point(torch.ones(n), numpy.ones(n)),
    "dict": lambda n: {"z": torch.ones(n), "a": [n], (1, 2): None, None: 0},
    "defaultdict": lambda n: collections.defaultdict(list, a=torch.ones(n)),
    "OrderedDict": lambda n: collections.OrderedDict(z=torch.ones(n), a=1),
    "Counter": lambda n: collections.Counter("aab"),
    "own dict": labelled,
    "own list": own,
    "dataclass": lambda n: Batch(torch.ones(n, 2), ["a"], {"more": numpy.ones(n)}),
    "plain object": lambda n: Plain(torch.ones(n, 2)),
    "others": lambda n: [
        datetime.datetime(2024, 1, n, tzinfo=datetime.UTC),
        datetime.timedelta(n),
        decimal.Decimal("1.10"),
        fractions.Fraction(n, 7),
        pathlib.PurePosixPath("a/b"),
        Level.HIGH,
        torch.float16,
        torch.Size([n]),
        numpy.dtype("f4"),
        int,
    ],
    **{str(dtype): lambda n, d=dtype: torch.arange(8).mul(n).to(d) for dtype in DTYPES},
    "tensor without axes": torch.tensor,
    "tensor of nothing": lambda n: torch.empty(0, n),
    "tensor that grows": lambda n: torch.full((n, 10**n), n),
    "nan": lambda n: torch.tensor([NAN, -NAN, -0.0]),
    "transposed": lambda n: torch.arange(6.0).reshape(2, 3).t(),
    "channels last": lambda n: torch.rand(
        2, 3, 4, 5, generator=torch.Generator().manual_seed(n)
    ).contiguous(memory_format=torch.channels_last),
    "with gaps": lambda n: torch.arange(24.0).reshape(4, 6)[::2, 1::3],
    "expanded": lambda n: torch.tensor([[float(n)]]).expand(3, 4),
    "a piece of much": lambda n: torch.arange(1000)[n : n + 2],
    "parameter": lambda n: torch.nn.Parameter(torch.ones(n)),
    "needs a gradient": lambda n: torch.ones(n, requires_grad=True),
    "own tensor": lambda n: torch.ones(n).as_subclass(MyTensor),
    "sparse": lambda n: torch.eye(3).mul(n).to_sparse(),
    "sparse, not coalesced": lambda n: torch.sparse_coo_tensor(
        [[0, 0]], [1.0, n], (2,), check_invariants=False
    ),
    "sparse rows": lambda n: torch.eye(3).mul(n).to_sparse_csr(),
    "sparse columns": lambda n: torch.eye(3).mul(n).to_sparse_csc(),
    "nested": lambda n: torch.nested.nested_tensor([torch.ones(n), torch.ones(2)]),
    "PackedSequence": lambda n: pack_sequence([torch.ones(n + 1), torch.ones(n)]),
    **{f"array {dtype}": lambda n, d=dtype: numpy.full((n, 3), n, d) for dtype in ARRAYS},
    "scalar": numpy.float32,
    "array without axes": numpy.array,
    "array of nothing": lambda n: numpy.zeros((0, n)),
    "array in columns": lambda n: numpy.asfortranarray(numpy.ones((2, 3)) * n),
    "array with gaps": lambda n: numpy.arange(24).reshape(4, 6)[::2, 1::3],
    "array of text": lambda n: numpy.array(["a", "bc" * n]),
    "array of objects": lambda n: numpy.array([{"a": n}, None], dtype=object),
    "array of records": lambda n: numpy.array([(n, 0.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "array of dates": lambda n: numpy.array(["2024-01-01"], dtype="M8[D]"),
    "masked array": lambda n: numpy.ma.masked_array([1.0, 2.0], mask=[True, False]),
    "large array": lambda n: numpy.full((512, 512), n, "f4"),
    "arrays and tensors": lambda n: {"a": numpy.ones(n), "t": [torch.ones(n), numpy.int8(n)]},
    "many": lambda n: {k: torch.full((k,), n) for k in range(200)},
}


def make_named(names):
    """Collate the name of a case, as often as it stands there, to what that case makes."""
    return MADE[names[0]](len(names))


@pytest.mark.slow
@in_groups(MADE)
def test_any_batch_of_a_collate_fn_comes_out_as_it_is(loader_class, num_workers, names):
    """Batches of sizes that vary, 2, 3 and 1, equal those made in this process."""
    sampler = [[n] * size for n in range(len(names)) for size in (2, 3, 1)]
    loader = loader_class(
        names, batch_sampler=sampler, collate_fn=make_named, num_workers=num_workers
    )
    batches = list(loader)
    for position, name in enumerate(names):
        made = [MADE[name](size) for size in (2, 3, 1)]
        assert_same(batches[3 * position : 3 * position + 3], made, name)


def test_an_array_of_another_byte_order_keeps_its_numbers(loader_class, num_workers):
    """Return whether the bytes were swapped on the way is nobody's concern: torch does it."""
    loader = loader_class([1, 2], 2, collate_fn=in_big_endian, num_workers=num_workers)
    assert [array_.tolist() for array_ in loader] == [[1, 2]]


def in_big_endian(samples):
    return numpy.array(samples, dtype=">i4")


def test_a_collate_fn_gets_a_list_of_samples(loader_class, num_workers):
    """A list, in the order of the indices, whatever the samples are."""
    loader = loader_class(
        [None, "a", {1}, object], batch_size=3, collate_fn=as_it_is, num_workers=num_workers
    )
    assert_same(list(loader), [[None, "a", {1}], [object]])


def test_a_collate_fn_may_give_what_cannot_be_sent_in_the_main_process(loader_class):
    """Without workers even a generator gets through, and is run by whoever takes it."""
    loader = loader_class(range(4), batch_size=2, collate_fn=lambda samples: (n for n in samples))
    assert [list(batch) for batch in loader] == [[0, 1], [2, 3]]


def test_one_tensor_in_two_places_is_equal_in_both(loader_class, num_workers):
    """However a batch refers to its parts, all of them are there."""

    def collate(samples):
        data = torch.tensor(samples)
        return {"a": data, "b": data, "c": [data, data[1:]]}

    (batch,) = loader_class(range(3), 3, collate_fn=collate, num_workers=num_workers)
    assert_same(batch, collate([0, 1, 2]))


# ---- what a batch is good for -------------------------------------------------------------------


@pytest.mark.parametrize("collate", [None, default_collate])
def test_a_batch_may_be_written_to(loader_class, num_workers, collate):
    """A batch is the user's: changes stay in it and reach no other."""
    loader = loader_class(Squares(8), 2, collate_fn=collate, num_workers=num_workers)
    kept = []
    for numbers, squares in loader:
        assert_same(squares, numbers.double().square().float())
        squares.mul_(-1).add_(1)
        numbers.fill_(7)
        kept.append((numbers, squares))
    assert [squares.tolist() for _, squares in kept] == [[1, 0], [-3, -8], [-15, -24], [-35, -48]]
    assert all(numbers.eq(7).all() for numbers, _ in kept)


def test_arrays_of_a_batch_may_be_written_to(loader_class, num_workers):
    """numpy arrays are as writable as torch hands them out."""

    def collate(samples):
        return numpy.array(samples)

    loader = loader_class(range(4), 2, collate_fn=collate, num_workers=num_workers)
    for array_ in loader:
        array_ += 1
        assert array_.flags.writeable


@pytest.mark.parametrize("save", [torch.save, pickle.dump], ids=["torch.save", "pickle"])
def test_a_saved_batch_holds_the_batch_alone(loader_class, num_workers, save):
    """A tensor's storage ends with the tensor, so a file of it is no larger than it has to be."""
    loader = loader_class(Squares(64), batch_size=16, num_workers=num_workers)
    for batch in loader:
        file = io.BytesIO()
        save(batch, file)
        assert len(file.getvalue()) < 4096
        assert [part.untyped_storage().nbytes() for part in batch] == [16 * 8, 16 * 4]


def test_a_batch_outlives_its_loader_and_copies_of_it_stand_alone(loader_class, num_workers):
    """copy, deepcopy, clone, numpy() and views: all keep what they show."""
    loader = loader_class(Squares(64), batch_size=32, num_workers=num_workers)
    batch, _ = list(loader)
    expected = default_collate([Squares(64)[n] for n in range(32)])
    squares = batch[1]
    others = [squares.numpy(), squares.view(4, 8), squares[3:], squares.detach(), squares.clone()]
    copies = [copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))]
    del loader, batch, squares
    for one in copies:
        assert_same(one, expected)
    whole = expected[1]
    views = [whole.numpy(), whole.view(4, 8), whole[3:], whole, whole]
    assert_same(others, views)


def test_a_batch_can_be_handed_to_another_process(loader_class, num_workers):
    """Through torch's own queue, as a trainer with helpers of its own does."""
    batch = next(iter(loader_class(Squares(4), batch_size=4, num_workers=num_workers)))
    context = torch.multiprocessing.get_context("fork")
    here, there = context.Pipe()
    helper = context.Process(target=send_sums, args=(there, batch))
    helper.start()
    there.close()
    assert here.recv() == [6, 14.0]
    helper.join()
    here.close()


def send_sums(pipe, batch):
    pipe.send([part.sum().item() for part in batch])
