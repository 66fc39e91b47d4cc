"""A loader's progress: its position, its statistics, and which samples of a batch count."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from forebay.buffer import low_mark_of
from forebay.errors import OptionError
from forebay.loading.pipeline import Pipeline
from forebay.loading.position import DAMAGED, Position
from forebay.loading.samplers import (
    chain_of,
    has_state,
    set_generator,
    set_states,
    state_of_generator,
    states_of,
)
from forebay.loading.settings import Settings
from forebay.observe.diagnosis import Diagnosis, diagnose
from forebay.observe.loader_setup import Setup
from forebay.observe.machine import pressure, usable_cores
from forebay.observe.statistics import Statistics, totals_of
from forebay.observe.trace import Trace
from forebay.options import AutoWorkers, cluster_of
from forebay.plan.mixture import Mixture
from forebay.ranks import local_ranks


def position_of(loader: Any, settings: Settings) -> Position:
    """Return a loader's position; at the end of an epoch it is the start of the next one."""
    pipeline: Pipeline | None = loader._pipeline
    planner = None if pipeline is None else pipeline.planner
    if pipeline is None or planner is None or planner.epoch < 0:
        return _start(loader, settings, pipeline, loader._next_epoch, 0)
    if pipeline.feed is not None:
        planner.worker_states = pipeline.feed.worker_states() or planner.worker_states
    states, is_over = planner.worker_states, not planner.has_next()
    sampler_states, values = planner.sampler_states()
    epoch = planner.epoch + is_over
    position = _start(loader, settings, pipeline, epoch, planner.origin_of(epoch))
    position = replace(position, seed=pipeline.seed, sampler=sampler_states, set_epoch=values)
    if settings.is_iterable and settings.is_local and states:
        position = replace(position, dataset=None)  # the worker state is that of the same object
    if is_over:
        lives_on = pipeline.keeps_workers or settings.is_local
        return replace(
            position,
            worker_states=tuple(each._replace(phase="before") for each in states if lives_on),
            draws_base_seed=not (settings.loader.persistent_workers and settings.by_torchs_rules),
        )
    return replace(
        position,
        batch=planner.batch,
        sample=planner.sample,
        length=planner.start.length,
        counts_samples=planner.start.by_sample,
        generator=pipeline.generator_before if settings.draws else None,
        draws_base_seed=pipeline.drew_base_seed,
        worker_states=tuple(states),
        next_worker=planner.next_worker,
    )


def _start(
    loader: Any, settings: Settings, pipeline: Pipeline | None, epoch: int, origin: int
) -> Position:
    """Return the position before an epoch that has not begun."""
    dataset, own = loader.dataset, loader.generator
    mixture = settings.plan.mixture if settings.plan else None
    if pipeline is not None:
        mixture = pipeline.mixture
    return Position(
        made_with=settings.made_with,
        epoch=epoch,
        origin=origin,
        seed=loader.seed,
        set_epoch=loader._recorders.values(),
        sampler=None if settings.is_iterable else states_of(settings.index_sampler),
        dataset=copy.deepcopy(dataset.state_dict()) if has_state(dataset) else None,
        generator=state_of_generator(own) if own is not None and settings.draws else None,
        mixture=None if mixture is None else mixture.state(),
    )


def restore_states(dataset: Any, sampler: Any, position: Position) -> None:
    """Restore the states of the dataset and the samplers of this process from a position.

    Raises:
        OptionError: The dataset or a sampler has no `load_state_dict`, or a state is damaged.
    """
    given = position.sampler or []
    chain = chain_of(sampler)
    if position.dataset is not None and not has_state(dataset):
        raise OptionError(_NO_STATE.format("dataset", type(dataset).__name__))
    for each, state in zip(chain, given, strict=False):
        takes = has_state(each) if state and "state" in state else hasattr(each, "generator")
        if state and not takes:
            raise OptionError(_NO_STATE.format("sampler", type(each).__name__))
    generators = [each["generator"] for each in given if each and "generator" in each]
    for state in [*generators, position.generator]:
        if state is not None:
            try:
                set_generator(torch.Generator(), state)
            except Exception as error:
                raise OptionError(DAMAGED.format("the state of a generator")) from error
    if position.dataset is not None:
        dataset.load_state_dict(copy.deepcopy(position.dataset))
    set_states(sampler, position.sampler)


_NO_STATE = (
    "the state includes that of a {0}, but {1} has no load_state_dict\n"
    "  Nothing was changed. Make the loader with the {0} that it was saved with."
)


