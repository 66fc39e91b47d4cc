"""Messages between the planner, the workers and the iterator, as records.

    BatchSpec        to each worker, once: how to make batches
    BatchRequest     to a worker: make this batch
    BatchResult      from a worker: the batch, or
    BatchError       the exception that the user's code raised, or
    WorkerExhausted  the worker's part of an iterable dataset has ended

They pass through processes that do not import torch, so this module does not import it either.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from forebay.errors import shortened
from forebay.failures import Failure
from forebay.loading.snapshots import unpickled
from forebay.memory.layout import Slot
from forebay.memory.packed_batch import PackedBatch
from forebay.observe.measurements import Timing

# With `concurrency`, so many times as many samples are being fetched, or wait for a thread or for
# their batch, besides those of the batch that is being made.
AHEAD = 2
# The kind of a failure that ends a worker's part of an iterable dataset: nothing can be retried.
STREAM = "stream"
LOST = (
    "a worker died, and its part of {0} cannot be continued: read again, it gives other samples\n"
    "  It was worker {1}, in epoch {2}, after {3:,} batches of it. The loader continues without "
    "the rest of that worker's stream.\n"
    "  Resume from the last checkpoint. A stream that depends on a seed, the epoch and the worker "
    "alone is read again; one that depends on the time, or on fresh entropy, cannot be."
)


class WorkerState(NamedTuple):
    """The state of one worker's copy of a dataset, and what it has read since.

    Attributes:
        dataset: State of the dataset; None if it has no state, or none was taken yet.
        since: What was read since, and is read again and dropped on a resume: so many samples of
            an iterable dataset; of a map-style dataset the indices of each batch.
        read: Samples of the epoch of an iterable dataset that were read when it was taken.
        digest: That of the worker's last batch, to which the samples above lead; None if unknown.
        generators: States of the generators that an iterable dataset owned when its epoch began; at
            its end, those that the next one begins with.
    """

    dataset: Any = None
    iterator: Any = None
    phase: str = "before"
    since: int | list[Any] = 0
    read: int = 0
    digest: int | None = None
    generators: Any = None

    @property
    def is_known(self) -> bool:
        """Return whether it has a state of the user's objects."""
        return self.dataset is not None or self.iterator is not None

    def copied(self) -> WorkerState:
        """Return a copy of its own, with what a worker pickled unpickled."""
        since = self.since
        if isinstance(since, list):
            since = [list(each) if isinstance(each, array) else each for each in since]
        dataset, iterator = unpickled(self.dataset), unpickled(self.iterator)
        return self._replace(dataset=dataset, iterator=iterator, since=since)

    def before_epoch(self) -> WorkerState:
        """Return the state of a worker that lives on, before its next epoch."""
        # A stream has ended, with a state of its end; the indices of a map-style dataset stay.
        since = self.since if isinstance(self.since, list) else 0
        generators = self.generators if self.phase == "ended" else None
        return WorkerState(self.dataset, self.iterator, "before", since, generators=generators)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """How to make the batches of a loader; torch's arguments have torch's meaning.

    Attributes:
        fetcher: The class of `BatchFetcher` that reads this kind of dataset.
        seed: Seeds each sample, together with the epoch and the sample's position in it; None:
            each worker has one sequence of random numbers, as in torch.
        tracks_state: Whether results have the state of the worker's dataset; see `snapshots.py`.
        concurrency: Samples that each worker fetches at once.
    """

    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    fetcher: Any
    drop_last: bool = False
    num_workers: int = 0
    base_seed: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    seed: int | None = None
    seeds_owned: bool = False
    skip_errors: bool = False
    first_epoch: int = 0
    worker_states: tuple[WorkerState, ...] = ()
    tracks_state: bool = False
    keeps_workers: bool = False
    concurrency: int = 1


