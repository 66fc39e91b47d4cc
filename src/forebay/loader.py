"""`forebay.DataLoader`: torch's, with a buffer so deep that training never waits.

DataLoader ── iter ──> ArrayIterator    tensors in memory
│                  LaneIterator     torch's arguments alone, with workers
│                  AheadIterator    an iterable dataset and a buffer
│                  torch's own      torch's arguments alone, without workers
└──────────────>   StreamIterator   buffer, seed, on_error or backend were named

Long because all that a user may call on a loader stands here, and because it repeats every argument
of torch's class, for the signature and the documentation.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pickle import PicklingError
from typing import Any, Self, TypeVar

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
from forebay.loading.ahead import AheadIterator
from forebay.loading.buffer import MOST_BATCHES, Buffer
from forebay.loading.crew import Workers
from forebay.loading.epochs import Watches
from forebay.loading.feed import Feed
from forebay.loading.fetch import MapFetcher, slicing
from forebay.loading.iterators import RETRIES, StreamIterator
from forebay.loading.job import holder_of_epoch
from forebay.loading.lanes import LaneIterator
from forebay.loading.local import ArrayIterator, PlainIterator
from forebay.loading.pump import PumpedFeed
from forebay.loading.recipe import Lane, Recipe, SkippedSample
from forebay.loading.seeding import generators_kept, generators_taken
from forebay.loading.shuffle import SeededShuffle
from forebay.loading.state import (
    Followed,
    Place,
    carried_by,
    give_back,
    has_state,
    holds_position,
    leave_out,
    set_generator,
    state_of_generator,
)
from forebay.loading.statistics import Statistics, Tally
from forebay.loading.stream import Stream
from forebay.options import Ray, check_backend, cluster_of

_T_co = TypeVar("_T_co", covariant=True)

# What a loader that is made cannot change any more, besides what torch names.
_FIXED = ("buffer", "backend", "seed", "on_error")
# Batches up to this size are sliced in the trainer, where the dataset is tensors in memory: making
# one takes less than sending it.
SLICED_BYTES = 1 << 20
STATE_VERSION = 1
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
        backend: "process", "thread", or "ray" (or a `forebay.Ray`) to have batches made on the
            nodes of a cluster; the buffer is this process's memory all the same. Threads share the
            generators of the process: with `seed` samples take turns, and a trainer that draws
            from `random`, numpy or torch's CPU generator meanwhile makes both its own draws and
            the samples depend on who came first.
        seed: Makes every batch a function of (seed, epoch, number of the batch): equal, bit for
            bit, for any number of workers, with and without a buffer, after the death of a worker
            and after a resume. `random`, numpy and torch are seeded for each sample; for an
            iterable dataset for each worker and epoch, so there `num_workers` matters.
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
        backend: str | Ray = "process",
        seed: int | None = None,
        on_error: str = "raise",
    ) -> None:
        """See the class."""
        check_backend(backend)
        _check("on_error", on_error, ("raise", "skip"))
        if seed is not None and type(seed) is not int:
            raise OptionError(f"seed={seed!r} is not possible; it takes a whole number or None")
        self.buffer = Buffer.of(buffer)
        if backend == "thread" and self.buffer is not None and self.buffer.directory is not None:
            raise OptionError(
                "Buffer(directory=) is not possible with backend='thread', whose batches are the "
                "trainer's own memory\n"
                "  Nothing was started. Use backend='process', or a buffer in memory."
            )
        if cluster_of(backend) is not None and not num_workers:
            raise OptionError(
                "backend='ray' with num_workers=0: nobody on the cluster would make batches\n"
                "  Nothing was started. Say how many workers the cluster is to run."
            )
        if timeout and not num_workers and (seed is not None or self.buffer is not None):
            raise OptionError(
                f"timeout={timeout:g} needs a worker that can be killed, and num_workers=0 has none"
                "\n  Set num_workers to 1 or more, or leave the timeout out."
            )
        self.backend = backend
        self.seed = seed
        self.on_error = on_error
        self._skips = on_error == "skip"
        is_map = not isinstance(dataset, IterableDataset)
        named = seed is not None or self.buffer is not None or self._skips or backend != "process"
        self._streams = is_map and named
        if not is_map and cluster_of(backend) is not None:
            raise OptionError(
                "an iterable dataset cannot have backend='ray': only samples that can be asked for "
                "one by one can be shared out among nodes\n"
                "  Nothing was started. Use a map-style dataset (__getitem__ and __len__), or "
                "backend='process', whose workers are on this machine."
            )
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
        self._passes: weakref.WeakSet[LaneIterator] = weakref.WeakSet()
        # The iterator that the stream is read by.
        self._reader: Callable[[], Any] = _nobody
        self._place: Place | None = None  # by torch's arguments alone: where the pass stands
        self._resumed: Place | None = None  # where the next one is to begin
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
        watched = holder_of_epoch(dataset) if self._streams or self.buffer is not None else None
        self._watches = Watches(self._whole_sampler if self._streams else None, watched)

    # ---- iterating -----------------------------------------------------------------------------

    def __iter__(self) -> Any:
        """Return an iterator over one epoch."""
        if self._streams:
            return StreamIterator(self, self._begin_epoch)
        place, self._resumed = self._resumed, None
        if place is not None and place.batch:
            self._place, self._epoch = place, place.epoch + 1
            return self._go_on(place)
        generator = self._drawn_from
        if place is not None and place.generator is not None:
            set_generator(generator, place.generator)
        carried = carried_by(self._whole_sampler)
        keeps_workers = self._keeps_workers and self._iterator is not None
        state = state_of_generator(generator)
        self._place = Place(self._epoch, state, carried, keeps_workers=keeps_workers)
        self._epoch += 1
        if self._dataset_kind == _DatasetKind.Iterable and has_state(self.dataset):
            self._place.lanes = [Lane() for _ in range(max(self.num_workers, 1))]
        return self._begin_pass()

    def _begin_pass(self) -> Any:
        """Begin a pass by torch's rules; those of workers that persist have one iterator."""
        if not (self._keeps_workers and self.num_workers):
            return self._get_iterator()
        if self._iterator is None:
            self._iterator = self._get_iterator()
        else:
            self._iterator._reset(self)
        return self._iterator

    def _go_on(self, place: Place) -> Any:
        """Begin a pass again, as it was begun, without what was handed out."""
        # The global generator is the user's, who goes on with it from where it is.
        with nullcontext() if self.generator is not None else generators_kept():
            assert place.generator is not None, "a pass that gave batches has begun"
            set_generator(self._drawn_from, place.generator)
            if place.lanes and not self.num_workers and place.lanes[0].dataset is not None:
                self.dataset.load_state_dict(place.lanes[0].dataset)  # type: ignore[attr-defined]
            iterator: Any = self._begin_pass()
            iterator.draw_order()
            if self._dataset_kind == _DatasetKind.Iterable and not place.lanes:
                count, place.batch = place.batch, 0
                leave_out(iterator, count)
        return iterator

    @property
    def _drawn_from(self) -> torch.Generator:
        """The generator that each iteration draws from; torch itself refuses an impossible one."""
        given = self.generator
        return given if isinstance(given, torch.Generator) else torch.default_generator

    @property
    def _whole_sampler(self) -> Any:
        return super()._index_sampler

    @property
    def _index_sampler(self) -> Any:
        """What torch's iterators read."""
        sampler, place = self._whole_sampler, self._place
        if place is None or not (place.skip or holds_position(sampler)):
            return sampler
        return Followed(sampler, place, self._drawn_from)

    def _position(self) -> tuple[int, int]:
        """Return the epoch that is being read, or was read last, and how much of it."""
        if self._stream is not None:
            return self._stream.epoch, self._stream.batch
        place = self._resumed or self._place
        if place is not None:
            return place.epoch, place.batch
        return (self._epoch, self._resume_at) if self._resume_at else (self._epoch - 1, 0)

    def _get_iterator(self) -> Any:
        """Choose how one pass is made where torch's arguments alone are given."""
        if self._is_sliced():
            return ArrayIterator(self)
        if self.num_workers == 0:
            return PlainIterator(self)
        self.check_worker_number_rationality()
        one_pass = LaneIterator(self) if self.buffer is None else AheadIterator(self)
        self._passes.add(one_pass)
        return one_pass

    def check_worker_number_rationality(self) -> None:
        """Warn, as torch does, of more workers than this machine has cores, if they are on it."""
        if cluster_of(self.backend) is None:
            super().check_worker_number_rationality()

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
        if not self._keeps_workers:
            self._stop()
        if self._stream is None:
            if isinstance(self.sampler, SeededShuffle):
                self.sampler.seed = seed
            self._stream = Stream(
                self._index_sampler,
                self.dataset,
                self._watches,
                seed,
                ahead=self.buffer is not None and self.num_workers > 0,
                depth=(self.prefetch_factor or 1) * max(self.num_workers, 1),
                shares_dataset=self.backend == "thread" or not self.num_workers,
            )
        stream = self._stream
        if isinstance(self.sampler, RandomSampler) and self.sampler.generator is None:
            # torch draws a seed for it here; what the user draws next stays the same.
            with generators_taken():
                torch.empty((), dtype=torch.int64).random_()
        if self._feed is None or not self._feed.is_open:
            # Seeded samples take turns where workers are threads, so there it has to be asked for.
            is_seeded = self.seed is not None or self.backend != "thread"
            recipe = self._recipe(base_seed, None, seed=stream.seed if is_seeded else None)
            if self._feed is not None:
                self._feed.close()
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
            first_epoch=0 if self._place is None else self._place.epoch,
            lanes=() if self._place is None else tuple(self._place.lanes),
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
            max_bytes=None if buffer.max_bytes is None else int(buffer.max_bytes),
            refill_below=buffer.low_mark(),
        )

    def _open_feed(self, recipe: Recipe, limits: Limits, *, keeps_tasks: bool) -> Feed:
        if not self.num_workers:
            return Feed(recipe, Workers("inline", 1), limits, keeps_tasks, self._tally)
        context = self.multiprocessing_context or multiprocessing.get_context()
        start: Any = "fork" if context.get_start_method() == "fork" else context
        cluster = cluster_of(self.backend)
        backend: Any = self.backend if cluster is None else "ray"
        directory = None if self.buffer is None else self.buffer.directory
        workers = Workers(backend, self.num_workers, start, directory, cluster)
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
        tally = self._tally
        feeds = [self._feed] if self._feed is not None else []
        feeds += [one_pass._feed for one_pass in self._passes]
        epoch, batch = self._position()
        ready = self._ready(tally.ready_batches)
        return Statistics(
            epoch=epoch,
            batch=batch,
            ready_batches=tally.ready_batches,
            ready_bytes=tally.ready_bytes,
            ready_from=ready[0] if ready else None,
            ready_to=ready[-1] if ready else None,
            in_flight=sum(feed.in_flight for feed in feeds),
            waited_s=tally.waited_s,
            wait_p50_s=tally.percentile(0.5),
            wait_p95_s=tally.percentile(0.95),
            wait_p99_s=tally.percentile(0.99),
            fetch_s=tally.fetch_s,
            fetch_cpu_s=tally.fetch_cpu_s,
            collate_s=tally.collate_s,
            room_s=tally.room_s,
            restarts=tally.restarts,
            failures=len(self._skipped),
        )

    def _ready(self, count: int) -> list[tuple[int, int]]:
        """Return epoch and number of the batches that wait to be handed out."""
        if self._stream is not None:
            orders = list(self._stream.orders)[:count]
            return [(order.epoch, order.batch) for _, order in orders]
        if isinstance(self._iterator, AheadIterator):
            return self._iterator.ready()
        epoch, batch = self._position()
        return [(epoch, batch + each) for each in range(count)] if self.in_order else []

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, as data for JSON: what was handed out, not what is ready.

        It takes no time that grows with the dataset. With `seed` or `buffer` it is valid for any
        `num_workers`, `backend` and `buffer`, and all later epochs are as they would have been.

        With torch's arguments alone the rest of the epoch has the same samples in the same order.
        What workers draw, and the order of later epochs, come from torch's generators, as ever:
        pass `generator`, or restore the global one with `torch.set_rng_state`. The workers of an
        iterable dataset go on where they were if it has `state_dict` and `load_state_dict`;
        otherwise what was handed out is made again and left out.

        Raises:
            OptionError: With `in_order=False` nobody can say which batches are left.
        """
        if not self.in_order and self.num_workers and not self._streams:
            raise OptionError(
                "state_dict() is not possible with in_order=False: which batches are left depends "
                "on how fast the workers were\n  Leave in_order=True, or name a seed."
            )
        state: dict[str, Any] = {"version": STATE_VERSION, "dataset": None}
        if self._dataset_kind == _DatasetKind.Map and has_state(self.dataset):
            state["dataset"] = copy.deepcopy(self.dataset.state_dict())  # type: ignore[attr-defined]
        return state | (self._state_of_stream() if self._streams else self._state_of_pass())

    def _state_of_stream(self) -> dict[str, Any]:
        if self._stream is not None:
            place = self._stream.state(ended=self._reader is _nobody)
        else:
            place = {
                "seed": self.seed,
                "epoch": self._epoch,
                "batch": self._resume_at,
                "sampler": carried_by(self._index_sampler),
                "said": list(self._watches.said().values),
            }
        return {"kind": "stream", **place}

    def _state_of_pass(self) -> dict[str, Any]:
        place = self._place if self._resumed is None else self._resumed
        if place is None or (place.is_over and self._resumed is None):
            # What the global generator will be when the next pass begins is not ours to say.
            own = None if self.generator is None else state_of_generator(self.generator)
            place = Place(self._epoch, own, carried_by(self._whole_sampler))
        return {"kind": "pass", **place.as_state(), "num_workers": self.num_workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the next iteration gives the rest of that epoch.

        Args:
            state: What `state_dict` returned, there or in another process.

        Raises:
            OptionError: The state is of a newer forebay, of another seed, or of another kind of
                loader.
        """
        self._check_state(state)
        self.close()
        self._stream, self._place, self._reader = None, None, _nobody
        self._epoch = state["epoch"]
        if state["dataset"] is not None:
            self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        give_back(self._whole_sampler, state["sampler"])
        if not self._streams:
            is_map = self._dataset_kind == _DatasetKind.Map
            skips = is_map and not holds_position(self._whole_sampler)
            self._resumed = Place.of_state(state, skip=state["batch"] if skips else 0)
            return
        if state["seed"] is not None:
            self.__dict__["seed"] = state["seed"]  # nothing rests on the old one now
        self._resume_at = state["batch"]
        self._watches.take_over(state["said"])

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            raise OptionError(
                f"the state has version {state.get('version')!r}, this forebay reads "
                f"{STATE_VERSION}\n  Nothing was changed. Load it with the forebay that made it."
            )
        if (state["kind"] == "stream") is not self._streams:
            theirs, ours = ("without", "with") if self._streams else ("with", "without")
            raise OptionError(
                f"the state is of a loader {theirs} seed=, buffer=, on_error= and backend=, this "
                f"one is {ours}\n"
                f"  Nothing was changed. Make the loader {theirs} them; any one of them counts."
            )
        seed = state.get("seed")
        if None not in (seed, self.seed) and seed != self.seed:
            raise OptionError(
                f"the state is of seed={seed}, the loader of seed={self.seed}\n"
                "  Nothing was changed. The batches would not be those that were to come: make the "
                "loader with the same seed, or with none."
            )
        is_split = self._dataset_kind == _DatasetKind.Iterable and state["batch"]
        if is_split and state["num_workers"] != self.num_workers:
            raise OptionError(
                f"the state is of num_workers={state['num_workers']}, the loader of "
                f"num_workers={self.num_workers}\n"
                "  Nothing was changed. Each worker has a part of an iterable dataset of its own, "
                "so that their number has to stay the same within an epoch."
            )

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
        seed = self.seed
        if seed is None and self._stream is not None and self.backend != "thread":
            seed = self._stream.seed
        if seed is None or not self._streams:
            raise OptionError(
                "replay() needs a seed: without one, batches depend on more than their number\n"
                "  Make the loader with seed=0, say."
            )
        stream = self._stream or Stream(self._index_sampler, self.dataset, self._watches, seed)
        with generators_kept():
            order, said = stream.order_of(epoch, batch)
            self._watches.set_dataset(said)
            try:
                return MapFetcher(self._recipe(0, None, seed=seed)).again(order)
            finally:
                self._watches.set_dataset(self._watches.said())

    def close(self) -> None:
        """End the workers now; otherwise they end with the loader, or with the process."""
        self._stop()
        for one_pass in list(self._passes):
            one_pass._shutdown_workers()
        self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        """Let a copy begin anew: workers, batches and counts stay with the original."""
        fresh = {
            "_feed": None,
            "_stream": None,
            "_reader": _nobody,
            "_passes": None,
            "_iterator": None,
            "_tally": Tally(),
        }
        return {**self.__dict__, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be a copy."""
        self.__dict__.update(state)
        self._passes = weakref.WeakSet()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, unless it is one that what is under way rests on; as torch does."""
        if name in _FIXED and "_watches" in self.__dict__:
            kind = type(self).__name__
            raise ValueError(f"{name} attribute should not be set after {kind} is initialized")
        super().__setattr__(name, value)

    def __enter__(self) -> Self:
        """Return the loader."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the loader."""
        self.close()

    def __del__(self) -> None:
        """Let the workers go with the loader."""
        feed = getattr(self, "_feed", None)
        if feed is not None:  # nothing is set: this may be the interpreter's very end
            feed.close()

    def _stop(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None


def _nobody() -> None:
    """Be nobody: the stream is read by no iterator."""


def _check(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        options = " or ".join(map(repr, allowed))
        raise OptionError(f"{name}={value!r} is not possible; it takes {options}")
