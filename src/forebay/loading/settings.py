"""A loader's settings, derived from its arguments.

Long because one class derives all of them: many depend on each other.
"""

from __future__ import annotations

import functools
import multiprocessing
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.graph_settings import apply_sharding

from forebay.batches import nbytes
from forebay.buffer import MAX_BATCHES, capacity_shown, low_mark_of
from forebay.collating.slicing import slicing
from forebay.engine.limits import Limits
from forebay.loading.auto_workers import WorkerTuning
from forebay.loading.depth import LOOKAHEAD, TINY_DEPTH, Depth
from forebay.loading.feed import RELEASED_TOGETHER
from forebay.loading.loader_arguments import LoaderArguments
from forebay.loading.messages import BatchSpec, WorkerState
from forebay.loading.position import MadeWith
from forebay.loading.samplers import has_state, is_self_contained, planned_sampler, resized
from forebay.loading.workers import Workers
from forebay.observe.trace import Trace
from forebay.options import AutoWorkers, backend_name, cluster_of
from forebay.plan.batch_plan import Plan
from forebay.ranks import Ranks, process_group

# How often a batch is tried again after its worker died or hung.
RETRIES = 1
# If the dataset is tensors in memory, batches up to this size are sliced in the trainer's thread:
# that takes less time than to receive one from a worker.
SLICED_BYTES = 1 << 20
# Work to send to a worker in one message if batches are quick, so that it rarely has to wait.
GROUP_S = 0.02
MAX_IN_GROUP = 64

