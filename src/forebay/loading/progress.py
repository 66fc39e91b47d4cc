"""What a loader has returned so far, and where it continues.

    LoaderProgress ──> where the next iteration begins, the position, the statistics

With only torch's arguments each iteration has a new pipeline, unless workers persist. A loader with
any of forebay's arguments keeps one pipeline, since each epoch continues from the one before.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from forebay.base.torch_internals import lightning_is_imported
from forebay.errors import OptionError
from forebay.failures import Failure, FailureLog
from forebay.loading.audit import LoaderAudit
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import BatchRequest
from forebay.loading.pipeline import Pipeline
from forebay.loading.planner import Planner
from forebay.loading.position import NO_ORDER, Position
from forebay.loading.samplers import asked_epoch, epoch_of, set_states
from forebay.loading.selections import Reached, Start
from forebay.observe.measurements import Setup
from forebay.observe.record import Trace

if TYPE_CHECKING:  # imported where a loader needs it
    from forebay.loading.feed import Feed
    from forebay.loading.iterable_kind import IterableKind
    from forebay.loading.local_feed import LocalFeed
    from forebay.loading.plan_kind import PlanKind


LEFT = (
    "epoch {0} was left after batch {1} and state_dict(): a program that loads that state finishes "
    "the epoch first, and this one begins epoch {2}\n"
    "  Nothing was changed. If each epoch is to end early, take the state when the next one has "
    "begun: iterator = iter(loader), then state_dict(), then the loop over the iterator."
)


def _nobody() -> None:
    """Stand for an iterator that is gone."""


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
        next_epoch: The epoch that follows the last iteration.
        before: Position and last batch before the one that was returned last, if a library takes
            each batch a step early; None otherwise, and at the end of an epoch.
        audit: Makes a few samples a second time.
    """

    def __init__(self, resumed: Position | None = None, trace: Trace | None = None) -> None:
        self.resumed = resumed
        self.trace = Trace() if trace is None else trace
        self.pipeline: Pipeline | None = None
        self.setup: Setup | None = None
        self.before: tuple[Position, Any] | None = None
        self.audit = LoaderAudit()
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()  # those in use
        self.next_epoch = 0 if resumed is None else resumed.epoch
        self._has_begun = False  # an iteration, since it was made or a state was loaded
        self._first: Position | None = None  # where that began, until another one does
        self._reader: Callable[[], Any] = _nobody
        self._saved_at: tuple[int, int] | None = None  # epoch and batch of the last state

    def __reduce__(self) -> Any:
        """Copy and pickle no pipelines and no counts."""
        return LoaderProgress, (self.resumed,)

    @cached_property
    def failures(self) -> FailureLog:
        """The samples that were left out, which most loaders have none of."""
        return FailureLog()

    # ---- an epoch ------------------------------------------------------------------------------

    def epoch(self, asked: int | None) -> int:
        """Return the current epoch, or the next one; see `DataLoader.epoch`.

        Args:
            asked: See `asked_epoch`.
        """
        planner = None if self.pipeline is None else self.pipeline.planner
        if self.resumed is None and planner is not None:
            if planner.has_next(reads=True):
                return planner.epoch
            return planner.epoch + 1 if asked is None else asked
        return self.next_epoch if asked is None else asked

    def next_start(self, kind: LoaderKind, own: Pipeline | None) -> tuple[Pipeline, Position]:
        """Return where the next iteration begins, and the pipeline that it reads.

        Args:
            own: The pipeline of a persistent iterator, which continues with its workers; else None.
        """
        late = self._heed_lightning(kind) if lightning_is_imported() else ""
        position, last = self.resumed, self._last_order
        planner, epoch = None if self.pipeline is None else self.pipeline.planner, self.next_epoch
        if position is None and planner is not None and planner.has_next():
            position = self._after_left(kind, planner, is_gone=own is not None)
        if position is None:
            origin = 0 if planner is None else planner.origin_of(epoch)
            position = Position(epoch=epoch, kind_state={"origin": origin})
        self.pipeline = own or self.pipeline_for(kind, is_new=not kind.keeps_pipeline)
        self.pipeline.is_resumed = self.resumed is not None
        return self.pipeline, kind.as_asked(position, last, late=late)

    def _after_left(self, kind: LoaderKind, planner: Planner, *, is_gone: bool) -> Position | None:
        """Return where to begin after an epoch was left; None for the next epoch.

        The first iteration of all, left after one batch, was a look at the data: it is begun again.

        Args:
            is_gone: Whether its iterator is no longer used.
        """
        first, self._first = self._first, None
        taken = planner.batch - planner.start.batch
        is_gone = is_gone or kind.keeps_pipeline or self._reader() is None
        if first is not None and is_gone and taken <= 1 and planner.epoch == first.epoch:
            set_states(kind.index_sampler, first.kind_state.get("sampler"))
            return first
        if self._saved_at == (planner.epoch, planner.batch):
            words = LEFT.format(planner.epoch, planner.batch, self.next_epoch)
            warnings.warn(words, stacklevel=5)
        return None

    def saved(self, kind: LoaderKind) -> dict[str, Any]:
        """Return the state of the loader; see `DataLoader.state_dict`."""
        position = self.position(kind)
        self._saved_at = position.epoch, position.batch
        return position.to_state()

    def _heed_lightning(self, kind: LoaderKind) -> str:
        """Begin with the epoch that Lightning counts; return `late` for `as_asked`."""
        from forebay.loading.lightning import counted_epoch

        counted, position = counted_epoch(), self.resumed
        if counted is None:
            return ""
        self._first, (epoch, is_over) = None, counted
        set_epoch = getattr(kind.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)  # as it does itself, too late if it takes a batch before
        elif position is None:
            self.next_epoch = epoch
        elif is_over and kind.kind_name == "iterable":
            self.resumed = cast("IterableKind", kind).left(position, epoch)
        return "" if position is None else "resumed"

    @property
    def _last_order(self) -> int | None:
        """What `set_epoch` of a foreseen sampler said for the last epoch that has begun, if any."""
        if self.resumed is not None:
            order: int | None = self.resumed.kind_state.get("set_epoch")
            return order
        planner = None if self.pipeline is None else self.pipeline.planner
        return None if planner is None else planner.orders.get(planner.epoch)

    @property
    def feeds(self) -> list[Feed | LocalFeed]:
        """What makes the batches of all iterations that are not closed."""
        return [each.feed for each in self._pipelines if each.feed is not None]

    def began(self, position: Position, iterator: Any) -> None:
        """Note that an epoch has begun, from the start of it or from a loaded state."""
        if not self._has_begun:
            self._first, self._has_begun = position, True
        self._reader = weakref.ref(iterator)
        self.resumed, self.next_epoch, self.before = None, position.epoch + 1, None

    def pipeline_for(self, kind: LoaderKind, *, is_new: bool) -> Pipeline:
        """Return the pipeline of the last iteration; a new one if none fits, or `is_new`."""
        before = self.pipeline
        what = None if before is None else (type(before.kind), before.kind.ranks)
        if before is not None and what != (
            type(kind),
            kind.ranks,
        ):  # a sampler, or ranks, are other
            before.reader, is_new = None, True
            before.close()
            kind.follow(before.kind)
        if before is None or is_new:
            left = () if before is None else before.states_left
            self.pipeline, self.setup = Pipeline(kind, self.trace, left), kind.setup
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
        self.audit.end()
        self.trace.hide()

    # ---- position ------------------------------------------------------------------------------

    def position(self, kind: LoaderKind) -> Position:
        """Return the position; at the end of an epoch it is the start of the next one."""
        if self.resumed is not None:
            return self.resumed
        if self.before is not None:
            return self.before[0]
        made_with: Mapping[str, Any] | None = None
        if self.pipeline is not None:
            kind = kind.follow(self.pipeline.kind)
            planner = self.pipeline.planner
            if planner is not None and planner.has_next(reads=True):
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
        asked = asked_epoch(kind.index_sampler, self._last_order)[0]
        if is_new or pipeline is None or planner is None or planner.epoch < 0:
            start, order = Start(self.next_epoch), epoch_of(kind.foreseen_sampler)
            start = start if asked is None else start._replace(epoch=asked)
            return Reached(start, False, False, kind.sampler_states(), order, [])
        sampler_states, drawn, order = planner.sampler_position()
        feed, turns = pipeline.feed, planner.turns
        states = (feed and feed.worker_states()) or ([] if turns is None else turns.states)
        if not planner.has_next():
            epoch = planner.epoch + 1 if asked is None else asked
            start = Start(epoch, origin=planner.origin_of(epoch))
            return Reached(start, False, True, sampler_states, order, states)
        start = planner.start
        if planner.batch > start.batch and not kind.returns_in_order:
            raise OptionError(NO_ORDER.format(epoch=planner.epoch, count=planner.batch))
        start = start._replace(batch=planner.batch, sample=planner.sample, drawn=drawn)
        next_worker = 0 if turns is None else turns.next_worker
        return Reached(start, True, False, sampler_states, order, states, next_worker)

    @property
    def last(self) -> tuple[BatchRequest, tuple[Failure, ...]] | None:
        """The last batch that was returned; see `Pipeline.last`."""
        if self.before is not None:
            last: tuple[BatchRequest, tuple[Failure, ...]] | None = self.before[1]
            return last
        return None if self.pipeline is None else self.pipeline.last

    def resume(self, position: Position) -> None:
        """Begin the next iteration at a position; iterators that began before return no more."""
        if self.pipeline is not None:
            self.pipeline.reader = None
        self.pipeline = self.before = None
        self.resumed, self.next_epoch, self._has_begun = position, position.epoch, False

    def set_weights(self, kind: LoaderKind, weights: tuple[float, ...]) -> None:
        """Use other weights for the sources of a mixture, starting with the next batch."""
        pipeline = self.pipeline_for(kind, is_new=False)
        planned = cast("PlanKind", pipeline.kind)  # which all mixtures have
        if self.before is not None:
            position, last = self.before
            self.before = planned.reweighted(position, weights), last
        if self.resumed is None:
            pipeline.set_weights(weights)
        else:
            self.resumed = planned.reweighted(self.resumed, weights)