class BatchRequest(NamedTuple):
    """A request to make one batch.

    Attributes:
        index: From the sampler: a list of indices, or one index. For an iterable dataset a list of
            None, as long as the batch. The planner keeps the indices of a plan as an `array`.
        epoch: Its epoch, from 0.
        batch: Its number in the epoch, from 0.
        position: Of its first sample in the epoch, which the others follow; or of each of them.
        worker_id: The only worker that may make it; None for any.
        wants_state: Whether the state after it must be taken, whatever that takes.
        audited: Which of its samples are made a second time; -1 for the batch. See `audit.py`.
    """

    index: Any
    epoch: int
    batch: int
    position: int | list[int] = 0
    repeated: int = 0
    worker_id: int | None = None
    preceding: int = 0
    worker_seed: int | None = None
    shared_seed: int | None = None
    wants_state: bool = False
    slot: Slot | None = None
    audited: tuple[int, ...] = ()

    def positions(self, count: int) -> Sequence[int]:
        """Return the position of each of the batch's `count` samples."""
        at = self.position
        return range(at, at + count) if isinstance(at, int) else at

    def __str__(self) -> str:
        """Return the batch's name in the log."""
        return f"epoch {self.epoch}, batch {self.batch}"

    @property
    def is_of_stream(self) -> bool:
        """Whether it asks for the next samples of an iterable dataset."""
        return self.index is None or (isinstance(self.index, list) and None in self.index)

    @property
    def samples_shown(self) -> str:
        """Its samples, in words."""
        if self.is_of_stream:
            return "the next samples of its stream"
        index = list(self.index) if isinstance(self.index, array) else self.index
        return f"samples {shortened(index)}"

    @property
    def replay_note(self) -> str:
        """The note of an exception that says how to reproduce it, for a loader with a seed."""
        call = f"loader.replay(epoch={self.epoch}, batch={self.batch})"
        return f"forebay: {call} makes the same batch in this process, for a debugger"


class AuditedSample(NamedTuple):
    """A sample that is made a second time, as it was the first time.

    Attributes:
        offset: Its place in the batch; -1 for the batch itself, collated.
        digest: See `batch_digests.digested`.
        shown: The beginning of each of its values, by path.
        is_whole: Whether it can only be made with the whole batch.
        others: What generators are called that only a search of the process found, by ID; None if
            there are none.
    """

    offset: int
    digest: Any
    shown: dict[str, str]
    is_whole: bool
    others: dict[int, str] | None


class BatchResult(NamedTuple):
    """A batch, packed if a worker process made it.

    Attributes:
        batch: The batch; None if every sample of it was skipped.
        timing: The time spent on it; None for most batches that take no time worth noting.
        state: The state of the worker's dataset after it; None if it was not taken.
        is_undivided: Whether the first batch of an iterable dataset was made without a question
            for the worker, so that every worker makes all batches.
        digest: Of a batch of an iterable dataset; see `batch_digest.py`.
        digest_before: That of the worker's batch before it in the epoch; None if there was none.
    """

    batch: PackedBatch | Any
    timing: Timing | None = None
    failures: tuple[Failure, ...] = ()
    is_empty: bool = False
    state: WorkerState | None = None
    is_inline: bool = False
    is_moved: bool = False
    refused: Exception | None = None
    is_undivided: bool = False
    audited: tuple[AuditedSample, ...] = ()
    digest: int | None = None
    digest_before: int | None = None


class BatchError(NamedTuple):
    """The exception that the user's code raised, instead of a batch."""

    error: Any
    notes: tuple[str, ...]
    state: WorkerState | None = None

    def reraise(self) -> NoReturn:
        """Raise the exception, with the notes."""
        try:
            if isinstance(self.error, BaseException):
                raise self.error
            self.error.reraise()
        except BaseException as error:
            for note in self.notes:
                # The user's code may raise the same object repeatedly.
                if note not in getattr(error, "__notes__", ()):
                    error.add_note(note)
            raise
        raise AssertionError("both raise")


class WorkerExhausted(NamedTuple):
    """The end of a worker's part of an iterable dataset, instead of a batch."""

    worker_id: int
    state: WorkerState | None = None


Result = BatchResult | BatchError | WorkerExhausted | Failure
