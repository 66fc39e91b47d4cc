"""Whatever a sample is made of comes back as it was, type for type and bit for bit."""

from __future__ import annotations

import importlib
import json
import math
import struct
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
import torch
from cached import Made, Point
from PIL import Image
from same import assert_same
from torch.utils.data import default_collate

import forebay
from forebay.base.value_classes import MisfitError
from forebay.caching import arrow_shards
from forebay.caching.index import CachePlan
from forebay.caching.shard_writer import ShardWork, layout_of
from forebay.errors import MAX_TEXT
from forebay.ledger.records import EarlierRows
from forebay.runs.ranges import failed_samples

# `forebay.cache` is the function.
CACHE = importlib.import_module("forebay.runs.cache")

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
    *(torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]
ARRAYS = ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", ">i4", "M8[ns]", "U5"]


def bits(index, *shape):
    """Return float32 numbers of all bit patterns, NaNs of every kind among them."""
    generator = torch.Generator().manual_seed(index)
    whole = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator)
    return whole.to(torch.int32).view(torch.float32)


def tensor_of(dtype):
    return lambda i: (torch.arange(6).reshape(2, 3) + i).to(dtype)


def array_of(dtype):
    return lambda i: (np.arange(6).reshape(2, 3) + i).astype(dtype)


