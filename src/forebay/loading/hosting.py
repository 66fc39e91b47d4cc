"""Handle batches in the host of a worker on a cluster, without importing torch.

    worker ── slot of its host's slab ──> host ── message: the bytes, or on the trainer's machine
                                            │              the slot itself, which is lent
                                            └── or the bytes over TCP (`sending.py`)

Importing torch takes a second or more. The worker imports it too, and starts only after its host.
"""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.engine.events import Event, TaskFinished, TasksReturned
from forebay.engine.job import Answer, Assignment
from forebay.engine.memory.lending import Lender
from forebay.engine.memory.packed_batch import PackedBatch
from forebay.engine.memory.sending import Address, Sender
from forebay.engine.memory.slab import Slab
from forebay.engine.memory.slab_layout import Slot
from forebay.engine.pools.base import Pool
from forebay.engine.pools.processes import ProcessPool
from forebay.loading.messages import BatchRequest, BatchResult, SealedResult

if TYPE_CHECKING:
    from forebay.loading.batch_job import ProcessJob


class BatchHosting:
    """Hosts a worker that makes batches; see `Hosting` in `engine/pools/ray`.

    Args:
        spec: How batches are made, pickled.
        trainer: Where bytes are sent over TCP; None to send them in messages.
    """

    is_shared = False  # each worker has a stream of batches of its own

    def __init__(self, spec: bytes, trainer: Address | None) -> None:
        self._spec = spec
        self._trainer = trainer
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
        self._sender = None if self._trainer is None else Sender(self._trainer, self._slab)
        job = RemoteJob(self._spec, self._slab.fileno(), self._slab.extent)
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
        """Lend the slot of a batch, or send its bytes: in the message, without a copy, or apart."""
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
            batch = self._with_bytes(batch._replace(offer=offer), slot)
        return event._replace(result=result._replace(batch=batch))

    def _with_bytes(self, batch: PackedBatch, slot: Slot) -> PackedBatch:
        if self._sender is not None:
            return batch._replace(sent=self._sender.send(slot, batch.used))
        self._leaving.append(slot)
        return batch._replace(body=np.frombuffer(self._slab.view(slot), np.uint8, batch.used))

    def sent(self) -> None:
        """Free the slots whose bytes were in messages, which were sent."""
        for slot in self._leaving:
            self._slab.give_back(slot)
        self._leaving.clear()

    def _free(self, task: int) -> None:
        slot = self._slots.pop(task, None)
        if slot is not None:
            self._slab.give_back(slot)


class RemoteJob:
    """Makes batches in a new interpreter, whose only input is this object.

    Args:
        spec: How batches are made, pickled.
        descriptor: The file descriptor of the slab, inherited by this process.
        extent: The `extent` of the slab.
    """

    keeps_tasks = False

    def __init__(self, spec: bytes, descriptor: int, extent: int) -> None:
        self._spec = spec
        self._descriptor = descriptor
        self._extent = extent
        self._job: ProcessJob | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the spec in the process that forks the workers, so that they share it."""
        self.__dict__.update(state)
        from forebay.loading.batch_job import ProcessJob

        slab = Slab.attach(self._descriptor, self._extent)
        spec = pickle.loads(self._spec)  # noqa: S301 - from our own trainer
        self._job = ProcessJob(spec, slab, on_class=make_known)

    def open(self, incarnation: int, worker_id: int) -> None:
        """Set up this process as a worker."""
        assert self._job is not None, "it came by pickle"
        self._job.open(incarnation, worker_id)

    def run(self, assignment: Assignment) -> Answer:
        """Make one batch; see `ProcessJob`."""
        import cloudpickle

        assert self._job is not None, "it came by pickle"
        answer = self._job.run(assignment)
        if isinstance(answer.result, BatchResult):
            return answer
        return Answer(SealedResult(cloudpickle.dumps(answer.result)), answer.nbytes)

    def close(self) -> None:
        """Do nothing: no cleanup is needed."""


def make_known(kind: type) -> None:
    """Make a class that was pickled by value importable here, so that it is pickled by name.

    The trainer has the class under that name.
    """
    module = sys.modules.get(kind.__module__)
    if module is None:
        module = sys.modules[kind.__module__] = ModuleType(kind.__module__)
    if "." not in kind.__qualname__ and not hasattr(module, kind.__qualname__):
        setattr(module, kind.__qualname__, kind)