def reweighted(position: Position, mixture: Mixture | None, weights: tuple[float, ...]) -> Position:
    """Return a position after which the sources of a mixture have other weights."""
    assert mixture is not None
    mixture = replace(mixture, **position.mixture or {})
    if position.seed is None:  # no batch was made yet
        changed = replace(mixture, weights=weights)
    else:
        changed = mixture.changed(weights, position.seed, position.origin + position.sample)
    return replace(position, mixture=changed.state())


def mask_of(pipeline: Pipeline | None) -> torch.Tensor:
    """Return the mask of the last batch; see `DataLoader.mask`."""
    if pipeline is None or pipeline.last is None:
        raise OptionError("mask describes the last batch, and no batch was returned yet")
    request, failures = pipeline.last
    if isinstance(request.index, list) and None in request.index:
        raise OptionError(
            "mask is not available for an iterable dataset, whose samples are not planned"
        )
    index = list(request.index) if hasattr(request.index, "__len__") else [request.index]
    counts = [True] * (len(index) - request.repeated) + [False] * request.repeated
    for failure in failures:  # left out of the batch, so also here
        at = index.index(failure.source)
        del index[at], counts[at]
    return torch.tensor(counts, dtype=torch.bool)


def statistics_of(
    loader: Any, pipelines: Iterable[Pipeline], trace: Trace, failures: int
) -> Statistics:
    """Return a loader's statistics over all its iterations; `pipelines` are those in use."""
    feeds = [each.feed for each in pipelines if each.feed is not None]
    waiting = [each for feed in feeds for each in feed.waiting()]
    position, pipeline = loader._resumed, loader._pipeline
    planner = None if pipeline is None else pipeline.planner
    epoch, batch = loader._next_epoch - 1, 0
    ready: list[tuple[int, int]] = []
    if planner is not None:
        epoch, batch = planner.epoch, planner.batch
        if pipeline.feed is not None and loader.in_order:
            ready = planner.numbers_of([task for task, _ in pipeline.feed.waiting()])
    if position is not None and position.batch:
        epoch, batch = position.epoch, position.batch
    return Statistics(
        epoch=epoch,
        batch=batch,
        ready_batches=len(waiting),
        ready_bytes=sum(nbytes for _, nbytes in waiting),
        ready_from=ready[0] if ready else None,
        ready_to=ready[-1] if ready else None,
        in_flight=sum(feed.in_flight for feed in feeds),
        failures=failures,
        sources={}
        if planner is None
        else pipeline.samples_by_source(getattr(loader.dataset, "datasets", ())),
        **totals_of(trace),
    )


def setup_of(loader: Any, settings: Settings, trace: Trace) -> Setup:
    """Return how a loader is set up, as far as its speed depends on it."""
    depth, buffer = settings.depth(), loader.buffer
    cluster, is_auto = cluster_of(loader.backend), isinstance(loader.num_workers, AutoWorkers)
    return Setup(
        num_workers=trace.num_workers if is_auto else loader.num_workers,
        most_workers=int(loader.num_workers) if is_auto else None,
        backend=loader.backend if cluster is None else "ray",
        cores=usable_cores() / local_ranks() if cluster is None else None,
        prefetch_factor=loader.prefetch_factor or 1,
        takes_turns=settings.by_torchs_rules,
        in_order=loader.in_order or not settings.by_torchs_rules,
        keeps_workers=settings.keeps_workers,
        crosses_epochs=settings.runs_ahead,
        buffer_bytes=None if buffer is None else buffer.nbytes,
        buffer_batches=None if buffer is None else buffer.max_batches,
        refill_below=None if buffer is None else low_mark_of(buffer),
        batch_size=settings.batch_size,
        is_iterable=settings.is_iterable,
        is_sliced=settings.is_sliced,
        prefetches_tiny=depth.most // max(loader.num_workers, 1) if buffer is None else 0,
    )


def diagnosis_of(trace: Trace, setup: Setup) -> Diagnosis:
    """Return why the user of a loader waits."""
    steps, batches = list(trace.steps), list(trace.batches)  # another thread may add to them
    since = ""
    if trace.decisions:  # with another number of workers before
        since, began = " since the number of workers changed", trace.decisions[-1][0]
        steps = [each for each in steps if each.asked_at >= began]
        batches = [each for each in batches if each.ended_at - each.seconds >= began]
    slowest = next(iter(trace.slowest), None)
    return diagnose(steps, batches, setup, slowest, pressure(), since)