SAMPLES = {
    **{f"tensor {str(dtype)[6:]}": tensor_of(dtype) for dtype in DTYPES},
    **{f"array {dtype}": array_of(dtype) for dtype in ARRAYS},
    "all bits": lambda i: bits(i, 50),
    "0-dim tensor": torch.tensor,
    "0-dim bfloat16": lambda i: torch.tensor(i + 0.5, dtype=torch.bfloat16),
    "0-dim complex": lambda i: torch.tensor(i + 0.5j),
    "0-dim array": np.array,
    "zero-size tensor": lambda i: torch.empty(0, 3),
    "zero-size array": lambda i: np.empty((2, 0), np.int16),
    "various shapes": lambda i: bits(i, i, 2),
    "various dimensions": lambda i: bits(i, *(2,) * (i % 3)),
    "various bool": lambda i: torch.ones(i, dtype=torch.bool),
    "various complex": lambda i: torch.full((i,), 1 + 2j),
    "various arrays": lambda i: np.full((3, i), i, "f8"),
    "NumPy's numbers": lambda i: (np.float32(i), np.int8(i), np.bool_(i % 2), np.complex64(1j * i)),
    "NumPy's dates": lambda i: np.datetime64("2020-01-01") + i,
    "int": lambda i: (i, -i, (1 << 63) - 1 - i, -(1 << 63) + i),
    "float": lambda i: (i / 3, -0.0, float("inf"), struct.unpack("d", struct.pack("q", -1 - i))[0]),
    "bool": lambda i: (i % 2 == 0, True),
    "text": lambda i: ("", "grüße\0\n\t", "🙂" * i, "\ufeff\u202e'\"\\"),
    "half a surrogate": lambda i: "plain" if i < 4 else "\udc80 and \ud800",
    "bytes": lambda i: (b"", bytes(range(256)) * i),
    "None": lambda i: None,
    "sometimes None": lambda i: [
        None if i % 2 else one
        for one in (i, 0.5, True, "text", b"bytes", torch.ones(2), np.float32(1), torch.tensor(1))
    ],
    "None at first": lambda i: [
        None if i < 4 else one for one in (i, 0.5, True, "text", b"b", torch.ones(i), np.ones(2))
    ],
    "nested": lambda i: {
        "a": [i, (torch.ones(2), {"b": np.ones(1)})],
        "c": OrderedDict(d="x", a=1),
    },
    "keys": lambda i: {1: i, "1": i, None: 2, 2.5: 3, "a.b": 1, "a": {"b": 2}, "": 4, "é\0": 5},
    "empty containers": lambda i: {"a": [], "b": (), "c": {}, "d": i},
    "NamedTuple": lambda i: Point(Point(i, "x"), [torch.ones(i)]),
    "a list": lambda i: [i, i + 0.5, "x"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch_bytes", [1, arrow_shards.BATCH_BYTES], ids=["one by one", "together"]
)
@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES)
def test_a_sample_comes_back_as_it_was(make, batch_bytes, tmp_path, monkeypatch):
    """One by one, several at once, and in batches of default_collate where that can."""
    monkeypatch.setattr(arrow_shards, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(CACHE, "LEAST_SHARDS", 2)
    dataset = Made(make, 9)
    cached = forebay.cache(dataset, tmp_path, num_workers=0, progress=False)
    assert len(cached) == 9
    for index in range(9):
        assert_same(dataset[index], cached[index])
    picked = cached.__getitems__([8, 0, 4, 4, -1])
    assert_same([dataset[index] for index in (8, 0, 4, 4, 8)], picked)
    try:
        batch = default_collate([dataset[index] for index in range(8)])
    except (TypeError, ValueError, RuntimeError):
        return
    assert_same(batch, default_collate([cached[index] for index in range(8)]))
    assert cached.table().num_rows == 9


def test_views_come_back_with_their_values(tmp_path):
    """Strided, transposed, conjugated and negated tensors are contiguous then; so are arrays."""

    def make(index):
        whole = torch.arange(24.0).reshape(2, 3, 4) + index
        conj = torch.tensor([1 + 2j]).conj()
        return whole.permute(2, 0, 1), whole[:, ::2], conj, conj.imag, whole.numpy()[:, :, ::-1]

    cached = forebay.cache(Made(make, 3), tmp_path, num_workers=0, progress=False)
    for given, got in zip(make(2), cached[2], strict=True):
        assert type(given) is type(got) and given.dtype == got.dtype
        assert given.tolist() == got.tolist()
        assert got.is_contiguous() if isinstance(got, torch.Tensor) else got.flags.c_contiguous


def test_a_memory_map_comes_back_as_an_array(tmp_path):
    """What a slice of one is to default_collate."""
    np.save(tmp_path / "all.npy", np.arange(12).reshape(4, 3))
    rows = np.load(tmp_path / "all.npy", mmap_mode="r")
    cached = forebay.cache(
        Made(lambda i: rows[i], 4), tmp_path / "cache", num_workers=0, progress=False
    )
    assert_same(cached[2], np.array([6, 7, 8]))


def test_one_tensor_used_again_and_again_is_copied_in_time(tmp_path):
    """A dataset may fill one buffer for all its samples."""
    buffer = torch.zeros(3)
    cached = forebay.cache(Made(buffer.fill_, 5), tmp_path, num_workers=0, progress=False)
    assert [cached[index].tolist() for index in range(5)] == [[i] * 3 for i in range(5)]


REFUSED = {
    "a huge int": (lambda: {"a": 1 << 20_000}, "'a' is an integer of 20,001 bits"),
    "an object": (lambda: [object()], "'0' is of type builtins.object, which has no form as data"),
    "an object in a list": (
        lambda: {"a": [{"b": 1}, {"b": [{"c": object()}]}]},
        "'a[…].b[…].c' is of type builtins.object",
    ),
    "an object array": (lambda: {"a": np.array([1, "x"], object)}, "'a' is a NumPy array of dtype"),
    "strings of any length": (lambda: np.array(["x"], np.dtypes.StringDType()), "make it a list"),
    "a set": (lambda: {"a": {1, 2}}, "'a' is a set, whose order differs; make it a sorted list"),
    "a frozenset": (lambda: [[{"a": frozenset()}]], "is a frozenset, whose order differs"),
    "records of NumPy": (lambda: np.zeros(2, [("a", "i4")]), "dtype [('a', '<i4')]"),
    "a function": (lambda: {"a": len}, "'a' is of type builtins.builtin_function_or_method"),
    "a gradient": (lambda: torch.ones(1, requires_grad=True), "requires a gradient"),
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), "sparse"),
    "a meta tensor": (lambda: torch.ones(1, device="meta"), "on the device meta"),
    "a parameter": (lambda: torch.nn.Parameter(torch.ones(1)), "torch.nn.parameter.Parameter"),
    "nothing at all": (lambda: [{}, ()], "the sample is [{}, ()], which contains nothing to store"),
    "itself": (lambda: [*endless()], "is nested deeper than 64 levels, or contains itself"),
    "a time zone": (
        lambda: {"a": datetime(2020, 1, 1, tzinfo=Zone())},
        "'a' has a time zone of type test_cache_types.Zone",
    ),
    "a long time": (lambda: {"a": timedelta.max}, "which no column of times can hold"),
}


def test_what_the_first_samples_show_is_refused_before_the_run_begins(tmp_path):
    """Even if only one of them cannot be stored."""
    asked = []

    def make(index):
        asked.append(index)
        return {"a": [index, object()] if index == 50 else [index]}

    with pytest.raises(forebay.FailuresError, match=r"sample 50: 'a\[…\]' is of type .*object"):
        forebay.cache(Made(make, 100), tmp_path, num_workers=0, progress=False)
    assert asked == [0, 50, 99]


class Zone(tzinfo):
    """A time zone that only its own code knows."""

    def utcoffset(self, when):
        return timedelta(hours=1)


