"""The messages between the planner, the workers and the iterator, as plain records.

    BatchSpec       to each worker, once: how every batch is made
    BatchRequest    to a worker: one batch to be made
    BatchResult     back: the batch, or
    BatchError      what the user's code raised, or
    WorkerExhausted that the worker's part of an iterable dataset has ended

They pass through processes that need no torch, so this module does not import it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from forebay.engine.memory.packed_batch import PackedBatch
from forebay.engine.memory.slab_layout import Slot
from forebay.failures import Failure
from forebay.observe.trace import Timing

# The kind of a failure that ends the stream in which it happens, so that nothing can be retried.
STREAM = "stream"


class WorkerState(NamedTuple):
    """Where one worker's copy of a dataset stands, if that has a state.

    Attributes:
        dataset: State of the dataset; None if it has none, or is untouched.
        iterator: State of the dataset's iterator, where that has one of its own.
        phase: "before" the epoch: the state that the epoch begins with; "within" it: after the last
            batch that was handed out; or "ended": the worker's part of the epoch is over.
    """

    dataset: Any = None
    iterator: Any = None
    phase: str = "before"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """How every batch of a loader is made; torch's arguments have torch's meaning.

    Attributes:
        dataset: The dataset, map-style or iterable.
        is_iterable: Which of the two.
        auto_collation: Whether a batch is made of several samples.
        collate_fn: Makes a batch of a list of samples, or converts one sample.
        drop_last: For iterable datasets: leave out an incomplete last batch.
        num_workers: What `get_worker_info()` says: how many workers there were at first.
        base_seed: Worker `w` starts with the seed `base_seed + w`.
        worker_init_fn: Called in each worker with its ID.
        seed: Seeds each sample by its position in the plan; None leaves each worker to its own
            random numbers, as torch does.
        skip_errors: Leave out samples that raise.
        first_epoch: The first epoch of which these workers make batches.
        worker_states: Where each worker is to begin with its copy of a dataset that has a state.
        tracks_state: Whether each result is to tell the state of the worker's copy.
    """

    dataset: Any
    is_iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool = False
    num_workers: int = 0
    base_seed: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    seed: int | None = None
    skip_errors: bool = False
    first_epoch: int = 0
    worker_states: tuple[WorkerState, ...] = ()
    tracks_state: bool = False


class BatchRequest(NamedTuple):
    """One batch to be made.

    Attributes:
        index: What the sampler gave: a list of indices, or one index. For an iterable dataset a
            list of None, as long as the batch.
        epoch: Its epoch, from 0.
        batch: Its number in the epoch, from 0.
        position: Position of its first sample in the epoch, over all ranks.
        repeated: How many of its last samples are repeated, to fill up the batch of this rank.
        worker_id: The only worker that may make it; None for any.
        preceding: How many batches that worker was to make before this one in the epoch.
        dataset_epoch: What to call the dataset's `set_epoch` with first; None for no call.
        worker_seed: What the workers of an iterable dataset are seeded with in this epoch.
        shared_seed: Likewise, for a datapipe: the same on all ranks.
        slot: Where the batch may be written, if the worker shares memory with its reader.
    """

    index: Any
    epoch: int
    batch: int
    position: int = 0
    repeated: int = 0
    worker_id: int | None = None
    preceding: int = 0
    dataset_epoch: int | None = None
    worker_seed: int | None = None
    shared_seed: int | None = None
    slot: Slot | None = None

    def __str__(self) -> str:
        """Return what the log calls it."""
        return f"epoch {self.epoch}, batch {self.batch}"


class BatchResult(NamedTuple):
    """A batch: packed by a worker process, or as it is where no process lies between.

    Attributes:
        batch: The batch; None if every sample of it was left out.
        timing: The time spent on it.
        failures: The samples that were left out.
        is_empty: Whether every sample was left out.
        state: Where the worker's copy of the dataset stands now, if that is tracked.
    """

    batch: PackedBatch | Any
    timing: Timing = Timing()
    failures: tuple[Failure, ...] = ()
    is_empty: bool = False
    state: WorkerState | None = None


class BatchError(NamedTuple):
    """Instead of a batch: what the user's code raised.

    Attributes:
        error: The exception; wrapped unless it was raised in this process.
        notes: What forebay adds to it.
    """

    error: Any
    notes: tuple[str, ...]

    def reraise(self) -> NoReturn:
        """Raise the exception, with the notes."""
        try:
            if isinstance(self.error, BaseException):
                raise self.error
            self.error.reraise()
        except BaseException as error:
            for note in self.notes:
                if note not in getattr(error, "__notes__", ()):  # some raise one object repeatedly
                    error.add_note(note)
            raise
        raise AssertionError("both raise")


class WorkerExhausted(NamedTuple):
    """Instead of a batch: this worker's part of an iterable dataset has ended.

    Attributes:
        worker_id: The worker.
        state: Where its copy of the dataset stands now, if that is tracked.
    """

    worker_id: int
    state: WorkerState | None = None


class SealedResult(NamedTuple):
    """A result that only the reader can unpickle: the user's classes may not be known on the way.

    Attributes:
        body: The result, pickled.
    """

    body: bytes

    def opened(self) -> Any:
        """Return the result."""
        return pickle.loads(self.body)  # noqa: S301 - from our own worker


Result = BatchResult | BatchError | WorkerExhausted | Failure
