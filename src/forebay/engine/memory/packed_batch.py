"""What a worker sends for a batch whose bytes lie in a slot; see `packing.py`.

A record alone, which whoever passes it on can read without torch.
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
        kept: The worker's own code still refers to the slot, which must never be used again.
        refused: Why the slab's disk had no room, so that bytes are in `in_band` instead.
    """

    in_band: bytes
    buffers: tuple[tuple[int, int], ...]
    body: bytearray | np.ndarray[Any, Any] | None
    nbytes: int
    kept: bool = False
    refused: str | None = None

    def settle(self, slab: Slab, slot: Slot | None) -> Slot | None:
        """Tell the slab what arrived; called once, by its owner, on arrival.

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
