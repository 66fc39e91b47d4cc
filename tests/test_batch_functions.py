"""What is done with whole batches: counted, moved, pinned, and cut into halves."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import ones
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from forebay.base import batches

META = torch.device("meta")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
]


class Pair(NamedTuple):
    left: Any
    right: Any


Fields = namedtuple("Fields", "x y")


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any = None


class Encoding(UserDict):
    """The shape of transformers' BatchEncoding: it moves itself."""

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Graph:
    """The shape of a PyG graph: tensors in attributes, methods that return another graph."""

    def __init__(self, x, edges):
        self.x, self.edges = x, edges

    def to(self, device):
        return Graph(self.x.to(device), self.edges.to(device))

    def pin_memory(self):
        return Graph(self.x, "pinned")


class Pinned:
    """Anything with a `pin_memory` method, which is what shows without a GPU."""

    def pin_memory(self):
        return "pinned"


def wrapped(leaf):
    """Return a leaf in one container of each kind."""
    return {
        "dict": {"a": leaf},
        "OrderedDict": OrderedDict(a=leaf),
        "UserDict": UserDict(a=leaf),
        "list": [leaf],
        "tuple": (leaf,),
        "NamedTuple": Pair(leaf, 1),
        "namedtuple": Fields("x", leaf),
        "dataclass": Point(leaf),
        "nested": {"a": [Pair(1, (Point(leaf),))]},
    }


KINDS = list(wrapped(None))


def in_attrs(leaf):
    attrs = pytest.importorskip("attrs")
    return attrs.make_class("Own", ["x"], frozen=True)(leaf)


# ---- bytes -------------------------------------------------------------------------------------

SIZES = {
    "tensor": (lambda: torch.zeros(3, 4), 48),
    "tensor without elements": (lambda: torch.zeros(0, 4), 0),
    "scalar": (lambda: torch.tensor(1, dtype=torch.int16), 2),
    "view of a larger tensor": (lambda: torch.zeros(100)[10:20], 40),
    "expanded tensor": (lambda: torch.zeros(1).expand(8), 32),
    "tensor on meta": (lambda: torch.zeros(10**6, device=META), 4 * 10**6),
    "array": (lambda: np.zeros((3, 4), np.int16), 24),
    "scalar of numpy": (lambda: np.float32(1), 4),
    "bytes": (lambda: b"12345", 5),
    "bytearray": (lambda: bytearray(5), 5),
    "memoryview": (lambda: memoryview(np.zeros(3, np.int64)), 24),
    "coo": (lambda: torch.eye(3).to_sparse(), 3 * 2 * 8 + 3 * 4),
    "coo, not coalesced": (
        lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True),
        2 * 8 + 2 * 4,
    ),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), 4 * 8 + 3 * 8 + 3 * 4),
    "csc": (lambda: torch.eye(3).to_sparse_csc(), 4 * 8 + 3 * 8 + 3 * 4),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), 3 * 8 + 2 * 8 + 2 * 4 * 4),
    "bsc": (lambda: torch.eye(4).to_sparse_bsc((2, 2)), 3 * 8 + 2 * 8 + 2 * 4 * 4),
    "nested": (lambda: torch.nested.nested_tensor([ones(1), ones(2)]), 12),
    "jagged": (
        lambda: torch.nested.nested_tensor([ones(1), ones(2)], layout=torch.jagged),
        12,
    ),
    "packed sequence": (lambda: pack_sequence([ones(2), ones(1)]), 3 * 4 + 2 * 8),
    "object with tensors": (lambda: Graph(ones(2), ones(3)), 20),
    "object without": (object, 0),
    "string": (lambda: "text", 0),
    "numbers": (lambda: [1, 2.5, True, None, int], 0),
}


@pytest.mark.parametrize(
    ("make", "size"),
    [
        pytest.param(*each, id=name, marks=[pytest.mark.slow] if name == "jagged" else [])
        for name, each in SIZES.items()
    ],
)
def test_bytes_are_those_of_the_data(make, size):
    """Of every layout of tensors, and of objects by what their attributes hold."""
    assert batches.nbytes(make()) == size


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_in_any_container_count(kind):
    """One tensor of 8 bytes, wherever it is."""
    assert batches.nbytes(wrapped(ones(2))[kind]) == 8


