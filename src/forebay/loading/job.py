"""What a worker of the loader does with one order: fetch, collate, pack.

The same code runs in a worker process, a worker thread and, without workers, in the trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.reduction import DupFd
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed

from forebay.collating.rules import collated
from forebay.engine.job import Answer, Assignment, Refusal
from forebay.engine.memory.heap import keep_freed
from forebay.engine.memory.layout import Slot
from forebay.engine.memory.packing import Packer, collate_into
from forebay.engine.memory.slab import Slab
from forebay.errors import shortened
from forebay.loading.fetch import EndOfDataset, IterableFetcher, MapFetcher, SampleError
from forebay.loading.recipe import (
    ENDED,
    Lane,
    LaneEnded,
    Made,
    NothingLeft,
    Order,
    Placed,
    Raised,
    Recipe,
    SkippedSample,
    Times,
)
from forebay.loading.seeding import seed_worker


class BatchJob:
    """Makes batches in the process it is opened in.

    Args:
        recipe: How they are made.
        keeps_tasks: See `Job`.
        guard: Put around each seeded sample, for threads that share the generators.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        keeps_tasks: bool,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """See the class."""
        self.keeps_tasks = keeps_tasks
        self._recipe = recipe
        self._guard = guard
        self._lane = 0
        self._begun: tuple[int, int | None] | None = None
        self._dataset_epoch: int | None = None
        self._maps: MapFetcher | None = None
        self._iterates: IterableFetcher | None = None
        self._init_error: BaseException | None = None
        self._idle_since = 0.0
        self._idle_s = 0.0  # before the present order

    def open(self, worker: int, lane: int) -> None:
        """Call the user's `worker_init_fn`; in a thread there is nothing else to set up."""
        self._lane = lane
        if self._recipe.worker_init_fn is not None:
            try:
                self._recipe.worker_init_fn(lane)
            except Exception as error:  # noqa: BLE001 - it is raised in the trainer, as torch does
                self._init_error = error
        self._idle_since = time.perf_counter()

    def run(self, assignment: Assignment) -> Answer:
        """Answer an order with a `Made`, or with what came instead."""
        self._idle_s = time.perf_counter() - self._idle_since
        try:
            return self._answer(assignment.payload)
        finally:
            self._idle_since = time.perf_counter()

    def close(self) -> None:
        """Nothing is to be tidied up."""

    def make(self, order: Order) -> Made | Raised | LaneEnded | NothingLeft:
        """Make one batch, catching what the user's code raises."""
        try:
            if self._recipe.is_iterable:
                return self._make_of_iterable(order)
            return self._make_of_map(order)
        except EndOfDataset:
            return LaneEnded(self._lane)
        except SampleError as error:
            return self.raised(order, error.__cause__ or error, error.index)
        except Exception as error:  # noqa: BLE001 - whatever collate_fn raises
            return self.raised(order, error, None)
        except BaseException as error:  # SystemExit, say
            if self._recipe.is_iterable:  # a generator is at its end then, and would say no more
                raise Refusal(ENDED) from error
            raise

    def raised(self, order: Order, error: BaseException, index: Any) -> Raised:
        """Hand an exception to the trainer, who raises it."""
        return Raised(error, notes_for(order, index, self._where(), self._recipe.seed))

    def _answer(self, payload: Any) -> Answer:
        if self._init_error is not None:
            return Answer(self.raised(payload, self._init_error, None), 0)
        result = self.make(payload)
        return Answer(result, _nbytes(result.batch) if isinstance(result, Made) else 0)

    def _where(self) -> str:
        return f"in DataLoader worker thread {self._lane}"

    def _before_collation(self) -> None:
        """Nothing: the batch goes where collation puts it."""

    def _make_of_map(self, order: Order) -> Made | NothingLeft:
        if self._maps is None:
            self._maps = MapFetcher(self._recipe, self._guard)
        self._tell_epoch(order)
        skipped: list[SkippedSample] = []
        began, cpu = time.perf_counter(), time.thread_time()
        batch = self._maps.whole_batch(order)
        samples = None
        if batch is None:
            samples = self._maps.fetch(order, skipped)
            if skipped and not samples:
                return NothingLeft(tuple(skipped))
        fetched, fetched_cpu = time.perf_counter(), time.thread_time()
        self._before_collation()
        if batch is None:
            batch = self._maps.collate(order, samples)
        done = time.perf_counter()
        times = Times(fetched - began, fetched_cpu - cpu, done - fetched, self._idle_s)
        return Made(batch, times, tuple(skipped))

    def _make_of_iterable(self, order: Order) -> Made:
        recipe = self._recipe
        if self._iterates is None and order.epoch == recipe.first_epoch and recipe.lanes:
            state = recipe.lanes[self._lane].dataset
            if state is not None:
                recipe.dataset.load_state_dict(state)
        # An epoch that was begun ahead is begun anew where `set_epoch` was called otherwise.
        if self._iterates is None or (order.epoch, order.dataset_epoch) != self._begun:
            self._begun = order.epoch, order.dataset_epoch
            self._tell_epoch(order)
            # worker_init_fn has the last word on how the first one begins.
            if order.lane_seed is not None and order.epoch != recipe.first_epoch:
                seed_worker(order.lane_seed, self._lane)
            self._seed_pipe(order)
            self._iterates = IterableFetcher(self._recipe)
            self._read_again(order)
        began, cpu = time.perf_counter(), time.thread_time()
        samples = self._iterates.fetch(order)
        fetched, fetched_cpu = time.perf_counter(), time.thread_time()
        self._before_collation()
        batch = collated(self._recipe.collate_fn, samples)
        done = time.perf_counter()
        lane = Lane(recipe.dataset.state_dict(), self._iterates.ended) if recipe.lanes else None
        times = Times(fetched - began, fetched_cpu - cpu, done - fetched, self._idle_s)
        return Made(batch, times, (), lane)

    def _read_again(self, order: Order) -> None:
        """Read past what this lane's last worker gave before it died: no other way leads there."""
        assert self._iterates is not None
        for _ in range(order.turn):
            with suppress(Exception):  # it was raised then, too
                # Collated as well, for the random numbers that this may draw.
                self._recipe.collate_fn(self._iterates.fetch(order))

    def _seed_pipe(self, order: Order) -> None:
        if isinstance(self._recipe.dataset, IterDataPipe) and order.shared_seed is not None:
            generator = torch.Generator()
            generator.manual_seed(order.shared_seed)
            apply_random_seed(self._recipe.dataset, generator)

    def _tell_epoch(self, order: Order) -> None:
        if order.dataset_epoch is not None and order.dataset_epoch != self._dataset_epoch:
            self._dataset_epoch = order.dataset_epoch
            holder_of_epoch(self._recipe.dataset).set_epoch(order.dataset_epoch)


