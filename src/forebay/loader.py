"""`forebay.DataLoader`: torch's, with a buffer so deep that training never waits.

DataLoader ── iter ──> ArrayIterator    tensors in memory
│                  LaneIterator     torch's arguments alone, with workers
│                  torch's own      torch's arguments alone, without workers
└──────────────>   StreamIterator   buffer, seed, on_error or backend were named

Long because it repeats every argument of torch's class, for the signature and the documentation.
"""

from __future__ import annotations

import functools
import multiprocessing
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pickle import PicklingError
from typing import Any, Literal, Self, TypeVar

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
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.dataloader import (
    _DatasetKind,
    _get_distributed_settings,
    _sharding_worker_init_fn,
)

from forebay.engine.limits import Limits
from forebay.errors import OptionError
from forebay.loading.buffer import REFILL_SHARE, Buffer, parse_bytes
from forebay.loading.feed import Feed, PumpedFeed, Workers
from forebay.loading.fetch import MapFetcher, SampleError, slicing
from forebay.loading.iterators import RETRIES, LaneIterator, StreamIterator
from forebay.loading.local import ArrayIterator, PlainIterator
from forebay.loading.recipe import Recipe, SkippedSample
from forebay.loading.seeding import generators_kept
from forebay.loading.shuffle import SeededShuffle
from forebay.loading.statistics import Statistics, Tally
from forebay.loading.stream import Stream, order_of

_T_co = TypeVar("_T_co", covariant=True)

# Batches up to this size are sliced in the trainer, where the dataset is tensors in memory: making
# one takes less than sending it.
SLICED_BYTES = 1 << 20
STATE_VERSION = 1
# A buffer that is bounded by bytes alone holds no more batches than this.
MOST_BATCHES = 1 << 20
# Work to send to a worker in one message, where batches are quick: it need not wait for the next.
GROUP_S = 0.02
MOST_IN_GROUP = 64


