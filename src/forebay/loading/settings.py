"""A loader's settings, derived from its arguments."""

from __future__ import annotations

import copy
import functools
import math
import multiprocessing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

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
    default_collate,
    get_worker_info,
)
from torch.utils.data.graph_settings import apply_sharding

from forebay.base.datasets import cached_samples, getitems_of, sequence_rows
from forebay.base.torch_internals import accepts
from forebay.buffer import MAX_BATCHES, capacity_shown, low_mark_of, warn_of_unfilled_buffer
from forebay.columns.slicing import Slicer, slicing
from forebay.devices.device import check_loader_device
from forebay.engine.limits import Limits
from forebay.errors import OptionError
from forebay.loading.fetch import AHEAD
from forebay.loading.messages import (
    LOOKAHEAD,
    RELEASED_TOGETHER,
    TINY_DEPTH,
    BatchSpec,
    Depth,
    WorkerState,
)
from forebay.loading.position import MadeWith
from forebay.loading.samplers import (
    epoch_of,
    has_state,
    is_self_contained,
    length_of,
    planned_sampler,
    resized,
    takes_set_epoch,
)
from forebay.loading.workers import WorkerTuning
from forebay.mixing import MixedDataset
from forebay.observe.progress import log
from forebay.observe.record import Trace
from forebay.options import (
    AutoWorkers,
    Ray,
    check_backend,
    check_killable,
    check_positive,
    check_timeout,
    cluster_of,
)
from forebay.plan import Plan
from forebay.ranks import Ranks, process_group

if TYPE_CHECKING:
    from forebay.loader import DataLoader

# ---- settings ------------------------------------------------------------------------------------

# How often a batch is tried again after its worker died or hung.
RETRIES = 1
# Larger slices for a device are left to worker processes: only their batches are copied in advance.
MOST_COPIED = 1 << 20
# Work to send to a worker in one message if batches are quick, so that it rarely has to wait.
GROUP_S = 0.02
MAX_IN_GROUP = 64