def test_bytes_in_an_attrs_class_count():
    """Its fields are looked at."""
    assert batches.nbytes([in_attrs(ones(2))]) == 8


def test_bytes_that_are_referred_to_twice_count_twice():
    """Two tensors over one memory as well as one tensor in two places."""
    one = ones(4)
    assert batches.nbytes({"a": one, "b": one, "c": one[:2]}) == 16 + 16 + 8


def test_an_object_that_refers_to_itself_is_counted():
    """There is an end to it, and nothing is left out."""
    graph = Graph(ones(2), ones(3))
    graph.parent = {"graph": graph}
    assert batches.nbytes(graph) >= 20


# ---- moved -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_in_any_container_are_moved(kind):
    """The container keeps its type, and the batch that was given is as it was."""
    batch = wrapped(ones(2))[kind]
    moved = batches.moved(batch, META)
    assert type(moved) is type(batch)
    assert tensors_of(moved) == [META]
    assert tensors_of(batch) == [torch.device("cpu")]


def tensors_of(batch):
    """Return the devices of the tensors in a batch."""
    leaves = batches.leaves(batch)
    return [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]


def test_tensors_in_an_attrs_class_are_moved():
    """Also in a frozen one."""
    assert batches.moved(in_attrs(ones(2)), META).x.device == META


def test_what_is_not_moved_is_the_same_object():
    """Arrays stay on the CPU; a tensor that is there already is not copied."""
    array, tensor, text = np.zeros(3), ones(2), "text"
    batch = {"array": array, "tensor": tensor, "text": [text, None]}
    moved = batches.moved(batch, torch.device("cpu"))
    assert moved["array"] is array
    assert moved["tensor"] is tensor
    assert moved["text"][0] is text
    assert moved["text"] is not batch["text"]


def test_an_object_is_moved_by_its_own_method():
    """A graph, a packed sequence, and a mapping that has such a method."""
    graph = Graph(ones(2), ones(3))
    batch = {"graph": graph, "words": pack_sequence([ones(2), ones(1)])}
    moved = batches.moved(batch, META)
    assert moved["graph"].edges.device == META
    assert graph.edges.device == torch.device("cpu")
    assert type(moved["words"]) is PackedSequence
    assert moved["words"].data.device == META
    encoding = Encoding({"ids": ones(2)})
    assert batches.moved([encoding], META)[0] is encoding
    assert encoding["ids"].device == META


def test_copies_to_a_device_do_not_wait():
    """A tensor is copied with `non_blocking`; a method of the user's gets the device alone."""
    calls = []

    class Asked(torch.Tensor):
        def to(self, *args, **options):
            calls.append((args, options))
            return self

    class Own:
        def to(self, *args, **options):
            calls.append((args, options))

    batches.moved([ones(2).as_subclass(Asked), Own()], META)
    assert calls == [((META,), {"non_blocking": True}), ((META,), {})]


def test_the_tensors_of_a_batch_are_found_in_containers_and_objects():
    """Those in the attributes of an object, too, and no object is followed for ever."""
    first, second, third, fourth = (ones(each + 1) for each in range(4))
    graph = Graph(third, fourth)
    graph.itself = graph
    batch = {
        "a": [first],
        "b": "text",
        "c": np.zeros(2),
        "d": Encoding({"ids": second}),
        "e": graph,
    }
    found = list(batches.tensors_of(batch))
    assert {id(each) for each in found} == {id(each) for each in (first, second, third, fourth)}


# ---- pinned ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_objects_in_any_container_are_pinned(kind):
    """They are what their method returns; the container keeps its type."""
    batch = wrapped(Pinned())[kind]
    pinned = batches.pinned(batch)
    assert type(pinned) is type(batch)
    assert pinned == wrapped("pinned")[kind]