class InlineBatchJob(BatchJob):
    """Makes batches in the trainer's own thread, where there is no worker to be set up."""

    def open(self, worker: int, lane: int) -> None:
        """Do nothing."""

    def run(self, assignment: Assignment) -> Answer:
        """Answer an order; between two of them the thread is the trainer's, not idle."""
        return self._answer(assignment.payload)

    def make(self, order: Order) -> Made | Raised | LaneEnded | NothingLeft:
        """Make one batch; what would end the process, as sys.exit() does, may do so here."""
        try:
            return super().make(order)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised in the trainer's loop
            return self.raised(order, error, None)

    def _where(self) -> str:
        return "in this process"


class ProcessBatchJob(BatchJob):
    """Makes batches in a worker process, and packs them into shared memory.

    Args:
        recipe: How they are made.
        slab: Where they go; another process attaches to it by its descriptor.
        keeps_tasks: See `Job`.
        meets: Called with each class in a batch.
    """

    def __init__(
        self,
        recipe: Recipe,
        slab: Slab,
        *,
        keeps_tasks: bool,
        meets: Callable[[type], None] | None = None,
    ) -> None:
        """See the class."""
        super().__init__(recipe, keeps_tasks=keeps_tasks)
        self._slab = slab
        self._meets = meets
        self._packer: Packer | None = None
        self._slot: Slot | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Travel to an interpreter of its own, and the slab's descriptor along."""
        state = dict(self.__dict__)
        state["_slab"] = DupFd(self._slab.fileno()), self._slab.size
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach to the slab."""
        descriptor, size = state.pop("_slab")
        self.__dict__.update(state)
        self._slab = Slab.attach(descriptor.detach(), size)

    def open(self, worker: int, lane: int) -> None:
        """Become a worker in torch's sense: one thread, a seed, and `get_worker_info()`."""
        torch.set_num_threads(1)
        keep_freed()
        recipe = self._recipe
        seed = seed_worker(recipe.base_seed, lane)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=lane, num_workers=recipe.num_workers, seed=seed, dataset=recipe.dataset
        )
        self._packer = Packer(self._slab, self._meets)
        collate_into(self._packer)
        super().open(worker, lane)

    def _answer(self, payload: Placed) -> Answer:
        order, slot = payload
        if self._init_error is not None:
            return Answer(self.raised(order, self._init_error, None), 0)
        packer = self._packer
        assert packer is not None, "open comes first"
        self._slot = slot
        made = self.make(order)
        if not isinstance(made, Made):
            packer.begin(None)
            return Answer(made, 0)
        try:
            parcel = packer.pack(made.batch)
        except Exception as error:  # noqa: BLE001 - whatever the batch's classes raise
            return Answer(self.raised(order, error, None), 0)
        made = made._replace(batch=None)  # what is still there of it from here on is the user's
        parcel = packer.seal(parcel)
        return Answer(made._replace(batch=parcel), parcel.nbytes)

    def raised(self, order: Order, error: BaseException, index: Any) -> Raised:
        """Describe an exception for the trainer, where it is raised again, as torch does."""
        info = (type(error), error, error.__traceback__)
        wrapper = ExceptionWrapper(info, where=self._where())
        return Raised(wrapper, notes_for(order, index, self._where(), self._recipe.seed))

    def _before_collation(self) -> None:
        assert self._packer is not None
        self._packer.begin(self._slot)

    def _where(self) -> str:
        return f"in DataLoader worker process {self._lane}"


def notes_for(order: Order, index: Any, where: str, seed: int | None) -> tuple[str, ...]:
    """Return what is added to an exception: which sample, which batch, and how to see it again."""
    what = f"sample {index!r}" if index is not None else f"the samples {shortened(order.index)}"
    place = f"epoch {order.epoch}, batch {order.batch}"
    note = f"forebay: {what}, {place}, {where.removeprefix('in DataLoader ')}"
    if seed is None:
        return (note,)
    again = f"loader.replay(epoch={order.epoch}, batch={order.batch})"
    return (note, f"forebay: {again} makes the same batch in this process, for a debugger")


def holder_of_epoch(dataset: Any) -> Any:
    """Return the dataset that has a `set_epoch`, within subsets too; None if there is none."""
    while dataset is not None and not hasattr(dataset, "set_epoch"):
        dataset = getattr(dataset, "dataset", None)
    return dataset


def _nbytes(batch: Any) -> int:
    """Return the bytes of the tensors and arrays in a batch, the usual containers searched."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, dict):
        return sum(map(_nbytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(_nbytes, batch))
    return int(getattr(batch, "nbytes", 0))
