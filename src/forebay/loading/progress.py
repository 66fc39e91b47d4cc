"""What a loader has returned so far, and what makes its batches: all that changes in a loader.

    kind, position ──> Pipeline.begin ──> planner ──> iterator
    LoaderProgress ──> where the next iteration begins, the position, the statistics

With only torch's arguments each iteration has a new pipeline, unless workers persist. A loader with
any of forebay's arguments keeps one pipeline, since each epoch continues from the one before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from forebay.base.randomness import generators_kept, generators_locked
from forebay.base.torch_internals import lightning_is_imported
from forebay.errors import OptionError
from forebay.failures import Failure, FailureLog
from forebay.loading.audit import LoaderAudit
from forebay.loading.kind import LoaderKind
from forebay.loading.kinds import feed_of
from forebay.loading.messages import BatchRequest, WorkerState
from forebay.loading.planner import Planner
from forebay.loading.position import NO_ORDER, Position
from forebay.loading.samplers import asked_epoch, epoch_of
from forebay.loading.selections import Reached, Rest, Start
from forebay.observe.measurements import Setup
from forebay.observe.progress import log
from forebay.observe.record import Trace
from forebay.ranks import Ranks, check_agreement

if TYPE_CHECKING:  # imported where a loader needs it
    from forebay.loading.feed import Feed
    from forebay.loading.hand_out import HandOut
    from forebay.loading.iterable_kind import IterableKind
    from forebay.loading.local_feed import LocalFeed
    from forebay.loading.plan_kind import PlanKind
    from forebay.loading.workers import WorkerTuning


class Pipeline:
    """Makes the batches of one loader, epoch after epoch.

    Attributes:
        kind: The loader's kind, as its arguments were when the last iteration began.
        feed: Makes the batches; None before the first epoch, and when closed.
        planner: Decides which batches are requested; None before the first epoch.
        made_with: `LoaderKind.made_with` when the last iteration began: a dataset may grow since.
        keeps_workers: Whether workers are kept from epoch to epoch.
        reader: The ID of the iterator that may take batches; None if none may.
        hand_out: Moves and transforms batches; None if they are returned as they were made.
        last: The request of the batch that was returned last, and the samples left out of it.
        is_resumed: Whether the last iteration began at a position that was loaded.
    """

    def __init__(self, kind: LoaderKind, trace: Trace, states: Sequence[WorkerState] = ()) -> None:
        self.kind, self.keeps_workers, self._states_left = kind, kind.keeps_workers, states
        self.feed: Feed | LocalFeed | None = None
        self.planner: Planner | None = None
        self.made_with: Mapping[str, Any] = {}
        self.reader: int | None = None
        self.is_resumed = False
        self.last: tuple[BatchRequest, tuple[Failure, ...]] | None = None
        self._trace, self._tuning = trace, tuning_of(kind, trace)
        self._dataset_seen: Any = None
        self._replaces_workers = False
        self._has_agreed = self._has_said = False
        self._has_loaded = False  # a dataset's state
        self.hand_out = _hand_out_of(kind)

    # ---- an epoch ------------------------------------------------------------------------------

    def begin(
        self, kind: LoaderKind, position: Position, iterator: Any, draw: Callable[..., Any]
    ) -> Planner:
        """Begin an epoch, or the rest of one; return the planner, which returns its batches.

        Args:
            draw: Draws seeds as torch's iterators do; see `LoaderKind.draw`.
        """
        before, self.kind = self.kind.order_key(), kind.follow(self.kind)
        self.keeps_workers, self.reader = kind.keeps_workers, id(iterator)
        self.made_with = kind.made_with()
        if not self.keeps_workers:
            self.close(between_epochs=True)
        rest = kind.rest_of(position)
        has_workers = self.feed is not None and self.feed.is_open
        try:
            # On a resume the global generator keeps its state: restoring it is up to the user.
            with generators_kept() if rest.keeps_generators else generators_locked():
                kind.draw(draw, position, has_workers=has_workers)
                if iterator.moved:
                    position = kind.moved(position, iterator.moved)
                    rest = kind.rest_of(position)
                planner, feed = self._opened(before, rest, position, iterator)
                if not rest.restores_workers:
                    planner.begin(feed, rest.start, rest.next_worker)
                    if rest.reads_ahead:
                        planner.read_ahead()
            if rest.restores_workers:  # not before: the dataset may restore the generators itself
                planner.begin(feed, rest.start, rest.next_worker)
        except BaseException:
            self.close()  # it may be inconsistent
            raise
        return planner

    def _opened(
        self, before: Any, rest: Rest, position: Position, iterator: Any
    ) -> tuple[Planner, Feed | LocalFeed]:
        """Return planner and feed for the current kind; the existing ones where they fit.

        Args:
            before: The kind's `order_key` in the last iteration.
        """
        kind, drawn = self.kind, (iterator.base_seed, iterator.first_shared_seed)
        base_seed, shared_seed = kind.seeds(*drawn, position.epoch)
        kind.begin_at(position)
        is_new, planner = self.planner is None, self.planner_for(kind)
        planner.shared_seed = shared_seed
        if not is_new and before != kind.order_key():
            planner.refresh()  # the dataset has another length
        if kind.ranks is not None and not self._has_agreed:
            self._check_ranks(kind.ranks, position)
        feed, seen = self.feed, kind.dataset_fingerprint()
        # Workers got copies of the dataset, which the user may have changed since.
        if feed is not None and seen != self._dataset_seen and not self._has_said:
            self._has_said = True
            log.warning(
                "%s: the dataset has changed since batches of this epoch were prefetched; they are "
                "made again, now and after each such change",
                kind.title,
            )
        is_old = kind.renews_workers or self._replaces_workers or seen != self._dataset_seen
        is_old |= feed is None or not feed.is_open
        turns, states = planner.turns, tuple[WorkerState, ...]()
        if turns is not None:
            known, self._states_left = self._states_left if is_old else turns.states, ()
            turns.begin(kind.first_worker_states(rest, known))
            states = tuple(each.copied() for each in turns.states)
        self._has_loaded = any(each.is_known and each.phase != "before" for each in states)
        if feed is None or is_old:
            self.close(between_epochs=True)
            self._replaces_workers, self._dataset_seen = False, seen
            spec = kind.spec(base_seed, position.epoch, states)
            device = None if self.hand_out is None else self.hand_out.device
            feed = self.feed = feed_of(kind, spec, self._trace, self._tuning, device)
        feed.in_use = iterator.one_at_a_time
        return planner, feed

    @property
    def states_left(self) -> Sequence[WorkerState]:
        """What the next epoch continues from, if a copy of the trainer's dataset has a state."""
        turns = None if self.planner is None else self.planner.turns
        is_left = turns is not None and self._has_loaded and self.kind.is_local
        return (self.feed and self.feed.worker_states()) or turns.states if is_left else ()

    def _check_ranks(self, ranks: Ranks, position: Position) -> None:
        """Raise an error unless all ranks have the same arguments and position."""
        kind = self.kind
        facts: Mapping[str, Any] = {
            "seed": kind.batch_seed,
            "epoch": position.epoch,
            "batch": position.batch,
            **kind.facts_of_ranks(),
            "tail": kind.tail,
            "sampler": type(kind.sampler).__name__,
        }
        self._has_agreed = check_agreement(ranks, facts)

    def planner_for(self, kind: LoaderKind) -> Planner:
        """Return the planner of a kind; create it if there is none."""
        if self.planner is None:
            kind.prepare(self._trace)
            self.planner = Planner(kind)
        self.planner.kind = kind
        return self.planner

    def refresh(self) -> None:
        """Replace the workers and make prefetched batches again, at the next epoch."""
        self._replaces_workers = True
        if self.planner is not None:
            self.planner.refresh()

    def close(self, between_epochs: bool = False) -> None:
        """Stop the workers; the position is kept, and between epochs what is fetched ahead, too."""
        feed, self.feed = self.feed, None
        planner = self.planner  # no global names from here on: the interpreter may be exiting
        if feed is None:
            if planner is not None and not between_epochs:
                planner.kind.close()
            return
        feed.close()
        if planner is not None:
            if planner.turns is not None:
                planner.turns.states = feed.worker_states() or planner.turns.states
            planner.detach(between_epochs)

    def asked_position(self) -> Position | None:
        """Return the beginning of the epoch that `set_epoch` asked for since this one began.

        None: it asked for this one, or was not called.
        """
        assert self.planner is not None
        start, last = self.planner.start, self.planner.orders.get(self.planner.epoch)
        here = Position(epoch=start.epoch, batch=start.batch, kind_state={"origin": start.origin})
        found = self.kind.as_asked(here, last, late="resumed" if self.is_resumed else "begun")
        is_same = found is here and epoch_of(self.kind.foreseen_sampler) == last
        return None if is_same else found

    # ---- a mixture -----------------------------------------------------------------------------

    def set_weights(self, weights: tuple[float, ...]) -> None:
        """Use other weights for the sources of a mixture, starting with the next batch."""
        planner, kind = self.planner, cast("PlanKind", self.kind)  # which all mixtures have
        kind.reweight(weights, None if planner is None else self.samples_before)
        if planner is not None:
            planner.replan()

    @property
    def samples_before(self) -> int:
        """Samples that were returned in all epochs, over all ranks."""
        return 0 if self.planner is None else self.planner.start.origin + self.planner.sample


