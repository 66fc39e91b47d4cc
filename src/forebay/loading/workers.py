"""Create the pool of workers for each backend, and handles of workers as in torch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Literal

import numpy as np
import torch

from forebay.loading.batch_job import BatchJob, ProcessJob, turns_of
from forebay.loading.messages import BatchSpec
from forebay.loading.slots import BatchSlots
from forebay.observe.progress import log
from forebay.observe.record import Trace
from forebay.options import Ray, whole_cores
from forebay.pools.base import Pool, ThreadPool
from forebay.pools.processes import ProcessPool
from forebay.ranks import ranks_sharing_cores


def _generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
    return generator


# Its own state is a tensor in shared memory, which is gone before a spawned worker can map it.
ForkingPickler.register(
    torch.Generator,
    lambda each: (_generator, (str(each.device), each.get_state().numpy().tobytes())),
)


@dataclass(frozen=True, slots=True)
class Workers:
    """Where workers run, and how many.

    Attributes:
        directory: The folder for the batches of worker processes; None for memory.
    """

    backend: Literal["process", "thread", "ray"]
    count: int
    start: Literal["fork"] | BaseContext = "fork"
    directory: str | os.PathLike[str] | None = None
    cluster: Ray | None = None

    @property
    def start_s(self) -> float:
        """Seconds that a worker may take to start; on a cluster it may wait for free resources."""
        return 10.0 if self.cluster is None else 120.0


def pool_for(
    spec: BatchSpec, workers: Workers, turns: bool, slots: BatchSlots | None, *, to_device: bool
) -> Pool:
    """Return a pool whose workers make batches, in the slab if there is one.

    Args:
        slots: The slab that is shared with the workers, and the slot of each batch; None for
            threads.
    """
    # A worker that fetches samples of several batches at once has begun all that it holds.
    keeps_tasks = turns or spec.concurrency > 1
    if workers.backend == "thread":
        thread_turns = turns_of(spec)
        job = BatchJob(spec, keeps_tasks=keeps_tasks, turns=thread_turns)
        return ThreadPool(job, thread_turns.abandon)
    assert slots is not None
    if workers.cluster is not None:
        from forebay.loading.remote import pool_on_cluster

        borrows = not (to_device or slots.is_on_disk)
        return pool_on_cluster(spec, workers.cluster, workers.count, slots, borrows=borrows)
    return ProcessPool(
        ProcessJob(spec, slots.slab, keeps_tasks=keeps_tasks), workers.count, workers.start
    )


# ---- auto workers --------------------------------------------------------------------------------
# `num_workers="auto"`: adjusts the number of workers to the training while it runs.
#
#     Feed.take ──> WorkerTuning.update ── totals of the trace ──> Tuner ── number ──> Feed.resize
#
# A batch does not depend on the worker that makes it, so changing their number changes no batch.

# The shortest time between two decisions.
EVERY_S = 0.25


class WorkerTuning:
    """Reads a trace at intervals, and changes the number of workers.

    Attributes:
        due: When to decide next, in seconds of `time.perf_counter()`.
    """

    def __init__(self, most: int, is_remote: bool, trace: Trace) -> None:
        self.due = 0.0
        self._trace = trace
        cores = max(1, whole_cores() // ranks_sharing_cores())
        from forebay.observe.tuning import Tuner

        self._tuner = Tuner(min(cores, most), most, math.inf if is_remote else cores)

    @property
    def num_workers(self) -> int:
        """The number of workers that there should be."""
        return self._tuner.num_workers

    def update(self, now: float, resize: Callable[[int], None]) -> None:
        """Decide on the number of workers; call `resize` if it is to change."""
        trace, self.due = self._trace, now + EVERY_S
        from forebay.observe.tuning import Totals

        totals = Totals(
            at=now,
            waited_s=trace.waited_s,
            steps=trace.step_count,
            steps_s=trace.steps_s,
            made=trace.made_count,
            made_s=trace.made_s,
            cpu_s=trace.cpu_s,
            queued_s=trace.queued_s,
            trainer_cpu_s=time.process_time(),
        )
        decision = self._tuner.decide(totals)
        trace.tried = self._tuner.rates
        if decision is None:
            return
        resize(decision.num_workers)
        trace.num_workers = decision.num_workers
        trace.decisions.append((now, decision.reason))
        log.info("num_workers=%d: %s", decision.num_workers, decision.reason)