_TORCHS_OWN = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class Settings:
    """A loader's settings. They are derived for each use, since a loader's attributes can change.

    Attributes:
        ranks: The ranks that share its batches; None without `world_size`.
        batch_size: Samples of a batch on this rank; None if a batch sampler decides.
        planned: The sampler with the order of a plan; None if a sampler of the user, or an
            iterable dataset, decides the order.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = cast(Any, loader)  # torch types a dataset without a length, for example
        self.ranks = loader._ranks
        self.by_torchs_rules = loader._by_torchs_rules
        self.is_iterable = isinstance(loader.dataset, IterableDataset)
        self.auto_collation = loader.batch_sampler is not None
        known = self.loader
        self.index_sampler = known.batch_sampler if self.auto_collation else known.sampler
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self.planned = None
        if not self.by_torchs_rules:
            self.planned = planned_sampler(loader.sampler, loader.batch_sampler)
        # Libraries create a loader with a BatchSampler around the planned sampler.
        if self.planned is not None and self.auto_collation:
            self.batch_size = self.index_sampler.batch_size
            self.drop_last = self.index_sampler.drop_last

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
        whole = replace(
            self.shared or alone,
            length=dataset.samples if plan.mixture is not None else len(dataset),
            seed=self.loader.seed or 0,
            shuffle=plan.shuffle,
            mixture=plan.mixture,
            by_epoch=plan.by_epoch,
            costs_of=plan.costs_of if self.ranks and self.ranks.world_size > 1 else None,
        )
        if plan.shuffle and (windows := self._windows(whole.global_batch_size)) is not None:
            whole = replace(whole, order=windows.at)
        if plan.mixture is None or not dataset.schedule:
            return whole
        stages = tuple((whole.position_of(at), weights) for at, weights in dataset.schedule)
        return replace(whole, mixture=replace(plan.mixture, schedule=stages))

    def _windows(self, batch: int) -> Any:
        cached = cached_samples(self.loader.dataset)
        return None if cached is None else cached.windows(batch)

    def lookahead(self, trace: Trace) -> Any:
        """Return what has blocks of a bucket fetched before they are needed; None for others."""
        cached, plan = cached_samples(self.loader.dataset), self.plan
        if cached is None or cached.remote is None:
            return None
        if plan is None or self.cluster is not None:
            why = "nothing says beforehand in which order. With seed=, blocks are fetched ahead"
            why = why if plan is None else "workers on a cluster do not share what this one fetches"
            log.warning("%r: its samples are fetched one by one, since %s", cached, why)
            return None
        log.info("%r: %s", cached, cached.described(plan.global_batch_size, plan.shuffle))
        first = plan.rank * plan.batch_size
        own = plan.global_batch_size, first, plan.batch_size, plan.shuffle
        return cached.lookahead(*own, trace.fetched)

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
    def orders_by_draws(self) -> bool:
        """Return whether samples depend on the state of torch's generator when an epoch begins."""
        is_free = self.is_iterable or not is_self_contained(self.index_sampler)
        return self.by_torchs_rules and is_free

    @property
    def draws(self) -> bool:
        """Return whether batches depend on the state of torch's generator when an epoch begins."""
        return self.orders_by_draws or (self.by_torchs_rules and not self.is_local)

    @property
    def keeps_workers(self) -> bool:
        """Return whether workers are kept from epoch to epoch."""
        return self.is_filled or self.loader.persistent_workers

    @property
    def keeps_iterator(self) -> bool:
        """Return whether one iterator serves all epochs, as in torch if workers persist."""
        return self.by_torchs_rules and self.loader.num_workers > 0 and self.keeps_workers

    @functools.cached_property
    def _slicer(self) -> Slicer | None:
        """What makes batches in the trainer's process; None if workers, or samples, are needed."""
        loader = self.loader
        if not self.auto_collation or loader.worker_init_fn is not None:
            return None
        slicer = slicing(loader.dataset, loader.collate_fn)
        if slicer is None or not len(loader.dataset) or self.cluster is not None:
            return None
        is_copied = loader.num_workers and loader.device is not None and str(loader.device) != "cpu"
        is_large = slicer.nbytes * (self.batch_size or 1) > MOST_COPIED
        return None if is_copied and is_large else slicer

    @property
    def is_sliced(self) -> bool:
        """Return whether batches are slices of what is in memory, made in the trainer's process."""
        return self._slicer is not None

    @property
    def sliced_ahead(self) -> int:
        """How many slices to make in advance, in a thread: as many as workers would."""
        loader, slicer = self.loader, self._slicer
        if slicer is None or not loader.num_workers:
            return 0
        if loader.buffer is None:
            return self._prefetched
        size = slicer.nbytes * (self.batch_size or 1)
        by_bytes = (loader.buffer.nbytes or MAX_BATCHES * size) // max(size, 1)
        return max(min(by_bytes, loader.buffer.max_batches or MAX_BATCHES), 1)

    @property
    def is_local(self) -> bool:
        """Return whether batches are made in the trainer's process, of the dataset itself."""
        return self.loader.num_workers == 0 or self.is_sliced

    @property
    def concurrency(self) -> int:
        """The number of samples that each worker fetches at once."""
        return self.loader.concurrency or 1

    @property
    def one_at_a_time(self) -> str:
        """Why samples of this dataset cannot be fetched at once; empty if they can."""
        dataset = self.loader.dataset
        if self.is_iterable:
            return "an iterable dataset yields one sample after the other"
        if self.auto_collation and slicing(dataset, self.loader.collate_fn) is not None:
            return "its batches are slices of what is in memory, where nothing waits"
        if self.auto_collation and getitems_of(dataset) is not None:
            return "its __getitems__ is called with a whole batch, and can read at once itself"
        return ""

    @property
    def at_once(self) -> int:
        """The number of batches that each worker has samples of, so that no thread is idle."""
        if self.concurrency == 1:
            return 1
        # Of a sampler of the user it is not known how many samples its batches have.
        return 1 + math.ceil(AHEAD * self.concurrency / (self.batch_size or 1))

    @property
    def is_filled(self) -> bool:
        """Return whether workers fill a buffer."""
        return self.loader.buffer is not None and not self.is_local

    @property
    def in_order(self) -> bool:
        """Return whether batches are returned in the order of the sampler, or of workers' turns."""
        loader = self.loader
        is_free = self.by_torchs_rules and not loader.in_order and not self.is_local
        return not is_free or loader.num_workers == 1

    @property
    def runs_ahead(self) -> bool:
        """Return whether batches are made for epochs that have not begun.

        Not for a datapipe, which is seeded when its epoch begins, and not with `in_order=False`,
        where batches of two epochs would mix. Nor for a sampler or dataset of the user that has
        `set_epoch`, since its next epoch depends on a call that is still to come.
        """
        if not self.is_filled or not self.in_order:
            return False
        if takes_set_epoch(self.loader.dataset) or takes_set_epoch(self.index_sampler):
            return False
        return not (self.by_torchs_rules and isinstance(self.loader.dataset, IterDataPipe))

    @property
    def renews_workers(self) -> bool:
        """Return whether each epoch needs workers with copies of the dataset as it is then.

        So it does if the dataset has `set_epoch`. Workers that persist in torch do so here, too.
        """
        is_torchs = self.by_torchs_rules and self.loader.buffer is None
        is_copied = not self.is_local and self.loader.backend != "thread"
        return is_copied and not is_torchs and takes_set_epoch(self.loader.dataset)

    @property
    def has_epoch(self) -> bool:
        """Return whether the sampler may have an epoch that is part of the position."""
        return not self.by_torchs_rules and not self.is_iterable

    @property
    def sampler_epoch(self) -> int | None:
        """The argument of the last `set_epoch` of the sampler; see `epoch_of`."""
        return epoch_of(self.index_sampler) if self.has_epoch else None

    @property
    def tracks_state(self) -> bool:
        """Return whether the position includes the state of each worker's copy of the dataset."""
        is_copied = self.by_torchs_rules and not self.is_local
        return self.is_iterable or (is_copied and has_state(self.loader.dataset))

    def dataset_state(self) -> Any:
        """Return the state of this process's dataset; None if it has none."""
        dataset = self.loader.dataset
        if not has_state(dataset):
            return None
        try:
            return copy.deepcopy(dataset.state_dict())
        except Exception:
            if self.is_local:
                raise
            return None  # an object that is filled where it is read, in workers

    @property
    def made_with(self) -> MadeWith:
        """The properties that positions depend on."""
        plan, kind = self.plan, "torch" if self.by_torchs_rules else "sampler"
        if self.is_iterable or plan is not None:
            kind = "iterable" if self.is_iterable else "plan"
        size = self.batch_size if self.auto_collation else 1
        if self.auto_collation and type(self.index_sampler) is not BatchSampler:
            size = None  # some libraries put a batch sampler of theirs there
        ranks = 1 if self.shared is None else self.shared.world_size
        replicas = getattr(self.loader.sampler, "num_replicas", 1)  # of a DistributedSampler
        replicas = replicas if isinstance(replicas, int) else 1
        windows: Any = plan and plan.order and self._windows(plan.global_batch_size)
        return MadeWith(
            kind=kind,
            global_batch_size=None if size is None else size * ranks * replicas,
            drop_last=self.drop_last,
            shuffle=self.shuffle,
            sources=self.loader.dataset.lengths if plan and plan.mixture else None,
            length=None if self.is_iterable else plan.length if plan else self.length,
            num_workers=self.loader.num_workers if self.by_torchs_rules else 0,
            windows=windows and windows.state,
        )

    @property
    def length(self) -> int | None:
        """The length of the dataset; None if it has none."""
        return length_of(self.loader.dataset)

    @property
    def shuffle(self) -> bool | None:
        """Return whether the order is random; None if a sampler of the user decides that."""
        if self.plan is not None:
            return self.plan.shuffle
        kind = type(self.loader.sampler)
        return kind is RandomSampler if kind in (RandomSampler, SequentialSampler) else None

    @property
    def may_resize(self) -> bool:
        """Return whether an epoch may have another number of samples than the dataset."""
        return self.plan is not None or resized(self.index_sampler, 1) is not None

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
            keeps_workers=self.keeps_workers,
            snapshot_every=loader.snapshot_every_n_steps,
            concurrency=self.concurrency,
        )

    @property
    def start_method(self) -> Any:
        """How worker processes start: "fork", or another context of multiprocessing."""
        context = self.loader.multiprocessing_context or multiprocessing.get_context()
        return "fork" if context.get_start_method() == "fork" else context

    @property
    def cluster(self) -> Ray | None:
        """The cluster that workers run on; None for this machine."""
        return cluster_of(self.loader.backend)

    def tuning(self, trace: Trace) -> WorkerTuning | None:
        """Return what changes the number of workers; None unless `num_workers="auto"`."""
        workers = self.loader.num_workers
        if not isinstance(workers, AutoWorkers) or self.is_local:
            return None
        return WorkerTuning(int(workers), self.cluster is not None, trace)

    @property
    def _prefetched(self) -> int:
        """Batches that workers make in advance, without a buffer; 0 without workers."""
        return max(self.loader.prefetch_factor or 1, self.at_once) * int(self.loader.num_workers)

    def depth(self) -> Depth:
        """Return the limit of outstanding requests."""
        loader, buffer, usual = self.loader, self.loader.buffer, self._prefetched
        # More requests than torch makes, if that has no visible effect.
        is_torchs = (
            self.by_torchs_rules
            and type(loader.sampler) in (*_TORCHS_OWN, DistributedSampler)
            and (loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler)
        )
        grows = not loader._prefetch_is_set and (is_torchs or self.plan is not None)
        if self.is_local:
            usual = 1 if self.is_iterable else max(usual, self.at_once - 1)
            # A request is only indices here, and reading many of them at a time is faster.
            return Depth(usual, now=TINY_DEPTH if grows and loader.num_workers else 0)
        if buffer is not None and (buffer.max_batches is None or not self.by_torchs_rules):
            return Depth(LOOKAHEAD, LOOKAHEAD, fills_by_itself=True)
        if buffer is not None and buffer.max_batches is not None:
            low, most = low_mark_of(buffer), buffer.max_batches
            return Depth(most, most, low if isinstance(low, int) else math.ceil(low * most))
        return Depth(usual, max(usual, TINY_DEPTH * loader.num_workers) if grows else usual)

    def limits(self, depth: Depth) -> Limits:
        """Return the limits for the engine."""
        loader, buffer, turns = self.loader, self.loader.buffer, self.by_torchs_rules
        slots, low = depth.most + loader.num_workers, None
        if turns:  # the planner limits the requests, so that no worker waits for another's slot
            slots = depth.most * 2 + RELEASED_TOGETHER
        if buffer is not None and depth.fills_by_itself:
            slots, low = buffer.max_batches or MAX_BATCHES, low_mark_of(buffer)
        return Limits(
            num_workers=loader.num_workers,
            slots=slots,
            at_once=self.at_once,
            max_bytes=None if buffer is None else buffer.nbytes,
            refill_below=low,
            in_memory=buffer is None or buffer.directory is None,
            in_order=self.in_order,
            retries=RETRIES,
            timeout_s=loader.timeout or None,
            group_s=0.0 if turns or self.at_once > 1 else GROUP_S,
            max_group=max(depth.most, 1) if turns else MAX_IN_GROUP,
            lookahead=0,
            all_workers=True,
            failure_ends_worker=turns and self.is_iterable,
        )

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
            "concurrency": None,
        }
        known = {name: getattr(loader, name) for name in usual}
        parts += [f"{name}={value!r}" for name, value in known.items() if value != usual[name]]
        name = loader.name if isinstance(loader.name, str) else ""
        return f"{f'{name}: ' if name else ''}{type(loader).__name__}({', '.join(parts)})"


