"""What the host of a worker that makes batches does with them: it needs no torch for that.

    worker ── slot of its host's slab ──> host ── message

Importing torch takes a second or more, and the worker, which does it too, waits for its host.
"""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.engine.events import Event, TaskFinished, TasksReturned
from forebay.engine.job import Answer, Assignment
from forebay.engine.memory.layout import Slot
from forebay.engine.memory.slab import Slab
from forebay.engine.pools.base import Pool
from forebay.engine.pools.processes import ProcessPool
from forebay.loading.recipe import Made, Placed, Sealed

if TYPE_CHECKING:
    from forebay.loading.job import ProcessBatchJob


class BatchHosting:
    """Hosts a worker that makes batches; see `Hosting`.

    Args:
        recipe: How batches are made, pickled.
    """

    def __init__(self, recipe: bytes) -> None:
        """See the class."""
        self._recipe = recipe
        self._slots: dict[int, Slot] = {}
        self._leaving: list[Slot] = []

    def pool(self) -> Pool:
        """Make a slab, and a pool whose worker packs into it."""
        import cloudpickle

        self._slab = Slab()
        job = RemoteBatchJob(self._recipe, self._slab.fileno(), self._slab.size)
        return ProcessPool(cloudpickle.dumps(job), 1, keep=(self._slab.fileno(),))

    def incoming(self, assignment: Assignment) -> Assignment:
        """Give the order a slot."""
        slot = self._slots.pop(assignment.task, None) or self._slab.take()
        if slot is not None:
            self._slots[assignment.task] = slot
        return assignment._replace(payload=Placed(assignment.payload, slot))

    def outgoing(self, event: Event) -> Event:
        """Put the bytes of a batch beside its skeleton, without a copy."""
        if isinstance(event, TasksReturned):
            for task in event.tasks:
                self._free(task)
        if not isinstance(event, TaskFinished):
            return event
        if not isinstance(event.result, Made):
            self._free(event.task)
            return event
        made: Made = event.result
        slot = made.batch.settle(self._slab, self._slots.pop(event.task, None))
        if slot is None:
            return event
        self._leaving.append(slot)
        used = max((at + nbytes for at, nbytes in made.batch.spans), default=0)
        body = np.frombuffer(self._slab.view(slot), np.uint8, used)
        return event._replace(result=made._replace(batch=made.batch._replace(body=body)))

    def sent(self) -> None:
        """Use the slots again whose bytes have left."""
        for slot in self._leaving:
            self._slab.give_back(slot)
        self._leaving.clear()

    def _free(self, task: int) -> None:
        slot = self._slots.pop(task, None)
        if slot is not None:
            self._slab.give_back(slot)


class RemoteBatchJob:
    """Makes batches in an interpreter that was told nothing but this.

    Args:
        recipe: How batches are made, pickled.
        descriptor: The slab's, which this process has inherited.
        size: The slab's.
    """

    keeps_tasks = False

    def __init__(self, recipe: bytes, descriptor: int, size: int) -> None:
        """See the class."""
        self._recipe = recipe
        self._descriptor = descriptor
        self._size = size
        self._job: ProcessBatchJob | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the recipe in the process that forks the workers, so that they share it."""
        self.__dict__.update(state)
        from forebay.loading.job import ProcessBatchJob

        slab = Slab.attach(self._descriptor, self._size)
        recipe = pickle.loads(self._recipe)  # noqa: S301 - from our own trainer
        self._job = ProcessBatchJob(recipe, slab, keeps_tasks=False, meets=make_known)

    def open(self, worker: int, lane: int) -> None:
        """Become a worker."""
        assert self._job is not None, "it came by pickle"
        self._job.open(worker, lane)

    def run(self, assignment: Assignment) -> Answer:
        """Make one batch; see `ProcessBatchJob`."""
        import cloudpickle

        assert self._job is not None, "it came by pickle"
        answer = self._job.run(assignment)
        if isinstance(answer.result, Made):
            return answer
        return Answer(Sealed(cloudpickle.dumps(answer.result)), answer.nbytes)

    def close(self) -> None:
        """Nothing is to be tidied up."""


def make_known(kind: type) -> None:
    """Let a class that came by value be pickled by its name: the trainer has it under that."""
    module = sys.modules.get(kind.__module__)
    if module is None:
        module = sys.modules[kind.__module__] = ModuleType(kind.__module__)
    if "." not in kind.__qualname__ and not hasattr(module, kind.__qualname__):
        setattr(module, kind.__qualname__, kind)
