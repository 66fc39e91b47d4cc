"""The pipeline behind a loader's iterators: source, planner, feed, and their position.

    settings, position ──> Pipeline.begin ──> planner ──> iterator

With only torch's arguments each iteration has a new pipeline, unless workers persist. A loader with
any of forebay's arguments keeps one pipeline, since each epoch continues from the one before.
"""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from itertools import zip_longest
from pickle import PicklingError
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler

from forebay.base.datasets import OwnedGenerators, sequence_rows
from forebay.base.randomness import (
    generators_kept,
    generators_locked,
    generators_seeded,
    seeded_generator,
)
from forebay.devices.device import Device, copying_device
from forebay.errors import OptionError
from forebay.failures import Failure, FailureLog
from forebay.loading.feed import Feed, LocalFeed
from forebay.loading.messages import BatchRequest, BatchResult, BatchSpec, WorkerState
from forebay.loading.planner import Planner
from forebay.loading.position import DAMAGED, NO_ORDER, Position
from forebay.loading.samplers import (
    NO_STATE,
    chain_of,
    draw_seed,
    fingerprint,
    has_state,
    holds_position,
    is_foreseen,
    set_generator,
    set_states,
    state_of_generator,
    states_of,
)
from forebay.loading.settings import Settings
from forebay.loading.sources import IterableSource, PlanSource, SamplerSource, Source
from forebay.loading.workers import WorkerTuning
from forebay.mixture import Mixture
from forebay.observe.figures import Statistics, statistics_of
from forebay.observe.record import Trace
from forebay.plan import Plan
from forebay.ranks import Ranks, check_agreement, check_still
from forebay.seeds import DEVICE, seed_of, worker_seed_of

# Prepare a batch for the user: on the loader's device, and transformed there.


class HandOut:
    """Moves and transforms the batches of one loader, in the thread that takes them.

    Attributes:
        device: Where the feed copies batches in advance; None if they stay in host memory.
    """

    def __init__(self, settings: Settings) -> None:
        loader = settings.loader
        pins = bool(loader.pin_memory)
        self.device: Device | None = copying_device(loader.device, pins=pins)
        self._transform: Callable[..., Any] | None = loader.device_transform
        # With the device "cpu" batches are returned as they were made: in host memory.
        moves = loader.device is not None and self.device is not None
        self.is_needed = moves or self._transform is not None
        self._takes_generator = _takes_generator(self._transform)
        self._replays = loader.seed is not None and not settings.is_iterable

    def __call__(self, request: BatchRequest, result: BatchResult, seed: int | None) -> Any:
        """Return the batch on the device, transformed.

        Args:
            seed: The loader's seed; None for random numbers that depend on the generators.
        """
        batch, device = result.batch, self.device
        if device is not None and self.is_needed and not result.is_moved:
            batch = device.moved(batch)
        if self._transform is None:
            return batch
        if seed is not None:
            seed = seed_of(seed, DEVICE, request.epoch, request.batch)
        try:
            if device is None:
                return self._transformed(batch, seed)
            with device.on_copy_stream():
                batch = self._transformed(batch, seed)
        except Exception as error:
            error.add_note(f"forebay: device_transform raised it, for {request}")
            if self._replays:
                error.add_note(request.replay_note)
            raise
        device.hand_over(batch)
        return batch

    def _transformed(self, batch: Any, seed: int | None) -> Any:
        transform, device = self._transform, self.device
        assert transform is not None
        if self._takes_generator:
            where = "cpu" if device is None else device.torch_device
            generator = None if seed is None else seeded_generator(seed, where)
            return transform(batch, generator=generator)
        if seed is None:
            return transform(batch)
        other = None if device is None else device.default_generator()
        with generators_seeded(seed, *([] if other is None else [other])):
            return transform(batch)


def _takes_generator(function: Callable[..., Any] | None) -> bool:
    if function is None:
        return False
    try:
        return "generator" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in
        return False


# ---- pipeline ------------------------------------------------------------------------------------


