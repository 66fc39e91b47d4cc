"""Packing: any batch comes back equal, type for type and bit for bit, and can be written to."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import os
import pickle
import threading
import warnings
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate

from forebay.memory import packing
from forebay.memory.packed_batch import memory_of, unpack
from forebay.memory.packing import (
    CODES,
    INLINE_BYTES,
    WORTH_PLACING,
    PackedBatch,
    Packer,
    collate_into,
)
from forebay.memory.slab import Slab

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture
def packer(slab):
    packer = Packer(slab)
    yield packer
    packer.begin(None)


@pytest.fixture
def collating(packer):
    """The packer, with default_collate stacking into its slot."""
    undo = collate_into(packer)
    yield packer
    undo()


class Pair(NamedTuple):
    left: Any
    right: Any


Untyped = namedtuple("Untyped", "x y")


@dataclasses.dataclass
class Sample:
    image: Any
    name: str


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Slotted and same(self.value, other.value)

    __hash__ = None


class Colour(enum.Enum):
    RED = 1


class Flavoured(torch.Tensor):
    """A subclass that keeps its type through torch's functions."""


class Buffered:
    """Has a buffer of its own, as columns of other libraries do."""

    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        return Buffered, (pickle.PickleBuffer(self.data),)

    def __eq__(self, other):
        return type(other) is Buffered and bytes(self.data) == bytes(other.data)

    __hash__ = None


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same_tensor(one, two):
    if any(
        getattr(one, name) != getattr(two, name)
        for name in ("dtype", "layout", "device", "requires_grad", "is_nested")
    ):
        return False
    if one.is_nested:
        return all(map(same, one.unbind(), two.unbind()))
    if one.shape != two.shape:
        return False
    if one.layout is torch.sparse_coo:
        parts = (torch.Tensor._indices, torch.Tensor._values, torch.Tensor.is_coalesced)
        return all(same(part(one), part(two)) for part in parts)
    if one.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values)
        return all(same(part(one), part(two)) for part in parts)
    if one.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values)
        return all(same(part(one), part(two)) for part in parts)
    if one.is_quantized:
        return one.qscheme() == two.qscheme() and torch.equal(one, two)
    if one.is_meta:
        return True
    one, two = (t.as_subclass(torch.Tensor).resolve_conj().resolve_neg() for t in (one, two))
    return bits(one) == bits(two)


def same(one, two):
    """Return whether two values are equal to the type and the bit, all the way down."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return same_tensor(one, two)
    if isinstance(one, np.ndarray):
        if (one.dtype, one.shape) != (two.dtype, two.shape) or not two.flags.writeable:
            return False
        if one.dtype.hasobject:
            return all(map(same, one.ravel().tolist(), two.ravel().tolist()))
        return one.tobytes() == two.tobytes() and one.flags.fnc == two.flags.fnc
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return same(vars(one), vars(two))
    return one == two or (one != one and two != two)


def numbers(dtype, *shape):
    """A tensor of any dtype, with bytes of every kind in it."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(count) * 37 % (2 if dtype is torch.bool else 251)
    return raw.to(torch.uint8).view(dtype).view(shape)


def f32(*shape):
    return numbers(torch.float32, *shape)


