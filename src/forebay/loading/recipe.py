"""What makes a batch, as plain records: they go to the workers once, or with each task."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay.engine.memory.layout import Slot
from forebay.engine.memory.parcel import Parcel

if TYPE_CHECKING:  # records travel through processes that need no torch
    from torch._utils import ExceptionWrapper

# The kind of a failure that ends the stream it happens in, so that nothing can be tried again.
ENDED = "ended"


class Lane(NamedTuple):
    """Where one worker's part of an iterable dataset stands.

    Attributes:
        dataset: The state of its dataset after the last batch that was handed out; None before.
        ended: Whether that batch was its last.
    """

    dataset: Any = None
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How every batch of a loader is made; torch's arguments have torch's meaning.

    Attributes:
        dataset: The dataset, map-style or iterable.
        is_iterable: Which of the two.
        auto_collation: Whether a batch is made of several samples.
        collate_fn: Makes a batch of a list of samples, or converts one sample.
        drop_last: For iterable datasets: leave out an incomplete last batch.
        num_workers: How many workers there are.
        base_seed: Worker `w` starts with the seed `base_seed + w`.
        worker_init_fn: Called in each worker with its lane.
        seed: Seeds each sample by its position in the stream; None leaves each worker to its own
            stream of random numbers, as torch does.
        skip_errors: Leave out samples that raise.
        shared_seed: For datapipes: of the first epoch.
        first_epoch: The first one that these workers make batches of.
        lanes: For iterable datasets with a state: where each worker is to begin with it.
    """

    dataset: Any
    is_iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    num_workers: int
    base_seed: int
    worker_init_fn: Callable[[int], None] | None
    seed: int | None = None
    skip_errors: bool = False
    shared_seed: int | None = None
    first_epoch: int = 0
    lanes: tuple[Lane, ...] = ()


class Order(NamedTuple):
    """One batch to be made: the payload of a task.

    Attributes:
        index: What the sampler gave: a list of indices, or one index.
        epoch: The epoch it belongs to.
        batch: Its number in the epoch.
        dataset_epoch: What to give to the dataset's `set_epoch` first; None leaves it alone.
        shared_seed: For datapipes: of this epoch.
        turn: How many batches its lane was to make before this one in the epoch, if it has a lane.
        lane_seed: For iterable datasets with a seed: what the workers begin this epoch with.
    """

    index: Any
    epoch: int
    batch: int
    dataset_epoch: int | None = None
    shared_seed: int | None = None
    turn: int = 0
    lane_seed: int | None = None


class Placed(NamedTuple):
    """An order as a worker process gets it: with the slot that its batch may fill."""

    order: Order
    slot: Slot | None


class Times(NamedTuple):
    """What a worker spent on one batch.

    Attributes:
        fetch_s: Seconds getting samples, by the clock.
        fetch_cpu_s: Seconds of processor time in that.
        collate_s: Seconds making a batch of them.
        room_s: Seconds that the worker had nothing to do before.
        is_inline: Whether the batch was small enough to travel with its answer.
    """

    fetch_s: float
    fetch_cpu_s: float
    collate_s: float
    room_s: float
    is_inline: bool = False


class SkippedSample(NamedTuple):
    """A sample that was left out because it raised (`on_error="skip"`).

    Attributes:
        index: What the sampler gave for it.
        epoch: The epoch.
        batch: The number of its batch in the epoch.
        error: The type of the exception.
        message: Its words.
        traceback: The frames, as text.
    """

    index: Any
    epoch: int
    batch: int
    error: str
    message: str
    traceback: str


class Made(NamedTuple):
    """A batch: packed by a worker process, or as it is where no process lies between.

    Attributes:
        batch: The batch.
        times: What was spent on it.
        skipped: The samples that were left out.
        lane: Where the worker's iterable dataset stands now, if it has a state.
    """

    batch: Parcel | Any
    times: Times
    skipped: tuple[SkippedSample, ...] = ()
    lane: Lane | None = None


class Raised(NamedTuple):
    """Instead of a batch: what the user's code raised, wrapped unless it was raised here."""

    error: ExceptionWrapper | BaseException
    notes: tuple[str, ...]


class LaneEnded(NamedTuple):
    """Instead of a batch: this lane's part of an iterable dataset is at its end."""

    lane: int


class NothingLeft(NamedTuple):
    """Instead of a batch: every sample of it was left out."""

    skipped: tuple[SkippedSample, ...]


class Sealed(NamedTuple):
    """A result that only the trainer can open: the user's classes may not be known on the way."""

    body: bytes

    def opened(self) -> Any:
        """Return the result."""
        return pickle.loads(self.body)  # noqa: S301 - from our own worker
