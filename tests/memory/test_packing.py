"""Packing: any batch comes back equal, type for type and bit for bit, and can be written to."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
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
