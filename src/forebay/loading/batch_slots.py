"""Which slot of the slab holds each batch, from its request until it is returned."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from forebay.buffer import warn_of_full_disk
from forebay.loading.messages import BatchRequest, BatchResult
from forebay.memory.layout import Slot
from forebay.memory.packed_batch import PackedBatch, memory_of, unpack
from forebay.memory.slab import Slab


class BatchSlots:
    """The slots of the batches that were requested and not taken.

    Args:
        directory: The folder for the slab's file; None for memory.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.slab = Slab(directory)
        self.by_task: dict[int, Slot] = {}
        self.is_on_disk = directory is not None
        self._directory = directory  # None once the user was warned that its disk is full

    @property
    def prepare(self) -> Any:
        """A function that adds a slot to a request when it is sent; see `Engine`.

        It does not reference this object's owner: such a cycle would keep the slab in memory until
        the garbage collector runs.
        """
        return partial(_with_slot, self.slab, self.by_task)

    def settle(self, task: int, result: BatchResult) -> None:
        """Free the part of a slot that its batch, which has arrived, does not need."""
        slot = self.by_task.pop(task, None)
        if slot is None and result.batch.nbytes <= self.slab.largest:
            return
        slot = result.batch.settle(self.slab, slot)
        if slot is not None:
            self.by_task[task] = slot

    def open(self, task: int, result: BatchResult) -> BatchResult:
        """Unpack a batch; its slot, if it has one, is then freed with the batch."""
        packed = result.batch
        batch = unpack(packed, self.memory_of(task, packed), copies_small=True)
        return result._replace(batch=batch, is_inline=isinstance(packed.body, bytearray))

    def memory_of(self, task: int, packed: PackedBatch) -> memoryview:
        """Return the memory of a batch; its slot, if it has one, is freed with the last view."""
        if packed.refused is not None and self._directory is not None:
            directory, self._directory = self._directory, None  # one warning is enough
            warn_of_full_disk(directory, packed.refused, packed.nbytes)
        return memory_of(packed, self.slab, self.by_task.pop(task, None))

    def free(self, task: int) -> None:
        """Free the slot of a task whose batch will not be taken."""
        slot = self.by_task.pop(task, None)
        if slot is not None:
            self.slab.give_back(slot)

    def close(self) -> None:
        """Free all slots, and the slab once it holds no batch."""
        for task in list(self.by_task):
            self.free(task)
        self.slab.retire()


def _with_slot(slab: Slab, slots: dict[int, Slot], task: int, request: BatchRequest) -> Any:
    """Add a slot to a request; a request that is sent again keeps its slot."""
    slot = slots.get(task)
    if slot is None:
        slot = slab.take()
        if slot is None:
            return request
        slots[task] = slot
    return request._replace(slot=slot)
