"""What loaders and runs measure, and how a loader is set up: records. PURE.

Times are seconds of `time.perf_counter()`, which all processes of a machine share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

# What is recent.
RECENT_S = 30.0
# What each worker has to have of its own before it is worth a sentence.
LEAST_COPIED_BYTES = 64 << 20


class SlowSample(NamedTuple):
    """A sample that took long."""

    seconds: float
    index: Any
    epoch: int
    batch: int


class Timing(NamedTuple):
    """The time that a worker spent on a batch, and on those before it that have no timing.

    Where batches take less than `FINEST_S`, one in `SAMPLED_S` has a timing: making and sending one
    takes some microseconds. Processor time and waiting for a core are measured over at least
    `MEASURED_S`: the last timing in that time has the sum, and the others have 0.
    """

    worker_id: int
    ended_at: float
    seconds: float
    batches: int
    busy_s: float
    fetch_s: float = 0.0
    collate_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    idle_s: float = 0.0
    slowest: SlowSample | None = None  # None if samples are too fast to be timed one by one
    read_bytes: int = 0
    threads_s: float = 0.0
    system_s: float = 0.0  # of `cpu_s`: page faults and system calls
    faults: int = 0
    private_bytes: int = 0  # of the worker's process, measured now and then; otherwise 0


class MadeRecord(NamedTuple):
    """One batch that was made, and the totals up to and with it."""

    ended_at: float
    seconds: float
    idle_s: float
    nbytes: int
    slowest_s: float
    made: int
    total_s: float
    total_cpu_s: float
    total_queued_s: float
    total_read_bytes: int = 0
    total_threads_s: float = 0.0
    total_system_s: float = 0.0
    total_faults: int = 0
    worker_id: int = 0


class StepRecord(NamedTuple):
    """One batch that the trainer took, and the totals up to and with it."""

    asked_at: float
    waited_s: float
    is_first: bool
    ready: int
    taken: int
    total_waited_s: float
    trainer_cpu_s: float
    # Measured at most once in `TRAINER_MEASURED_S`: what its thread waited for a core, and what the
    # cores were idle, on average; None if the system does not tell.
    trainer_queued_s: float
    cores_idle_s: float | None = None


def recent_work(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return the rate of training in the `RECENT_S` before its last step, and its share of waits.

    Of a loader whose steps take less than 10 ms it may be less time: that of the steps kept.
    """
    ends = [each.asked_at + each.waited_s for each in steps]
    first = bisect_left(ends, ends[-1] - RECENT_S) if ends else 0
    seconds = ends[-1] - ends[first] if ends else 0.0
    if not seconds:
        return {"recent_rate": 0.0, "recent_wait_share": 0.0}
    before, last = steps[first], steps[-1]
    waited_s = last.total_waited_s - before.total_waited_s
    return {
        "recent_rate": (last.taken - before.taken) / seconds,
        "recent_wait_share": min(waited_s / seconds, 1.0),
    }


class Measured(NamedTuple):
    """The last steps and batches of a loader, oldest first.

    Attributes:
        since: What they began with, as the end of a sentence; "" for the loader's start.
        run_rate: Batches per second over the whole run, pauses included; None if not known.
    """

    steps: Sequence[StepRecord]
    batches: Sequence[MadeRecord]
    slowest: SlowSample | None = None
    since: str = ""
    run_rate: float | None = None


@dataclass(slots=True)
class Transfers:
    """What was copied to a device so far, by the names of `Statistics`; one thread changes it."""

    copied_batches: int = 0
    copied_bytes: int = 0
    copy_s: float = 0.0
    staged_bytes: int = 0
    pinned_bytes: int = 0
    pinned_reason: str = ""


