"""Receive batches from other machines: each is sent as one buffer and copied into the local slab.

    worker ── slot of its host's slab ──> host ── Ray's object store ──> feed ── slot of the slab

The host's slab holds a batch until it is sent, and the object store until it is received, so the
size of the buffer affects only the trainer's memory. The trainer may write to a batch and keep it,
as if a local worker had made it.
"""

from __future__ import annotations

import time
from functools import partial

from forebay.engine.events import TaskFinished
from forebay.engine.memory.packing import copy_into_slab
from forebay.engine.memory.slab import Slab
from forebay.engine.memory.slab_layout import Slot
from forebay.engine.pools.ray.node_checks import NodeCheck
from forebay.engine.pools.ray.pool import RayPool
from forebay.engine.pools.ray.shipping import shipped
from forebay.loading.hosting import BatchHosting
from forebay.loading.messages import BatchResult, BatchSpec, SealedResult
from forebay.observe.progress import note
from forebay.options import Ray

# How many messages with batches each worker may keep in the object store.
MESSAGES_AHEAD = 2


def pool_on_cluster(
    spec: BatchSpec, cluster: Ray, max_workers: int, slab: Slab, slots: dict[int, Slot]
) -> RayPool:
    """Return a pool on a cluster whose workers make batches.

    Each batch from there is copied into a slot of the slab, which is added to `slots` by task.
    """
    payload = shipped(spec)
    hosting = BatchHosting(payload)
    arrive = partial(_copied_to_slab, slab, slots)
    return RayPool(
        hosting,
        cluster,
        NodeCheck(payload),
        max_workers,
        grows=False,
        ahead=MESSAGES_AHEAD,
        arrive=arrive,
        say=note,
    )


def _copied_to_slab(slab: Slab, slots: dict[int, Slot], event: TaskFinished) -> TaskFinished:
    """Copy a batch from the object store into the slab as soon as it arrives.

    It may have to wait for earlier batches, and must not occupy the object store meanwhile.
    """
    result = event.result
    if isinstance(result, SealedResult):
        return event._replace(result=result.opened())
    if not isinstance(result, BatchResult) or result.is_empty:
        return event
    packed, slot = copy_into_slab(result.batch, slab)
    if slot is not None:
        earlier = slots.pop(event.task, None)
        if earlier is not None:  # an earlier attempt, assumed lost, arrived first
            slab.give_back(earlier)
        slots[event.task] = slot
    if result.timing is not None:  # by this machine's clock
        result = result._replace(timing=result.timing._replace(ended_at=time.perf_counter()))
    return event._replace(result=result._replace(batch=packed))