def endless():
    """Return a list that contains itself."""
    found = []
    found.append({"a": found})
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_given_back_is_refused(make, words, tmp_path):
    """The message names the sample, the part of it, and what is wrong."""
    with pytest.raises(forebay.FailuresError) as caught:
        forebay.cache(Made(lambda i: make(), 1), tmp_path, num_workers=0, progress=False)
    assert "sample 0: " in str(caught.value) and words in str(caught.value)


@pytest.mark.thorough
def test_a_sample_may_have_more_than_two_billion_numbers(tmp_path):
    """Beyond what 32 bits count, in one file with samples of another shape."""
    large = np.zeros((1 << 31) + 1, np.uint8)
    large[-1] = 7
    cached = forebay.cache([large, large[:3]], tmp_path, num_workers=0, progress=False)
    assert (len(cached[0]), cached[0][-1], len(cached[1])) == (len(large), 7, 3)


def test_numpys_strings_become_those_of_python(tmp_path):
    """Their dtype has a length, which differs from sample to sample; the column has none."""
    words = ["a", "longer", "", "grüße"]
    dataset = Made(lambda i: (np.str_(words[i]), np.bytes_(words[i].encode())), 4)
    found = list(forebay.cache(dataset, tmp_path, num_workers=0, progress=False))
    assert found == [(word, word.encode()) for word in words]
    assert {(type(word), type(data)) for word, data in found} == {(str, bytes)}


OtherPoint = namedtuple("OtherPoint", "x y")


@dataclass(frozen=True)
class Box:
    """A dataclass whose samples have several forms."""

    corners: object
    label: object = None


@dataclass(slots=True)
class Late:
    """A dataclass of which a field may be unset."""

    first: int
    second: object = field(init=False)


def late(index):
    found = Late(index)
    if index % 2:
        found.second = "x"
    return found


def some_keys(index):
    return {key: value for at, (key, value) in enumerate(zip("abc", (1, None, "x"), strict=True))
            if index >> at & 1}  # fmt: skip


UNLIKE = {
    "type": lambda i: (1, "a", 2.5, None, True, 1 << 70, [1], {"a": 1}, [{"a": ["b"]}])[i],
    "type of a key": lambda i: {"content": ["x", [{"text": "x", "n": i}], None][i % 3], "n": i},
    "type of an item": lambda i: [i, "x", {"a": math.inf}, "\ud800é"][: i % 5],
    "keys": some_keys,
    "keys and containers": lambda i: (
        {"a": torch.ones(i % 2 + 1)} | ({"b": [some_keys(i)]} if i > 3 else {})
    ),
    "keys in another order": lambda i: OrderedDict([("a", i), ("b", 2)][:: 1 if i % 2 else -1]),
    "length": lambda i: [0] * i,
    "lengths of tuples": lambda i: tuple(range(i)),
    "depth": lambda i: [0] if i else 0,
    "dataclass": lambda i: Box([Box(i, late(i))] * (i % 3), (None, "x", 1)[i % 3]),
    "unset fields": late,
    "any keys": lambda i: {(i, "x"): [i], (i, "y"): []},
    "many keys": lambda i: {f"key {at}": at for at in range(i * 30)},
    "late None": lambda i: {"a": [{"x": None if i > 6 else i}] if i % 3 else [{}]},
    "large int": lambda i: (1 << 20 * i) * (-1) ** i,
    "times": lambda i: (
        *(
            datetime.fromisoformat(f"2020-02-03 04:05:06.00000{i}"),
            datetime(2020, 7, 1, tzinfo=UTC),
            date(1, 1, 1),
        ),
        *(time(1, 2, 3, i), timedelta(-1, 2, i)),
        datetime(2020, 10, 25, 1, 30, i, tzinfo=timezone(timedelta(hours=-1))),
        datetime(2020, 10, 25, 1, 30, i, tzinfo=ZONE),
    ),
    "pandas": lambda i: [pd.Timestamp(i), pd.Timedelta(i), pd.Timestamp(i, tz="UTC")],
    "Decimals": lambda i: [Decimal("1.50") * i, Decimal(10**27) * i, -Decimal(i) / 8],
    "odd Decimals": lambda i: Decimal(["1E+3", "-0", "0E-9", "Infinity", "7e-40"][i % 5]),
    "written": lambda i: [Decimal("1.50") + i, 1 + 2j, Path(f"/a{i}"), UUID(int=i)],
    "NumPy's numbers": lambda i: [np.float32(i), np.int8(i), np.bool_(i), np.datetime64(i, "s")],
    "NumPy's strings of one length": lambda i: np.array([str(i), "x" * i], "U9"),
    "deep": lambda i: [[[[i] * i]] * i, []],
    "one key or another": lambda i: {"a": {"b": i}} if i % 2 else {"a": {"c": [1.5] * i}},
}
ZONE = ZoneInfo("Europe/Berlin")

