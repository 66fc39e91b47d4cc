"""Which slot of the slab each batch lies in, from its request until the user has it."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from forebay.buffer import warn_of_full_disk
from forebay.engine.memory.packing import unpack
from forebay.engine.memory.slab import Slab
from forebay.engine.memory.slab_layout import Slot
from forebay.loading.messages import BatchRequest, BatchResult


class BatchSlots:
    """The slots of the batches that were requested and not taken.

    Args:
        directory: Where the slab's file is to be; None for memory.

    Attributes:
        slab: The slab.
        by_task: The slot of each task that has one.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.slab = Slab(directory)
        self.by_task: dict[int, Slot] = {}
        self._directory = directory  # None once the user was warned that its disk is full

    @property
    def prepare(self) -> Any:
        """A function that adds a slot to a request when it is sent; see `Engine`.

        It has no reference to this object's owner, which would be a cycle that keeps the slab
        until the garbage collector runs.
        """
        return partial(_with_slot, self.slab, self.by_task)

    def settle(self, task: int, result: BatchResult) -> None:
        """Take back what a batch that has arrived does not need of its slot."""
        slot = self.by_task.pop(task, None)
        if slot is None and result.batch.nbytes <= self.slab.largest:
            return
        slot = result.batch.settle(self.slab, slot)
        if slot is not None:
            self.by_task[task] = slot

    def open(self, task: int, result: BatchResult) -> BatchResult:
        """Unpack a batch; its slot, if it has one, now belongs to it."""
        packed = result.batch
        if packed.refused is not None and self._directory is not None:
            directory, self._directory = self._directory, None  # one warning is enough
            warn_of_full_disk(directory, packed.refused, packed.nbytes)
        batch = unpack(packed, self.slab, self.by_task.pop(task, None))
        timing = result.timing._replace(is_inline=packed.body is not None)
        return result._replace(batch=batch, timing=timing)

    def free(self, task: int) -> None:
        """Give back the slot of a task whose batch nobody will take."""
        slot = self.by_task.pop(task, None)
        if slot is not None:
            self.slab.give_back(slot)

    def close(self) -> None:
        """Give back all slots, and the slab itself once no batch lies in it."""
        for task in list(self.by_task):
            self.free(task)
        self.slab.retire()


def _with_slot(slab: Slab, slots: dict[int, Slot], task: int, request: BatchRequest) -> Any:
    """Choose the slot for a request that is sent; one that is sent again keeps its own."""
    slot = slots.get(task)
    if slot is None:
        slot = slab.take()
        if slot is None:
            return request
        slots[task] = slot
    return request._replace(slot=slot)