def of_few_friends():
    """Kinds of tensors that torch calls experimental when it meets the first one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse, not coalesced": torch.sparse_coo_tensor([[1, 1], [0, 0]], f32(2), (2, 3)),
            "sparse with dense parts": torch.sparse_coo_tensor([[1, 2]], f32(2, 3), (4, 3)),
            "compressed": torch.eye(4).to_sparse_csr(),
            "compressed columns": torch.eye(4).to_sparse_csc(),
            "compressed blocks": torch.eye(4).to_sparse_bsr((2, 2)),
            "compressed blocks of columns": torch.eye(4).to_sparse_bsc((2, 2)),
            "nested": torch.nested.nested_tensor([f32(2), f32(3)]),
            "quantized": torch.quantize_per_tensor(torch.ones(12), 0.1, 3, torch.quint8),
        }


STRUCTURED = np.zeros(5, np.dtype([("id", "<i4"), ("box", "<f4", (2, 2)), ("name", "U3")]))
STRUCTURED["id"] = range(5)
STRUCTURED["name"] = "abc"

TENSORS = {
    **{str(dtype): numbers(dtype, 3, 4) for dtype in CODES},
    "0-dim": torch.tensor(3.5),
    "zero-size": torch.empty(3, 0, 2, dtype=torch.int16),
    "nothing": torch.empty(0),
    "nan and -0": torch.tensor([float("nan"), -0.0, float("inf")]),
    "transposed": f32(3, 5).t(),
    "every other": f32(10)[::2],
    "every ninth": f32(90)[::9],
    "a column": f32(40, 7)[:, 3],
    "a part": f32(10, 4)[3:5],
    "channels last": f32(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": f32(3, 1).expand(3, 4),
    "expanded 0-dim": torch.tensor(2).expand(5, 5),
    "overlapping": f32(10).unfold(0, 4, 1),
    "six dims": f32(1, 2, 3, 1, 2, 2),
    "needs grad": f32(3).requires_grad_(),
    "transposed, needs grad": f32(3, 2).t().requires_grad_(),
    "conjugate": numbers(torch.complex64, 4).conj(),
    "negative": numbers(torch.complex64, 4).conj().imag,
    "parameter": torch.nn.Parameter(f32(3)),
    "subclass": f32(3, 4).as_subclass(Flavoured),
    "empty subclass": f32(0, 4).as_subclass(Flavoured),
    "part of a subclass": f32(9, 4).as_subclass(Flavoured)[2:5],
    "sparse": torch.eye(4).to_sparse(),
    "sparse, needs grad": torch.eye(2).to_sparse().requires_grad_(),
    **of_few_friends(),
    "meta": torch.empty(3, device="meta"),
}

ARRAYS = {
    **{kind: np.arange(6).reshape(2, 3).astype(kind) for kind in "?bBhHiIlLqQefdgFDG"},
    "strings": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "big endian": np.arange(5).astype(">i4"),
    "dates": np.array(["2024-02-29", "NaT"], "M8[D]"),
    "durations": np.arange(3).astype("m8[ms]"),
    "structured": STRUCTURED,
    "void": np.frombuffer(b"abcdef", "V3"),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "0-d": np.array(5.0),
    "zero-size": np.empty((0, 3), np.float32),
    "zero-size dates": np.empty(0, "M8[s]"),
    "empty strings": np.empty(3, "S0"),
    "not contiguous": np.arange(20).reshape(4, 5)[::2, ::-1],
    "turned": np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "read-only": np.frombuffer(b"abcdefgh", np.int16),
    "broadcast": np.broadcast_to(np.arange(3.0), (4, 3)),
    "objects": np.array([1, "two", None, (3,)], object),
    "tensors": np.array([Slotted(f32(2)), None], object),
    "scalar": np.float32(1.5),
    "integer scalar": np.int64(7),
    "date scalar": np.datetime64("2024-02-29"),
    "string scalar": np.str_("abc"),
    "record": STRUCTURED[2],
    "masked": np.ma.masked_array([1, 2], [False, True]).data,
    "record array": STRUCTURED.view(np.recarray),
}

OTHERS = {
    "nothing": None,
    "numbers": [1, -(2**200), 1.5, float("nan"), True, 2 + 3j],
    "texts": ("", "héllo", b"", b"\x00\xff", bytearray(b"abc")),
    "long bytes": [b"x" * 100_000, bytearray(b"y" * 100_000)],
    "containers": [(), [], {}, set(), {1, 2}, frozenset("ab"), range(5), slice(1, 2)],
    "named tuple": Pair(f32(2), Pair(np.arange(3), "x")),
    "old named tuple": Untyped(1, f32(2)),
    "dataclass": Sample(f32(2, 2), "n"),
    "slots": Slotted(f32(3)),
    "ordered": OrderedDict(b=f32(1), a=2),
    "default": defaultdict(list, a=[f32(1)]),
    "deep": {"a": [{"b": (f32(2), [np.arange(2)])}], (1, "k"): {"c": None}},
    "enum": [Colour.RED, torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.strided],
    "decimal": decimal.Decimal("1.10"),
    "types": [Pair, Colour, int, len],
    "packed sequence": pack_sequence([f32(3, 2), f32(1, 2)]),
    "own buffer": Buffered(bytearray(b"abc")),
    "own read-only buffer": Buffered(b"abc"),
    "own empty buffer": Buffered(b""),
}


def send(slab: Slab, packer: Packer, batch: Any, route: str) -> tuple[PackedBatch, Any]:
    """Pack a batch and unpack it, as a worker and the owner of the slab would."""
    slot = None if route == "pipe" else slab.take()
    packer.begin(slot)
    packed = packer.seal(packer.pack(batch))
    packed = pickle.loads(pickle.dumps(packed, protocol=5))
    slot = packed.settle(slab, slot)
    assert (slot is None) == (route == "pipe" or packed.body is not None)
    return packed, unpack(packed, memory_of(packed, slab, slot))


@pytest.fixture(params=["body", "slot", "pipe"])
def route(request, monkeypatch):
    """The ways a batch's bytes can go: in a body, in the slot, in the in-band pickle."""
    if request.param == "slot":
        monkeypatch.setattr(packing, "INLINE_BYTES", -1)
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_tensors_come_back_equal(slab, packer, route, tensor):
    """Dtype, shape, layout, bits, type; strides too, but for slices of something much larger."""
    _, back = send(slab, packer, tensor, route)
    assert same(tensor, back)
    if tensor.layout is torch.strided and not tensor.is_nested and tensor.numel():
        gaps = tensor is TENSORS["every ninth"] or tensor is TENSORS["a column"]
        assert back.stride() == (tensor.contiguous() if gaps else tensor).stride()
    del back
    assert slab.out == 0


