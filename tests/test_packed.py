"""`PackedSequence`: what goes in comes out, type for type, and memory stays where it is."""

from __future__ import annotations

import copy
import math
import os
import pickle
import struct
import sys
import tracemalloc
from collections import namedtuple
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forebay
from forebay.packed import CHUNK, PackedSequence

# Newer Pythons warn of a fork beside threads, of which libraries have some; the child only reads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

Point = namedtuple("Point", "x y")


class Text(str):
    """A string that is not quite one."""


class Unlike:
    """Equal to nothing, itself included."""

    def __eq__(self, other):
        return False

    __hash__ = None


SEQUENCES = {
    "nothing": [],
    "one": ["a"],
    "texts": ["", "a", "ä€𝄞", "a\0b", "", "\ud800", "\ud800\udc00", "x" * 100_000],
    "bytes": [b"", b"\0\xff", b"x" * 100_000, b""],
    "numbers": [0, 1, -1, 2**63 - 1, -(2**63)],
    "numbers beyond 64 bits": [0, 2**63, -(2**63) - 1, 10**100],
    "floats": [0.0, -0.0, math.inf, -math.inf, 5e-324, 0.1],
    "truths": [True, False],
    "numbers and truths": [1, True, 0, False],
    "numbers and floats": [1, 1.0],
    "texts and a subclass": ["a", Text("a")],
    "tuples": [("a", 1, 0.5), (), (None, ("b",))],
    "dicts": [{"path": "a", "label": 1}, {}, {1: [2, {3}]}],
    "objects": [None, Point(1, 2), Fraction(1, 3), print, Text("b"), [1, [2]]],
    "many texts": [f"name-{at}" for at in range(3 * CHUNK + 7)],
    "many numbers": list(range(-CHUNK, 2 * CHUNK)),
    "texts, later something else": ["a"] * (2 * CHUNK + 1) + [None],
    "numbers, later a large one": [*range(2 * CHUNK), 2**64],
    "floats, later texts": [0.5] * CHUNK + ["a"] * CHUNK,
    "objects, later texts": [None] * CHUNK + ["a"] * CHUNK,
}


def types(items):
    return [type(item) for item in items]


@pytest.mark.parametrize("items", SEQUENCES.values(), ids=SEQUENCES)
def test_what_goes_in_comes_out(items):
    """By index from either end, by iteration from either end, from a list or an iterator."""
    packed = PackedSequence(items)
    assert isinstance(packed, Sequence) and len(packed) == len(items)
    assert (list(packed), types(packed)) == (items, types(items))
    assert [packed[at] for at in range(len(items))] == items
    assert [packed[at] for at in range(-len(items), 0)] == items
    assert list(reversed(packed)) == items[::-1]
    assert list(PackedSequence(iter(items))) == items


def test_floats_keep_every_bit():
    """Zeros keep their sign and what is not a number its payload."""
    bits = [0x8000000000000000, 0x7FF8000000000001, 0xFFF8000000ABCDEF]
    floats = [struct.unpack("d", struct.pack("Q", each))[0] for each in bits]
    packed = PackedSequence(floats)
    assert [struct.unpack("Q", struct.pack("d", each))[0] for each in packed] == bits


item = st.one_of(
    st.text(st.characters(codec=None), max_size=5),
    st.binary(max_size=5),
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.tuples(st.text(max_size=3), st.integers()),
)
likes = st.sampled_from(
    [st.text(max_size=3), st.binary(max_size=3), st.integers(-9, 9), st.floats(allow_nan=False)]
)


@pytest.mark.slow
@given(
    items=st.one_of(st.lists(item), likes.flatmap(st.lists)),
    cut=st.builds(
        slice,
        *[st.none() | st.integers(-12, 12)] * 2,
        st.none() | st.integers(-3, 3).filter(bool),
    ),
    again=st.slices(6),
)
def test_slices_are_what_slices_of_a_list_are(items, cut, again):
    """Of slices too, in both directions, by index and when they have travelled."""
    part, wanted = PackedSequence(items)[cut], items[cut]
    assert (list(part), types(part)) == (wanted, types(wanted))
    assert [part[-1 - at] for at in range(len(part))] == wanted[::-1]
    assert list(part[again]) == wanted[again]
    assert list(pickle.loads(pickle.dumps(part))) == wanted


def test_a_slice_is_a_view():
    """It shares the bytes, and says so."""
    packed = PackedSequence(["a", "b", "c"])
    assert packed[1:]._data is packed._data
    assert packed[1:].nbytes == packed.nbytes


@pytest.mark.parametrize("index", [3, -4, 10**30])
def test_an_index_out_of_range_is_an_index_error(index):
    """It says how many there are; a view counts its own."""
    with pytest.raises(IndexError, match=f"there is no item {index}: there are 3"):
        PackedSequence("abc")[index]
    with pytest.raises(IndexError, match="there is no item 2: there are 2"):
        PackedSequence("abc")[:2][2]


def test_an_index_may_be_any_whole_number():
    """As a sampler may give numpy's; what is none is refused, as a list does."""
    packed = PackedSequence("abc")
    assert (packed[np.int64(1)], packed[True]) == ("b", "b")
    with pytest.raises(TypeError):
        packed["a"]
    with pytest.raises(TypeError):
        packed[1.0]


