"""A loader's settings, derived from its arguments."""

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
from forebay.buffer import MAX_BATCHES
from forebay.collating.slicing import slicing
from forebay.engine.limits import Limits
from forebay.loading.auto_workers import WorkerTuning
from forebay.loading.depth import LOOKAHEAD, TINY_DEPTH, Depth
from forebay.loading.feed import RELEASED_TOGETHER
from forebay.loading.messages import BatchSpec, WorkerState
from forebay.loading.position import MadeWith
from forebay.loading.samplers import has_state, planned_sampler, resized
from forebay.loading.workers import Workers
from forebay.observe.trace import Trace
from forebay.options import AutoWorkers, cluster_of
from forebay.plan.batch_plan import Plan
from forebay.ranks import Ranks, process_group

# A batch whose worker died, or hung, is made once more.
RETRIES = 1
# Batches up to this size are sliced in the trainer, where the dataset is tensors in memory: making
# one takes less than sending it.
SLICED_BYTES = 1 << 20
# Work to send to a worker in one message, where batches are quick: it need not wait for the next.
GROUP_S = 0.02
MAX_IN_GROUP = 64

_TORCHS_OWN = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class Settings:
    """A loader's settings. Derived for each use, because attributes of a loader may be set.

    Args:
        loader: The loader.

    Attributes:
        by_torchs_rules: Whether none of forebay's own arguments was named, or they do not change
            which worker makes which batch.
        is_iterable: Whether samples come one after another, and cannot be asked for.
        auto_collation: Whether a batch is made of several samples.
        batch_size: Samples of a batch on this rank; None where a sampler says how many.
        drop_last: Whether the incomplete batch of an epoch is left out.
        index_sampler: What gives the index, or the list of indices, of each batch.
        planned: The sampler that stands for a plan; None where a sampler, or an iterable dataset,
            says which batches there are.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.by_torchs_rules: bool = loader._by_torchs_rules
        self.is_iterable = isinstance(loader.dataset, IterableDataset)
        self.auto_collation = loader.batch_sampler is not None
        self.index_sampler = loader.batch_sampler if self.auto_collation else loader.sampler
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self.planned = None
        if not self.by_torchs_rules:
            self.planned = planned_sampler(loader.sampler, loader.batch_sampler)
        if self.planned is not None and self.auto_collation:  # also if re-created around it
            self.batch_size = loader.batch_sampler.batch_size
            self.drop_last = loader.batch_sampler.drop_last

    @functools.cached_property
    def shared(self) -> Plan | None:
        """How batches are shared among ranks; None if they are not. It has no length."""
        ranks, loader = self.loader.ranks, self.loader
        if ranks is None:
            return None
        return Plan(
            length=0,
            batch_size=self.batch_size,
            seed=0,
            world_size=ranks.world_size,
            rank=ranks.rank,
            drop_last=self.drop_last,
            tail=loader.tail,
        )

    @functools.cached_property
    def plan(self) -> Plan | None:
        """Which batches there are; None without a `planned` sampler."""
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
        """The batches of an epoch on this rank."""
        if self.plan is not None:
            return self.plan.steps()
        if self.shared is not None:
            return replace(self.shared, length=len(self.loader.sampler)).steps()
        return len(self.index_sampler)

    @property
    def drawn_from(self) -> torch.Generator:
        """The generator that each iteration draws from; torch itself refuses an impossible one."""
        given = self.loader.generator
        return given if isinstance(given, torch.Generator) else torch.default_generator

    @property
    def draws(self) -> bool:
        """Whether what comes depends on torch's generator when an epoch begins."""
        is_self_contained = self.is_local and type(self.loader.sampler) is SequentialSampler
        return self.by_torchs_rules and (self.is_iterable or not is_self_contained)

    @property
    def keeps_workers(self) -> bool:
        """Whether workers live on from epoch to epoch."""
        return self.loader.buffer is not None or self.loader.persistent_workers

    @functools.cached_property
    def is_sliced(self) -> bool:
        """Whether the dataset is tensors in memory that are best sliced where they are."""
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
    def runs_ahead(self) -> bool:
        """Whether batches of epochs are made that have not begun.

        A datapipe is seeded by the trainer when its epoch begins, and without order epochs would
        mix: there the next epoch waits for that.
        """
        loader = self.loader
        is_free = loader.in_order and not isinstance(loader.dataset, IterDataPipe)
        return loader.buffer is not None and (is_free or not self.by_torchs_rules)

    @property
    def tracks_state(self) -> bool:
        """Whether the position tells where each worker's copy of the dataset stands."""
        is_copied = self.by_torchs_rules and not self.is_local
        return self.is_iterable or (is_copied and has_state(self.loader.dataset))

    @property
    def made_with(self) -> MadeWith:
        """What positions depend on."""
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
        )

    @property
    def length(self) -> int | None:
        """The samples of the dataset, as it says; None if it does not."""
        try:
            return len(self.loader.dataset)
        except TypeError:
            return None

    @property
    def shuffle(self) -> bool | None:
        """Whether the order is random; None where a sampler of the user's decides that."""
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
        """How many ranks a DistributedSampler shares samples among."""
        return int(getattr(self.loader.sampler, "num_replicas", 1))

    def spec(
        self,
        base_seed: int = 0,
        seed: int | None = None,
        first_epoch: int = 0,
        worker_states: tuple[WorkerState, ...] = (),
    ) -> BatchSpec:
        """Return how batches are made; see `BatchSpec`."""
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
            skip_errors=loader.on_error == "skip",
            first_epoch=first_epoch,
            worker_states=worker_states,
            tracks_state=self.tracks_state and not self.is_local,
        )

    def workers(self) -> Workers:
        """Return where batches are made."""
        loader = self.loader
        context = loader.multiprocessing_context or multiprocessing.get_context()
        start: Any = "fork" if context.get_start_method() == "fork" else context
        cluster = cluster_of(loader.backend)
        backend: Any = loader.backend if cluster is None else "ray"
        directory = None if loader.buffer is None else loader.buffer.directory
        return Workers(backend, loader.num_workers, start, directory, cluster)

    def tuning(self, trace: Trace) -> WorkerTuning | None:
        """Return what changes the number of workers; None unless `num_workers="auto"`."""
        workers = self.loader.num_workers
        if not isinstance(workers, AutoWorkers):
            return None
        return WorkerTuning(int(workers), cluster_of(self.loader.backend) is not None, trace)

    def depth(self) -> Depth:
        """Return how many requests to have out."""
        loader = self.loader
        usual = (loader.prefetch_factor or 1) * loader.num_workers
        # More than torch requests, where it makes no visible difference.
        grows = (
            self.by_torchs_rules
            and not loader.prefetch_is_set
            and type(loader.sampler) in (*_TORCHS_OWN, DistributedSampler)
            and (loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler)
        )
        if self.is_local:
            usual = 1 if self.is_iterable else usual
            # A request is but indices here; reading many at a time is quicker.
            return Depth(usual, now=TINY_DEPTH if grows and loader.num_workers else 0)
        if loader.buffer is not None:
            if self.by_torchs_rules:
                usual = loader.buffer.max_batches or LOOKAHEAD
            return Depth(usual, usual, buffer=loader.buffer, counts_batches=self.by_torchs_rules)
        return Depth(usual, max(usual, TINY_DEPTH * loader.num_workers) if grows else usual)

    def limits(self, depth: Depth) -> Limits:
        """Return what the engine may do."""
        loader, buffer = self.loader, self.loader.buffer
        limits = Limits(
            num_workers=loader.num_workers,
            slots=((loader.prefetch_factor or 1) + 1) * loader.num_workers,
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
                # The planner bounds what is out, so that no worker waits for another's slot.
                slots=depth.most * 2 + RELEASED_TOGETHER,
                in_order=loader.in_order,
                group_s=0.0,
                max_group=max(depth.most, 1),
                failure_ends_worker=self.is_iterable,
            )
        if buffer is None:
            return limits
        if buffer.max_batches is None or not self.by_torchs_rules:
            slots = buffer.max_batches or MAX_BATCHES
            limits = replace(limits, slots=slots, refill_below=buffer.low_mark())
        return replace(limits, max_bytes=buffer.nbytes)

    def described(self) -> str:
        """Return the loader in one line: its dataset, sizes, and the arguments given."""
        loader, length = self.loader, self.length
        shown = type(loader.dataset).__name__ + ("" if length is None else f"({length:,})")
        parts = [shown, f"batch_size={self.batch_size}", f"num_workers={loader.num_workers}"]
        if loader.buffer is not None:
            parts.append(f"buffer={loader.buffer.described()}")
        if loader.ranks is not None:
            parts.append("rank={1} of {0}".format(*loader.ranks))
        usual = {"seed": None, "backend": "process", "on_error": "raise", "drop_last": False}
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
