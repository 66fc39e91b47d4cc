"""By torch's rules workers make batches in turns, each from its own copy of the dataset."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from forebay.errors import WorkerDiedError
from forebay.failures import Failure
from forebay.loading.messages import (
    LOST,
    BatchError,
    BatchRequest,
    BatchResult,
    Result,
    WorkerExhausted,
    WorkerState,
)

# Batches of a stream with a seed that are read again on a resume: the first sample of an iterator
# may draw other random numbers, so the first batch of these may be another one.
READ_AGAIN = 2

ReadSince = Callable[[WorkerState, BatchRequest], WorkerState]


@dataclass(slots=True)
class EpochTurns:
    """The turns of one epoch.

    Attributes:
        first_task: The task of its first request.
        next_worker: Whose turn it is to get a request.
        ended: The workers whose part of the data has ended.
        preceding: By worker: how many requests of the epoch it has got.
        digests: By worker: that of its last batch.
    """

    first_task: int
    next_worker: int
    ended: set[int]
    preceding: dict[int, int] = field(default_factory=dict)
    digests: dict[int, int | None] = field(default_factory=dict)

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
        is_checked: Whether a resume reads the last batch of each worker again, and compares it.

    Attributes:
        states: The state of each worker after its last batch that was returned; empty if they have
            none.
        next_worker: Whose batch is returned next.
    """

    def __init__(
        self,
        count: int,
        dataset: str,
        *,
        failure_ends: bool,
        read_since: ReadSince | None,
        is_checked: bool = False,
    ) -> None:
        self.count, self.states, self.next_worker = count, list[WorkerState](), 0
        self._dataset, self._failure_ends, self._is_undivided = dataset, failure_ends, False
        self._read_since, self._is_checked = read_since, is_checked
        # Those after each worker's last batches.
        self._waiting: dict[int, deque[WorkerState | None]] = {}

    def begin(self, states: list[WorkerState]) -> None:
        """Begin an epoch with these states of workers."""
        self.states = states
        self._waiting.clear()

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

    def note(self, epoch: EpochTurns, request: BatchRequest, result: Result) -> Result | None:
        """Record the result of a worker; return what to pass on, None for nothing."""
        worker, states = request.worker_id, self.states
        assert worker is not None
        found: Result | None = None if worker in epoch.ended else result
        if isinstance(result, WorkerExhausted):
            if states and found is not None:
                states[worker] = result.state or states[worker]._replace(phase="ended")
            epoch.ended.add(worker)
            found = None
        elif isinstance(result, Failure):
            if self._failure_ends:
                epoch.ended.add(worker)
        elif found is not None and self._is_other(epoch, request, result):
            epoch.ended.add(worker)
            words = LOST.format(self._dataset, worker, request.epoch, request.preceding)
            found = BatchError(WorkerDiedError(words), ())
        else:
            self._is_undivided |= isinstance(result, BatchResult) and result.is_undivided
            if self._read_since is not None:
                self._keep_state(worker, request, result)
        self.next_worker = (worker + 1) % self.count
        return found

    def _is_other(self, epoch: EpochTurns, request: BatchRequest, result: Result) -> bool:
        """Return whether a worker in the place of a dead one read another stream than that."""
        if not isinstance(result, BatchResult) or request.worker_id is None:
            return False
        known, epoch.digests[request.worker_id] = (
            epoch.digests.get(request.worker_id),
            result.digest,
        )
        return request.preceding > 0 and known is not None and known != result.digest_before

    def _keep_state(
        self, worker: int, request: BatchRequest, result: BatchResult | BatchError
    ) -> None:
        """Note the state of a worker after a batch."""
        states, state = self.states, result.state
        assert self._read_since is not None
        if not self._is_checked:
            states[worker] = state or self._read_since(states[worker], request)
            return
        # On a resume its last batches are read again, and the very last one is compared.
        waiting = self._waiting.setdefault(worker, deque())
        waiting.append(None)
        states[worker] = self._read_since(states[worker], request)
        for at, each in enumerate(waiting):
            waiting[at] = each and self._read_since(each, request)
        if len(waiting) > READ_AGAIN and (found := waiting.popleft()) is not None:
            states[worker] = found
        digest = result.digest if isinstance(result, BatchResult) else None
        states[worker] = states[worker]._replace(digest=digest)
        waiting[-1] = state

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
