"""The message for a batch whose bytes are in a slot; see `packing.py`.

It is a plain record, so that a process without torch can forward it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from forebay.engine.memory.slab import Slab
from forebay.engine.memory.slab_layout import Slot

if TYPE_CHECKING:
    import numpy as np


class PackedBatch(NamedTuple):
    """A packed batch.

    Attributes:
        in_band: The batch, pickled without its buffers.
        buffers: Where each buffer lies, in the slot or in `body`: its offset and its length.
        body: The used part of the slot, where it travels along and the slot is free; an array
            where it came from another machine, until it has landed.
        nbytes: Bytes that the batch occupies until it is consumed.
        kept: The user's code in the worker still refers to the slot, so it is never used again.
        refused: Why the slab's disk had no room, so that bytes are in `in_band` instead.
    """

    in_band: bytes
    buffers: tuple[tuple[int, int], ...]
    body: bytearray | np.ndarray[Any, Any] | None
    nbytes: int
    kept: bool = False
    refused: str | None = None

    def settle(self, slab: Slab, slot: Slot | None) -> Slot | None:
        """Record the batch's arrival in the slab; called once, by the slab's owner.

        Args:
            slab: The slab that the slot was taken from.
            slot: The slot that the worker had, if any.

        Returns:
            The slot that `unpack` needs, if any.
        """
        slab.saw(self.nbytes)
        if self.body is None:
            return slot
        if slot is not None and not self.kept:
            slab.give_back(slot)
        return None