@pytest.mark.slow
@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_come_back_equal(slab, packer, route, array):
    """Dtype, shape, bits, order of dimensions; and they can be written to."""
    _, back = send(slab, packer, array, route)
    assert same(array, back)
    del back
    assert slab.out == 0


@pytest.mark.slow
@pytest.mark.parametrize("batch", OTHERS.values(), ids=OTHERS)
def test_anything_else_comes_back_equal(slab, packer, route, batch):
    """As pickle would have it, with the tensors and arrays inside."""
    _, back = send(slab, packer, batch, route)
    if isinstance(batch, PackedSequence):
        assert isinstance(back, PackedSequence)
        batch, back = tuple(batch), tuple(back)
    assert same(batch, back)
    del back
    assert slab.out == 0


def test_what_comes_back_can_be_written_to(slab, packer, route):
    """In-place work on batches is common, and one tensor's is no other's."""
    batch = [f32(2, 2), torch.arange(3), f32(2, 3).t(), np.arange(3), np.frombuffer(b"abcd", "i2")]
    _, (image, label, turned, array, read_only) = send(slab, packer, batch, route)
    image.zero_()
    label += 1
    turned[0] = 5
    array *= 2
    read_only[:] = 1
    assert label.tolist() == [1, 2, 3]
    assert array.tolist() == [0, 2, 4]
    assert turned[:, 1].tolist() == [5, *f32(2, 3).t()[1:, 1].tolist()]
    assert not image.any() and read_only.tolist() == [1, 1]
    assert image.requires_grad_().is_leaf


