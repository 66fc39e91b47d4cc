"""Rebuild one batch in the trainer's thread, for a debugger."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from forebay.base.libraries import one_thread
from forebay.base.randomness import generators_kept
from forebay.errors import OptionError
from forebay.loading.batch_job import BatchJob
from forebay.loading.fetch import MapFetcher
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import BatchError, BatchRequest, BatchResult
from forebay.loading.pipeline import Pipeline
from forebay.loading.planner import Planner
from forebay.loading.progress import LoaderProgress
from forebay.loading.samplers import epoch_of
from forebay.loading.selections import Start

NEEDS_SEED = (
    "replay() needs a seed: without one, batches depend on more than their number\n"
    "  Make the loader with seed=0, for example."
)
OF_STREAM = (
    "replay() needs a dataset whose samples have an index: a batch of an iterable dataset is what "
    "comes next\n  Load a state from before the batch, with num_workers=0 if it was saved so, and "
    "iterate up to it."
)


def replayed(kind: LoaderKind, progress: LoaderProgress, epoch: int, batch: int) -> Any:
    """Return one batch, made again in this thread; see `DataLoader.replay`."""
    epoch, batch = operator.index(epoch), operator.index(batch)
    resumed = progress.resumed
    pipeline = progress.pipeline or Pipeline(kind, progress.trace, ())
    # After a sampler was replaced, the last iteration is replayed as it was.
    same = type(kind) is type(pipeline.kind)
    kind = kind.follow(pipeline.kind) if same else pipeline.kind
    if kind.sample_seed is None:
        raise OptionError(NEEDS_SEED if kind.seed is None else OF_STREAM)
    if epoch < 0 or batch < 0:
        raise IndexError(f"epoch {epoch}, batch {batch}: both count from 0")
    planner = pipeline.planner_for(pipeline.kind)
    begun, planned = planner.start, planner.planned(epoch)
    origin = planner.origin_of(epoch)
    if resumed is not None:
        kind.begin_at(resumed)
        begun = Start.of(resumed)
        origin = begun.origin + (epoch - begun.epoch) * (kind.end_of(Start(epoch)) or 0)
    states = None if planned is None else planned.sampler_states
    known = None if planned is None else planned.start
    kind, start, skip = kind.replaying(Start(epoch, batch, origin=origin), begun, known, states)
    with generators_kept(), one_thread():
        found = kind.open(start, _order_of(planner, epoch)).read(skip + 1)
        if len(found) <= skip:
            raise IndexError(f"epoch {epoch} has no batch {batch}")
        index, position, repeated, _ = found[-1]
        request = BatchRequest(index, epoch, batch, position, repeated)
        spec = replace(kind.spec(), concurrency=1, fetcher=MapFetcher)  # in this thread
        result = BatchJob(spec).make(request)
    if isinstance(result, BatchError):
        raise result.error
    assert isinstance(result, BatchResult), "the dataset is a map-style one"
    if result.is_empty:
        raise IndexError(f"every sample of epoch {epoch}, batch {batch} is bad")
    hand_out = pipeline.hand_out
    return result.batch if hand_out is None else hand_out(request, result, kind.batch_seed)


def _order_of(planner: Planner, epoch: int) -> int | None:
    """Return `epoch_of` the sampler in an epoch, or as it is expected to be."""
    orders = planner.orders
    if epoch in orders or not orders:
        return orders.get(epoch, epoch_of(planner.kind.foreseen_sampler))
    last = max(orders)
    return epoch if orders[last] == last else orders[last]  # is `set_epoch` called?