class DataLoader(TorchDataLoader[_T_co]):
    """PyTorch's DataLoader, faster, harder to kill, and with a buffer of any depth.

    With torch's arguments alone it does what torch does. The further ones:

    Args:
        dataset: As torch's, like all up to `in_order`.
        batch_size: See torch.
        shuffle: See torch. With `buffer` or `seed`, the order is a function of seed and epoch.
        sampler: See torch.
        batch_sampler: See torch.
        num_workers: See torch. With 0 nobody can fill a buffer, so it stays empty.
        collate_fn: See torch.
        pin_memory: See torch.
        drop_last: See torch.
        timeout: See torch. The worker that hangs is killed and its batch made once more first.
        worker_init_fn: See torch.
        multiprocessing_context: See torch.
        generator: See torch.
        prefetch_factor: See torch; a buffer is counted by `buffer` instead.
        persistent_workers: See torch. With `buffer` workers always persist.
        pin_memory_device: See torch.
        in_order: See torch.
        buffer: How much to make ahead, across the ends of epochs: bytes, a text such as "30GB", or
            a `forebay.Buffer`. Only one iteration at a time then: a new one ends the one before.
        backend: "process" or "thread".
        seed: Makes every batch a function of (seed, epoch, number of the batch): equal, bit for
            bit, for any number of workers, with and without a buffer, after the death of a worker
            and after a resume. `random`, numpy and torch are seeded for each sample.
        on_error: "raise", or "skip" to leave out samples that raise and list them in `failures`.

    Raises:
        OptionError: One of forebay's own arguments is impossible.
        ValueError: One of torch's is, as torch says it.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Any = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Any = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        buffer: int | str | Buffer | None = None,
        backend: str = "process",
        seed: int | None = None,
        on_error: str = "raise",
    ) -> None:
        """See the class."""
        _check("backend", backend, ("process", "thread"))
        _check("on_error", on_error, ("raise", "skip"))
        if seed is not None and type(seed) is not int:
            raise OptionError(f"seed={seed!r} is not possible; it takes a whole number or None")
        self.buffer = Buffer.of(buffer)
        self.backend = backend
        self.seed = seed
        self.on_error = on_error
        self._skips = on_error == "skip"
        is_map = not isinstance(dataset, IterableDataset)
        named = seed is not None or self.buffer is not None or self._skips or backend != "process"
        self._streams = is_map and named
        if not is_map and (self._skips or backend != "process"):
            raise OptionError(
                f"an iterable dataset cannot have backend={backend!r} with on_error={on_error!r}: "
                "its iterator ends where it raises, and threads cannot share it out\n"
                "  Use a map-style dataset, or backend='process' and on_error='raise'."
            )
        if self._streams and shuffle and sampler is None and batch_sampler is None:
            sampler, shuffle = SeededShuffle(dataset, seed, generator), None
        self._prefetch_is_set = prefetch_factor is not None
        self._tally = Tally()
        self._skipped: list[SkippedSample] = []
        self._stream: Stream | None = None
        self._feed: Feed | None = None
        # The iterator that the stream is read by.
        self._reader: Callable[[], Any] = _nobody
        self._epoch = 0  # to be begun next
        self._resume_at = 0  # batches of it that were handed out before a resume
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )

    # ---- iterating -----------------------------------------------------------------------------

    def __iter__(self) -> Any:
        """Return an iterator over one epoch."""
        if self._streams:
            return StreamIterator(self, self._begin_epoch)
        return super().__iter__()

    def _get_iterator(self) -> Any:
        """Choose how one pass is made where torch's arguments alone are given."""
        if self._is_sliced():
            return ArrayIterator(self)
        if self.num_workers == 0:
            return PlainIterator(self)
        self.check_worker_number_rationality()
        return LaneIterator(self)

    def _next_pass(self) -> int:
        """Count passes over an iterable dataset; return this one's number."""
        self._epoch += 1
        return self._epoch - 1

    def _may_prefetch_more(self) -> bool:
        """Tell whether nobody can notice that more batches are under way than torch would have."""
        own = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
        inner, outer = self.sampler, self.batch_sampler
        return (
            not self._prefetch_is_set
            and type(inner) in (*own, DistributedSampler)
            and (outer is None or type(outer) is BatchSampler)
        )

    def _is_sliced(self) -> bool:
        cut = slicing(self._recipe(0, None))
        if cut is None or len(self.dataset) == 0 or self.worker_init_fn is not None:  # type: ignore[arg-type]
            return False
        if self.num_workers == 0:
            return True
        one = cut([0])
        row = one.nbytes if isinstance(one, torch.Tensor) else sum(each.nbytes for each in one)
        return row * (self.batch_size or 1) <= SLICED_BYTES

    def _begin_epoch(self, reader: Any, base_seed: int) -> tuple[Stream, Feed]:
        """Let `reader` read the next epoch of the stream; the reader before it is at its end."""
        self._reader = weakref.ref(reader)
        seed = self.seed if self.seed is not None else base_seed
        stream = self._stream
        if stream is None or not self._keeps_workers:
            self._stop()
            seed = seed if stream is None else stream.seed
            if isinstance(self.sampler, SeededShuffle):
                self.sampler.seed = seed
            depth = (self.prefetch_factor or 1) * max(self.num_workers, 1)
            ahead = self.buffer is not None and self.num_workers > 0
            self._stream = stream = Stream(
                self._index_sampler, self.dataset, seed, ahead=ahead, depth=depth
            )
        if isinstance(self.sampler, SeededShuffle) and self.generator is None:
            # torch's RandomSampler draws its seed here; what the user draws next stays the same.
            torch.empty((), dtype=torch.int64).random_()
        if self._feed is None or not self._feed.is_open:
            recipe = self._recipe(base_seed, None, seed=stream.seed)
            self._feed = self._open_feed(recipe, self._limits(), keeps_tasks=False)
        stream.begin(self._feed, self._epoch, self._resume_at)
        self._epoch, self._resume_at = self._epoch + 1, 0
        return stream, self._feed

    def _is_read_by(self, reader: Any) -> bool:
        return self._reader() is reader

    def _epoch_ended(self, reader: Any) -> None:
        if self._is_read_by(reader):
            self._reader = _nobody
            if not self._keeps_workers:
                self._stop()

    @property
    def _keeps_workers(self) -> bool:
        return self.buffer is not None or self.persistent_workers

    def _recipe(self, base_seed: int, shared_seed: int | None, seed: int | None = None) -> Recipe:
        init = self.worker_init_fn
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            world_size, rank = _get_distributed_settings()
            init = functools.partial(_sharding_worker_init_fn, init, world_size, rank)
        return Recipe(
            dataset=self.dataset,
            is_iterable=self._dataset_kind == _DatasetKind.Iterable,
            auto_collation=self._auto_collation,
            collate_fn=self.collate_fn,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            base_seed=base_seed,
            worker_init_fn=init,
            seed=seed,
            skip_errors=self._skips,
            shared_seed=shared_seed,
        )

    def _limits(self) -> Limits:
        """Return what the engine may do for a stream."""
        workers = max(self.num_workers, 1)
        limits = Limits(
            num_workers=workers,
            slots=((self.prefetch_factor or 1) + 1) * workers,
            in_order=True,
            retries=RETRIES,
            timeout_s=self.timeout or None,
            group_s=GROUP_S if self.num_workers else 0.0,
            max_group=MOST_IN_GROUP,
            lookahead=0,
            all_workers=True,
        )
        buffer = self.buffer
        if buffer is None or not self.num_workers:
            return limits
        return replace(
            limits,
            slots=buffer.max_batches or MOST_BATCHES,
            max_bytes=None if buffer.max_bytes is None else parse_bytes(buffer.max_bytes),
            refill_below=buffer.refill_below or REFILL_SHARE,
        )

    def _open_feed(self, recipe: Recipe, limits: Limits, *, keeps_tasks: bool) -> Feed:
        if not self.num_workers:
            return Feed(recipe, Workers("inline", 1), limits, keeps_tasks, self._tally)
        context = self.multiprocessing_context or multiprocessing.get_context()
        start: Any = "fork" if context.get_start_method() == "fork" else context
        backend: Literal["thread", "process"] = "thread" if self.backend == "thread" else "process"
        workers = Workers(backend, self.num_workers, start)
        # Any worker may take the next order of a stream, so somebody must always be there to hand
        # it out. By torch's rules each worker has its orders already.
        kind = PumpedFeed if self._streams or self.buffer is not None else Feed
        try:
            return kind(recipe, workers, limits, keeps_tasks, self._tally)
        except (TypeError, AttributeError, PicklingError):
            if start == "fork":
                raise
            warnings.warn(
                "Got pickle error when attempting to start a worker Process: with the start "
                f"method {context.get_start_method()!r}, the dataset, collate_fn and "
                "worker_init_fn have to be picklable. Define them at the top of a module, or use "
                "multiprocessing_context='fork'.",
                stacklevel=2,
            )
            raise

    # ---- forebay's own powers ------------------------------------------------------------------

    @property
    def failures(self) -> list[SkippedSample]:
        """The samples that were left out so far (`on_error="skip"`), in order."""
        return list(self._skipped)

    def statistics(self) -> Statistics:
        """Return what the loader has done and what it waits for; cheap, at any time."""
        tally, stream = self._tally, self._stream
        orders = [order for _, order in stream.orders] if stream is not None else []
        ready = orders[: tally.ready_batches]
        return Statistics(
            epoch=stream.epoch if stream is not None else self._epoch - 1,
            batch=stream.batch if stream is not None else 0,
            ready_batches=tally.ready_batches,
            ready_bytes=tally.ready_bytes,
            ready_from=(ready[0].epoch, ready[0].batch) if ready else None,
            ready_to=(ready[-1].epoch, ready[-1].batch) if ready else None,
            in_flight=len(orders) - len(ready),
            waited_s=tally.waited_s,
            wait_p50_s=tally.percentile(0.5),
            wait_p95_s=tally.percentile(0.95),
            wait_p99_s=tally.percentile(0.99),
            fetch_s=tally.fetch_s,
            fetch_cpu_s=tally.fetch_cpu_s,
            collate_s=tally.collate_s,
            restarts=tally.restarts,
            failures=len(self._skipped),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, as data for JSON: what was handed out, not what is ready.

        It takes no time that grows with the dataset, and is valid for any `num_workers`, `backend`
        and `buffer`.

        Raises:
            OptionError: The loader has no seed, and is not a stream.
        """
        self._check_stream("state_dict()")
        stream = self._stream
        state: dict[str, Any] = {"version": STATE_VERSION}
        state["seed"] = self.seed if stream is None else stream.seed
        if stream is None or self._reader is _nobody:
            return {**state, "epoch": self._epoch, "batch": self._resume_at, "sampler": None}
        place = {"epoch": stream.epoch, "batch": stream.batch}
        return {**state, **place, "sampler": stream.state_of_sampler()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the next iteration gives the rest of that epoch.

        Args:
            state: What `state_dict` returned, there or in another process.

        Raises:
            OptionError: The state is of a newer forebay, or of another seed.
        """
        self._check_stream("load_state_dict()")
        if state.get("version") != STATE_VERSION:
            raise OptionError(
                f"the state has version {state.get('version')!r}, this forebay reads "
                f"{STATE_VERSION}\n  Nothing was changed. Load it with the forebay that made it."
            )
        seed = state["seed"]
        if None not in (seed, self.seed) and seed != self.seed:
            raise OptionError(
                f"the state is of seed={seed}, the loader of seed={self.seed}\n"
                "  Nothing was changed. The batches would not be those that were to come: make the "
                "loader with the same seed, or with none."
            )
        self.close()
        self._stream, self._reader = None, _nobody
        self.seed = seed if seed is not None else self.seed
        self._epoch, self._resume_at = state["epoch"], state["batch"]
        if state.get("sampler") is not None:
            self._index_sampler.load_state_dict(state["sampler"])

    def replay(self, *, epoch: int, batch: int) -> Any:
        """Make one batch again, in this process, for a debugger; nothing else changes.

        Args:
            epoch: Its epoch, from 0.
            batch: Its number in the epoch, from 0.

        Returns:
            The batch, bit for bit.

        Raises:
            OptionError: There is no seed to make it from.
            IndexError: The epoch has no such batch.
            Exception: What making it raised, with the real traceback.
        """
        seed = self._stream.seed if self._stream is not None else self.seed
        if seed is None or not self._streams:
            raise OptionError(
                "replay() needs a seed: without one, batches depend on more than their number\n"
                "  Make the loader with seed=0, say."
            )
        with generators_kept():
            order = order_of(self._index_sampler, self.dataset, seed, epoch, batch)
            fetcher = MapFetcher(self._recipe(0, None, seed=seed))
            whole = fetcher.whole_batch(order)
            if whole is not None:
                return whole
            try:
                samples = fetcher.fetch(order, [])
            except SampleError as error:
                raise error.__cause__ or error from None
            return fetcher.collate(order, samples)

    def close(self) -> None:
        """End the workers now; otherwise they end with the loader, or with the process."""
        self._stop()
        iterator = self._iterator
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
            self._iterator = None

    def __enter__(self) -> Self:
        """Return the loader."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the loader."""
        self.close()

    def __del__(self) -> None:
        """Let the workers go with the loader."""
        if getattr(self, "_feed", None) is not None:
            self._stop()

    def _stop(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _check_stream(self, what: str) -> None:
        if not self._streams:
            raise OptionError(
                f"{what} needs a loader whose batches depend on their number alone\n"
                "  Make it with seed=0, say; an iterable dataset keeps its own state."
            )


def _nobody() -> None:
    """Be nobody: the stream is read by no iterator."""


def _check(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        options = " or ".join(map(repr, allowed))
        raise OptionError(f"{name}={value!r} is not possible; it takes {options}")
