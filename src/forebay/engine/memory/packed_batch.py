"""The message for a batch whose bytes are in a slot; see `packing.py`.

It is a plain record, which a process without torch can forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from forebay.engine.memory.lending import Loan, Offer
from forebay.engine.memory.sending import Sent
from forebay.engine.memory.slab import Slab
from forebay.engine.memory.slab_layout import Slot

if TYPE_CHECKING:
    import numpy as np


class PackedBatch(NamedTuple):
    """A packed batch.

    Attributes:
        in_band: The batch, pickled without its buffers; if that is large, its offset and length in
            the slot.
        buffers: Offset and length of each buffer, in the slot or in `body`.
        body: The used part of the slot, if it is sent along and the slot is free again; an array if
            it came from another machine, until it is copied to the slab.
        nbytes: Bytes that the batch occupies until it is consumed.
        kept: Whether user code in the worker still refers to the slot, so that it is never reused.
        refused: Why the slab's disk had no room, if the bytes are therefore in `in_band`.
        offer: Where a reader on the same machine finds the slab that the bytes came from.
        loan: The slot that has the bytes, if that reader has accepted the offer.
        sent: What to receive, if the bytes are sent apart from this message.
    """

    in_band: bytes | tuple[int, int]
    buffers: tuple[tuple[int, int], ...]
    body: bytearray | np.ndarray[Any, Any] | None
    nbytes: int
    kept: bool = False
    refused: str | None = None
    offer: Offer | None = None
    loan: Loan | None = None
    sent: Sent | None = None

    @property
    def end(self) -> int:
        """The end of the last buffer; 0 without buffers."""
        return max((at + nbytes for at, nbytes in self.buffers), default=0)

    @property
    def used(self) -> int:
        """How many bytes of the slot, or of `body`, are used."""
        return self.end if isinstance(self.in_band, bytes) else max(self.end, sum(self.in_band))

    def settle(self, slab: Slab, slot: Slot | None) -> Slot | None:
        """Record the batch's arrival in the slab; called once, by the slab's owner.

        Args:
            slab: The slab that the slot was taken from.
            slot: The slot that the worker had, if any.

        Returns:
            The slot that `memory_of` needs, if any.
        """
        slab.record_size(self.nbytes)
        if self.body is None:
            return slot
        if slot is not None and not self.kept:
            slab.give_back(slot)
        return None
