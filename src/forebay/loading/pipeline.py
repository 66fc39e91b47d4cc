"""What makes the batches of one loader, epoch after epoch: a planner and a feed.

kind, position ──> Pipeline.begin ──> planner ──> iterator
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from forebay.base.randomness import generators_kept, generators_locked
from forebay.failures import Failure
from forebay.loading.kind import LoaderKind
from forebay.loading.kinds import feed_of
from forebay.loading.messages import BatchRequest, WorkerState
from forebay.loading.planner import Planner
from forebay.loading.position import Position
from forebay.loading.samplers import epoch_of
from forebay.loading.selections import Rest
from forebay.observe.progress import log
from forebay.observe.record import Trace
from forebay.ranks import Ranks, check_agreement
from forebay.seeds import worker_seed_of

if TYPE_CHECKING:  # imported where a loader needs it
    from forebay.loading.feed import Feed
    from forebay.loading.hand_out import HandOut
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
        self._drawn: tuple[int, int | None] | None = None  # what the workers' seeds are from
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
        # Workers that have begun an epoch of a stream read on in it.
        is_old |= turns is not None and position.epoch in planner.orders
        if turns is not None:
            known, self._states_left = self._states_left if is_old else turns.states, ()
            turns.begin(kind.first_worker_states(rest, known))
            states = tuple(each.copied() for each in turns.states)
        self._has_loaded = any(each.is_known and each.phase != "before" for each in states)
        if feed is None or is_old:
            self.close(between_epochs=True)
            self._replaces_workers, self._dataset_seen = False, seen
            if kind.seed is None and self._drawn == drawn:  # those of before have drawn from it
                base_seed = worker_seed_of(base_seed, position.epoch)
            self._drawn = drawn
            spec = kind.spec(base_seed, position.epoch, states)
            device = None if self.hand_out is None else self.hand_out.device
            feed = self.feed = feed_of(kind, spec, self._trace, self._tuning, device)
        feed.in_use = iterator.one_at_a_time
        return planner, feed

    @property
    def states_left(self) -> Sequence[WorkerState]:
        """What the next epoch continues from, if a copy of the trainer's dataset has a state."""
        turns = None if self.planner is None else self.planner.turns
        if turns is None or not (self._has_loaded and self.kind.is_local):
            return ()
        return (self.feed and self.feed.worker_states()) or turns.states

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
        feed = self.feed
        planner = self.planner  # no global names from here on: the interpreter may be exiting
        if feed is None:
            if planner is not None and not between_epochs:
                planner.kind.close()
            return
        feed.close()
        self.feed = None  # not before: a signal's handler may have raised
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
