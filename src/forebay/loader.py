"""`forebay.DataLoader`: PyTorch's DataLoader with a prefetch buffer of any size.

    DataLoader ── iter ──> BatchIterator ──> Pipeline: kind -> planner -> feed -> workers

In `loading/`, a `LoaderKind` says what the arguments come to, and `progress.py` holds what changes
from batch to batch.
"""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Literal, Self, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from forebay.base.torch_internals import RAY_TRAIN, library_call, torch_init
from forebay.buffer import Buffer, buffer_of
from forebay.errors import OptionError, short_tracebacks
from forebay.loading.arguments import ARGUMENTS
from forebay.loading.inspection import InspectedLoader, page_of_loader
from forebay.loading.iterators import BatchIterator, UnreadSampler
from forebay.loading.kind import LoaderKind
from forebay.loading.kinds import (
    check_arguments,
    kind_of_loader,
    replaced_by_lightning,
)
from forebay.loading.progress import LoaderProgress
from forebay.loading.samplers import ranks_sharing, sampler_for_plan
from forebay.mixing import MixedDataset, weights_for
from forebay.observe.record import PUBLISH_S
from forebay.options import (
    AutoWorkers,
    Ray,
    checked_name,
    checked_workers,
    cluster_of,
    plain_number,
)
from forebay.ranks import Ranks, ranks_of

_T_co = TypeVar("_T_co", covariant=True)

# Attributes that cannot be set after `__init__`, besides torch's.
_FIXED: tuple[str, ...] = ("buffer", "backend", "seed", "on_error", "world_size", "rank", "tail")
_FIXED += ("device", "device_transform", "concurrency")
_READ_ONLY = ("epoch", "mask", "failures")
_TAKEN = (
    ": forebay's DataLoader has an attribute of this name\n"
    "  If it is for a subclass of yours, use another name there."
)


