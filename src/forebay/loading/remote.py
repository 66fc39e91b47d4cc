"""Batches made on other machines: packed there, sent as one buffer, copied into the slab here.

    worker ── slot of its host's slab ──> host ── Ray's object store ──> feed ── slot of our slab

The host's slab holds a batch until it is on its way, and the object store until it has come, so
neither grows with the buffer: that is the trainer's memory alone. The batch in it is the trainer's
own, to be written to and kept, as if it had been made here.
"""

from __future__ import annotations

import time
from functools import partial

from forebay.engine.events import Event, TaskFinished
from forebay.engine.memory.packing import land
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

    What comes from there is copied into the slab, and `slots` gets its slot, by task.
    """
    payload = shipped(spec)
    hosting = BatchHosting(payload)
    arrive = partial(_landed, slab, slots)
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


def _landed(slab: Slab, slots: dict[int, Slot], event: Event) -> Event:
    """Bring what was made on another machine into this process's own memory, at once.

    It may have to wait for its turn, and the object store must not wait with it.
    """
    if not isinstance(event, TaskFinished):
        return event
    result = event.result
    if isinstance(result, SealedResult):
        return event._replace(result=result.opened())
    if not isinstance(result, BatchResult) or result.is_empty:
        return event
    packed, slot = land(result.batch, slab)
    if slot is not None:
        earlier = slots.pop(event.task, None)
        if earlier is not None:  # of an attempt that was given up, and came after all
            slab.give_back(earlier)
        slots[event.task] = slot
    timing = result.timing._replace(ended_at=time.perf_counter())  # by this machine's clock
    return event._replace(result=result._replace(batch=packed, timing=timing))
