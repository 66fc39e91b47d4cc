"""How far a loader has got: its epoch and position, and the counts of what it returned.

    DataLoader ── settings ──> LoaderProgress ── position ──> Pipeline.begin ──> BatchIterator

The loader itself holds only its arguments.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset

from forebay.errors import OptionError
from forebay.failures import FailureLog
from forebay.loading.pipeline import Pipeline
from forebay.loading.planner import Planner
from forebay.loading.position import DAMAGED, Position
from forebay.loading.samplers import (
    chain_of,
    has_state,
    set_generator,
    set_states,
    state_of_generator,
    states_of,
)
from forebay.loading.set_epoch import SetEpochRecorders
from forebay.loading.settings import Settings
from forebay.observe.statistics import Statistics, totals_of
from forebay.observe.trace import Trace


class LoaderProgress:
    """What a loader has returned so far, and where it continues.

    A copy has returned nothing yet; it keeps a position that was loaded and not yet used.

    Args:
        recorders: Record the user's calls of `set_epoch`.
        resumed: Where the first iteration begins; None for the first epoch.

    Attributes:
        recorders: Record the user's calls of `set_epoch`.
        resumed: Where the next iteration begins, if a state was loaded; None otherwise.
        trace: Records events and times.
        failures: The samples that were left out.
        pipeline: The pipeline of the last iteration; None before the first.
    """

    def __init__(self, recorders: SetEpochRecorders, resumed: Position | None = None) -> None:
        self.recorders, self.resumed = recorders, resumed
        self.trace, self.failures = Trace(), FailureLog()
        self.pipeline: Pipeline | None = None
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()  # those in use
        self._next_epoch = 0 if resumed is None else resumed.epoch

    def __reduce__(self) -> Any:
        """Copy and pickle no pipelines and no counts."""
        return LoaderProgress, (self.recorders, self.resumed)

    # ---- an epoch ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """See `DataLoader.epoch`."""
        planner = None if self.pipeline is None else self.pipeline.planner
        if self.resumed is not None or planner is None:
            return self._next_epoch
        return planner.epoch + (not planner.has_next())

    def begin_epoch(
        self,
        settings: Settings,
        iterator: Any,
        initialize: Callable[[], None] | None,
        reset: Callable[[], None],
    ) -> tuple[Pipeline, Planner]:
        """Begin an epoch, or continue from a loaded state; for the arguments, see `Pipeline.begin`.

        Returns:
            The pipeline that makes the batches, and the planner that returns them.
        """
        if initialize is not None:
            pipeline = self.pipeline_for(settings, is_new=settings.by_torchs_rules)
        else:  # a persistent iterator continues with its own workers
            pipeline = self.pipeline = iterator.pipeline
        position = self.resumed
        if position is None:
            epoch = self._next_epoch
            origin = 0 if pipeline.planner is None else pipeline.planner.origin_of(epoch)
            position = Position(made_with=settings.made_with, epoch=epoch, origin=origin)
        try:
            planner = pipeline.begin(settings, position, iterator, initialize, reset)
        except BaseException:
            pipeline.close()  # it may be inconsistent
            raise
        self.resumed, self._next_epoch = None, position.epoch + 1
        return pipeline, planner

    def pipeline_for(self, settings: Settings, *, is_new: bool) -> Pipeline:
        """Return the pipeline of the last iteration; a new one if there is none, or `is_new`."""
        if self.pipeline is None or is_new:
            self.pipeline = Pipeline(settings, self.recorders, self.trace)
            self._pipelines.add(self.pipeline)
        return self.pipeline

    def refresh(self) -> None:
        """See `DataLoader.refresh`."""
        for pipeline in self._pipelines:
            pipeline.refresh()

    def close(self) -> None:
        """Stop the workers; the position is kept."""
        for pipeline in list(self._pipelines):
            pipeline.close()
        self.trace.publication.remove()

    # ---- position ------------------------------------------------------------------------------

    def position(self, settings: Settings) -> Position:
        """Return the position; at the end of an epoch it is the start of the next one."""
        if self.resumed is not None:
            return self.resumed
        pipeline = self.pipeline
        planner = None if pipeline is None else pipeline.planner
        if pipeline is None or planner is None or planner.epoch < 0:
            return self._start(settings, self._next_epoch, 0)
        if pipeline.feed is not None:
            planner.worker_states = pipeline.feed.worker_states() or planner.worker_states
        states, is_over = planner.worker_states, not planner.has_next()
        sampler_states, values = planner.sampler_states()
        epoch = planner.epoch + is_over
        position = self._start(settings, epoch, planner.origin_of(epoch))
        position = replace(position, seed=pipeline.seed, sampler=sampler_states, set_epoch=values)
        if settings.is_iterable and settings.is_local and states:
            # The state of the worker is that of the same object.
            position = replace(position, dataset=None)
        if is_over:
            lives_on = pipeline.keeps_workers or settings.is_local
            keeps_seed = settings.loader.persistent_workers and settings.by_torchs_rules
            return replace(
                position,
                worker_states=tuple(each._replace(phase="before") for each in states if lives_on),
                draws_base_seed=not keeps_seed,
            )
        return replace(
            position,
            batch=planner.batch,
            outstanding=planner.outstanding(),
            sample=planner.sample,
            length=planner.start.length,
            counts_samples=planner.start.by_sample,
            generator=pipeline.generator_before if settings.draws else None,
            draws_base_seed=pipeline.drew_base_seed,
            worker_states=tuple(states),
            next_worker=planner.next_worker,
        )

    def _start(self, settings: Settings, epoch: int, origin: int) -> Position:
        """Return the position before an epoch that has not begun."""
        loader, dataset = settings.loader, settings.loader.dataset
        mixture = settings.plan.mixture if settings.plan else None
        if self.pipeline is not None:
            mixture = self.pipeline.mixture
        draws = loader.generator is not None and settings.draws
        return Position(
            made_with=settings.made_with,
            epoch=epoch,
            origin=origin,
            seed=loader.seed,
            set_epoch=self.recorders.values(),
            sampler=None if settings.is_iterable else states_of(settings.index_sampler),
            dataset=copy.deepcopy(dataset.state_dict()) if has_state(dataset) else None,
            generator=state_of_generator(loader.generator) if draws else None,
            mixture=None if mixture is None else mixture.state(),
        )

    def resume(self, position: Position) -> None:
        """Begin the next iteration at a position; iterators that began before return no more."""
        if self.pipeline is not None:
            self.pipeline.reader = None
        self.pipeline = None
        self.recorders.restore(position.set_epoch)
        self.resumed, self._next_epoch = position, position.epoch

    def set_weights(self, settings: Settings, weights: tuple[float, ...]) -> None:
        """Use other weights for the sources of a mixture, starting with the next batch."""
        pipeline = self.pipeline_for(settings, is_new=False)
        if self.resumed is None:
            pipeline.set_weights(weights)
        else:
            assert pipeline.mixture is not None
            self.resumed = self.resumed.reweighted(pipeline.mixture, weights)

    # ---- what was returned ---------------------------------------------------------------------

    def mask(self) -> torch.Tensor:
        """Return the mask of the last batch; see `DataLoader.mask`."""
        if self.pipeline is None or self.pipeline.last is None:
            raise OptionError("mask describes the last batch, and no batch was returned yet")
        request, failures = self.pipeline.last
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

    def statistics(self, settings: Settings) -> Statistics:
        """Return the statistics over all iterations; see `DataLoader.statistics`."""
        loader, pipeline = settings.loader, self.pipeline
        feeds = [each.feed for each in self._pipelines if each.feed is not None]
        waiting = [each for feed in feeds for each in feed.waiting()]
        epoch, batch = self._next_epoch - 1, 0
        ready: list[tuple[int, int]] = []
        sources: dict[str, tuple[int, float]] = {}
        if pipeline is not None and pipeline.planner is not None:
            planner = pipeline.planner
            epoch, batch = planner.epoch, planner.batch
            sources = pipeline.samples_by_source(getattr(loader.dataset, "datasets", ()))
            if pipeline.feed is not None and settings.in_order:
                ready = planner.numbers_of([task for task, _ in pipeline.feed.waiting()])
        if self.resumed is not None and self.resumed.batch:
            epoch, batch = self.resumed.epoch, self.resumed.batch
        return Statistics(
            epoch=epoch,
            batch=batch,
            ready_batches=len(waiting),
            ready_bytes=sum(nbytes for _, nbytes in waiting),
            ready_from=ready[0] if ready else None,
            ready_to=ready[-1] if ready else None,
            in_flight=sum(feed.in_flight for feed in feeds),
            failures=self.failures.total,
            sources=sources,
            **totals_of(self.trace),
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
    if position.dataset is not None and not _has_already(dataset, position.dataset):
        dataset.load_state_dict(copy.deepcopy(position.dataset))
    set_states(sampler, position.sampler)


def _has_already(dataset: Any, state: Any) -> bool:
    """Return whether an iterable dataset is known to have a state already.

    Then it must not be loaded: the dataset may keep a loaded state as the position where iteration
    begins, and its copies in workers, which read other parts, would begin there.
    """
    is_iterable = isinstance(dataset, IterableDataset)
    try:
        return is_iterable and bool(state == dataset.state_dict())
    except Exception:  # noqa: BLE001 - from the comparison of arrays, for example
        return False


_NO_STATE = (
    "the state includes that of a {0}, but {1} has no load_state_dict\n"
    "  Nothing was changed. Make the loader with the {0} that it was saved with."
)