class DataLoader(InspectedLoader[_T_co]):
    """PyTorch's DataLoader, with a prefetch buffer of any size and batches that can be repeated.

    With only torch's arguments it behaves as torch's does. Those from `buffer` on are additional.

    Args:
        dataset: See torch, as for all up to `in_order`. Or a mixture, made by `forebay.mix`.
        batch_size: See torch. With `world_size`, samples per rank.
        shuffle: See torch. With any of forebay's additional arguments the order is a function of
            seed and epoch, computed position by position, without a list of the dataset's length.
        sampler: See torch.
        batch_sampler: See torch.
        num_workers: See torch. With "auto", or a `forebay.AutoWorkers`, the loader adjusts the
            number to the training while it runs; `statistics().decisions` says what was changed
            and why. With a `seed`, batches of a map-style dataset do not depend on the number.
            Without one, order and random numbers come from a seed drawn from torch's generator
            before the first epoch.
        collate_fn: See torch.
        pin_memory: See torch.
        drop_last: See torch. With `world_size`, drops the incomplete global batch.
        timeout: See torch. A worker that exceeds it is killed, and its batch is retried once before
            the error is raised. With or without it, a warning says once where the workers are if
            nothing comes from them for a minute.
        worker_init_fn: See torch.
        multiprocessing_context: See torch. Without it workers are forked, even if the program's
            start method is forkserver, Python's default since 3.14. If it is spawn, they are
            spawned.
        generator: See torch. Not with `seed` or `world_size`, where it would have no effect.
        prefetch_factor: See torch; with `buffer` it has no effect on the size of the buffer.
        persistent_workers: See torch. With `buffer` workers always persist; of an iterable dataset
            not with `set_epoch`, nor with `seed` and `worker_init_fn`.
        pin_memory_device: See torch.
        in_order: See torch. With an additional argument, map-style batches are always in order.
        buffer: How much to prefetch, across epochs: bytes, a string such as "30GB" or "50%" (of the
            memory, for all ranks of a machine), or a `forebay.Buffer`. Workers fill it: without
            them it has no effect. Only one iterator is valid at a time: `iter(loader)` invalidates
            the previous one.
        backend: "process", "thread", or "ray" (or a `forebay.Ray`) to make batches on the nodes
            of a cluster; the buffer is still in this process's memory. Threads share the random
            generators of the process: with `seed`, and without `concurrency`, samples that draw
            from them are made by one thread at a time. If the training loop draws from `random`,
            numpy or torch's CPU generator meanwhile, its numbers and the samples depend on thread
            timing.
        seed: Makes every batch a function of (seed, epoch, number of the batch): equal, bit for
            bit, for any number of workers, with and without a buffer, after a worker died and
            after a resume. All that a sample of a map-style dataset draws from generators of
            Python, NumPy and torch, whoever holds them, depends on seed, epoch and its place there
            (with `__getitems__`, of the batch of a rank). For an iterable dataset the global
            generators of a worker are a function of seed, epoch and worker, set before any of your
            code of that epoch, and again before each of its samples; a generator that the dataset
            owns is left alone, as in torch, because streams divide their work by it. A fork makes a
            few samples again, unless `dataset.made_once`; a warning names one that differs.
        on_error: "raise", or "skip" to leave out samples that raise and list them in `failures`. A
            sample that runs past `timeout` is not left out: it ends the iteration. FailuresError is
            raised for an epoch, and with `world_size` a batch, of which no sample is left.
        world_size: Number of ranks that share each batch: a count, "auto" for that of the process
            group or the launcher when an iteration begins, or None for no sharding. A global batch
            has `batch_size * world_size` samples, and is the same for every world size that divides
            it. Without `seed` the seed is 0, on all ranks.
        rank: Rank of this process; None detects it.
        tail: How to split the incomplete last batch if `drop_last=False`. "repeat" gives every
            rank the same number of steps and samples: it repeats a sample where one is missing,
            and `mask` is False there. "fill" repeats until all have whole batches, those of the
            dataset first. "uneven" repeats none: some ranks may have a step less, for torch's Join.
        device: Where batches are returned: "cuda", "cuda:1", a `torch.device`, or "cpu". A batch of
            a worker process is copied to a GPU in one copy, while the training loop is busy with
            the batch before. It may be kept: its memory is used again when its last tensor is gone.
            A tensor used on another stream than the current one needs that stream to be waited for
            before it is dropped. Tensors are moved; arrays and other objects are not.
        device_transform: Called with each batch on the device; what it returns is the batch. With
            `seed`, random numbers in it depend on seed, epoch and batch: it is passed a generator
            of the device if it has a parameter `generator`, and otherwise the global generators
            are seeded for the call, that of the device included. It runs in the calling thread.
        concurrency: How many samples each worker (without workers, this process) fetches at once,
            in threads: for a map-style dataset whose `__getitem__` waits for a network or a disk,
            and can be called by several threads. Batches are the same. None is 1. Not for a dataset
            with `__getitems__`, an iterable dataset, or slices of what is in memory.
        name: What the loader is called in its `repr`, in `forebay top` and in reports, such as
            "train"; batches do not depend on it.
        snapshot_every_n_steps: Accepted, since torchdata's StatefulDataLoader has it, and without
            effect: a state is exact at every step.

    Attributes:
        epoch: The current epoch; after its last batch, the next one.

    Raises:
        OptionError: An additional argument has an impossible value.
        ValueError: One of torch's arguments has an impossible value; torch raises it.
    """

    name: str | None = None

    @short_tracebacks
    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: BaseContext | str | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        buffer: float | str | Buffer | None = None,
        backend: Literal["process", "thread", "ray"] | Ray = "process",
        seed: int | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        world_size: int | Literal["auto"] | None = None,
        rank: int | None = None,
        tail: Literal["repeat", "uneven", "fill"] = "repeat",
        device: str | torch.device | None = None,
        device_transform: Callable[..., Any] | None = None,
        concurrency: int | None = None,
        name: str | None = None,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        earlier = {name: value for name, value in self.__dict__.items() if name in _FIXED}
        if name is not None:  # otherwise a subclass may have an attribute of this name
            self.name = checked_name(name)
        num_workers = checked_workers(num_workers)
        sizes = batch_size, prefetch_factor, timeout
        batch_size, prefetch_factor, timeout = map(plain_number, sizes)
        numbers = seed, concurrency, world_size, rank
        seed, concurrency, world_size, rank = map(plain_number, numbers)
        self.buffer = None if buffer is None else buffer_of(buffer)
        self.backend = backend
        if (planned := replaced_by_lightning(sampler)) is not None:
            world_size, rank = sampler.num_replicas, sampler.rank  # type: ignore[union-attr]
            sampler, shuffle = None, planned.plan.shuffle
        found = None if world_size is rank is None else ranks_of(world_size, rank)
        self._found_rank = None if found is None or world_size == "auto" else found.rank
        self.seed = 0 if seed is None and world_size is not None else seed
        self._own_seed = seed  # the argument; loading a state changes `seed`
        self.on_error, self.tail = on_error, tail
        # Unchanged arguments, and nothing else in public attributes: some libraries make a new
        # loader from all of them.
        self.world_size, self.rank = world_size, rank
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self.device, self.device_transform, self.concurrency = device, device_transform, concurrency
        for name, value in earlier.items():
            if getattr(self, name) is _DEFAULTS[name] is not value:
                raise OptionError(
                    f"{name} attribute of {type(self).__name__} was set before "
                    f"DataLoader.__init__, which would replace it{_TAKEN}"
                )
        self._prefetch_is_set = prefetch_factor is not None
        is_named = self.seed is not None or self.buffer is not None or on_error == "skip"
        is_named = is_named or self.backend != "process" or isinstance(dataset, MixedDataset)
        is_named = is_named or isinstance(num_workers, AutoWorkers) or concurrency not in (None, 1)
        is_stream = isinstance(dataset, IterableDataset)
        if is_named and not is_stream and sampler is batch_sampler is None:
            share = world_size, self._found_rank, batch_size or 1
            order = dataset, bool(shuffle), self.seed, generator
            sampler, shuffle = sampler_for_plan(*order, share), None
        torch_init()(
            self,
            *(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn),
            *(pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self._is_named = is_named  # whether there is an argument that torch does not have
        check_arguments(self._kind())
        self._loader_progress = LoaderProgress()
        if RAY_TRAIN in sys.modules:
            from forebay.loading.ray_train import wrap_no_loader

            wrap_no_loader(DataLoader)

    @property
    def _kind_class(self) -> type[LoaderKind]:
        """The kind of the loader; libraries may replace a sampler."""
        is_stream = isinstance(self.dataset, IterableDataset)
        samplers = self.sampler, self.batch_sampler
        return kind_of_loader(*samplers, is_stream=is_stream, is_named=self._is_named)

    @property
    def _ranks(self) -> Ranks | None:
        samplers = self.sampler, self.batch_sampler
        rank = self._found_rank if self.rank is None else self.rank
        return ranks_sharing(self.world_size, rank, *samplers)

    def _kind(self) -> LoaderKind:
        """Return the loader as its kind, with its present arguments."""
        values: dict[str, Any] = {name: getattr(self, name) for name in ARGUMENTS}
        values |= {"ranks": self._ranks, "prefetch_is_set": self._prefetch_is_set}
        return self._kind_class(**values, title=type(self).__name__)

    # ---- iterating -----------------------------------------------------------------------------

    def __iter__(self) -> Any:
        """Return an iterator over one epoch."""
        if self._prepared is not None:
            return self._prepared.batches(self)
        if library_call(RAY_TRAIN, "__iter__", 1) is not None:
            from forebay.loading.ray_train import refuse_wrapper

            refuse_wrapper()
        return self._begun()

    def _begun(self) -> Any:
        """Return an iterator of torch's kind over one epoch."""
        iterator: Any = self._iterator
        if iterator is not None and (kind := self._kind()).keeps_iterator:
            iterator.begin(self, kind)
        else:
            iterator = self._get_iterator()
            if getattr(iterator, "is_kept", False):
                self._iterator = iterator
        return iterator

    def _get_iterator(self) -> Any:
        """Return a new iterator; libraries and subclasses call this, too."""
        kind = self._kind()
        if not kind.is_local:
            self.check_worker_number_rationality()
        progress = self._loader_progress
        page = partial(page_of_loader, weakref.WeakMethod(self._kind), weakref.ref(progress))
        progress.trace.publish_from(time.perf_counter() + PUBLISH_S, page)
        return BatchIterator(self, kind, self._loader_progress)

    @property
    def _index_sampler(self) -> Any:
        """The sampler that torch's iterator iterates and takes the length of."""
        own = super()._index_sampler
        is_read = not self._is_initialized or self._kind_class.torch_reads
        return own if is_read else UnreadSampler(lambda: self._kind().steps)

    def check_worker_number_rationality(self) -> None:
        """Warn, as torch does, if there are more local workers than cores."""
        backend = getattr(self, "backend", "process")  # torchdata's subclass has none
        if cluster_of(backend) is None and not isinstance(self.num_workers, AutoWorkers):
            super().check_worker_number_rationality()

    # ---- position ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a JSON-serializable dict: batches returned, not prefetched.

        The time it takes does not grow with the dataset. With any of forebay's additional
        arguments the state is valid for any `num_workers`, `backend`, `buffer` and `world_size`,
        equal on all ranks, and after a resume all later epochs are the same as without the
        interruption; but a sampler with a `state_dict` of its own does not go from one rank to
        several within an epoch, or back. After the last batch of an epoch it is the state before
        the next epoch: `epoch` is the epoch that the next iteration returns. Without workers and
        with only torch's arguments, a sampler without a length, or that ends before, is read no
        further than torch reads it: there the rest of the epoch may be empty.

        With only torch's arguments the rest of the epoch has the same samples in the same order.
        Random numbers in workers, and the order of later epochs, come from torch's generators:
        pass `generator`, or restore the global one with `torch.set_rng_state`. Workers continue
        where they were if the dataset or its iterator has `state_dict` and `load_state_dict`: a
        state that takes long is taken now and then, and what was read since is read again. An
        iterable dataset without them is read again from its beginning, and the samples that were
        returned before are skipped. After a `break` it is the state in the middle of that epoch.

        A batch that raised counts as returned, unless the sampler raised. Call `set_epoch` of a
        sampler or dataset of your own before you resume, as in torch: it is not in the state.

        Raises:
            OptionError: In mid-epoch with `in_order=False`; or a `state_dict` of the user raised.
        """
        return self._loader_progress.saved(self._kind())

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume from `state`: the next iteration returns the rest of that epoch.

        Args:
            state: What `state_dict` returned, in this or another process, on any rank.
            strict: Refuse a state with another global batch size, length or `drop_last`, also if
                only its epoch has another length, because it began before the dataset grew. With
                `batch_size=None` any number of ranks fits, as each takes one sample a step. False
                counts in samples instead: the epoch continues after the samples that were returned,
                in its original order, so that no sample is lost or repeated.

        Raises:
            OptionError: The state does not fit, and the message names both values; or it is
                damaged: a value is missing, impossible, or contradicts another. Nothing was
                changed.
        """
        from forebay.loading.restoring import loaded_position, restore_states

        kind = self._kind()
        position = loaded_position(state, kind, self._own_seed, strict=strict)
        restore_states(kind, position)
        self.close()  # nothing depends on the old seed any more
        self.__dict__["seed"] = self._own_seed if position.seed is None else position.seed
        self._loader_progress.resume(position)

    # ---- changes -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Drop the prefetched batches and replace the workers at the next iteration.

        Call it after a change that forebay cannot detect: an array of more than 4 KB or a list of
        more than 100 modified in place, a file, any with `persistent_workers=True` or threads.
        """
        self._loader_progress.refresh()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights of a mixture, starting with the next batch.

        No sample is lost or repeated. With several ranks, all of them must call it at the same
        step.

        Args:
            weights: A weight for each source, by name.

        Raises:
            OptionError: The dataset is not a mixture, it has a schedule, or a weight is impossible.
        """
        self._loader_progress.set_weights(self._kind(), weights_for(self.dataset, weights))

    def close(self) -> None:
        """Stop the workers now; otherwise they stop with the loader, or with the process."""
        if self._is_initialized:
            self._loader_progress.close()
        self._iterator = None

    @property
    def sampler(self) -> Any:
        """See torch. Ray Train, which asks whether it divides the samples, has the loader do so."""
        asked = library_call("ray.train.", "prepare_data_loader", 1)
        if asked is not None and asked["add_dist_sampler"] and self._is_initialized:
            from forebay.loading.ray_train import divided_sampler

            return divided_sampler(self)
        if "sampler" not in vars(self):  # wrappers look elsewhere then
            raise AttributeError(f"{type(self).__name__} object has no attribute 'sampler'")
        return vars(self)["sampler"]

    @sampler.setter
    def sampler(self, value: Any) -> None:
        vars(self)["sampler"] = value

    @property
    def _is_initialized(self) -> bool:
        """Return whether `__init__` has ended; subclasses such as torchdata's may not call it."""
        return "_loader_progress" in self.__dict__

    # ---- object protocol -----------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse those that must not change after `__init__`, as torch does."""
        kind = type(self).__name__
        if name in _FIXED and self._is_initialized:
            raise ValueError(
                f"{name} attribute should not be set after {kind} is initialized{_TAKEN}"
            )
        if name in _READ_ONLY and getattr(type(self), name) is getattr(DataLoader, name):
            raise AttributeError(f"{name} attribute of {kind} cannot be set{_TAKEN}")
        super().__setattr__(name, value)

    def __enter__(self) -> Self:
        """Return the loader."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the loader."""
        self.close()

    def __del__(self) -> None:
        """Stop the workers."""
        progress = self.__dict__.get("_loader_progress")
        pipeline = None if progress is None else progress.pipeline
        if pipeline is not None and pipeline.kind.keeps_pipeline:
            pipeline.close()


DataLoader._class = DataLoader
# Now, since Lightning replaces `__init__`.
_DEFAULTS: Any = inspect.unwrap(DataLoader.__init__).__kwdefaults__
