"""Rebuild one batch in the trainer's thread, for a debugger."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from forebay.errors import OptionError
from forebay.library_threads import one_thread
from forebay.loading.batch_job import BatchJob
from forebay.loading.messages import BatchError, BatchRequest, BatchResult
from forebay.loading.pipeline import Pipeline
from forebay.loading.planner import Planner
from forebay.loading.position import Position
from forebay.loading.samplers import holds_position, set_states
from forebay.loading.set_epoch import SetEpochRecorders
from forebay.loading.settings import Settings
from forebay.loading.sources import PlanSource, SamplerSource, Source, Start
from forebay.randomness import generators_kept


def replayed(
    pipeline: Pipeline, settings: Settings, resumed: Position | None, epoch: int, batch: int
) -> Any:
    """Return one batch, made again in this thread; see `DataLoader.replay`.

    Args:
        pipeline: The loader's pipeline.
        settings: The settings of the loader.
        resumed: The position that was loaded, if no iteration has begun since.
        epoch: See `DataLoader.replay`.
        batch: See `DataLoader.replay`.
    """
    loader = settings.loader
    is_seeded = loader.seed is not None or loader.backend != "thread"
    if settings.by_torchs_rules or pipeline.seed is None or not is_seeded:
        raise OptionError(
            "replay() needs a seed: without one, batches depend on more than their number\n"
            "  Make the loader with seed=0, for example."
        )
    if epoch < 0 or batch < 0:
        raise IndexError(f"epoch {epoch}, batch {batch}: both count from 0")
    planner, recorders = pipeline.planner_for(settings), pipeline.recorders
    source: Source = planner.source
    values, skip = planner.values_of(epoch), 0
    start = Start(epoch, batch)
    if isinstance(source, PlanSource):
        source, start = _plan_source(source, planner, resumed, start)
    elif source.sampler_states() is not None:
        source, start, skip = _sampler_source(pipeline, settings, start)
    with generators_kept(), one_thread():
        found = source.open(start, values).read(skip + 1)
        if len(found) <= skip:
            raise IndexError(f"epoch {epoch} has no batch {batch}")
        index, position, repeated, _ = found[-1]
        request = BatchRequest(index, epoch, batch, position, repeated)
        recorders.call_on_dataset(values)
        try:
            result = BatchJob(settings.spec(seed=pipeline.seed)).make(request)
        finally:
            recorders.call_on_dataset(recorders.values())
    if isinstance(result, BatchError):
        raise result.error
    assert isinstance(result, BatchResult), "the dataset is a map-style one"
    if result.is_empty:
        raise IndexError(f"every sample of epoch {epoch}, batch {batch} is bad")
    return pipeline.hand_out(settings)(request, result, pipeline.seed)


def _plan_source(
    source: PlanSource, planner: Planner, resumed: Position | None, start: Start
) -> tuple[PlanSource, Start]:
    """Return a source of a planned batch, and where to open it."""
    plan, begun = source.plan, planner.start
    origin = planner.origin_of(start.epoch)
    if resumed is not None:
        begun, later = resumed.start, start.epoch - resumed.epoch
        origin = resumed.origin + later * plan.end()
        if plan.mixture is not None and resumed.mixture is not None:
            plan = replace(plan, mixture=replace(plan.mixture, **resumed.mixture))
    sample = start.batch * plan.global_batch_size
    if begun.epoch == start.epoch and (begun.by_sample or begun.length is not None):
        sample = begun.sample + (start.batch - begun.batch) * plan.global_batch_size
        start = start._replace(length=begun.length)
    mixture = plan.mixture
    is_before = begun.epoch == start.epoch and begun.by_sample and start.batch < begun.batch
    if is_before or (mixture is not None and origin + sample < mixture.since):
        raise OptionError(
            f"epoch {start.epoch}, batch {start.batch} was made before the weights, or the batch "
            "size, changed\n  Nothing was changed. Make a loader with the earlier weights and "
            "batch size to replay it."
        )
    source = PlanSource(plan, source.auto_collation, source.as_tensors)
    return source, start._replace(sample=sample, origin=origin)


def _sampler_source(
    pipeline: Pipeline, settings: Settings, start: Start
) -> tuple[Source, Start, int]:
    """Return a source with a copy of the sampler, where to open it, and the batches to skip."""
    planned = pipeline.planner_for(settings).planned(start.epoch)
    sampler = settings.index_sampler
    follows = holds_position(sampler)
    if planned is None or (follows and start.batch < planned.start.batch):
        raise OptionError(
            f"the sampler has a state, and its state before epoch {start.epoch}, batch "
            f"{start.batch} is not known\n"
            "  Load a state that was taken in this epoch and start iterating, or use "
            "shuffle=True, whose order is a function of seed and epoch."
        )
    # A copy, because the iteration reads the original.
    dataset = settings.loader.dataset
    sampler = copy.deepcopy(sampler, {id(dataset): dataset})
    set_states(sampler, planned.sampler_states)
    recorders, auto = SetEpochRecorders(sampler, None), settings.auto_collation
    source = SamplerSource(sampler, pipeline.seed, recorders, settings.shared, auto_collation=auto)
    if follows:  # it continues from its own position
        return source, planned.start, start.batch - planned.start.batch
    return source, start, 0
