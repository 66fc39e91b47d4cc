"""Containers of samples and batches: opened, walked and built again with their types."""

from __future__ import annotations

import dataclasses
import datetime
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from forebay.base import batches
from forebay.base.batch_digests import differing, digested


class Pair(NamedTuple):
    left: Any
    right: Any


class Named(dict):
    """A dict with an attribute, as libraries have them."""

    def __init__(self, name, **items):
        super().__init__(items)
        self.name = name


class Encoding(UserDict):
    """The shape of transformers' BatchEncoding: `data`, `to`, attributes, keys as attributes."""

    def __init__(self, data, n_sequences=None):
        super().__init__(data)
        self.n_sequences = n_sequences

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device):
        raise AssertionError("trees calls no method of a tokenizer's batch")


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Derived:
    """One field is not an argument, and making an instance is not to be repeated."""

    x: Any
    double: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.double = 2 * self.x


def tens(value):
    return 10 * value


MAPPINGS = {
    "dict": {"a": 1, "b": 2},
    "OrderedDict": OrderedDict(b=1, a=2),
    "defaultdict": defaultdict(list, a=1, b=2),
    "subclass of dict": Named("n", a=1, b=2),
    "UserDict": UserDict(a=1, b=2),
    "BatchEncoding": Encoding({"a": 1, "b": 2}, n_sequences=3),
    "read-only": MappingProxyType({"a": 1, "b": 2}),
    "keys of any type": {(1, 2): 1, None: 2},
    "empty": {},
}


@pytest.mark.parametrize("value", MAPPINGS.values(), ids=MAPPINGS)
def test_a_mapping_keeps_its_type_and_its_keys_in_order(value):
    """The old one is as it was; the new one is another object with the new values."""
    before = dict(value)
    branch = batches.opened(value)
    assert branch == ("mapping", tuple(value), tuple(value.values()))
    new = batches.mapped(tens, value)
    assert type(new) is type(value)
    assert new is not value
    assert list(new.items()) == [(key, 10 * each) for key, each in before.items()]
    assert dict(value) == before


def test_a_mapping_keeps_what_is_not_among_its_items():
    """The factory of a defaultdict, attributes of subclasses, and access by attribute."""
    assert batches.mapped(tens, MAPPINGS["defaultdict"])["new"] == []
    assert batches.mapped(tens, MAPPINGS["subclass of dict"]).name == "n"
    encoding = batches.mapped(tens, MAPPINGS["BatchEncoding"])
    assert encoding.n_sequences == 3
    assert encoding.a == 10
    assert encoding.data is not MAPPINGS["BatchEncoding"].data


@pytest.mark.parametrize("value", [Point(1, 2), Frozen(1, 2)], ids=repr)
def test_a_dataclass_keeps_its_type(value):
    """Also a frozen one with slots; the old one is as it was."""
    assert batches.opened(value) == ("fields", ("x", "y"), (1, 2))
    assert batches.field_names(type(value)) == ("x", "y")
    assert batches.mapped(tens, value) == type(value)(10, 20)
    assert value == type(value)(1, 2)


def test_a_dataclass_is_not_initialized_again():
    """A field that is no argument gets its value as the others do; other attributes stay."""
    value = Derived(1)
    value.note = "kept"
    new = batches.mapped(lambda each: each + 5, value)
    assert (new.x, new.double, new.note) == (6, 7, "kept")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("slots", [False, True])
def test_an_attrs_class_is_like_a_dataclass(frozen, slots):
    """Frozen or not, with slots or without, with a field that is no argument."""
    attrs = pytest.importorskip("attrs")
    own = attrs.make_class(
        "Own",
        {"x": attrs.field(), "y": attrs.field(init=False, default=2)},
        frozen=frozen,
        slots=slots,
    )
    assert batches.field_names(own) == ("x", "y")
    new = batches.mapped(tens, own(1))
    assert type(new) is own
    assert (new.x, new.y) == (10, 20)