# The values of two samples that have no type in common, and what is said of the second.
APART = {
    "dtype": (torch.ones(1), torch.ones(1, dtype=torch.float64), "a torch tensor of float64, and"),
    "tensor and number": (torch.ones(1), 1, "of type int, and a torch tensor of float32"),
    "number": (np.int64(1), 1, "of type int, and a NumPy number of <i8 in other samples"),
    "length of strings": (np.array(["a"]), np.array(["bc"]), "a NumPy array of <U2, and"),
    "bytes": ("a", b"a", "of type bytes, and of type str in other samples"),
    "kind": ([0], (0,), "of type tuple, and of type list in other samples"),
    "class": (Point(1, 1), OtherPoint(1, 1), "of type namedtuple, and of type namedtuple"),
    "zone": (
        datetime(2020, 7, 1, tzinfo=UTC),
        datetime.fromisoformat("2020-07-01"),
        "of type datetime without a time zone, and",
    ),
    "items of a tuple": ((1, 2), (1, torch.ones(1), 2), "a torch tensor of float32, and of type"),
}


@pytest.mark.parametrize(("one", "other", "words"), APART.values(), ids=APART)
def test_a_sample_without_a_type_in_common_fails_alone(one, other, words, tmp_path):
    """It is named, with both types; nothing is converted, so that all come back as they were."""
    dataset = Made(lambda i: {"a": other if i == 30 else one, "n": i}, 100)
    with pytest.raises(forebay.FailuresError) as caught:
        forebay.cache(dataset, tmp_path, num_workers=0, progress=False)
    assert "sample 30: 'a" in str(caught.value) and words in str(caught.value)
    assert "sample 31" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 9])
@pytest.mark.parametrize("make", UNLIKE.values(), ids=UNLIKE)
def test_samples_that_are_unlike_come_back_as_they_were(make, shards, tmp_path, monkeypatch):
    """Whether the first samples show how they differ, and whether they share a shard."""
    monkeypatch.setattr(CACHE, "LEAST_SHARDS", shards)
    dataset = Made(make, 9)
    cached = forebay.cache(dataset, tmp_path, num_workers=0, progress=False)
    again = forebay.open_cache(tmp_path, transform=lambda sample: sample)
    for index in range(9):
        assert_alike(dataset[index], cached[index])
        assert_alike(dataset[index], again[index])
    assert cached.table().num_rows == 9


def assert_alike(one, other):
    """Fail unless both are the same; keys of a dict may stand in another order."""
    assert_same(in_order(one), in_order(other))


def in_order(value):
    """Return a value in which the keys of each dict are sorted, and images are their parts."""
    if type(value) is dict:
        return {key: in_order(value[key]) for key in sorted(value, key=repr)}
    if isinstance(value, Image.Image):
        return [value.mode, value.size, value.tobytes(), value.getpalette()]
    if isinstance(value, Box | Late):
        names = (each.name for each in fields(value) if hasattr(value, each.name))
        return [type(value), {name: in_order(getattr(value, name)) for name in names}]
    return [*map(in_order, value)] if type(value) in (list, tuple) else value


class MuteError(Exception):
    """An exception that cannot be shown."""

    def __str__(self):
        raise LookupError("no message")


def test_the_message_of_a_shard_names_the_first_samples_and_counts_the_others(tmp_path):
    """It stays short however many fail, and whatever their messages are."""
    failed = {0: MuteError(), 1: SystemExit(), 2: ValueError("x" * 10**6), 4: MisfitError("is odd")}

    def fail(index):
        raise failed.get(index, ValueError("bad\nindeed"))

    plan = CachePlan(22_000, 22_000, layout_of([1]))
    work = ShardWork(Made(fail, 22_000), plan, tmp_path, EarlierRows(), lambda _: None)
    with pytest.raises(forebay.FailuresError) as caught:
        work({"first": 0, "count": 22_000}, SimpleNamespace(file=tmp_path.joinpath))
    text = str(caught.value)
    lines = text.splitlines()
    assert lines[0] == "sample 0: MuteError: <its __str__ raised LookupError>"
    assert lines[1] == "sample 1: SystemExit"
    assert lines[3] == "sample 3: ValueError: bad"
    assert lines[4] == "sample 4: is odd"
    assert lines[20] == "and 21980 more of this shard"
    assert len(text) < MAX_TEXT
    listed, count = failed_samples(json.loads(json.dumps(caught.value.record)))
    assert ([each.index for each in listed], count) == (list(range(20)), 22_000)
    assert (listed[4].error, listed[4].message) == ("MisfitError", "is odd")