_TORCHS_OWN = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class Settings:
    """A loader's settings. They are derived for each use, since a loader's attributes can change.

    Args:
        loader: The loader.

    Attributes:
        loader: The loader.
        ranks: The ranks that share its batches; None without `world_size`.
        by_torchs_rules: Whether batches are made as in torch, each by the worker whose turn it is:
            with torch's arguments alone, or with an iterable dataset.
        is_iterable: Whether the dataset is iterable.
        auto_collation: Whether a batch is made from several samples.
        batch_size: Samples of a batch on this rank; None if a batch sampler decides.
        drop_last: Whether the incomplete batch of an epoch is left out.
        index_sampler: Yields the index, or the list of indices, of each batch.
        planned: The sampler with the order of a plan; None if a sampler of the user, or an
            iterable dataset, decides the order.
    """

    def __init__(self, loader: LoaderArguments) -> None:
        self.loader = loader
        self.ranks = loader._ranks
        self.by_torchs_rules = loader._by_torchs_rules
        self.is_iterable = isinstance(loader.dataset, IterableDataset)
        self.auto_collation = loader.batch_sampler is not None
        self.index_sampler = loader.batch_sampler if self.auto_collation else loader.sampler
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self.planned = None
        if not self.by_torchs_rules:
            self.planned = planned_sampler(loader.sampler, loader.batch_sampler)
        # Libraries create a loader with a BatchSampler around the planned sampler.
        if self.planned is not None and self.auto_collation:
            self.batch_size = loader.batch_sampler.batch_size
            self.drop_last = loader.batch_sampler.drop_last

    @functools.cached_property
    def shared(self) -> Plan | None:
        """How ranks share each batch, as a plan without a length; None if they do not."""
        if self.ranks is None:
            return None
        return Plan(
            length=0,
            batch_size=self.batch_size or 1,
            seed=0,
            world_size=self.ranks.world_size,
            rank=self.ranks.rank,
            drop_last=self.drop_last,
            tail=self.loader.tail,
        )

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The plan of the batches; None without a `planned` sampler."""
        if self.planned is None:
            return None
        dataset, plan = self.loader.dataset, self.planned.plan
        alone = replace(plan, batch_size=self.batch_size or 1, drop_last=self.drop_last)
        return replace(
            self.shared or alone,
            length=dataset.samples if plan.mixture is not None else len(dataset),
            seed=self.loader.seed or 0,
            shuffle=plan.shuffle,
            mixture=plan.mixture,
        )

    @property
    def steps(self) -> int:
        """The number of batches of an epoch on this rank."""
        if self.plan is not None:
            return self.plan.steps()
        if self.shared is not None:
            return replace(self.shared, length=len(self.loader.sampler)).steps()
        return len(self.index_sampler)

    @property
    def drawn_from(self) -> torch.Generator:
        """The generator that each iteration draws from; torch refuses an invalid argument."""
        given = self.loader.generator
        return given if isinstance(given, torch.Generator) else torch.default_generator

    @property
    def draws(self) -> bool:
        """Whether batches depend on the state of torch's generator when an epoch begins."""
        draws_none = self.is_local and is_self_contained(self.index_sampler)
        return self.by_torchs_rules and (self.is_iterable or not draws_none)

    @property
    def keeps_workers(self) -> bool:
        """Whether workers are kept from epoch to epoch."""
        return self.loader.buffer is not None or self.loader.persistent_workers

    @property
    def keeps_iterator(self) -> bool:
        """Whether one iterator serves all epochs, as in torch if workers persist."""
        return self.by_torchs_rules and self.loader.num_workers > 0 and self.keeps_workers

    @functools.cached_property
    def is_sliced(self) -> bool:
        """Whether batches are slices of tensors in memory, made in the trainer's thread."""
        loader = self.loader
        cut = slicing(loader.dataset, loader.collate_fn) if self.auto_collation else None
        if cut is None or not len(loader.dataset) or loader.worker_init_fn is not None:
            return False
        if loader.num_workers and (loader.buffer is not None or loader.backend != "process"):
            return False
        row = 0 if not loader.num_workers else nbytes(cut([0]))
        return row * (self.batch_size or 1) <= SLICED_BYTES

    @property
    def is_local(self) -> bool:
        """Whether batches are made in the trainer's thread."""
        return self.loader.num_workers == 0 or self.is_sliced

    @property
    def in_order(self) -> bool:
        """Whether batches are returned in the order of the sampler, or of the workers' turns."""
        loader = self.loader
        is_free = self.by_torchs_rules and not loader.in_order and not self.is_local
        return not is_free or loader.num_workers == 1

    @property
    def runs_ahead(self) -> bool:
        """Whether batches are made for epochs that have not begun.

        Not for a datapipe, which is seeded when its epoch begins, and not with `in_order=False`,
        where batches of two epochs would mix.
        """
        is_seeded_late = self.by_torchs_rules and isinstance(self.loader.dataset, IterDataPipe)
        return self.loader.buffer is not None and self.in_order and not is_seeded_late

    @property
    def tracks_state(self) -> bool:
        """Whether the position includes the state of each worker's copy of the dataset."""
        is_copied = self.by_torchs_rules and not self.is_local
        return self.is_iterable or (is_copied and has_state(self.loader.dataset))

    @property
    def made_with(self) -> MadeWith:
        """The properties that positions depend on."""
        kind = "torch" if self.by_torchs_rules else "sampler"
        if self.is_iterable or self.plan is not None:
            kind = "iterable" if self.is_iterable else "plan"
        size = self.batch_size if self.auto_collation else 1
        ranks = 1 if self.shared is None else self.shared.world_size
        return MadeWith(
            kind=kind,
            global_batch_size=None if size is None else size * ranks * self.replicas,
            drop_last=self.drop_last,
            shuffle=self.shuffle,
            sources=getattr(self.loader.dataset, "lengths", None) if self.plan else None,
            length=None if self.is_iterable else self.plan.length if self.plan else self.length,
            num_workers=self.loader.num_workers if self.by_torchs_rules else 0,
            in_order=self.in_order,
        )

    @property
    def length(self) -> int | None:
        """The length of the dataset; None if it has none."""
        try:
            return len(self.loader.dataset)
        except Exception:  # noqa: BLE001 - the user's class may raise anything; torch asks no length
            return None

    @property
    def shuffle(self) -> bool | None:
        """Whether the order is random; None if a sampler of the user decides that."""
        if self.plan is not None:
            return self.plan.shuffle
        kind = type(self.loader.sampler)
        return kind is RandomSampler if kind in (RandomSampler, SequentialSampler) else None

    @property
    def may_resize(self) -> bool:
        """Whether an epoch may have another number of samples than the dataset."""
        return self.plan is not None or resized(self.index_sampler, 1) is not None

    @property
    def replicas(self) -> int:
        """The number of ranks of a DistributedSampler; 1 for other samplers."""
        count = getattr(self.loader.sampler, "num_replicas", 1)
        return count if isinstance(count, int) else 1

    def spec(
        self,
        base_seed: int = 0,
        seed: int | None = None,
        first_epoch: int = 0,
        worker_states: tuple[WorkerState, ...] = (),
    ) -> BatchSpec:
        """Return how to make batches; see `BatchSpec`."""
        loader = self.loader
        init = loader.worker_init_fn
        if isinstance(loader.dataset, IterDataPipe | MapDataPipe) and loader.num_workers:
            init = functools.partial(_shard, init, process_group())
        return BatchSpec(
            dataset=loader.dataset,
            is_iterable=self.is_iterable,
            auto_collation=self.auto_collation,
            collate_fn=loader.collate_fn,
            drop_last=self.drop_last,
            num_workers=loader.num_workers,
            base_seed=base_seed,
            worker_init_fn=init,
            seed=seed,
            seeds_owned=loader.seed is not None,
            skip_errors=loader.on_error == "skip",
            first_epoch=first_epoch,
            worker_states=worker_states,
            tracks_state=self.tracks_state and not self.is_local,
        )

    def workers(self) -> Workers:
        """Return where workers run, and how many."""
        loader = self.loader
        context = loader.multiprocessing_context or multiprocessing.get_context()
        start: Any = "fork" if context.get_start_method() == "fork" else context
        backend = backend_name(loader.backend)
        directory = None if loader.buffer is None else loader.buffer.directory
        return Workers(backend, loader.num_workers, start, directory, cluster_of(loader.backend))

    def tuning(self, trace: Trace) -> WorkerTuning | None:
        """Return what changes the number of workers; None unless `num_workers="auto"`."""
        workers = self.loader.num_workers
        if not isinstance(workers, AutoWorkers):
            return None
        return WorkerTuning(int(workers), cluster_of(self.loader.backend) is not None, trace)

    def depth(self) -> Depth:
        """Return the limit of outstanding requests."""
        loader = self.loader
        usual = (loader.prefetch_factor or 1) * loader.num_workers
        # More requests than torch makes, if that has no visible effect.
        is_torchs = (
            self.by_torchs_rules
            and type(loader.sampler) in (*_TORCHS_OWN, DistributedSampler)
            and (loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler)
        )
        grows = not loader._prefetch_is_set and (is_torchs or self.plan is not None)
        if self.is_local:
            usual = 1 if self.is_iterable else usual
            # A request is only indices here, and reading many of them at a time is faster.
            return Depth(usual, now=TINY_DEPTH if grows and loader.num_workers else 0)
        if loader.buffer is not None:
            if self.by_torchs_rules:
                usual = loader.buffer.max_batches or LOOKAHEAD
            return Depth(usual, usual, buffer=loader.buffer, counts_batches=self.by_torchs_rules)
        return Depth(usual, max(usual, TINY_DEPTH * loader.num_workers) if grows else usual)

    def limits(self, depth: Depth) -> Limits:
        """Return the limits for the engine."""
        loader, buffer = self.loader, self.loader.buffer
        limits = Limits(
            num_workers=loader.num_workers,
            slots=depth.most + loader.num_workers,
            in_order=True,
            retries=RETRIES,
            timeout_s=loader.timeout or None,
            group_s=GROUP_S,
            max_group=MAX_IN_GROUP,
            lookahead=0,
            all_workers=True,
        )
        if self.by_torchs_rules:
            limits = replace(
                limits,
                # The planner limits the requests, so that no worker waits for another's slot.
                slots=depth.most * 2 + RELEASED_TOGETHER,
                in_order=self.in_order,
                group_s=0.0,
                max_group=max(depth.most, 1),
                failure_ends_worker=self.is_iterable,
            )
        if buffer is None:
            return limits
        if buffer.max_batches is None or not self.by_torchs_rules:
            slots = buffer.max_batches or MAX_BATCHES
            limits = replace(limits, slots=slots, refill_below=low_mark_of(buffer))
        return replace(limits, max_bytes=buffer.nbytes)

    def described(self) -> str:
        """Return the loader in one line: its dataset, sizes and main arguments."""
        loader, length = self.loader, self.length
        shown = type(loader.dataset).__name__ + ("" if length is None else f"({length:,})")
        parts = [shown, f"batch_size={self.batch_size}", f"num_workers={loader.num_workers}"]
        if loader.buffer is not None:
            parts.append(f"buffer={capacity_shown(loader.buffer)}")
        if self.ranks is not None:
            parts.append("rank={1} of {0}".format(*self.ranks))
        usual = {
            "device": None,
            "seed": None,
            "backend": "process",
            "on_error": "raise",
            "drop_last": False,
        }
        known = {name: getattr(loader, name) for name in usual}
        parts += [f"{name}={value!r}" for name, value in known.items() if value != usual[name]]
        return f"{type(loader).__name__}({', '.join(parts)})"


def _shard(init: Any, ranks: Ranks, worker_id: int) -> None:
    """Give a worker its part of a datapipe, among all workers of all ranks; as torch does."""
    info: Any = get_worker_info()
    instances = info.num_workers * ranks.world_size
    apply_sharding(info.dataset, instances, worker_id * ranks.world_size + ranks.rank)
    if init is not None:
        init(worker_id)
