"""Workers that make batches in turns, as torch's do, each from its own copy of the dataset."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from forebay.failures import Failure
from forebay.loading.messages import BatchRequest, BatchResult, Result, WorkerExhausted, WorkerState

ReadSince = Callable[[WorkerState, BatchRequest], WorkerState]


@dataclass(slots=True)
class EpochTurns:
    """The turns of one epoch.

    Attributes:
        first_task: The task of its first request.
        next_worker: Whose turn it is to get a request.
        ended: The workers whose part of the data has ended.
        preceding: By worker: how many requests of the epoch it has got.
    """

    first_task: int
    next_worker: int
    ended: set[int]
    preceding: dict[int, int] = field(default_factory=dict)

    def assign(self, worker: int) -> int:
        """Give a worker a request; return how many it got before."""
        preceding = self.preceding.get(worker, 0)
        self.preceding[worker] = preceding + 1
        return preceding


class WorkerTurns:
    """Whose turn it is, and what the workers have told.

    Args:
        dataset: What the type of the dataset is called.
        failure_ends: Whether a worker's part ends where a batch of it failed: a replacement would
            read to the same point.
        read_since: Returns a worker's state after a batch that came without one; None if batches
            have none.

    Attributes:
        states: The state of each worker after its last batch that was returned; empty if they have
            none.
        next_worker: Whose batch is returned next.
    """

    def __init__(
        self, count: int, dataset: str, *, failure_ends: bool, read_since: ReadSince | None
    ) -> None:
        self.count, self.states, self.next_worker = count, list[WorkerState](), 0
        self._dataset, self._failure_ends, self._is_undivided = dataset, failure_ends, False
        self._read_since = read_since

    def opened(self, first_task: int, next_worker: int, *, is_rest: bool) -> EpochTurns:
        """Return the turns of an epoch.

        Args:
            is_rest: Whether parts of some workers may have ended before.
        """
        states = enumerate(self.states if is_rest else ())
        ended = {worker for worker, state in states if state.phase == "ended"}
        return EpochTurns(first_task, next_worker, ended)

    def next_turn(
        self,
        epoch: EpochTurns,
        exhausted: Mapping[int, int],
        may_request: Callable[[int], bool] | None,
    ) -> int | None:
        """Return the worker whose turn it is; None if none has data left or may get a request."""
        for _ in range(self.count):
            worker = epoch.next_worker
            epoch.next_worker = (worker + 1) % self.count
            if self._has_more(epoch, worker, exhausted) and (
                may_request is None or may_request(worker)
            ):
                return worker
        return None

    def is_over(self, epoch: EpochTurns, exhausted: Mapping[int, int]) -> bool:
        """Return whether no worker has data left in an epoch."""
        return not any(self._has_more(epoch, each, exhausted) for each in range(self.count))

    def _has_more(self, epoch: EpochTurns, worker: int, exhausted: Mapping[int, int]) -> bool:
        return exhausted.get(worker, -1) < epoch.first_task and worker not in epoch.ended

    def note(self, epoch: EpochTurns, request: BatchRequest, result: Result) -> bool:
        """Record the result of a worker; return whether to pass it on."""
        worker, states = request.worker_id, self.states
        assert worker is not None
        is_batch = worker not in epoch.ended
        if isinstance(result, WorkerExhausted):
            epoch.ended.add(worker)
            if states and is_batch:
                states[worker] = result.state or states[worker]._replace(phase="ended")
            is_batch = False
        elif isinstance(result, Failure):
            if self._failure_ends:
                epoch.ended.add(worker)
        else:
            self._is_undivided |= isinstance(result, BatchResult) and result.is_undivided
            if self._read_since is not None:
                states[worker] = result.state or self._read_since(states[worker], request)
        self.next_worker = (worker + 1) % self.count
        return is_batch

    def warn_of_copies(self) -> None:
        """Warn once if every worker was found to read the whole dataset."""
        if not self._is_undivided:
            return
        self._is_undivided = False
        warnings.warn(
            f"each of the {self.count} workers reads all of {self._dataset}: its samples come "
            f"{self.count} times in an epoch, as with torch\n"
            "  Its __iter__ did not ask get_worker_info() which worker it is in. Divide the data "
            "there, by info.id and info.num_workers, or in worker_init_fn=. Otherwise use "
            "num_workers=1, or a map-style dataset, whose batches do not depend on num_workers.",
            stacklevel=2,
        )
