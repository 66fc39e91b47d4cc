"""What a loader has returned so far, and where it continues: all that changes in a loader."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch

from forebay.errors import OptionError
from forebay.failures import FailureLog
from forebay.loading.kind import LoaderKind
from forebay.loading.pipeline import Pipeline
from forebay.loading.position import NO_ORDER, Position
from forebay.loading.samplers import epoch_of
from forebay.loading.selections import Reached, Start
from forebay.observe.figures import Statistics, statistics_of
from forebay.observe.measurements import Setup
from forebay.observe.record import Trace

if TYPE_CHECKING:  # other kinds do not need it
    from forebay.loading.plan_kind import PlanKind


class LoaderProgress:
    """What a loader has returned so far, and where it continues.

    A copy has returned nothing yet; it keeps a position that was loaded and not yet used.

    Args:
        resumed: Where the first iteration begins; None for the first epoch.
        trace: Records what happens; None for a new one.

    Attributes:
        resumed: Where the next iteration begins, if a state was loaded; None otherwise.
        pipeline: The pipeline of the last iteration; None before the first.
        setup: How the loader was set up when that began; None before the first.
    """

    def __init__(self, resumed: Position | None = None, trace: Trace | None = None) -> None:
        self.resumed = resumed
        self.trace = Trace() if trace is None else trace
        self.pipeline: Pipeline | None = None
        self.setup: Setup | None = None
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()  # those in use
        self._next_epoch = 0 if resumed is None else resumed.epoch

    def __reduce__(self) -> Any:
        """Copy and pickle no pipelines and no counts."""
        return LoaderProgress, (self.resumed,)

    @cached_property
    def failures(self) -> FailureLog:
        """The samples that were left out, which most loaders have none of."""
        return FailureLog()

    # ---- an epoch ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """See `DataLoader.epoch`."""
        planner = None if self.pipeline is None else self.pipeline.planner
        if self.resumed is not None or planner is None:
            return self._next_epoch
        return planner.epoch + (not planner.has_next())

    def next_start(self, kind: LoaderKind, own: Pipeline | None) -> tuple[Pipeline, Position]:
        """Return where the next iteration begins, and the pipeline that it reads.

        Args:
            own: The pipeline of a persistent iterator, which continues with its workers; else None.
        """
        pipeline = own or self.pipeline_for(kind, is_new=not kind.keeps_pipeline)
        self.pipeline = pipeline
        if self.resumed is not None:
            return pipeline, self.resumed
        epoch = self._next_epoch
        origin = 0 if pipeline.planner is None else pipeline.planner.origin_of(epoch)
        return pipeline, Position(epoch=epoch, kind_state={"origin": origin})

    def began(self, epoch: int) -> None:
        """Note that an epoch has begun, from the start of it or from a loaded state."""
        self.resumed, self._next_epoch = None, epoch + 1

    def pipeline_for(self, kind: LoaderKind, *, is_new: bool) -> Pipeline:
        """Return the pipeline of the last iteration; a new one if none fits, or `is_new`."""
        before = self.pipeline
        if before is not None and type(before.kind) is not type(kind):  # a sampler was replaced
            before.reader, is_new = None, True
            before.close()
            kind.follow(before.kind)
        if before is None or is_new:
            self.pipeline, self.setup = Pipeline(kind, self.trace), kind.setup
            self._pipelines.add(self.pipeline)
            return self.pipeline
        return before

    def refresh(self) -> None:
        """See `DataLoader.refresh`."""
        for pipeline in self._pipelines:
            pipeline.refresh()

    def close(self) -> None:
        """Stop the workers; the position is kept."""
        for pipeline in list(self._pipelines):
            pipeline.close()
        self.trace.hide()

    # ---- position ------------------------------------------------------------------------------

    def position(self, kind: LoaderKind) -> Position:
        """Return the position; at the end of an epoch it is the start of the next one."""
        if self.resumed is not None:
            return self.resumed
        made_with: Mapping[str, Any] | None = None
        if self.pipeline is not None:
            kind = kind.follow(self.pipeline.kind)
            if self.pipeline.planner is not None and self.pipeline.planner.has_next():
                # The rest of the epoch is as the arguments were, and the dataset, when it began.
                kind, made_with = self.pipeline.kind, self.pipeline.made_with
        reached = self._reached(kind)
        start = reached.start
        return Position(
            made_with=made_with or kind.made_with(),
            epoch=start.epoch,
            batch=start.batch,
            sample=start.sample,
            seed=kind.batch_seed,
            kind_state=kind.state(reached),
        )

    def _reached(self, kind: LoaderKind) -> Reached:
        """Return how far the loader has come."""
        pipeline = self.pipeline
        planner = None if pipeline is None else pipeline.planner
        is_new = pipeline is None or type(pipeline.kind) is not type(kind)
        if is_new or pipeline is None or planner is None or planner.epoch < 0:
            start, order = Start(self._next_epoch), epoch_of(kind.foreseen_sampler)
            return Reached(start, False, False, kind.sampler_states(), order, [])
        sampler_states, drawn, order = planner.sampler_position()
        feed, turns = pipeline.feed, planner.turns
        states = (feed and feed.worker_states()) or ([] if turns is None else turns.states)
        if not planner.has_next():
            epoch = planner.epoch + 1
            start = Start(epoch, origin=planner.origin_of(epoch))
            return Reached(start, False, True, sampler_states, order, states)
        start = planner.start
        if planner.batch > start.batch and not kind.returns_in_order:
            raise OptionError(NO_ORDER.format(epoch=planner.epoch, count=planner.batch))
        start = start._replace(batch=planner.batch, sample=planner.sample, drawn=drawn)
        next_worker = 0 if turns is None else turns.next_worker
        return Reached(start, True, False, sampler_states, order, states, next_worker)

    def resume(self, position: Position) -> None:
        """Begin the next iteration at a position; iterators that began before return no more."""
        if self.pipeline is not None:
            self.pipeline.reader = None
        self.pipeline = None
        self.resumed, self._next_epoch = position, position.epoch

    def set_weights(self, kind: LoaderKind, weights: tuple[float, ...]) -> None:
        """Use other weights for the sources of a mixture, starting with the next batch."""
        pipeline = self.pipeline_for(kind, is_new=False)
        if self.resumed is None:
            pipeline.set_weights(weights)
        else:
            planned = cast("PlanKind", pipeline.kind)  # which all mixtures have
            self.resumed = planned.reweighted(self.resumed, weights)

    # ---- what was returned ---------------------------------------------------------------------

    def mask(self) -> torch.Tensor:
        """Return the mask of the last batch; see `DataLoader.mask`."""
        if self.pipeline is None or self.pipeline.last is None:
            raise OptionError("mask describes the last batch, and no batch was returned yet")
        request, failures = self.pipeline.last
        if request.is_of_stream:
            raise OptionError(
                "mask is not available for an iterable dataset, whose samples are not planned"
            )
        index = list(request.index) if hasattr(request.index, "__len__") else [request.index]
        counts = [True] * (len(index) - request.repeated) + [False] * request.repeated
        for failure in failures:  # left out of the batch, so also here
            at = index.index(failure.source)
            del index[at], counts[at]
        return torch.tensor(counts, dtype=torch.bool)

    def statistics(self, kind: LoaderKind) -> Statistics:
        """Return the statistics over all iterations; see `DataLoader.statistics`."""
        pipeline = self.pipeline
        feeds = [each.feed for each in self._pipelines if each.feed is not None]
        waiting = [each for feed in feeds for each in feed.waiting()]
        epoch, batch = self._next_epoch - 1, 0
        ready: list[tuple[int, int]] = []
        sources, tokens = {}, {}
        if pipeline is not None and pipeline.planner is not None:
            planner, position = pipeline.planner, pipeline.samples_before
            epoch, batch = planner.epoch, planner.batch
            names = getattr(kind.dataset, "datasets", ())
            sources = pipeline.kind.samples_by_source(names, position)
            tokens = pipeline.kind.tokens_by_source(position)
            if pipeline.feed is not None and kind.returns_in_order:
                ready = planner.numbers_of([task for task, _ in pipeline.feed.waiting()])
        if self.resumed is not None and self.resumed.batch:
            epoch, batch = self.resumed.epoch, self.resumed.batch
        return statistics_of(
            self.trace,
            epoch=epoch,
            batch=batch,
            ready_batches=len(waiting),
            ready_bytes=sum(nbytes for _, nbytes in waiting),
            ready_from=ready[0] if ready else None,
            ready_to=ready[-1] if ready else None,
            in_flight=sum(feed.in_flight for feed in feeds),
            failures=self.failures.total,
            sources=sources,
            tokens=tokens,
        )