class WorkerMemory:
    """What each worker has of its own, as measured last, and how fast that grows."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, int, float]] = {}  # when, bytes, bytes per second

    def add(self, worker_id: int, at: float, nbytes: int, began_at: float) -> None:
        """Record a measurement; `began_at` is when the loader began."""
        before_at, before, _ = self._last.get(worker_id, (began_at, 0, 0.0))
        if nbytes < before:  # it was replaced, or gave memory back
            before_at, before = began_at, 0
        rate = (nbytes - before) / max(at - before_at, 1e-9)
        self._last[worker_id] = at, nbytes, rate

    @property
    def nbytes(self) -> int:
        """The bytes of all workers together; 0 where little can have been copied."""
        return sum(each for _, each, _ in list(self._last.values()))

    @property
    def rate(self) -> float:
        """The bytes per second by which they grow, all together."""
        return sum(each for _, _, each in list(self._last.values()))

    @property
    def each(self) -> float:
        """The bytes of a worker, on average."""
        return self.nbytes / max(len(self._last), 1)

    @property
    def rate_each(self) -> float:
        """The bytes per second by which a worker grows, on average."""
        return self.rate / max(len(self._last), 1)

    @property
    def is_large(self) -> bool:
        """Whether each worker has so much that objects of the dataset may be the cause."""
        return self.each >= LEAST_COPIED_BYTES


@dataclass(slots=True)
class Fetched:
    """What was fetched from a bucket since a loader began, for all processes of the node.

    Attributes:
        hits: Blocks that were there when a window needed them.
        busy_s: Seconds for which any request was under way.
        p50_s: The median time of the last requests; `p95_s` likewise.
        on_disk: Bytes of blocks that stay on disk.
        total: Bytes of all blocks; 0 if none are in a bucket.
        elapsed_s: Seconds since the loader began to read.
        readers: How many loaders read these blocks.
    """

    requests: int = 0
    nbytes: int = 0
    hits: int = 0
    busy_s: float = 0.0
    p50_s: float = 0.0
    p95_s: float = 0.0
    on_disk: int = 0
    total: int = 0
    elapsed_s: float = 0.0
    readers: int = 1

    @property
    def rate(self) -> float:
        """Bytes per second while any request was under way."""
        return self.nbytes / self.busy_s if self.busy_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a loader is set up, as far as its speed depends on it.

    None is what it does not have, or what is not known.
    """

    num_workers: int
    most_workers: int | None = None  # with num_workers="auto": batches are prefetched for so many
    auto_workers: int = 8
    concurrency: int | None = None  # None for a dataset that cannot have it
    backend: Literal["process", "thread", "ray"] = "process"
    cores: float | None = None  # with the trainer's
    requests: int = 0  # that are outstanding at most, unless a buffer limits them
    tiny_requests: int = 0  # the same while batches are tiny
    first_requests: int = 0  # the same at first
    fills_by_itself: bool = False  # whether any batch that is made, not taken, makes room for one
    takes_turns: bool = False
    in_order: bool = True
    keeps_workers: bool = False
    crosses_epochs: bool = False
    buffer_bytes: int | None = None
    buffer_batches: int | None = None
    refill_below: int | float | None = None
    batch_size: int | None = None
    may_adjust: bool = True  # the number of workers while it runs: the batches stay the same
    is_sliced: bool = False
    tried: Mapping[int, float] = field(default_factory=dict)  # by workers: batches per second
    samples: int | None = None
    read_limit: int | None = None  # bytes per second
    free_memory: int | None = None  # bytes that files may occupy
    fetched: Fetched | None = None  # of a cache or shards in a bucket
    consumer: str = "training"
    step: str = "the training step"

    @property
    def makers(self) -> int:
        """The number of workers that make batches: none of slices of what is in memory."""
        return 0 if self.is_sliced else self.num_workers

    @property
    def most_makers(self) -> int:
        """The number of workers that batches are prefetched for."""
        return 0 if self.is_sliced else self.most_workers or self.num_workers

    @property
    def waits_for_epochs(self) -> bool:
        """Return whether workers make no batches of an epoch that has not begun."""
        return self.makers > 0 and not self.crosses_epochs

    @property
    def prefetch_factor(self) -> int:
        """The number of outstanding requests for each worker, at least 1."""
        return max(self.requests // max(self.most_makers, 1), 1)

    def with_workers(self, num_workers: int) -> Setup:
        """Return it with another number of workers, and as many requests for each."""
        most = self.most_workers and max(self.most_workers, num_workers)
        other = replace(self, num_workers=num_workers, most_workers=most)
        tiny = self.tiny_requests // max(self.most_makers, 1)
        return replace(
            other,
            requests=self.prefetch_factor * other.most_makers,
            tiny_requests=tiny * other.most_makers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Sums of one run. Times are in seconds, and None if not known."""

    inputs: int
    committed: int
    elapsed_s: float
    num_workers: int
    busy_s: float
    cpu_s: float | None
    flush_s: float
    record_s: float
    cores: float | None
    decisions: tuple[str, ...] = ()
    at_once: int = 1  # inputs of each worker
    system_s: float = 0.0
    faults: int = 0
    threads_s: float = 0.0
    queued_s: float = 0.0
    keeps_freed: bool = True