LEAVES = {
    "str": "text",
    "bytes": b"bytes",
    "int": 1,
    "float": 1.5,
    "bool": True,
    "None": None,
    "date": datetime.date(2024, 1, 1),
    "set": {1, 2},
    "range": range(3),
    "deque": deque([1]),
    "object": object(),
    "class of a dataclass": Point,
    "function": tens,
}


@pytest.mark.parametrize("value", LEAVES.values(), ids=LEAVES)
def test_all_else_is_a_leaf(value):
    """A string is no sequence of characters; a leaf is handed on as the object that it is."""
    assert batches.opened(value) is None
    assert list(batches.leaves(value)) == [value]
    assert batches.mapped(lambda each: each, value) is value
    assert batches.mapped(lambda each: each, {"a": [value]})["a"][0] is value


def nested(first):
    """Return every kind of container within others, with numbers from `first` on as leaves."""
    return {
        "list": [first, (first + 1, {"deep": first + 2})],
        "pair": Pair(Point(first + 3, [first + 4]), OrderedDict(z=first + 5, a=first + 6)),
        "encoding": Encoding({"ids": [first + 7], "frozen": Frozen(first + 8, (first + 9,))}),
        "empty": [{}, (), []],
    }


def test_containers_may_be_nested_in_each_other():
    """Leaves come in order, and the structure around them is the same."""
    assert list(batches.leaves(nested(0))) == list(range(10))
    new = batches.mapped(lambda each: each + 100, nested(0))
    assert new == nested(100)
    assert type(new["pair"].left) is Point
    assert type(new["pair"].right) is OrderedDict
    assert type(new["encoding"]) is Encoding
    assert type(new["encoding"]["frozen"]) is Frozen


def test_containers_are_new_and_leaves_are_the_same():
    """What shares a container before shares none afterwards, but the leaf in it."""
    leaf, value = object(), nested(0)
    shared = [leaf]
    value["one"], value["other"] = shared, shared
    new = batches.mapped(lambda each: each, value)
    assert new == value
    assert new["one"] is not shared and new["other"] is not new["one"]
    assert new["one"][0] is new["other"][0] is leaf
    assert new["pair"].left.y is not value["pair"].left.y


def test_a_container_is_rebuilt_with_as_many_values_as_it_has_keys():
    """One value too few is an error, not a container with fewer keys."""
    value = {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="shorter"):
        batches.rebuilt(value, batches.opened(value), [1])


class Locked(OrderedDict):
    """The shape of transformers' ModelOutput: items are set one by one, and `update` raises."""

    def update(self, *args, **kwargs):
        raise TypeError("You cannot use update on a ModelOutput instance")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Counter(a=1), id="Counter"),
        pytest.param(lambda: _locked(a=1), id="ModelOutput"),
    ],
)
def test_a_mapping_whose_update_is_its_own_keeps_its_keys(make):
    """A Counter's adds counts, and a ModelOutput's raises."""
    new = batches.mapped(tens, make())
    assert type(new) is type(make())
    assert dict(new) == {"a": 10}


def _locked(**items):
    value = Locked()
    for key, each in items.items():
        value[key] = each
    return value


def test_a_field_without_a_value_has_none_afterwards():
    """It is no leaf: the function is not called for it."""

    @dataclasses.dataclass
    class Late:
        x: int
        y: int = dataclasses.field(init=False)

    new = batches.mapped(tens, [Late(1)])[0]
    assert new.x == 10
    assert not hasattr(new, "y")


def test_tensors_on_other_devices_differ():
    """They are told, and not compared, which torch refuses."""
    one = {"x": [torch.zeros(2)], "y": 1}
    two = {"x": [torch.zeros(2, device="meta")], "y": 1}
    assert [*differing(digested(one), digested(two))] == ["['x'][0]"]
    assert digested(one) == digested({"x": [torch.zeros(2)], "y": 1})
