"""Packing batches to be sent between processes, and unpacking them.

The batch is pickled with its buffers out of band. Buffers are copied into the slot, once, or were
created there (see `collate_into`). The in-band pickle that remains is sent by pipe if it is small,
and in the slot otherwise. The reader unpickles it over the slot, without a copy, and may write to
the tensors.

    worker                                   owner of the slab
    packer.begin(slot)                       slot = slab.take()
    batch = collate(samples)
    packed = packer.pack(batch)
    del batch
    packed = packer.seal(packed)  ------->   slot = packed.settle(slab, slot)
                                             memory = memory_of(packed, slab, slot)
                                             batch = unpack(packed, memory)
"""

from __future__ import annotations

import ctypes
import pickle
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from threading import get_ident
from typing import Any, cast

import numpy as np
import torch

from forebay import torch_internals
from forebay.engine.memory.allocation import set_allocator
from forebay.engine.memory.batch_pickler import CODES, BatchPickler, is_plain
from forebay.engine.memory.packed_batch import PackedBatch
from forebay.engine.memory.slab import Slab
from forebay.engine.memory.slab_layout import Slot

# A batch this small is sent entirely by pipe and never uses a slot.
INLINE_BYTES = 1 << 14
# For a smaller tensor, allocating on the heap and copying is faster than allocating in the slot.
WORTH_PLACING = 1 << 14

_NOTHING = memoryview(bytearray())


def memory_of(packed: PackedBatch, slab: Slab, slot: Slot | None) -> memoryview:
    """Return the memory with the buffers of a batch.

    The slot, which `settle` returned, is freed automatically when nothing views it any more.
    """
    if packed.body is not None:
        return memoryview(cast(bytearray, packed.body))
    assert slot is not None
    return slab.lease(slot, min(packed.nbytes, slot.capacity))


def unpack(packed: PackedBatch, view: memoryview) -> Any:
    """Return the batch, with its tensors and arrays over memory with its buffers."""
    buffers = [view[at : at + nbytes] for at, nbytes in packed.buffers]
    in_band: bytes | tuple[int, int] | memoryview = packed.in_band
    if isinstance(in_band, tuple):
        at, nbytes = in_band
        in_band = view[at : at + nbytes]
    return pickle.loads(in_band, buffers=buffers)  # noqa: S301 - from our own worker


def copy_into_slab(packed: PackedBatch, slab: Slab) -> tuple[PackedBatch, Slot | None]:
    """Copy a packed batch from another machine into this machine's slab.

    Args:
        packed: One whose body may be an array in memory of another library.
        slab: Where its bytes are copied to, if it has room for them.

    Returns:
        The packed batch for `settle`, and its slot, if it now has one.
    """
    body = packed.body
    if not isinstance(body, np.ndarray):
        return packed, None
    slab.record_size(body.nbytes)
    slot = slab.take()
    if slot is not None and body.nbytes <= slot.capacity:
        refused = slab.reserve(slot, 0, body.nbytes) if slab.is_bounded else None
        if refused is None:
            np.copyto(np.frombuffer(slab.view(slot), np.uint8, body.nbytes), body)
            return packed._replace(body=None), slot
        packed = packed._replace(refused=refused)
    if slot is not None:
        slab.give_back(slot)
    return packed._replace(body=bytearray(body)), None


class Packer:
    """Packs one batch after another, in a worker."""

    def __init__(self, slab: Slab, on_class: Callable[[type], None] | None = None) -> None:
        """Pack into slots of this slab; `on_class` is called with each class in a batch."""
        self._slab = slab
        self._pickler = BatchPickler(on_class)
        self._alive: weakref.ref[Any] | None = None
        self._used, self._thread = 0, 0
        # Whether user code drops its references to the batches that it returns.
        self._trusting = True
        self.begin(None)

    def begin(self, slot: Slot | None) -> None:
        """Start a batch; call it after its samples were loaded and before they are collated.

        Otherwise tensors that the dataset itself stacks would be in a slot that is used again.
        After a batch that failed, `begin(None)` ends it.

        Args:
            slot: Where to put the bytes. None: they are sent in the in-band pickle.
        """
        self._view = _NOTHING if slot is None else self._slab.view(slot)
        if slot is None:
            self._pickler.aim(self._view, 0)
        else:
            reserve = partial(self._slab.reserve, slot) if self._slab.is_bounded else None
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._view))
            self._pickler.aim(self._view, address, reserve)
        self._owner, self._alive = _NOTHING, None
        self._thread = get_ident()

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor in the slot, its values unset, for collation to write into.

        Returns:
            None if there is no room, if the tensor is too small to benefit, or if another thread
            calls it, which may be working on something else.
        """
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < WORTH_PLACING or not self._trusting or self._thread != get_ident():
            return None
        at = self._pickler.cursor.take(nbytes)
        if at is None:
            return None
        if self._alive is None:
            # All tensors of this batch share one base array, which tells whether any is alive.
            array = np.frombuffer(self._view, np.uint8)
            self._owner, self._alive = array.data, weakref.ref(array)
        return torch.frombuffer(self._owner[at : at + nbytes], dtype=dtype).resize_(shape)

    def pack(self, batch: Any) -> PackedBatch:
        """Pack a batch. Drop the batch, then `seal` what is returned, before it is sent.

        Raises:
            Exception: Something in the batch cannot be pickled; the exception is pickle's.
        """
        try:
            in_band, buffers = self._pickler.pickled(batch, INLINE_BYTES)
        finally:
            self._used = used = self._pickler.cursor.used
            refused = self._pickler.cursor.refused
            self._pickler.aim(_NOTHING, 0)
            self._owner = _NOTHING
        body = bytearray(self._view[:used]) if used <= INLINE_BYTES else None
        nbytes = used + len(in_band) if isinstance(in_band, bytes) else used
        return PackedBatch(in_band, buffers, body, nbytes, refused=refused)

    def seal(self, packed: PackedBatch) -> PackedBatch:
        """Return the record to send; call it after the worker has dropped the batch.

        A `collate_fn` may keep a reference to the batch. Its tensors must not change then, so this
        slot is never used again, and later batches are not collated into slots.
        """
        if self._alive is None or self._alive() is None:
            return packed
        self._trusting = False
        body = packed.body or bytearray(self._view[: self._used])
        return packed._replace(body=body, kept=True)


def collate_into(packer: Packer) -> Callable[[], None]:
    """Make torch's default_collate stack tensors in the packer's slot; for a worker process.

    This also works if a user's `collate_fn` calls default_collate. The results equal torch's.
    Tensors from `allocation.new_tensor` are in the slot, too.

    Returns:
        A function that undoes it.
    """

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
            first = batch[0]
            dtype = first.dtype
            if type(first) is not torch.Tensor or dtype not in CODES or not is_plain(first):
                return cast(torch.Tensor, original(batch, collate_fn_map=collate_fn_map))
            shape = (len(batch), *first.shape)
            out = packer.new(shape, dtype)
            if out is None:
                stacked = torch.stack(batch)
                if stacked.dtype is dtype and stacked.is_contiguous() and not stacked.requires_grad:
                    return stacked
                # torch's own workers also stack into a contiguous tensor like the first, or raise.
                out = torch.empty(shape, dtype=dtype, device="cpu")
            return torch.stack(batch, out=out)

        return collate_tensors

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        return packer.new(shape, dtype) if dtype in CODES else None

    restore_torch = torch_internals.replace_tensor_collation(replace)
    unset_allocator = set_allocator(allocate)

    def undo() -> None:
        restore_torch()
        unset_allocator()

    return undo
