"""Where workers run: in processes, in threads, or on a cluster."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import torch

from forebay.loading.batch_job import BatchJob, ProcessJob, turns_of
from forebay.loading.batch_slots import BatchSlots
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import BatchSpec
from forebay.loading.samplers import set_generator, state_of_generator
from forebay.pools.base import Pool, ThreadPool
from forebay.pools.processes import ProcessPool


def _generator(device: str, state: str) -> torch.Generator:
    generator = torch.Generator(device)
    set_generator(generator, state)
    return generator


# Its own state is a tensor in shared memory, which is gone before a spawned worker can map it.
ForkingPickler.register(
    torch.Generator,
    lambda each: (_generator, (str(each.device), state_of_generator(each))),
)


# Seconds that a worker may take to start; on a cluster it may wait for free resources.
START_S, CLUSTER_START_S = 10.0, 120.0


def pool_for(
    kind: LoaderKind, spec: BatchSpec, slots: BatchSlots | None, *, to_device: bool
) -> Pool:
    """Return a pool whose workers make batches.

    Args:
        slots: The slab that is shared with the workers, and the slot of each batch; None for
            threads.
    """
    keeps_tasks = kind.keeps_tasks
    if slots is None:
        turns = turns_of(spec)
        return ThreadPool(BatchJob(spec, keeps_tasks=keeps_tasks, turns=turns), turns.abandon)
    if kind.cluster is not None:
        from forebay.loading.remote import pool_on_cluster

        borrows = not (to_device or slots.is_on_disk)
        return pool_on_cluster(spec, kind.cluster, spec.num_workers, slots, borrows=borrows)
    job = ProcessJob(spec, slots.slab, keeps_tasks=keeps_tasks)
    return ProcessPool(job, spec.num_workers, kind.start_method)