class Pipeline:
    """Makes the batches of one loader, epoch after epoch.

    Attributes:
        seed: The seed of all batches; None by torch's rules, and before it is drawn.
        mixture: The current mixture of sources; None if there is one dataset.
        feed: Makes the batches; None before the first epoch, and when closed.
        planner: Decides which batches are requested; None before the first epoch.
    """

    def __init__(self, settings: Settings, trace: Trace) -> None:
        self.seed: int | None = settings.loader.seed
        self.mixture: Mixture | None = settings.plan.mixture if settings.plan else None
        self.feed: Feed | LocalFeed | None = None
        self.planner: Planner | None = None
        self.keeps_workers = settings.keeps_workers
        self.reader: int | None = None
        self.last: tuple[BatchRequest, tuple[Failure, ...]] | None = None
        self._trace = trace
        self._tuning = settings.tuning(trace)
        self.generator_before: str | None = None
        self.drew_base_seed = True
        self._dataset_seen: Any = None
        self._replaces_workers = False
        self._has_agreed = self._has_searched = False
        self.hand_out = HandOut(settings)

    # ---- an epoch ------------------------------------------------------------------------------

    def begin(self, settings: Settings, position: Position, iterator: Any) -> Planner:
        """Begin an epoch, or the rest of one; return the planner, which returns its batches."""
        self.keeps_workers, self.reader = settings.keeps_workers, id(iterator)
        if not self.keeps_workers:
            self.close(between_epochs=True)
        is_rest = position.batch > 0 and settings.by_torchs_rules
        skip = position.batch if settings.is_iterable and not position.knows_workers else 0
        if skip:  # a dataset without a state is read again up to the position
            position = replace(position, batch=0, sample=0, worker_states=(), next_worker=0)
        # On a resume the global generator keeps its state: restoring it is up to the user.
        is_users = is_rest and settings.loader.generator is None
        try:
            with generators_kept() if is_users else generators_locked():
                self._draw_as_torch(settings, position, iterator)
                planner, feed = self._opened(settings, position, iterator)
                if not position.knows_workers:
                    planner.begin(feed, position.start, position.next_worker)
                    if is_rest:
                        planner.read_ahead()
                    for _ in range(skip):
                        if planner.take() is None:
                            break  # the dataset has become shorter
            if position.knows_workers:  # not before: the dataset may restore the generators itself
                planner.begin(feed, position.start, position.next_worker)
        except BaseException:
            self.close()  # it may be inconsistent
            raise
        return planner

    def _draw_as_torch(self, settings: Settings, position: Position, iterator: Any) -> None:
        """Draw from the generators, and iterate the sampler, as torch's iterators do."""
        loader, generator = settings.loader, settings.drawn_from
        if position.generator is not None:
            set_generator(generator, position.generator)
        if settings.by_torchs_rules:
            self.generator_before = state_of_generator(generator)
        # torch draws a base seed once for workers that persist.
        persists = loader.persistent_workers and self.feed is not None and self.feed.is_open
        self.drew_base_seed = position.draws_base_seed and not persists
        # With workers, torch resets a new iterator, too: that draws, and iterates the sampler,
        # again. A sampler that keeps its position might lose it.
        resets = loader.num_workers > 0 and not holds_position(settings.index_sampler)
        iterator.begin_as_torch(loader, generator, draws=self.drew_base_seed, resets=resets)
        is_shuffled = isinstance(loader.sampler, RandomSampler)
        if is_shuffled and loader.sampler.generator is None and not settings.by_torchs_rules:
            draw_seed(None)  # as torch does for the order: later draws are equal to torch's

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
        planner.shared_seed, source = iterator.first_shared_seed, planner.source
        if settings.is_iterable and loader.seed is not None:  # also for the shuffle of a datapipe
            planner.shared_seed = base_seed = worker_seed_of(loader.seed, position.epoch)
        if isinstance(source, PlanSource) and source.plan != (plan := self._plan(settings)):
            source.plan = plan  # the dataset has another length
            planner.refresh()
        if isinstance(source, PlanSource | SamplerSource):
            source.as_tensors = settings.is_sliced  # the dataset may have another format
        if isinstance(source, SamplerSource) and settings.by_torchs_rules:
            source.iterator = iterator._sampler_iter
        if self._replaces_workers:  # new workers get copies of the dataset in its current state
            self.close(between_epochs=True)
            planner.worker_states = []
        planner.worker_states = self._worker_states(settings, position, planner)
        if settings.ranks is not None and not self._has_agreed:
            self._check_ranks(settings.ranks, settings, position)
        feed = self.feed
        seen = self._dataset_fingerprint(settings)
        # Workers got copies of the dataset, which the user may have changed since.
        is_old = seen != self._dataset_seen or settings.renews_workers
        if feed is None or not feed.is_open or is_old:
            self.close(between_epochs=True)
            seed = None
            # Threads draw from the generators of the process, unless the user set a seed.
            if not settings.by_torchs_rules and (
                loader.seed is not None or loader.backend != "thread"
            ):
                seed = self.seed
            self._replaces_workers, self._dataset_seen = False, seen
            states = tuple(each.copied() for each in planner.worker_states)
            spec = settings.spec(base_seed, seed, position.epoch, states)
            device = self.hand_out.device
            if spec.seeds_owned and not self._has_searched and not settings.is_sliced:
                self._has_searched = True
                OwnedGenerators(dataset=spec.dataset, collate_fn=spec.collate_fn).warn_if_cut(
                    type(spec.dataset).__name__
                )
            feed = self.feed = feed_of(settings, spec, self._trace, self._tuning, device)
        feed.in_use = iterator.one_at_a_time
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
        } | ({} if self.mixture is None else {"weights": self.mixture.weights})
        self._has_agreed = check_agreement(ranks, facts)

    def planner_for(self, settings: Settings) -> Planner:
        """Return the planner; create it if there is none."""
        if self.planner is None:
            self.planner = Planner(self._source(settings), settings)
        return self.planner

    def _source(self, settings: Settings) -> Source:
        if settings.is_iterable:
            return IterableSource(settings.batch_size if settings.auto_collation else None)
        if settings.plan is not None:
            plan, ahead = self._plan(settings), settings.lookahead(self._trace)
            return PlanSource(plan, settings.auto_collation, settings.is_sliced, ahead)
        seed = None if settings.by_torchs_rules else self.seed
        return SamplerSource(settings.index_sampler, seed, settings)

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
            return [state.before_epoch() for state in planner.worker_states]
        return [WorkerState()] * (1 if settings.is_local else settings.loader.num_workers)

    def _dataset_fingerprint(self, settings: Settings) -> Any:
        """Return the dataset's fingerprint; None if changes of it are not detected."""
        loader = settings.loader
        if settings.is_iterable or settings.is_local or loader.persistent_workers:
            return None
        if not settings.is_filled or loader.backend == "thread":
            return None
        return fingerprint(loader.dataset)

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
                planner.source.close()
            return
        feed.close()
        if planner is not None:
            planner.worker_states = feed.worker_states() or planner.worker_states
            planner.detach(between_epochs)

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

    def tokens_by_source(self, dataset: Any) -> dict[str, tuple[int, float]]:
        """Return the tokens returned from each dataset of rows; see `Statistics.tokens`."""
        planner = self.planner
        if planner is None or not isinstance(planner.source, PlanSource):
            return {}
        counts = self.samples_by_source(getattr(dataset, "datasets", ()))
        counts = counts or {"dataset": (self._mixture_position(planner), 0.0)}
        return {
            name: (round(counts[name][0] * each.tokens / len(each)), each.filled)
            for name, each in sequence_rows(dataset).items()
            if name in counts
        }

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
    """Return a new feed and begin to start its workers."""
    if settings.is_local:
        return LocalFeed(settings, spec, trace)
    if settings.start_method != "fork" and settings.cluster is None:
        from forebay.pools.main_module import check_main

        check_main(settings.start_method, spec.dataset, spec.collate_fn, spec.worker_init_fn)
    try:
        return Feed(settings, spec, trace, tuning, device)
    except (TypeError, AttributeError, PicklingError):
        if settings.start_method != "fork":
            warnings.warn(
                "Got pickle error when attempting to start a worker Process: with this start "
                "method the dataset, collate_fn and worker_init_fn have to be picklable. Define "
                "them at the top of a module, or use multiprocessing_context='fork'.",
                stacklevel=2,
            )
        raise


