"""The message for a batch whose bytes are in a slot; see `packing.py`.

It is a plain record, which a process without torch can forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
            slab.give_back(slot)
        return None
