"""Receive batches from hosts: those of other machines are sent and copied into the local slab.

    worker ── slot of its host's slab ──> host ── Ray's object store ──> feed ── slot of the slab
                        │                  └───── or TCP (`sending.py`) ───┘
                        └── on this machine: lent to the feed, which returns it (`lending.py`)

The host's slab holds a batch until it is sent, and the object store until it is received. So the
buffer occupies the trainer's memory, or that of hosts on the same machine. The trainer may write to
a batch and keep it, as if a local worker had made it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from forebay.engine.events import Event, TaskFinished, as_received
from forebay.engine.memory.lending import Borrower
from forebay.engine.memory.packed_batch import PackedBatch
from forebay.engine.memory.packing import copy_into_slab
from forebay.engine.memory.sending import Receiver, Sent
from forebay.engine.pools.ray.cluster import joined
from forebay.engine.pools.ray.node_checks import NodeCheck
from forebay.engine.pools.ray.pool import RayPool
from forebay.engine.pools.ray.shipping import shipped
from forebay.errors import OptionError
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
    with joined(cluster.address, note) as here:
        direct = _receiver_at(here) if cluster.direct else None
        receiver = BatchReceiver(slots, direct, borrows=borrows)
        address = None if direct is None else direct.address
        try:
            return RayPool(
                BatchHosting(payload, address),
                cluster,
                NodeCheck(payload, trainer=None if address is None else address[:2]),
                max_workers,
                grows=False,
                ahead=MESSAGES_AHEAD,
                receiver=receiver,
                say=note,
            )
        except BaseException:
            receiver.close()
            raise


def _receiver_at(here: str) -> Receiver:
    try:
        return Receiver(here)
    except OSError as error:
        raise OptionError(
            f"the trainer cannot listen on {here}, the address of its node: {error}\n"
            "  Nothing was started. forebay.Ray(direct=True) needs that: leave `direct` out to "
            "have batches sent through Ray's object store."
        ) from error


class BatchReceiver:
    """Brings batches from hosts into the trainer's memory: the `AnswerReceiver` of a `RayPool`.

    Args:
        slots: See `pool_on_cluster`.
        direct: Receives what hosts send over TCP; None if they send messages alone.
        borrows: See `pool_on_cluster`.
    """

    def __init__(self, slots: BatchSlots, direct: Receiver | None, *, borrows: bool) -> None:
        self._slab, self._slots = slots.slab, slots.by_task
        self._direct = direct
        self._senders: dict[int, bytes] = {}  # by host
        self._borrows = borrows
        self._borrowers: dict[int, Borrower] = {}  # by host

    def complete(self, host: int, events: list[Any]) -> list[Any]:
        """Receive the bytes of batches that were sent over TCP; called in the host's thread."""
        if self._direct is None:
            return events
        received = [as_received(each) for each in events]
        sent = [(at, each) for at, event in enumerate(received) if (each := _sent(event))]
        if sent:
            self._senders[host] = sent[0][1].sender
            bodies = self._direct.receive([each for _, each in sent])
            for (at, _), body in zip(sent, bodies, strict=True):
                result: BatchResult = received[at].result
                batch = result.batch._replace(body=body, sent=None)
                received[at] = received[at]._replace(result=result._replace(batch=batch))
        return received

    def receive(self, host: int, event: TaskFinished, *, is_here: bool) -> TaskFinished:
        """Copy a batch from where it arrived into the slab, or map it, at once.

        It may have to wait for earlier batches, and must not occupy the object store meanwhile, or
        the memory of its connection.
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
        """Close its connection, and unmap its slab once nothing views its batches."""
        self._borrowers.pop(host, None)
        sender = self._senders.pop(host, None)
        if self._direct is not None and sender is not None:
            self._direct.forget(sender)

    def close(self) -> None:
        """Stop listening; whoever waits for bytes gets an error."""
        if self._direct is not None:
            self._direct.close()


def _sent(event: Event) -> Sent | None:
    """Return what a host sends apart from the message with this event, if anything."""
    result = event.result if isinstance(event, TaskFinished) else None
    batch = result.batch if isinstance(result, BatchResult) else None
    return batch.sent if isinstance(batch, PackedBatch) else None