# ---- loader progress -----------------------------------------------------------------------------
# The loader itself holds only its arguments.


class LoaderProgress:
    """What a loader has returned so far, and where it continues.

    A copy has returned nothing yet; it keeps a position that was loaded and not yet used.

    Args:
        resumed: Where the first iteration begins; None for the first epoch.

    Attributes:
        resumed: Where the next iteration begins, if a state was loaded; None otherwise.
        pipeline: The pipeline of the last iteration; None before the first.
    """

    def __init__(self, resumed: Position | None = None) -> None:
        self.resumed = resumed
        self.trace, self.failures = Trace(), FailureLog()
        self.pipeline: Pipeline | None = None
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()  # those in use
        self._next_epoch = 0 if resumed is None else resumed.epoch

    def __reduce__(self) -> Any:
        """Copy and pickle no pipelines and no counts."""
        return LoaderProgress, (self.resumed,)

    # ---- an epoch ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """See `DataLoader.epoch`."""
        planner = None if self.pipeline is None else self.pipeline.planner
        if self.resumed is not None or planner is None:
            return self._next_epoch
        return planner.epoch + (not planner.has_next())

    def next_start(self, settings: Settings, own: Pipeline | None) -> tuple[Pipeline, Position]:
        """Return where the next iteration begins, and the pipeline that it reads.

        Args:
            own: The pipeline of a persistent iterator, which continues with its workers; else None.
        """
        pipeline = own or self.pipeline_for(settings, is_new=settings.by_torchs_rules)
        self.pipeline = pipeline
        if self.resumed is not None:
            return pipeline, self.resumed
        epoch = self._next_epoch
        origin = 0 if pipeline.planner is None else pipeline.planner.origin_of(epoch)
        return pipeline, Position(made_with=settings.made_with, epoch=epoch, origin=origin)

    def began(self, epoch: int) -> None:
        """Note that an epoch has begun, from the start of it or from a loaded state."""
        self.resumed, self._next_epoch = None, epoch + 1

    def pipeline_for(self, settings: Settings, *, is_new: bool) -> Pipeline:
        """Return the pipeline of the last iteration; a new one if there is none, or `is_new`."""
        if self.pipeline is None or is_new:
            self.pipeline = Pipeline(settings, self.trace)
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
        self.trace.hide()

    # ---- position ------------------------------------------------------------------------------

    def position(self, settings: Settings) -> Position:
        """Return the position; at the end of an epoch it is the start of the next one."""
        if self.resumed is not None:
            return self.resumed
        pipeline = self.pipeline
        planner = None if pipeline is None else pipeline.planner
        if pipeline is None or planner is None or planner.epoch < 0:
            return self._start(settings, self._next_epoch, 0)
        feed, is_over = pipeline.feed, not planner.has_next()
        states = (feed and feed.worker_states()) or planner.worker_states
        epoch = planner.epoch + is_over
        known = {"seed": pipeline.seed, **planner.sampler_position()}
        position = self._start(settings, epoch, planner.origin_of(epoch), **known)
        if settings.is_iterable and settings.is_local and states:
            # The state of the worker is that of the same object.
            position = replace(position, dataset=None)
        if is_over:
            lives_on = pipeline.keeps_workers or settings.is_local
            keeps_seed = settings.loader.persistent_workers and settings.by_torchs_rules
            return replace(
                position,
                worker_states=tuple(each.copied().before_epoch() for each in states if lives_on),
                draws_base_seed=not keeps_seed,
            )
        if planner.batch > planner.start.batch and not settings.in_order:
            raise OptionError(NO_ORDER.format(epoch=epoch, count=planner.batch))
        return replace(
            position,
            batch=planner.batch,
            sample=planner.sample,
            length=planner.start.length,
            counts_samples=planner.start.by_sample,
            generator=pipeline.generator_before if settings.draws else None,
            draws_base_seed=pipeline.drew_base_seed,
            worker_states=tuple(each.copied() for each in states),
            next_worker=planner.next_worker,
        )

    def _start(self, settings: Settings, epoch: int, origin: int, **known: Any) -> Position:
        """Return the position before an epoch that has not begun."""
        loader = settings.loader
        mixture = settings.plan.mixture if settings.plan else None
        if not known:
            states = None if settings.is_iterable else states_of(settings.index_sampler)
            known = {"seed": loader.seed, "sampler": states, "set_epoch": settings.sampler_epoch}
        if self.pipeline is not None:
            mixture = self.pipeline.mixture
        draws = loader.generator is not None and settings.draws
        return Position(
            made_with=settings.made_with,
            epoch=epoch,
            origin=origin,
            **known,
            dataset=settings.dataset_state(),
            generator=state_of_generator(loader.generator) if draws else None,
            mixture=None if mixture is None else mixture.state(),
        )

    def resume(self, position: Position) -> None:
        """Begin the next iteration at a position; iterators that began before return no more."""
        if self.pipeline is not None:
            self.pipeline.reader = None
        self.pipeline = None
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
        sources, tokens = {}, {}
        if pipeline is not None and pipeline.planner is not None:
            planner = pipeline.planner
            epoch, batch = planner.epoch, planner.batch
            sources = pipeline.samples_by_source(getattr(loader.dataset, "datasets", ()))
            tokens = pipeline.tokens_by_source(loader.dataset)
            if pipeline.feed is not None and settings.in_order:
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


def restore_states(settings: Settings, position: Position) -> None:
    """Restore the states of the dataset and the samplers of this process from a position."""
    dataset, sampler, given = (
        settings.loader.dataset,
        settings.index_sampler,
        position.sampler or [],
    )
    own = states_of(sampler) or []
    states = [position.dataset, *(each.dataset for each in position.worker_states)]
    if not has_state(dataset) and any(each is not None for each in states):
        raise OptionError(NO_STATE.format("dataset", type(dataset).__name__))
    for each, has, state in zip_longest(chain_of(sampler), own, given):
        if state and (not has or has.keys() != state.keys()):
            raise OptionError(NO_STATE.format("sampler", type(each).__name__))
        if has and not state and position.batch:
            raise OptionError(DAMAGED.format(f"it has no state of the {type(each).__name__}"))
    if position.batch and position.generator is None and settings.orders_by_draws:
        raise OptionError(DAMAGED.format("it has no state of torch's generator"))
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
    if position.set_epoch is not None and settings.has_epoch and is_foreseen(sampler):
        chain_of(sampler)[-1].set_epoch(position.set_epoch)


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