def test_channels_last_stays_so(slab, packer, route):
    """Models choose their kernels by it."""
    image = f32(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    _, back = send(slab, packer, image, route)
    assert back.is_contiguous(memory_format=torch.channels_last)
    assert not back.is_contiguous()


def test_one_object_twice_comes_back_as_one(slab, packer, route):
    """As pickle does it for everything."""
    tensor, array = f32(3), np.arange(3)
    _, back = send(slab, packer, [tensor, array, {"again": (tensor, array)}], route)
    assert back[0] is back[2]["again"][0]
    assert back[1] is back[2]["again"][1]


def test_a_tensor_has_its_own_storage(slab, packer, route):
    """So that saving one tensor does not save the batch."""
    _, (one, two) = send(slab, packer, [f32(2), f32(100)], route)
    assert one.untyped_storage().nbytes() == 8
    assert two.untyped_storage().nbytes() == 400
    assert one._base is None


def test_a_gap_is_not_sent(slab, packer):
    """A thin slice of a large tensor costs what it holds; an expanded one even less."""
    thin, _ = send(slab, packer, f32(5000, 100)[:, 3], "slot")
    wide, _ = send(slab, packer, torch.zeros(1).expand(1_000_000), "body")
    assert [length for _, length in thin.buffers] == [20_000]
    assert [length for _, length in wide.buffers] == [4]


def test_a_gradient_history_is_refused_in_words(slab, packer):
    """As torch refuses it: what it comes from cannot be sent."""
    packer.begin(None)
    with pytest.raises(RuntimeError, match=r"gradient history(.|\n)*detach\(\)"):
        packer.pack([f32(2).requires_grad_() * 2])


def test_what_pickle_refuses_is_its_own_error_and_spoils_nothing(slab, packer, route):
    """The next batch is packed as if nothing had been."""
    slot = slab.take()
    packer.begin(slot)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        packer.pack([f32(9), lambda: None])
    packer.begin(None)
    slab.give_back(slot)
    _, back = send(slab, packer, [f32(3)], route)
    assert same(back, [f32(3)])


def test_a_packer_keeps_nothing_of_a_batch(slab, packer):
    """The worker's memory is its own between batches."""
    batch = [torch.zeros(8), torch.zeros(8, requires_grad=True), torch.zeros(50_000)]
    alive = [weakref.ref(tensor) for tensor in batch]
    send(slab, packer, batch, "slot")
    del batch
    assert [tensor() for tensor in alive] == [None, None, None]


def test_a_default_device_changes_nothing(slab, packer, route):
    """Trainers set it; batches are made in this process's memory all the same."""
    with torch.device("meta"):
        _, back = send(slab, packer, [TENSORS["zero-size"], TENSORS["transposed"]], route)
    assert same(back, [TENSORS["zero-size"], TENSORS["transposed"]])


def test_a_small_batch_never_holds_a_slot(slab, packer):
    """It travels whole, and the slot is free when it arrives."""
    packed, back = send(slab, packer, torch.zeros(INLINE_BYTES, dtype=torch.uint8), "body")
    assert len(packed.body) == INLINE_BYTES
    assert packed.nbytes == INLINE_BYTES + len(packed.in_band)
    assert slab.out == 0
    assert back.numel() == INLINE_BYTES


def test_a_large_batch_holds_its_slot_until_its_last_tensor_is_gone(slab, packer):
    """And is read where it was written."""
    packed, back = send(slab, packer, [f32(5000), np.zeros(5000), "x"], "slot")
    assert packed.body is None
    assert packed.nbytes >= 60_000
    tensor = back[0][1:]
    del back
    assert slab.out == 1
    del tensor
    assert slab.out == 0


def test_what_does_not_fit_in_the_slot_travels_beside_it(slab, packer):
    """A batch that outgrew its slot is late, not lost, and can be written to; later slots fit."""
    slab._space.large_left = 0
    slab.record_size(1)
    batch = [f32(10_000), f32(10_000), np.zeros(10_000), Buffered(bytearray(50_000)), f32(2)]
    packed, back = send(slab, packer, batch, "slot")
    assert [length for _, length in packed.buffers] == [40_000, 8]
    assert same(back, batch)
    back[1].zero_()
    back[2] += 1
    assert slab.take().capacity >= 4 * packed.nbytes


def test_a_worker_packs_what_its_owner_unpacks(slab, packer):
    """Across a fork and a pipe, twice over the same memory."""
    for lap in range(2):
        slot = slab.take()
        assert slot.offset == 0
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            undo = collate_into(packer)
            packer.begin(slot)
            batch = default_collate([(torch.full((100, 100), float(lap)), k) for k in range(4)])
            packed = packer.pack(batch)
            del batch
            with open(writer, "wb") as pipe:
                pickle.dump(packer.seal(packed), pipe)
            undo()
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            packed = pickle.load(pipe)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        images, labels = unpack(packed, memory_of(packed, slab, packed.settle(slab, slot)))
        assert same(images, torch.full((4, 100, 100), float(lap)))
        assert same(labels, torch.arange(4))
        del images, labels
        # The first lap's slot was of another capacity; from then on they are alike.
        assert slab.out == 0


# ---- collating into the slot


LARGE = WORTH_PLACING // 4


def pack_collated(packer, slot, samples):
    packer.begin(slot)
    batch = default_collate(samples)
    address = batch.data_ptr()
    packed = packer.pack(batch)
    del batch
    return packer.seal(packed), address


def test_collated_tensors_are_not_copied(slab, collating):
    """They are where they must be."""
    slot = slab.take()
    packed, address = pack_collated(collating, slot, [f32(LARGE), f32(LARGE)])
    start = np.frombuffer(slab.view(slot), np.uint8).ctypes.data
    assert packed.buffers == ((address - start, 8 * LARGE),)
    assert packed.nbytes == 8 * LARGE + len(packed.in_band)
    assert same(
        unpack(packed, memory_of(packed, slab, slot)), torch.stack([f32(LARGE), f32(LARGE)])
    )


def in_torchs_worker(monkeypatch, samples):
    """What torch's own collation gives in one of its workers."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.utils.data._utils.worker, "_worker_info", "some")
        return torch.utils.data._utils.collate.collate_tensor_fn(samples)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize(
    "samples",
    [
        lambda n: [f32(n), f32(n)],
        lambda n: [f32(n), torch.ones(n, dtype=torch.float64)],
        lambda n: [torch.ones(n, dtype=torch.float64), f32(n)],
        lambda n: [torch.ones(n, dtype=torch.bfloat16), f32(n)],
        lambda n: [torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)],
        lambda n: [numbers(torch.complex64, n), numbers(torch.complex64, n).conj()],
        lambda n: [f32(3, n).t(), f32(3, n).t()],
        lambda n: [f32(1, 3, 2, n).contiguous(memory_format=torch.channels_last) for _ in range(2)],
        lambda n: [torch.empty(0), torch.empty(0)],
        lambda n: [torch.tensor(1), torch.tensor(2)],
        lambda n: [numbers(torch.float8_e5m2, 4 * n), numbers(torch.float8_e5m2, 4 * n)],
        lambda n: [torch.nn.Parameter(f32(n)).detach(), f32(n)],
    ],
)
def test_collation_gives_what_torch_gives(slab, collating, monkeypatch, samples, size):
    """Also where dtypes are mixed: the first sample decides, as in torch's workers."""
    expected = in_torchs_worker(monkeypatch, samples(size))
    collating.begin(slab.take())
    got = default_collate(samples(size))
    assert same(got, expected)
    assert got.stride() == expected.stride()


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize(
    "samples",
    [
        lambda n: [torch.ones(n, dtype=torch.int64), f32(n)],
        lambda n: [f32(n), f32(n + 1)],
        lambda n: [f32(n).requires_grad_(), f32(n)],
        lambda n: [f32(n), torch.eye(n % 100).to_sparse()],
    ],
)
def test_collation_refuses_what_torch_refuses(slab, collating, monkeypatch, samples, size):
    """With the same error and the same words."""
    with pytest.raises((RuntimeError, TypeError)) as expected:
        in_torchs_worker(monkeypatch, samples(size))
    collating.begin(slab.take())
    with pytest.raises(expected.type) as got:
        default_collate(samples(size))
    assert str(got.value) == str(expected.value)


def test_what_torch_refuses_to_collate_at_all_is_left_to_torch(slab, collating):
    """Sparse and nested samples ask for a collate_fn of one's own."""
    collating.begin(slab.take())
    for kind in ("sparse", "nested"):
        with pytest.raises(RuntimeError, match=f"{kind} tensors are not currently supported"):
            default_collate([TENSORS[kind], TENSORS[kind]])


def test_arrays_and_nested_samples_are_collated_into_the_slot_too(slab, collating):
    """A whole batch of the usual kind: the copies that are left are of numbers."""
    samples = [{"x": np.full(LARGE, k, "f4"), "y": (f32(LARGE), k), "n": "a"} for k in range(3)]
    expected = {
        "x": torch.stack([torch.full((LARGE,), float(k)) for k in range(3)]),
        "y": [torch.stack([f32(LARGE)] * 3), torch.arange(3)],
        "n": ["a", "a", "a"],
    }
    slot = slab.take()
    collating.begin(slot)
    packed = collating.pack(default_collate(samples))
    packed = collating.seal(packed)
    assert packed.nbytes < 2 * 12 * LARGE + 1000
    assert same(unpack(packed, memory_of(packed, slab, slot)), expected)


def test_a_full_slot_is_no_obstacle(slab, collating):
    """Collation goes on in the worker's own memory."""
    slab.record_size(1)
    samples = [f32(100_000), f32(100_000)]
    slot = slab.take()
    packed, _ = pack_collated(collating, slot, samples)
    assert same(
        unpack(packed, memory_of(packed, slab, packed.settle(slab, slot))), torch.stack(samples)
    )


def test_undoing_leaves_torch_as_it_was(packer):
    """Tests and other loaders share this process."""
    table = torch.utils.data._utils.collate.default_collate_fn_map
    before = dict(table)
    undo = collate_into(packer)
    assert table != before
    undo()
    assert table == before


# ---- memory that is used again must be free


def test_what_is_collated_outside_a_batch_is_not_in_a_slot(slab, collating):
    """A dataset may collate by itself, and keep it: before, after, and in a thread beside."""
    slot = slab.take()
    start = np.frombuffer(slab.view(slot), np.uint8).ctypes.data
    inside = []

    def collate():
        inside.append(0 <= default_collate([f32(LARGE)]).data_ptr() - start < slot.capacity)

    collate()
    collating.begin(slot)
    collate()
    thread = threading.Thread(target=collate)
    thread.start()
    thread.join()
    collating.pack(None)
    collate()
    collating.begin(None)
    collate()
    assert inside == [False, True, False, False, False]


def test_a_batch_that_the_worker_keeps_is_never_overwritten(slab, collating):
    """Its slot is given up, what was sent is a copy, and later batches are not collated there."""
    kept = []
    slot = slab.take()
    collating.begin(slot)
    kept.append(default_collate([f32(LARGE), f32(LARGE)]))
    packed = collating.seal(collating.pack(kept[0]))
    assert packed.kept
    assert packed.settle(slab, slot) is None
    back = unpack(packed, memory_of(packed, slab, None))
    assert same(back, kept[0])
    back.zero_()
    assert kept[0].any()
    assert slab.out == 1

    other = slab.take()
    assert other != slot
    packed, _ = pack_collated(collating, other, [f32(LARGE), f32(LARGE)])
    assert not packed.kept
    assert same(unpack(packed, memory_of(packed, slab, packed.settle(slab, other))), kept[0])
    # It may even be returned once more.
    _, again = send(slab, collating, kept[0], "slot")
    assert again.data_ptr() != kept[0].data_ptr()
    assert same(again, kept[0])


def test_every_batch_can_be_kept(slab, collating):
    """`list(loader)`: each is in a slot of its own, for as long as it lives."""
    batches, slots = [], []
    for k in range(20):
        slots.append(slot := slab.take())
        packed, _ = pack_collated(collating, slot, [torch.full((LARGE,), float(k))] * 2)
        batches.append(unpack(packed, memory_of(packed, slab, packed.settle(slab, slot))))
    assert [batch.unique().tolist() for batch in batches] == [[float(k)] for k in range(20)]
    assert slab.out == 20
    del batches, packed
    assert slab.out == 0
    assert slab.take() in slots


def test_a_small_tensor_that_is_kept_does_not_keep_its_batch(slab, packer):
    """`labels.append(y)` in an evaluation loop: the images of each batch are freed."""
    slot = slab.take()
    batch = {"image": torch.rand(1 << 16), "label": torch.arange(8), "box": np.ones((8, 4))}
    packer.begin(slot)
    packed = packer.seal(packer.pack(batch))
    memory = memory_of(packed, slab, packed.settle(slab, slot))
    found = unpack(packed, memory, copies_small=True)
    assert same(found, batch)
    del memory
    found.pop("image")
    assert slab.out == 0
    assert found["label"].add_(1).tolist() == list(range(1, 9))
    assert found["box"].flags.writeable
