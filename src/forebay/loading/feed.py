"""From orders to batches: the engine and the slab.

    trainer ── put(orders) ──> engine ──> workers ──> slab
       ^                         │
       └───────── take() <───────┘

Without a buffer nothing runs in the trainer's process but the trainer: `take` itself turns the
engine's wheel. With one, a thread does (see `pump.py`), so that workers get their next orders while
the trainer is busy. It wakes when answers come, and does no more with them than to put them into
line.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from forebay.engine.engine import Engine, NewTask, Outcome
from forebay.engine.events import Cause, DeliverResult, DropTask, ReportFailure, ReportRetry
from forebay.engine.limits import Limits
from forebay.engine.memory.layout import Slot
from forebay.engine.memory.packing import unpack
from forebay.engine.memory.parcel import Parcel
from forebay.engine.memory.slab import Slab
from forebay.engine.pools.launch import occupy_standard_descriptors
from forebay.errors import WorkerDiedError
from forebay.loading.buffer import warn_of_full_disk
from forebay.loading.crew import Workers, pool_for
from forebay.loading.recipe import LaneEnded, Made, Placed, Recipe
from forebay.loading.statistics import Tally, is_of_a_batch

RELEASED_TOGETHER = 16
# What a worker may take to come up, beyond `timeout`.
START_S = 10.0
# The same on a cluster, where a worker may have to wait for its place.
CLUSTER_START_S = 120.0


class Taken(NamedTuple):
    """The next result in line.

    Attributes:
        task: Its number.
        result: A `Made` with the batch as the user gets it, or what came instead of one.
        cause: Why there is none, if the task failed for good.
    """

    task: int
    result: Any
    cause: Cause | None = None


class Feed:
    """Orders in, batches out, in order unless the limits say otherwise.

    Args:
        recipe: How batches are made.
        workers: Where.
        limits: What the engine may do.
        keeps_tasks: Whether tasks are bound to lanes.
        tally: Counts what happens.
    """

    def __init__(
        self, recipe: Recipe, workers: Workers, limits: Limits, keeps_tasks: bool, tally: Tally
    ) -> None:
        """Start the workers."""
        self._owner = os.getpid()
        self._closed = False
        self._error: BaseException | None = None  # why there will be no more results
        self._timeout_s = limits.timeout_s
        self._start_s = START_S if workers.cluster is None else CLUSTER_START_S
        self._tries = limits.retries + 1
        self._tally = tally
        self._ready: deque[DeliverResult | ReportFailure] = deque()
        self._slots: dict[int, Slot] = {}
        self._taken: list[int] = []  # and not released yet
        self.ended: dict[int, int] = {}  # by lane: the last task that found it at its end
        self._directory = workers.directory
        occupy_standard_descriptors()
        shares = workers.backend in ("process", "ray")
        self._slab = Slab(workers.directory) if shares else None
        self.pool = pool_for(recipe, workers, keeps_tasks, self._slab, self._slots)
        # No method of its own: a cycle would keep the slab until the collector comes round.
        address = None
        if self._slab is not None and workers.backend == "process":
            address = partial(_placed, self._slab, self._slots)
        try:
            self._engine = Engine(self.pool, limits, address=address)
        except BaseException:  # Ctrl-C, say
            self.pool.close()
            raise
        _open_feeds.add(self)

    def put(self, tasks: Sequence[NewTask]) -> None:
        """Queue tasks; their numbers must grow."""
        self._check()
        self._engine.put(tasks)

    def forget(self, before: int) -> None:
        """Drop every task with a lower number that was not taken."""
        self._check()
        self._engine.forget(before)
        self._ready = deque(each for each in self._ready if self._keep(each, before))

    def take(self) -> Taken:
        """Return the next result, waiting for it.

        Raises:
            WorkerDiedError: Workers cannot be kept alive, or do not even come up in time.
            RuntimeError: It cannot be used: it is closed, torn, or another process's.
        """
        self._check()
        began = time.perf_counter()
        outcome = self._next(self._until())
        self._tally.waited(time.perf_counter() - began)
        if outcome is None:
            raise WorkerDiedError(
                f"DataLoader timed out after {self._timeout_s:g} seconds: no worker answered\n"
                "  They may hang in worker_init_fn, or while they import the dataset's module.\n"
                f"  forebay gave them {self._start_s:g} s more to come up, and goes on waiting if "
                "it is asked again. Raise `timeout`, or try worker_init_fn in this process."
            )
        if isinstance(outcome, ReportFailure):
            return Taken(outcome.task, None, outcome.cause)
        self._release(outcome.task)
        return Taken(outcome.task, self._opened(outcome))

    def ready(self) -> int:
        """Return how many results wait to be taken."""
        return len(self._ready)

    def ready_batches(self) -> list[int]:
        """Return the tasks of the results that wait, in order, without those that say the end."""
        return [each.task for each in self._ready if is_of_a_batch(each)]

    @property
    def in_flight(self) -> int:
        """How many batches the workers have in hand."""
        return 0 if self._closed else self._engine.running

    @property
    def is_open(self) -> bool:
        """Whether it can be used: not closed or torn, and not in a fork of its process."""
        return not self._closed and self._error is None and os.getpid() == self._owner

    def close(self) -> None:
        """End the workers, unless this is a fork of the trainer: they are not its own."""
        if self._closed:
            return
        self._closed = True
        _open_feeds.discard(self)
        if os.getpid() != self._owner:
            return
        self._stop()
        for outcome in self._ready:
            self._tally.went(outcome)
        self._ready.clear()
        for task in list(self._slots):
            self._free(task)
        if self._slab is not None:
            self._slab.retire()

    def look(self, seconds: float) -> None:
        """Let the engine see to what has happened, for at most so long."""
        self._line_up(self._engine.step(seconds))

    def interrupted(self) -> None:
        """Take note of an exception that came from a signal, such as Ctrl-C.

        One that came while nothing was done but waiting costs nothing. Any other may have torn
        something, so the feed is closed: to go on would be to hang, or to lose batches.
        """
        if self._closed or not self._was_at_rest():
            self._error = self._error or RuntimeError(
                "this iterator was interrupted in the midst of its work, and cannot go on\n"
                "  Its workers were ended. Begin a new epoch: iter(loader)."
            )
            self.close()

    def _was_at_rest(self) -> bool:
        was, self.pool.at_rest = self.pool.at_rest, False
        return was

    def _check(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                "this iterator belongs to another process, of which this one is a fork\n"
                f"  Its workers answer to process {self._owner}; this is {os.getpid()}. Nothing "
                "was taken. Begin an epoch of this process's own: iter(loader)."
            )
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError(
                "this iterator was closed, with its loader or with its workers\n"
                "  Nothing more comes from it. Begin a new epoch: iter(loader)."
            )

    def _until(self) -> float | None:
        """Return when to lose patience: later than the engine would replace a worker that hangs."""
        if self._timeout_s is None:
            return None
        return time.monotonic() + self._timeout_s * self._tries + self._start_s

    def _next(self, until: float | None) -> DeliverResult | ReportFailure | None:
        while not self._ready:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return None
            try:
                if self._taken:
                    self._engine.release(self._taken)
                    self._taken = []
                self._line_up(self._engine.step(left))
            except WorkerDiedError as error:
                self._error = error
                self.close()
                raise
            except KeyboardInterrupt:
                raise  # the iterator sees to it, wherever it comes
            except BaseException:
                self.interrupted()
                raise
        return self._pop()

    def _pop(self) -> DeliverResult | ReportFailure:
        outcome = self._ready.popleft()
        self._tally.went(outcome)
        return outcome

    def _line_up(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case DeliverResult():
                    self._settle(outcome)
                    self._tally.came(outcome)
                    self._ready.append(outcome)
                    if isinstance(outcome.result, LaneEnded):
                        self.ended[outcome.result.lane] = outcome.task
                case ReportFailure():
                    self._free(outcome.task)
                    self._tally.came(outcome)
                    self._ready.append(outcome)
                case DropTask():
                    self._free(outcome.task)
                case ReportRetry():
                    self._tally.restarts += 1

    def _release(self, task: int) -> None:
        # One event for several: what they free is not needed at once.
        self._taken.append(task)
        if len(self._taken) >= RELEASED_TOGETHER:
            self._engine.release(self._taken)
            self._taken = []

    def _keep(self, outcome: DeliverResult | ReportFailure, before: int) -> bool:
        if outcome.task >= before:
            return True
        self._tally.went(outcome)
        if isinstance(outcome, DeliverResult):
            self._release(outcome.task)
            self._free(outcome.task)
        return False

    def _settle(self, outcome: DeliverResult) -> None:
        """Keep the slot of what has arrived if its batch is in there, and free it otherwise."""
        made = outcome.result
        if self._slab is None or not isinstance(made, Made):
            self._free(outcome.task)
            return
        slot = made.batch.settle(self._slab, self._slots.pop(outcome.task, None))
        if slot is not None:
            self._slots[outcome.task] = slot

    def _free(self, task: int) -> None:
        slot = self._slots.pop(task, None)
        if slot is not None and self._slab is not None:
            self._slab.give_back(slot)

    def _opened(self, outcome: DeliverResult) -> Any:
        """Unpack a parcel; its slot, if it has one, now belongs to the batch."""
        made = outcome.result
        if self._slab is None or not isinstance(made, Made):
            return made
        parcel: Parcel = made.batch
        if parcel.refused is not None and self._directory is not None:
            directory, self._directory = self._directory, None  # it is said once
            warn_of_full_disk(directory, parcel.refused, parcel.nbytes)
        batch = unpack(parcel, self._slab, self._slots.pop(outcome.task, None))
        times = made.times._replace(is_inline=parcel.body is not None)
        return made._replace(batch=batch, times=times)

    def _stop(self) -> None:
        self._engine.close()


def _placed(slab: Slab, slots: dict[int, Slot], task: int, payload: Any) -> Placed:
    """Choose the slot for a task that is sent; one that is sent again keeps its own."""
    slot = slots.get(task)
    if slot is None:
        slot = slab.take()
        if slot is not None:
            slots[task] = slot
    return Placed(payload, slot)


_open_feeds: weakref.WeakSet[Feed] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the workers before the interpreter takes down what their pools need."""
    for feed in list(_open_feeds):
        feed.close()
