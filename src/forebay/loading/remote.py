"""Receive batches from hosts: those of other machines are sent and copied into the local slab.

    worker ── slot of its host's slab ──> host ── Ray's object store ──> feed ── slot of the slab
                        │
                        └── on this machine: lent to the feed, which returns it (`lending.py`)

The host's slab holds a batch until it is sent, and the object store until it is received. So the
buffer occupies the trainer's memory, or that of hosts on the same machine. The trainer may write to
a batch and keep it, as if a local worker had made it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from forebay.engine.events import TaskFinished
from forebay.engine.memory.lending import Borrower
from forebay.engine.memory.packed_batch import PackedBatch
from forebay.engine.memory.packing import copy_into_slab
from forebay.engine.pools.ray.node_checks import NodeCheck
from forebay.engine.pools.ray.pool import RayPool
from forebay.engine.pools.ray.shipping import shipped
from forebay.loading.hosting import BatchHosting
from forebay.loading.messages import BatchResult, BatchSpec, SealedResult
from forebay.observe.progress import note
from forebay.options import Ray

if TYPE_CHECKING:
    from forebay.loading.batch_slots import BatchSlots

# How many messages with batches each worker may keep in the object store.
MESSAGES_AHEAD = 2


def pool_on_cluster(
    spec: BatchSpec, cluster: Ray, max_workers: int, slots: BatchSlots, *, borrows: bool
) -> RayPool:
    """Return a pool on a cluster whose workers make batches.

    Args:
        spec: How to make batches.
        cluster: Which cluster.
        max_workers: The largest number of workers at a time.
        slots: The trainer's slab, and the slot of each batch that is copied there.
        borrows: Whether batches of hosts on this machine may stay in the slabs of those hosts.
    """
    payload = shipped(spec)
    hosting = BatchHosting(payload)
    return RayPool(
        hosting,
        cluster,
        NodeCheck(payload),
        max_workers,
        grows=False,
        ahead=MESSAGES_AHEAD,
        receiver=BatchReceiver(slots, borrows=borrows),
        say=note,
    )


class BatchReceiver:
    """Brings batches from hosts into the trainer's memory: the `AnswerReceiver` of a `RayPool`.

    Args:
        slots: See `pool_on_cluster`.
        borrows: See `pool_on_cluster`.
    """

    def __init__(self, slots: BatchSlots, *, borrows: bool) -> None:
        self._slab, self._slots = slots.slab, slots.by_task
        self._borrows = borrows
        self._borrowers: dict[int, Borrower] = {}  # by host

    def receive(self, host: int, event: TaskFinished, *, is_here: bool) -> TaskFinished:
        """Copy a batch from the object store into the slab, or map it, as soon as it arrives.

        It may have to wait for earlier batches, and must not occupy the object store meanwhile.
        """
        result = event.result
        if isinstance(result, SealedResult):
            return event._replace(result=result.opened())
        if not isinstance(result, BatchResult) or result.is_empty:
            return event
        batch: PackedBatch = result.batch
        if batch.offer is not None and is_here and self._borrows:
            with suppress(OSError, ValueError):  # it is in another container, for example
                self._borrowers[host] = Borrower(batch.offer)
        if batch.loan is not None:
            body = self._borrowers[host].borrow(batch.loan)
            batch = batch._replace(body=body, loan=None)
        else:
            batch = self._copied(event.task, batch)
        if result.timing is not None:  # by this machine's clock
            result = result._replace(timing=result.timing._replace(ended_at=time.perf_counter()))
        return event._replace(result=result._replace(batch=batch))

    def _copied(self, task: int, batch: PackedBatch) -> PackedBatch:
        batch, slot = copy_into_slab(batch, self._slab)
        if slot is not None:
            earlier = self._slots.pop(task, None)
            if earlier is not None:  # an earlier attempt, assumed lost, arrived first
                self._slab.give_back(earlier)
            self._slots[task] = slot
        return batch._replace(offer=None)

    def host_ended(self, host: int) -> None:
        """Unmap the slab of a host that has ended, once nothing views its batches."""
        self._borrowers.pop(host, None)
