"""A packed batch, whose bytes are in a slot: the message, and how its receiver unpacks it.

`packing.py` makes it. It is a plain record, which a process without torch can forward, or copy into
another slab.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple, cast

import numpy as np

from forebay.memory.layout import Slot
from forebay.memory.lending import Loan, Offer
from forebay.memory.slab import Slab


class PackedBatch(NamedTuple):
    """A packed batch.

    Attributes:
        refused: Why the slab's disk had no room, if the bytes are therefore in `in_band`.
        offer: Where a reader on the same machine finds the slab that the bytes came from.
        loan: The slot that has the bytes, if that reader has accepted the offer.
    """

    in_band: bytes | tuple[int, int]
    buffers: tuple[tuple[int, int], ...]
    body: bytearray | np.ndarray[Any, Any] | None
    nbytes: int
    kept: bool = False
    refused: str | None = None
    offer: Offer | None = None
    loan: Loan | None = None

    @property
    def end(self) -> int:
        """The end of the last buffer; 0 without buffers."""
        return max((at + nbytes for at, nbytes in self.buffers), default=0)

    @property
    def used(self) -> int:
        """How many bytes of the slot, or of `body`, are used."""
        return self.end if isinstance(self.in_band, bytes) else max(self.end, sum(self.in_band))

    def settle(self, slab: Slab, slot: Slot | None) -> Slot | None:
        """Record the batch's arrival in the slab; called once, by the slab's owner."""
        slab.record_size(self.nbytes)
        if self.body is None:
            return slot
        if slot is not None and not self.kept:
            slab.give_back(slot, self.refused)
        return None


# Tensors of less than this, and less than this part of their batch, are copied out of the slot: a
# loop that keeps the labels of each batch then does not keep its images.
SMALL_BYTES = 1 << 16
SMALL_PART = 16


def memory_of(packed: PackedBatch, slab: Slab, slot: Slot | None) -> memoryview:
    """Return the memory with the buffers of a batch.

    The slot, which `settle` returned, is freed automatically when nothing views it any more.
    """
    if packed.body is not None:
        return memoryview(cast(bytearray, packed.body))
    assert slot is not None
    return slab.lease(slot, min(packed.nbytes, slot.capacity))


def unpack(packed: PackedBatch, view: memoryview, *, copies_small: bool = False) -> Any:
    """Return the batch, with its tensors and arrays over memory with its buffers.

    Args:
        copies_small: Whether what is small beside its batch gets memory of its own, so that keeping
            it does not keep the whole slot.
    """
    most = min(SMALL_BYTES, packed.nbytes // SMALL_PART) if copies_small else 0
    buffers = [
        bytearray(view[at : at + nbytes]) if nbytes < most else view[at : at + nbytes]
        for at, nbytes in packed.buffers
    ]
    in_band: bytes | tuple[int, int] | memoryview = packed.in_band
    if isinstance(in_band, tuple):
        at, nbytes = in_band
        in_band = view[at : at + nbytes]
    return pickle.loads(in_band, buffers=buffers)  # noqa: S301 - from our own worker


def copy_into_slab(packed: PackedBatch, slab: Slab) -> tuple[PackedBatch, Slot | None]:
    """Copy a packed batch from another machine into this machine's slab, if that has room."""
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
        slab.give_back(slot, packed.refused)
    return packed._replace(body=bytearray(body)), None
