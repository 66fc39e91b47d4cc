"""Receive batches from hosts: those of other machines are sent and copied into the local slab.

    worker ── slot of its host's slab ──> host ── Ray's object store ──> feed ── slot of the slab
                        └── on this machine: lent to the feed, which returns it (the same file)

The host's slab holds a batch until it is sent, and the object store until it is received. So the
buffer occupies the trainer's memory, or that of hosts on the same machine. The trainer may write to
a batch and keep it, as if a local worker had made it.
"""

from __future__ import annotations

import pickle
import sys
import time
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.loading.messages import BatchRequest, BatchResult, BatchSpec
from forebay.memory.layout import Slot
from forebay.memory.lending import Borrower, Lender
from forebay.memory.packed_batch import PackedBatch, copy_into_slab
from forebay.memory.slab import Slab
from forebay.observe.progress import note
from forebay.options import Ray
from forebay.pools.base import Pool
from forebay.pools.events import Assignment, Event, TaskFinished, TasksReturned
from forebay.pools.job_loading import load_job
from forebay.pools.processes import ProcessPool
from forebay.pools.ray_host import Hosting
from forebay.pools.ray_nodes import NodeCheck
from forebay.pools.ray_pool import AnswerReceiver, RayPool
from forebay.pools.ray_shipping import shipped

if TYPE_CHECKING:
    from forebay.loading.hosted_job import HostedJob

# ---- hosting -------------------------------------------------------------------------------------
# Handle batches in the host of a worker on a cluster, without importing torch: that takes a second
# or more, the worker does it too, and it starts only after its host.


class BatchHosting(Hosting):
    """Hosts a worker that makes batches."""

    is_shared = False  # each worker has a stream of batches of its own

    def __init__(self, spec: bytes) -> None:
        super().__init__(spec)
        self._slots: dict[int, Slot] = {}
        self._leaving: list[Slot] = []

    def collect_s(self, hosts: int) -> float:
        """Return 3 ms: the trainer may be waiting for the batch."""
        return 0.003

    def pool(self, max_workers: int) -> Pool:
        """Create a slab, and a pool whose worker packs batches into it."""
        import cloudpickle

        self._slab = Slab()
        self._lender = Lender(self._slab)
        self._has_offered = False
        job = RemoteJob(self._job, self._slab.fileno(), self._slab.extent)
        return ProcessPool(cloudpickle.dumps(job), max_workers, keep=(self._slab.fileno(),))

    def incoming(self, assignment: Assignment) -> Assignment:
        """Give the request a slot."""
        for returned in self._lender.returned():
            self._slab.give_back(returned)
        slot = self._slots.pop(assignment.task, None) or self._slab.take()
        if slot is not None:
            self._slots[assignment.task] = slot
        request: BatchRequest = assignment.payload
        return assignment._replace(payload=request._replace(slot=slot))

    def outgoing(self, event: Event) -> Event:
        """Lend the slot of a batch, or send its bytes in the message, without a copy."""
        if isinstance(event, TasksReturned):
            for task in event.tasks:
                self._free(task)
        if not isinstance(event, TaskFinished):
            return event
        result = event.result
        if not isinstance(result, BatchResult) or result.is_empty:
            self._free(event.task)
            return event
        slot = result.batch.settle(self._slab, self._slots.pop(event.task, None))
        if slot is None:
            return event
        batch, loan = result.batch, None
        if self._lender.may_lend:
            loan = self._lender.lend(slot, batch.used)
        if loan is not None:
            batch = batch._replace(loan=loan)
        else:
            offer = None if self._has_offered else self._lender.offer
            self._has_offered = True
            body = np.frombuffer(self._slab.view(slot), np.uint8, batch.used)
            batch = batch._replace(offer=offer, body=body)
            self._leaving.append(slot)
        return event._replace(result=result._replace(batch=batch))

    def sent(self) -> None:
        """Free the slots whose bytes were in messages that have been sent."""
        for slot in self._leaving:
            self._slab.give_back(slot)
        self._leaving.clear()

    def _free(self, task: int) -> None:
        slot = self._slots.pop(task, None)
        if slot is not None:
            self._slab.give_back(slot)


class RemoteJob:
    """Becomes a `HostedJob` in a new interpreter, whose only input is this object."""

    def __init__(self, spec: bytes, descriptor: int, extent: int) -> None:
        self._arguments = spec, descriptor, extent

    def __reduce__(self) -> Any:
        """Pickle what the job is made of."""
        return _hosted_job, self._arguments


def _hosted_job(spec: bytes, descriptor: int, extent: int) -> HostedJob:
    """Load the spec in the process that forks the workers, so that they share it."""
    from forebay.loading.hosted_job import HostedJob

    slab = Slab.attach(descriptor, extent)
    loaded: BatchSpec = load_job(spec)  # from our own trainer
    keeps_tasks = loaded.concurrency > 1  # it has begun all that it holds
    return HostedJob(loaded, slab, keeps_tasks=keeps_tasks, on_class=make_known)


def make_known(kind: type) -> None:
    """Make a class that was pickled by value importable: the trainer has it under its name."""
    module = sys.modules.get(kind.__module__)
    if module is None:
        module = sys.modules[kind.__module__] = ModuleType(kind.__module__)
    if "." not in kind.__qualname__ and not hasattr(module, kind.__qualname__):
        setattr(module, kind.__qualname__, kind)


# ---- in the trainer ------------------------------------------------------------------------------

# How many messages with batches each worker may keep in the object store.
MESSAGES_AHEAD = 2


def pool_on_cluster(
    spec: BatchSpec, cluster: Ray, slab: Slab, slots: dict[int, Slot], *, borrows: bool
) -> RayPool:
    """Return a pool on a cluster whose workers make batches."""
    payload = shipped(spec)
    return RayPool(
        BatchHosting(payload),
        cluster,
        NodeCheck(payload),
        spec.num_workers,
        grows=False,
        ahead=MESSAGES_AHEAD,
        receiver=BatchReceiver(slab, slots, borrows=borrows),
        say=note,
    )


class BatchReceiver(AnswerReceiver):
    """Brings batches from hosts into the trainer's memory."""

    def __init__(self, slab: Slab, slots: dict[int, Slot], *, borrows: bool) -> None:
        self._slab, self._slots = slab, slots
        self._borrows = borrows
        self._borrowers: dict[int, Borrower] = {}  # by host

    def receive(self, host: int, event: TaskFinished, *, is_here: bool) -> TaskFinished:
        """Copy a batch into the slab, or map it, at once: it may have to wait for earlier ones."""
        result = event.result
        if isinstance(result, bytes):
            return event._replace(result=pickle.loads(result))  # noqa: S301 - from our own worker
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
        """Unmap its slab once nothing views its batches."""
        self._borrowers.pop(host, None)
