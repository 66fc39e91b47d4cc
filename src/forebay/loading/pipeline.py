"""The pipeline behind a loader's iterators: source, planner, feed, and their position.

    settings, position ──> Pipeline.begin ──> planner ──> iterator

With only torch's arguments each iteration has a new pipeline, unless workers persist. A loader with
any of forebay's arguments keeps one pipeline, since each epoch continues from the one before.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pickle import PicklingError
from typing import Any

from torch.utils.data import RandomSampler

from forebay.devices.device_api import Device
from forebay.failures import Failure
from forebay.loading.auto_workers import WorkerTuning
from forebay.loading.feed import Feed
from forebay.loading.hand_out import HandOut
from forebay.loading.local_feed import LocalFeed
from forebay.loading.messages import BatchRequest, BatchSpec, WorkerState
from forebay.loading.planner import Planner
from forebay.loading.position import Position
from forebay.loading.samplers import (
    draw_seed,
    holds_position,
    set_generator,
    state_of_generator,
)
from forebay.loading.set_epoch import SetEpochRecorders
from forebay.loading.settings import Settings
from forebay.loading.sources import IterableSource, PlanSource, SamplerSource, Source
from forebay.observe.trace import Trace
from forebay.plan.batch_plan import Plan
from forebay.plan.mixture import Mixture
from forebay.plan.seeds import worker_seed_of
from forebay.randomness import generators_kept, generators_locked
from forebay.ranks import Ranks, check_agreement, check_still


class Pipeline:
    """Makes the batches of one loader, epoch after epoch.

    Args:
        settings: The settings of the loader.
        recorders: Record the user's calls of `set_epoch`.
        trace: Records events and times.

    Attributes:
        seed: The seed of all batches; None by torch's rules, and before it is drawn.
        mixture: The current mixture of sources; None if there is one dataset.
        feed: Makes the batches; None before the first epoch, and when closed.
        planner: Decides which batches are requested; None before the first epoch.
        recorders: Record the user's calls of `set_epoch`.
        keeps_workers: Whether workers are kept at the end of an epoch.
        reader: The `id` of the only valid iterator; earlier ones have ended.
        last: The request of the last batch returned, and its samples that failed.
        generator_before: By torch's rules: state of the generator before this epoch.
        drew_base_seed: By torch's rules: whether this epoch began with drawing a base seed.
    """

    def __init__(self, settings: Settings, recorders: SetEpochRecorders, trace: Trace) -> None:
        self.seed: int | None = settings.loader.seed
        self.mixture: Mixture | None = settings.plan.mixture if settings.plan else None
        self.feed: Feed | LocalFeed | None = None
        self.planner: Planner | None = None
        self.keeps_workers = settings.keeps_workers
        self.reader: int | None = None
        self.last: tuple[BatchRequest, tuple[Failure, ...]] | None = None
        self.recorders, self._trace = recorders, trace
        self._tuning = settings.tuning(trace)
        self.generator_before: str | None = None
        self.drew_base_seed = True
        self._dataset_seen: Any = None
        self._replaces_workers = False
        self._has_agreed = False
        self._hand_out: HandOut | None = None

    # ---- an epoch ------------------------------------------------------------------------------

    def begin(
        self,
        settings: Settings,
        position: Position,
        iterator: Any,
        initialize: Callable[[], None] | None,
        reset: Callable[[], None],
    ) -> Planner:
        """Begin an epoch, or the rest of one; return the planner, which returns its batches.

        Args:
            settings: The current settings of the loader.
            position: Where to begin.
            iterator: The iterator of the epoch.
            initialize: Calls torch's `__init__` of the iterator, which draws a base seed; None if
                the iterator is not new.
            reset: Calls torch's `_reset` of the iterator.
        """
        self.keeps_workers, self.reader = settings.keeps_workers, id(iterator)
        if not self.keeps_workers:
            self.close()
        resumes = position.batch > 0 and settings.by_torchs_rules
        skip = position.batch if settings.is_iterable and not position.knows_workers else 0
        if skip:  # a dataset without a state is read again up to the position
            position = replace(position, batch=0, sample=0, worker_states=(), next_worker=0)
        loader, generator = settings.loader, settings.drawn_from
        # On a resume the global generator keeps its state: restoring it is up to the user.
        with generators_kept() if resumes and loader.generator is None else generators_locked():
            if position.generator is not None:
                set_generator(generator, position.generator)
            before = generator.get_state()
            if settings.by_torchs_rules:
                self.generator_before = state_of_generator(generator)
            # torch draws a base seed once for workers that persist.
            persists = loader.persistent_workers and self.feed is not None and self.feed.is_open
            self.drew_base_seed = position.draws_base_seed and not persists
            if initialize is not None:
                initialize()
                if not self.drew_base_seed:
                    generator.set_state(before)
            shared_seed = iterator._shared_seed  # torch starts workers with the one drawn first
            # With workers, torch resets a new iterator, too: that draws, and iterates the sampler,
            # again. A sampler that keeps its position might lose it.
            if initialize is None or (
                loader.num_workers and not holds_position(settings.index_sampler)
            ):
                reset()
            if initialize is None or not self.drew_base_seed:
                shared_seed = iterator._shared_seed
            is_shuffled = isinstance(loader.sampler, RandomSampler)
            if is_shuffled and loader.sampler.generator is None and not settings.by_torchs_rules:
                draw_seed(None)  # as torch does for the order: later draws are equal to torch's
            planner, feed = self._opened(settings, position, iterator)
            planner.shared_seed = shared_seed
            if not position.knows_workers:
                planner.begin(feed, position.start, position.next_worker)
                if resumes:
                    planner.read_ahead()
                for _ in range(skip):
                    planner.take()
        if position.knows_workers:  # not before: the dataset may restore the generators itself
            planner.begin(feed, position.start, position.next_worker)
        return planner

    def _opened(
        self, settings: Settings, position: Position, iterator: Any
    ) -> tuple[Planner, Feed | LocalFeed]:
        """Return planner and feed for the current settings; the existing ones where they fit."""
        loader, base_seed = settings.loader, int(iterator._base_seed)
        if not settings.by_torchs_rules and self.seed is None:
            self.seed = base_seed
        if position.mixture is not None and self.mixture is not None:
            self.mixture = replace(self.mixture, **position.mixture)
        planner = self.planner_for(settings)
        source = planner.source
        if isinstance(source, PlanSource) and source.plan != (plan := self._plan(settings)):
            source.plan = plan  # the dataset has another length
            planner.refresh()
        if isinstance(source, SamplerSource) and settings.by_torchs_rules:
            source.iterator = iterator._sampler_iter
        if self._replaces_workers:  # new workers get copies of the dataset in its current state
            self.close()
            planner.worker_states = []
        planner.worker_states = self._worker_states(settings, position, planner)
        if settings.ranks is not None and not self._has_agreed:
            self._check_ranks(settings.ranks, settings, position)
        feed = self.feed
        if feed is None or not feed.is_open or self._has_old_dataset(settings):
            self.close()
            seed = None
            # Threads draw from the generators of the process, unless the user set a seed.
            if not settings.by_torchs_rules and (
                loader.seed is not None or loader.backend != "thread"
            ):
                seed = self.seed
            if settings.is_iterable and loader.seed is not None:
                base_seed = worker_seed_of(loader.seed, position.epoch)
            self._replaces_workers = False
            self._dataset_seen = self._dataset_fingerprint(settings)
            states = tuple(planner.worker_states)
            spec = settings.spec(base_seed, seed, position.epoch, states)
            device = self.hand_out(settings).device
            feed = self.feed = feed_of(settings, spec, self._trace, self._tuning, device)
        return planner, feed

    def _check_ranks(self, ranks: Ranks, settings: Settings, position: Position) -> None:
        """Raise an error unless all ranks have the same settings and position."""
        loader = settings.loader
        if loader.world_size == "auto":
            check_still(ranks)
        facts: dict[str, Any] = {
            "seed": self.seed,
            "epoch": position.epoch,
            "batch": position.batch,
            **asdict(settings.made_with),
            "tail": loader.tail,
            "sampler": type(loader.sampler).__name__,
        }
        if self.mixture is not None:
            facts["weights"] = self.mixture.weights
        self._has_agreed = check_agreement(ranks, facts)

    def planner_for(self, settings: Settings) -> Planner:
        """Return the planner; create it if there is none."""
        if self.planner is None:
            loader = settings.loader
            turns = max(loader.num_workers, 1) if settings.by_torchs_rules else 0
            self.planner = Planner(
                self._source(settings),
                self.recorders,
                settings.depth(),
                turns=0 if settings.is_local and not settings.is_iterable else turns,
                in_order=settings.in_order,
                shares_dataset=loader.backend == "thread" or settings.is_local,
                may_run_ahead=settings.runs_ahead,
                worker_seed=loader.seed if settings.is_iterable else None,
            )
        return self.planner

    def _source(self, settings: Settings) -> Source:
        if settings.is_iterable:
            return IterableSource(settings.batch_size if settings.auto_collation else None)
        if settings.plan is not None:
            return PlanSource(self._plan(settings), settings.auto_collation, settings.is_sliced)
        return SamplerSource(
            settings.index_sampler,
            None if settings.by_torchs_rules else self.seed,
            self.recorders,
            settings.shared,
            auto_collation=settings.auto_collation,
            as_tensors=settings.is_sliced,
        )

    def _plan(self, settings: Settings) -> Plan:
        assert settings.plan is not None and self.seed is not None
        return replace(settings.plan, seed=self.seed, mixture=self.mixture)

    def _worker_states(
        self, settings: Settings, position: Position, planner: Planner
    ) -> list[WorkerState]:
        if not settings.tracks_state:
            return []
        if position.worker_states:
            return copy.deepcopy(list(position.worker_states))
        if self.keeps_workers and planner.worker_states:
            return [state._replace(phase="before") for state in planner.worker_states]
        return [WorkerState()] * (1 if settings.is_local else settings.loader.num_workers)

    def _has_old_dataset(self, settings: Settings) -> bool:
        """Return whether the user changed the dataset after the workers got their copies."""
        return bool(self._dataset_fingerprint(settings) != self._dataset_seen)

    def _dataset_fingerprint(self, settings: Settings) -> Any:
        """Return the dataset's fingerprint; None if changes of it are not detected."""
        loader = settings.loader
        if settings.is_iterable or settings.is_local or loader.persistent_workers:
            return None
        if not settings.runs_ahead or loader.backend == "thread":
            return None
        return self.recorders.dataset_fingerprint(loader.dataset)

    def hand_out(self, settings: Settings) -> HandOut:
        """Return what moves and transforms the batches; create it if there is none."""
        if self._hand_out is None:
            self._hand_out = HandOut(settings)
        return self._hand_out

    def refresh(self) -> None:
        """Replace the workers and make prefetched batches again, at the next epoch."""
        self._replaces_workers = True
        if self.planner is not None:
            self.planner.refresh()

    def close(self) -> None:
        """Stop the workers; the position is kept."""
        feed, self.feed = self.feed, None
        if feed is None:
            return
        planner = self.planner  # no global names from here on: the interpreter may be exiting
        if planner is not None:
            planner.worker_states = feed.worker_states() or planner.worker_states
            planner.detach()
        feed.close()

    # ---- a mixture -----------------------------------------------------------------------------

    def set_weights(self, weights: tuple[float, ...]) -> None:
        """Use other weights for the sources of a mixture, starting with the next batch."""
        assert self.mixture is not None
        planner = self.planner
        if planner is None or self.seed is None:
            self.mixture = replace(self.mixture, weights=weights)
            return
        assert isinstance(planner.source, PlanSource)
        self.mixture = self.mixture.changed(weights, self.seed, self._mixture_position(planner))
        planner.source.plan = replace(planner.source.plan, mixture=self.mixture)
        planner.replan()

    def samples_by_source(self, names: Iterable[str]) -> dict[str, tuple[int, float]]:
        """Return the samples returned from each source of a mixture; see `Statistics.sources`."""
        planner, mixture = self.planner, self.mixture
        if planner is None or mixture is None or self.seed is None:
            return {}
        known = zip(
            names,
            mixture.drawn(self.seed, self._mixture_position(planner)),
            mixture.lengths,
            strict=True,
        )
        return {name: (count, count / length) for name, count, length in known}

    @staticmethod
    def _mixture_position(planner: Planner) -> int:
        """Return the position in a mixture, counted from the start of its first epoch."""
        assert isinstance(planner.source, PlanSource)
        return planner.start.origin + planner.sample


def feed_of(
    settings: Settings,
    spec: BatchSpec,
    trace: Trace,
    tuning: WorkerTuning | None = None,
    device: Device | None = None,
) -> Feed | LocalFeed:
    """Return a new feed and begin to start its workers.

    A thread runs it if batches are copied to a device, so that this happens during a step.
    """
    if settings.is_local:
        return LocalFeed(spec, trace)
    workers, turns = settings.workers(), settings.by_torchs_rules
    by_caller = turns and settings.loader.buffer is None and device is None
    limits = settings.limits(settings.depth())
    try:
        return Feed(spec, workers, limits, trace, tuning, device, turns=turns, by_caller=by_caller)
    except (TypeError, AttributeError, PicklingError):
        if workers.start != "fork":
            warnings.warn(
                "Got pickle error when attempting to start a worker Process: with this start "
                "method the dataset, collate_fn and worker_init_fn have to be picklable. Define "
                "them at the top of a module, or use multiprocessing_context='fork'.",
                stacklevel=2,
            )
        raise