def test_a_tensor_is_pinned_by_its_method(monkeypatch):
    """Which needs a GPU, so another one is in its place here."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    assert batches.pinned({"x": [ones(2)]})["x"][0].tolist() == [2, 2]


def test_what_cannot_be_pinned_is_the_same_object():
    """Arrays, strings, numbers."""
    leaves = [np.zeros(2), "text", b"bytes", 1, None]
    pinned = batches.pinned(leaves)
    assert pinned is not leaves
    assert all(one is other for one, other in zip(pinned, leaves, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_are_pinned_where_there_is_a_gpu():
    """And can be copied from there without waiting."""
    pinned = batches.pinned({"x": [ones(2)]})
    assert pinned["x"][0].is_pinned()
    assert batches.moved(pinned, torch.device("cuda"))["x"][0].tolist() == [1, 1]


# ---- halves ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "container",
    [
        {"a": 1},
        OrderedDict(a=1),
        UserDict(a=1),
        [1],
        (1,),
        Pair(1, {}),
        Fields({}, 1),
        Point(1, {}),
        {"a": [Pair({}, (Point([1], {}),))]},
    ],
    ids=repr,
)
@pytest.mark.parametrize("count", [2, 5])
def test_tensors_in_any_container_are_cut(container, count):
    """The first half is the smaller one where the count is odd; each half is a view."""
    tensor = torch.arange(count)
    batch = batches.mapped(lambda one: tensor, container)
    halves = batches.halves(batch, count)
    assert [type(half) for half in halves] == [type(batch)] * 2
    for half, expected in zip(halves, (tensor[: count // 2], tensor[count // 2 :]), strict=True):
        (found,) = batches.leaves(half)
        assert found.tolist() == expected.tolist()
        assert found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_arrays_and_lists_of_a_batch_are_cut_with_it():
    """Where a list has an item for each sample; its type stays."""
    batch = Pair(
        {"x": np.arange(6).reshape(3, 2), "names": ["a", "b", "c"]}, (torch.arange(3), (1, 2.5, 0))
    )
    one, other = batches.halves(batch, 3)
    assert one.left["x"].tolist() == [[0, 1]]
    assert other.left["x"].tolist() == [[2, 3], [4, 5]]
    assert (one.left["names"], other.left["names"]) == (["a"], ["b", "c"])
    assert (one.right[1], other.right[1]) == ((1,), (2.5, 0))
    assert type(one) is Pair


UNCUT = {
    "tensor of another length": {"x": ones(3)},
    "tensor without dimensions": {"x": ones(4), "weight": torch.tensor(1.0)},
    "array of another length": np.zeros(3),
    "list of another length": {"x": ones(4), "names": ["a"]},
    "empty list": {"x": ones(4), "names": []},
    "string": {"x": ones(4), "name": "text"},
    "number": [ones(4), 4],
    "None": [ones(4), None],
    "object": [ones(4), object()],
    "object with tensors": Graph(ones(4), ones(4)),
    "packed sequence": pack_sequence([ones(2)] * 4),
}


@pytest.mark.parametrize("batch", UNCUT.values(), ids=UNCUT)
def test_a_batch_is_not_cut_where_it_is_unknown_how(batch):
    """One value of which nobody knows the samples is enough."""
    assert batches.halves(batch, 4) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([ones(1), ones(2)] * 2, layout=torch.jagged),
        lambda: torch.nested.nested_tensor([ones(1), ones(2)] * 2),
    ],
    ids=["coo", "csr", "jagged", "nested"],
)
def test_a_tensor_that_torch_cannot_slice_is_not_cut(make):
    """Sparse and nested ones: the batch is loaded again in two halves."""
    assert batches.halves({"x": make()}, 4) is None


def test_a_list_that_may_be_of_fields_or_of_samples_is_not_cut():
    """Two samples with two boxes each look like two fields of two samples."""
    boxes = [torch.zeros(2, 4), torch.ones(2, 4)]
    assert batches.halves(boxes, 2) is None
    fields = [torch.zeros(4, 2), torch.ones(4)]
    assert [len(half[0]) for half in batches.halves(fields, 4)] == [2, 2]
