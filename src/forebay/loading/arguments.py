"""A loader's arguments, as they are now, and what they come to for every kind of loader."""

from __future__ import annotations

import copy
import functools
import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import (
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.graph_settings import apply_sharding

from forebay.base.datasets import cached_samples, getitems_of, is_made_once, is_mixture
from forebay.base.origins import content_digests
from forebay.buffer import MAX_BATCHES, Buffer, capacity_shown, low_mark_of
from forebay.columns.slicing import Slicer, slicing
from forebay.loading.audit_plan import audited_offsets
from forebay.loading.changes import dataset_content
from forebay.loading.messages import AHEAD
from forebay.loading.samplers import length_of, takes_set_epoch
from forebay.loading.selections import LOOKAHEAD, TINY_DEPTH, PlannedEpoch
from forebay.loading.snapshots import UnknownState
from forebay.loading.user_states import has_state, saved_state
from forebay.options import AutoWorkers, Ray, check_killable, cluster_of
from forebay.plan import Plan
from forebay.ranks import Ranks, process_group

if TYPE_CHECKING:  # imported where a loader needs it
    from forebay.loading.fetch import BatchFetcher

# Larger slices for a device are left to worker processes: only their batches are copied in advance.
MOST_COPIED = 1 << 20


@dataclass(eq=False, kw_only=True)
class LoaderArguments:
    """A loader's arguments; torch's have torch's meaning.

    Attributes:
        batch_size: Samples of a batch on this rank; None if a batch sampler decides.
        ranks: The ranks that share its batches; None without `world_size`.
        prefetch_is_set: Whether the user set `prefetch_factor`.
        title: What the class of the loader is called.
        auto_collation: Whether a sampler yields batches, and not single samples.
        index_sampler: The sampler that yields what batches are made of.
    """

    dataset: Any
    batch_size: int | None
    sampler: Any
    batch_sampler: Any
    num_workers: int
    collate_fn: Callable[[Any], Any]
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: Any
    prefetch_factor: int | None
    persistent_workers: bool
    in_order: bool
    buffer: Buffer | None
    backend: Literal["process", "thread", "ray"] | Ray
    seed: int | None
    on_error: str
    world_size: int | str | None
    tail: str
    device: Any
    device_transform: Callable[..., Any] | None
    concurrency: int | None
    name: Any
    ranks: Ranks | None
    prefetch_is_set: bool
    title: str

    def __post_init__(self) -> None:
        """Find which sampler has the indices of batches."""
        self.auto_collation = self.batch_sampler is not None
        self.index_sampler = self.batch_sampler if self.auto_collation else self.sampler

    # ---- where batches are made ----------------------------------------------------------------

    @functools.cached_property
    def _slicer(self) -> Slicer | None:
        """What makes batches in the trainer's process; None if workers, or samples, are needed."""
        if not self.auto_collation or self.worker_init_fn is not None:
            return None
        slicer = slicing(self.dataset, self.collate_fn)
        if slicer is None or not len(self.dataset) or self.cluster is not None:
            return None
        is_copied = self.num_workers and self.device is not None and str(self.device) != "cpu"
        is_large = slicer.nbytes * (self.batch_size or 1) > MOST_COPIED
        return None if is_copied and is_large else slicer

    @property
    def is_sliced(self) -> bool:
        """Return whether batches are slices of what is in memory, made in the trainer's process."""
        return self._slicer is not None

    @property
    def sliced_ahead(self) -> int:
        """How many slices to make in advance, in a thread: as many as workers would."""
        slicer = self._slicer
        if slicer is None or not self.num_workers:
            return 0
        if self.buffer is None:
            return self.prefetched
        size = slicer.nbytes * (self.batch_size or 1)
        by_bytes = (self.buffer.nbytes or MAX_BATCHES * size) // max(size, 1)
        return max(min(by_bytes, self.buffer.max_batches or MAX_BATCHES), 1)

    @property
    def is_local(self) -> bool:
        """Return whether batches are made in the trainer's process, of the dataset itself."""
        return self.num_workers == 0 or self.is_sliced

    @property
    def tunes_workers(self) -> bool:
        """Return whether the number of workers is adjusted to the training."""
        return isinstance(self.num_workers, AutoWorkers) and not self.is_local

    @property
    def is_filled(self) -> bool:
        """Return whether workers fill a buffer."""
        return self.buffer is not None and not self.is_local

    @property
    def cluster(self) -> Ray | None:
        """The cluster that workers run on; None for this machine."""
        return cluster_of(self.backend)

    @property
    def start_method(self) -> Any:
        """How worker processes start: "fork", or another context of multiprocessing.

        A forkserver has to be asked for in the loader's own argument: for the whole program, it is
        Python's default since 3.14, and lambdas and local classes could not be used.
        """
        context = self.multiprocessing_context
        if context is None:
            method = multiprocessing.get_start_method(allow_none=True)
            if method in (None, "fork", "forkserver"):
                return "fork"
            context = multiprocessing.get_context(method)
        return "fork" if context.get_start_method() == "fork" else context

    @property
    def init_function(self) -> Callable[[int], None] | None:
        """What a worker calls first: the user's, after that of a datapipe."""
        if isinstance(self.dataset, IterDataPipe | MapDataPipe) and self.num_workers:
            return functools.partial(_shard, self.worker_init_fn, process_group())
        return self.worker_init_fn

    @property
    def keeps_workers(self) -> bool:
        """Return whether workers are kept from epoch to epoch."""
        return self.is_filled or self.persistent_workers

    @property
    def may_stop_workers(self) -> bool:
        """Return whether workers may be replaced by others: they have no state of their own."""
        return self.backend == "process"

    @property
    def keeps_tasks(self) -> bool:
        """Return whether a worker makes all that it holds, whoever else is free."""
        # A worker that fetches samples of several batches at once has begun all that it holds.
        return self.at_once_each > 1

    @functools.cached_property
    def is_audited(self) -> bool:
        """Return whether some samples are made a second time, in a fork, and compared."""
        is_fork = self.start_method == "fork" and self.cluster is None
        is_wanted = self.seed is not None and self.replays and not self.is_sliced
        return is_fork and is_wanted and not is_made_once(self.dataset) and not self._is_remote

    @property
    def _is_remote(self) -> bool:
        """Return whether samples are fetched from a bucket, by a process that workers ask."""
        parts = self.dataset.datasets.values() if is_mixture(self.dataset) else [self.dataset]
        cached = filter(None, map(cached_samples, parts))
        return any(each.remote is not None for each in cached)

    def audited(self, index: Any, epoch: PlannedEpoch, first: int) -> tuple[int, ...]:
        """Return which samples of the next batch of an epoch are made a second time.

        Args:
            first: The epoch that was begun first.
        """
        if not self.is_audited:
            return ()
        size = length_of(index) or 1 if self.auto_collation else 1
        step, is_first = epoch.batch - epoch.start.batch, epoch.start.epoch == first
        return audited_offsets(step, size, is_first=is_first)

    @property
    def renews_workers(self) -> bool:
        """Return whether each epoch needs workers with copies of the dataset as it is then.

        So it does if the dataset has `set_epoch`. Workers that persist in torch do so here, too.
        """
        return not self.is_local and self.backend != "thread" and takes_set_epoch(self.dataset)

    @property
    def keeps_iterator(self) -> bool:
        """Return whether one iterator serves all epochs, as in torch if workers persist."""
        return False

    def dataset_fingerprint(self) -> Any:
        """Return the dataset's fingerprint; None if changes of it are not detected."""
        is_watched = self.is_filled and not self.persistent_workers and self.backend != "thread"
        return dataset_content(self.dataset) if is_watched else None

    @property
    def fetcher(self) -> type[BatchFetcher]:
        """What reads a dataset of this kind, in workers."""
        if self.at_once_each > 1:
            from forebay.loading.sample_threads import ThreadedFetcher

            return ThreadedFetcher
        from forebay.loading.fetch import MapFetcher

        return MapFetcher

    # ---- how many ------------------------------------------------------------------------------

    @property
    def at_once_each(self) -> int:
        """The number of samples that each worker fetches at once."""
        return self.concurrency or 1

    @property
    def at_once(self) -> int:
        """The number of batches that each worker has samples of, so that no thread is idle."""
        if self.at_once_each == 1:
            return 1
        # Of a sampler of the user it is not known how many samples its batches have.
        return 1 + math.ceil(AHEAD * self.at_once_each / (self.batch_size or 1))

    @property
    def prefetched(self) -> int:
        """Batches that workers make in advance, without a buffer; 0 without workers."""
        return max(self.prefetch_factor or 1, self.at_once) * int(self.num_workers)

    @property
    def _may_grow(self) -> bool:
        """Return whether more requests than torch makes have no effect that a user sees."""
        return False

    def _prefetching(self) -> dict[str, Any]:
        """Return the values of `Setup` that say how many requests are outstanding."""
        usual, grows = self.prefetched, self._may_grow and not self.prefetch_is_set
        buffer, most = self.buffer, max(usual, TINY_DEPTH * self.num_workers) if grows else usual
        if self.is_local:
            # A request is only indices here, and reading many of them at a time is faster.
            requests = max(usual, self.at_once - 1)
            first = TINY_DEPTH if grows and self.num_workers else 0
            return {
                "requests": requests,
                "first_requests": first,
                "buffer_batches": buffer and requests,
            }
        if buffer is None:
            return {"requests": usual, "tiny_requests": most}
        return {
            "requests": LOOKAHEAD,
            "tiny_requests": LOOKAHEAD,
            "fills_by_itself": True,
            "buffer_batches": buffer.max_batches or MAX_BATCHES,
            "refill_below": low_mark_of(buffer),
        }

    @property
    def runs_ahead(self) -> bool:
        """Return whether batches are made for epochs that have not begun.

        Not for a sampler or dataset of the user that has `set_epoch`, since its next epoch depends
        on a call that is still to come.
        """
        known = self.dataset, self.index_sampler
        return self.is_filled and not (self.renews_workers or any(map(takes_set_epoch, known)))

    # ---- what is refused -----------------------------------------------------------------------

    def check_timeout(self) -> None:
        """Refuse a timeout that kills workers whose work is made again if there are none."""
        check_killable(self.timeout, self.num_workers)

    def refused_combinations(self) -> list[tuple[bool, str]]:
        """Return combinations of arguments that are refused: whether there are, and in words."""
        return []

    # ---- what there is -------------------------------------------------------------------------

    @property
    def drawn_from(self) -> torch.Generator:
        """The generator that each iteration draws from; torch refuses an invalid argument."""
        given = self.generator
        return given if isinstance(given, torch.Generator) else torch.default_generator

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
            tail=self.tail,
        )

    @property
    def steps(self) -> int:
        """The number of batches of an epoch on this rank."""
        if self.shared is None:
            return len(self.index_sampler)
        return replace(self.shared, length=len(self.sampler)).steps()

    @property
    def length(self) -> int | None:
        """The length of the dataset; None if it has none."""
        return length_of(self.dataset)

    @property
    def shuffle(self) -> bool | None:
        """Return whether the order is random; None if a sampler of the user decides that."""
        kind = type(self.sampler)
        return kind is RandomSampler if kind in (RandomSampler, SequentialSampler) else None

    @property
    def one_at_a_time(self) -> str:
        """Why samples of this dataset cannot be fetched at once; empty if they can."""
        if self.auto_collation and slicing(self.dataset, self.collate_fn) is not None:
            return "its batches are slices of what is in memory, where nothing waits"
        if self.auto_collation and getitems_of(self.dataset) is not None:
            return "its __getitems__ is called with a whole batch, and can read at once itself"
        return ""

    def dataset_state(self) -> Any:
        """Return the state of this process's dataset; None if it has none."""
        state = saved_state(self.dataset) if has_state(self.dataset) else None
        if isinstance(state, UnknownState) and not self.is_local:
            return None  # an object that is filled where it is read, in workers
        return copy.deepcopy(state)

    @property
    def content(self) -> str | None:
        """What a state has of the samples, to notice other ones; None if it is not known."""
        dataset, kind = self.dataset, type(self.dataset)
        is_asked = kind.__module__.startswith(("forebay.", "torch."))
        if hasattr(kind, "origins"):
            is_asked = is_asked and bool(dataset.origins(reads=False))
        return content_digests(dataset) if is_asked else None

    @property
    def replays(self) -> bool:
        """Return whether a batch can be made again by its number."""
        return self.seed is not None

    def described(self) -> str:
        """Return the loader in one line: its dataset, sizes and main arguments."""
        length = self.length
        shown = type(self.dataset).__name__ + ("" if length is None else f"({length:,})")
        parts = [shown, f"batch_size={self.batch_size}", f"num_workers={self.num_workers}"]
        if self.buffer is not None:
            parts.append(f"buffer={capacity_shown(self.buffer)}")
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
        known = {name: getattr(self, name) for name in usual}
        parts += [f"{name}={value!r}" for name, value in known.items() if value != usual[name]]
        name = self.name if isinstance(self.name, str) else ""
        return f"{f'{name}: ' if name else ''}{self.title}({', '.join(parts)})"


# What a loader has under the same names.
_OWN = ("ranks", "prefetch_is_set", "title")
ARGUMENTS = tuple(each.name for each in fields(LoaderArguments) if each.name not in _OWN)


def _shard(init: Any, ranks: Ranks, worker_id: int) -> None:
    """Give a worker its part of a datapipe, among all workers of all ranks; as torch does."""
    info: Any = get_worker_info()
    instances = info.num_workers * ranks.world_size
    apply_sharding(info.dataset, instances, worker_id * ranks.world_size + ranks.rank)
    if init is not None:
        init(worker_id)
