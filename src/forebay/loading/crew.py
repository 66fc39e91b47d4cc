"""Where batches are made: the pool for each backend."""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Literal

from forebay.engine.memory.layout import Slot
from forebay.engine.memory.slab import Slab
from forebay.engine.pools.base import Pool
from forebay.engine.pools.inline import InlinePool
from forebay.engine.pools.processes import ProcessPool
from forebay.engine.pools.threads import ThreadPool
from forebay.loading.job import BatchJob, InlineBatchJob, ProcessBatchJob
from forebay.loading.recipe import Recipe
from forebay.loading.seeding import abandoned, generators_kept
from forebay.options import Ray


@dataclass(frozen=True, slots=True)
class Workers:
    """Where batches are made.

    Attributes:
        backend: "process", "thread", "ray", or "inline" for this very thread.
        count: How many there are.
        start: How processes start, see `ProcessPool`.
        directory: Where the batches of processes lie; None for memory.
        cluster: Which cluster, for "ray".
    """

    backend: Literal["process", "thread", "ray", "inline"]
    count: int
    start: Literal["fork"] | BaseContext = "fork"
    directory: str | os.PathLike[str] | None = None
    cluster: Ray | None = None


def pool_for(
    recipe: Recipe,
    workers: Workers,
    keeps_tasks: bool,
    slab: Slab | None,
    slots: dict[int, Slot],
) -> Pool:
    """Return a pool whose workers make batches by a recipe, in the slab if there is one.

    `slots` tells where in the slab each task's batch is.
    """
    if workers.backend == "inline":
        return InlinePool(InlineBatchJob(recipe, keeps_tasks=keeps_tasks))
    if workers.backend == "thread":
        job = BatchJob(recipe, keeps_tasks=keeps_tasks, guard=generators_kept)
        return ThreadPool(job, abandoned=abandoned)
    assert slab is not None
    if workers.cluster is not None:
        from forebay.loading.remote import pool_on_cluster

        return pool_on_cluster(recipe, workers.cluster, workers.count, slab, slots)
    packing = ProcessBatchJob(recipe, slab, keeps_tasks=keeps_tasks)
    return ProcessPool(packing, workers.count, workers.start)