def _hand_out_of(kind: LoaderKind) -> HandOut | None:
    if kind.device is None and kind.device_transform is None and not kind.pin_memory:
        return None
    from forebay.loading.hand_out import HandOut

    return HandOut(kind)


def tuning_of(kind: LoaderKind, trace: Trace) -> WorkerTuning | None:
    """Return what changes the number of workers; None unless `num_workers="auto"`."""
    if not kind.tunes_workers:
        return None
    from forebay.loading.workers import WorkerTuning

    return WorkerTuning(int(kind.num_workers), kind.cluster is not None, trace)


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
        if position is None:
            planner, epoch = (
                None if self.pipeline is None else self.pipeline.planner,
                self.next_epoch,
            )
            origin = 0 if planner is None else planner.origin_of(epoch)
            position = Position(epoch=epoch, kind_state={"origin": origin})
        self.pipeline = own or self.pipeline_for(kind, is_new=not kind.keeps_pipeline)
        self.pipeline.is_resumed = self.resumed is not None
        return self.pipeline, kind.as_asked(position, last, late=late)

    def _heed_lightning(self, kind: LoaderKind) -> str:
        """Begin with the epoch that Lightning counts; return `late` for `as_asked`."""
        from forebay.loading.lightning import counted_epoch

        counted, position = counted_epoch(), self.resumed
        if counted is None:
            return ""
        epoch, is_over = counted
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

    def began(self, epoch: int) -> None:
        """Note that an epoch has begun, from the start of it or from a loaded state."""
        self.resumed, self.next_epoch, self.before = None, epoch + 1, None

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
        self.resumed, self.next_epoch = position, position.epoch

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