def test_equal_items_in_the_same_order_are_equal():
    """However they are stored; a list is never equal, as it is not to a tuple."""
    packed = PackedSequence(["a", "b", None])
    assert packed == PackedSequence(["a", "b", None])
    assert packed[:2] == PackedSequence(["a", "b"])
    assert PackedSequence([1, 2]) == PackedSequence([1.0, 2.0])
    assert packed != PackedSequence(["b", "a", None])
    assert packed != packed[:2]
    assert packed != ["a", "b", None]
    assert PackedSequence([Unlike()]) != PackedSequence([Unlike()])
    with pytest.raises(TypeError, match="unhashable"):
        hash(packed)


def test_it_cannot_be_changed():
    """Neither an item nor the sequence; what is changed is the caller's own copy."""
    packed = PackedSequence([[1], [2]])
    packed[0].append(3)
    assert list(packed) == [[1], [2]]
    with pytest.raises(TypeError):
        packed[0] = [1]
    with pytest.raises(TypeError):
        del packed[0]


def test_it_has_what_sequences_have():
    """From the abstract class."""
    packed = PackedSequence("abca")
    assert "c" in packed and "d" not in packed
    assert (packed.index("c"), packed.count("a")) == (2, 2)


def test_its_repr_is_short():
    """It says how many of what, and how large."""
    assert repr(PackedSequence("abc")) == "<PackedSequence: 3 str, 19 bytes>"
    assert repr(PackedSequence(range(100_000))) == "<PackedSequence: 100,000 int, 800,000 bytes>"
    assert repr(PackedSequence([None])).startswith("<PackedSequence: 1 objects, ")


def test_what_cannot_be_pickled_is_named():
    """The error is pickle's own."""
    with pytest.raises((pickle.PicklingError, AttributeError)) as caught:
        PackedSequence([*range(CHUNK), None, lambda: 0])
    assert caught.value.__notes__ == [
        f"forebay.PackedSequence: item {CHUNK + 1} cannot be pickled; a list can hold it"
    ]


def test_an_iterable_that_raises_is_heard():
    """Nothing is packed of half an iterable."""

    def broken():
        yield "a"
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        PackedSequence(broken())


# ---- travelling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ["nothing", "texts", "numbers", "objects"])
def test_it_travels_by_any_protocol(name, protocol):
    """To an interpreter of its own, say."""
    packed = PackedSequence(SEQUENCES[name])
    twin = pickle.loads(pickle.dumps(packed, protocol))
    assert (list(twin), types(twin)) == (SEQUENCES[name], types(packed))
    assert repr(twin) == repr(packed)


def test_its_bytes_travel_out_of_band():
    """They are the buffers themselves; what is left is small, and the twin copies nothing."""
    packed = PackedSequence([f"name-{at}" for at in range(10_000)])
    buffers = []
    small = pickle.dumps(packed, 5, buffer_callback=buffers.append)
    assert len(small) < 500
    assert sum(buffer.raw().nbytes for buffer in buffers) == packed.nbytes
    twin = pickle.loads(small, buffers=[bytes(buffer) for buffer in buffers])
    assert twin == packed
    assert copy.copy(packed)._data is packed._data


def test_a_view_travels_without_what_it_does_not_show():
    """A tenth is a tenth."""
    packed = PackedSequence([b"x" * 1000] * 1000)
    assert len(pickle.dumps(packed[100:200])) < 120_000
    assert pickle.loads(pickle.dumps(packed[::100])) == packed[::100]


# ---- memory --------------------------------------------------------------------------------------


def test_an_iterator_is_never_all_there():
    """While it is packed there is little more than the packed bytes; a list would be far more."""
    count = 50_000
    tracemalloc.start()
    try:
        packed = PackedSequence(f"name-{at:09}" for at in range(count))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.3 * packed.nbytes
    assert peak < 3 * packed.nbytes
    assert packed.nbytes == count * 14 + (count + 1) * 4


def own_bytes_after(look, items):
    """How much memory of its own a forked process gets by looking at all items."""
    inside, outside = os.pipe()
    child = os.fork()
    if not child:
        try:
            before = own_bytes()
            look(items)
            os.write(outside, str(own_bytes() - before).encode())
        finally:
            os._exit(0)
    os.close(outside)
    os.waitpid(child, 0)
    with os.fdopen(inside) as answer:
        return int(answer.read())


def own_bytes():
    with open("/proc/self/smaps_rollup") as rollup:
        return sum(int(line.split()[1]) for line in rollup if line.startswith("Private")) * 1024


def look(items):
    for at in range(len(items)):
        items[at]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads what the kernel of Linux counts")
def test_looking_at_items_in_a_forked_process_copies_no_memory():
    """A list of the same is copied whole."""
    names = [f"name-{at:09}" for at in range(200_000)]
    packed = PackedSequence(names)
    assert own_bytes_after(look, names) > 8_000_000
    assert own_bytes_after(look, packed) < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_loader_takes_it_as_a_dataset(method):
    """As it takes a list."""
    names = PackedSequence([f"name-{at}" for at in range(10)])
    with forebay.DataLoader(
        names, batch_size=4, num_workers=2, multiprocessing_context=method
    ) as loader:
        assert [name for batch in loader for name in batch] == list(names)