def _shard(init: Any, ranks: Ranks, worker_id: int) -> None:
    """Give a worker its part of a datapipe, among all workers of all ranks; as torch does."""
    info: Any = get_worker_info()
    instances = info.num_workers * ranks.world_size
    apply_sharding(info.dataset, instances, worker_id * ranks.world_size + ranks.rank)
    if init is not None:
        init(worker_id)


# ---- checks --------------------------------------------------------------------------------------


def check(settings: Settings) -> None:
    """Refuse impossible values and combinations of forebay's own arguments."""
    loader, ranks = settings.loader, settings.ranks
    rows = sequence_rows(loader.dataset).values()
    check_backend(loader.backend)
    _check("on_error", loader.on_error, ("raise", "skip"))
    _check("tail", loader.tail, ("repeat", "uneven"))
    if loader.seed is not None and type(loader.seed) is not int:
        raise OptionError(f"seed={loader.seed!r} is not valid; it must be an integer or None")
    if loader.concurrency is not None:
        check_positive("concurrency", loader.concurrency, " or None")
    if loader.snapshot_every_n_steps is not None:
        check_positive("snapshot_every_n_steps", loader.snapshot_every_n_steps, " or None")
    if loader.timeout and loader.num_workers:  # torch itself refuses negative values
        check_timeout(loader.timeout)
    if not settings.by_torchs_rules:
        check_killable(loader.timeout, loader.num_workers)
    check_loader_device(loader.device)
    buffer, workers, backend = loader.buffer, loader.num_workers, loader.backend
    on_cluster = settings.cluster is not None
    alone = settings.one_at_a_time if settings.concurrency > 1 else ""
    refused = [
        (
            buffer is not None and buffer.directory is not None and backend == "thread",
            "Buffer(directory=) is not possible with backend='thread', whose batches are the "
            "trainer's own memory\n"
            "  Nothing was started. Use backend='process', or a buffer in memory.",
        ),
        (
            loader.generator is not None and loader.seed is not None,
            f"generator= with seed={loader.seed} would have no effect: all random numbers come "
            "from the seed, which is 0 for ranks if none is given\n"
            "  Nothing was started. Leave out one of them; seed=generator.initial_seed() keeps "
            "runs apart as the generator did.",
        ),
        (
            on_cluster and not workers,
            "backend='ray' with num_workers=0: no worker on the cluster would make batches\n"
            "  Nothing was started. Set the number of workers for the cluster to run.",
        ),
        (
            settings.is_iterable and on_cluster,
            "an iterable dataset cannot have backend='ray': only a map-style dataset can be "
            "divided among nodes\n"
            "  Nothing was started. Use a map-style dataset (__getitem__ and __len__), or "
            "backend='process', whose workers are on this machine.",
        ),
        (
            settings.is_iterable and (backend != "process" or loader.on_error == "skip"),
            f"an iterable dataset cannot have backend={backend!r} with "
            f"on_error={loader.on_error!r}: its iterator ends where it raises, and threads "
            "cannot share it\n"
            "  Use a map-style dataset, or backend='process' and on_error='raise'.",
        ),
        (
            bool(alone),
            f"concurrency={loader.concurrency!r} is impossible with "
            f"{type(loader.dataset).__name__}: {alone}\n"
            "  Nothing was started. Leave concurrency out, or pass a map-style dataset whose "
            "__getitem__ reads one sample.",
        ),
        (
            settings.is_iterable and isinstance(workers, AutoWorkers),
            'an iterable dataset cannot have num_workers="auto": each worker reads a part of it, '
            "so their number decides which samples there are\n"
            "  Nothing was started. Set the number of workers, or use a map-style dataset "
            "(__getitem__ and __len__).",
        ),
        (
            settings.is_iterable and ranks is not None,
            "an iterable dataset cannot have world_size=: only a map-style dataset can be "
            "divided among ranks\n"
            "  Nothing was started. Use a map-style dataset, or give each rank its part in the "
            "dataset's __iter__.",
        ),
        (
            ranks is not None and isinstance(loader.sampler, DistributedSampler),
            "world_size= and a DistributedSampler would both divide the samples among ranks\n"
            "  Nothing was started. Leave the sampler out, with shuffle=True if it shuffled; "
            "with Lightning, Trainer(use_distributed_sampler=False).",
        ),
        (
            ranks is not None and settings.batch_size is None and not rows,
            "world_size= with batches of the user's own: they cannot be divided among ranks"
            "\n  Nothing was started. Pass batch_size=, and sampler= if need be; or give this "
            "rank's batches only, without world_size.",
        ),
        (
            loader.device_transform is not None and loader.device is None,
            "device_transform= needs device=, which says where it runs\n"
            "  Nothing was started. Pass device='cuda', or device='cpu' for host memory.",
        ),
        (
            not (loader.device_transform is None or callable(loader.device_transform)),
            f"device_transform={loader.device_transform!r} is not valid; it must be a function of "
            "a batch",
        ),
        (
            loader.tail != "repeat" and ranks is None,
            f"tail={loader.tail!r} applies to ranks, but world_size= is not given",
        ),
        (
            settings.batch_size is not None and not all(each.is_packed for each in rows),
            "batch_by_length makes whole batches, and batch_size= would make batches of them\n"
            "  Nothing was started. Pass batch_size=None, and a collate_fn that pads, such as "
            "forebay.collate.pad().",
        ),
        (
            loader.collate_fn is default_collate and any(each.is_packed for each in rows),
            "rows of pack_sequences are lists of samples of different lengths, which torch's "
            "default_collate cannot stack\n"
            "  Nothing was started. Pass collate_fn=forebay.collate.sequences(size=...), or a "
            "function of your own.",
        ),
        (
            isinstance(loader.dataset, MixedDataset) and settings.planned is None,
            "a mixture decides the order of its samples, so it takes no sampler\n"
            "  Nothing was started. Leave sampler and batch_sampler out.",
        ),
    ]
    for is_refused, words in refused:
        if is_refused:
            raise OptionError(words)
    if buffer is not None and not workers:
        warn_of_unfilled_buffer()


def check_worker_method(worker_method: str | None) -> None:
    """Refuse `worker_method`, as torch would, if the installed torch does not accept it."""
    if worker_method is not None and not accepts("worker_method"):
        raise TypeError(
            "DataLoader.__init__() got an unexpected keyword argument 'worker_method': torch "
            f"{torch.__version__} has none; use backend='thread'"
        )


def _check(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        options = " or ".join(map(repr, allowed))
        raise OptionError(f"{name}={value!r} is not valid; it must be {options}")
