"""The contract of a pool.

A pool hosts workers. It makes no decisions: it starts, feeds, stops and kills workers on request,
and `wait` returns what happened to them. `forebay.testing.conformance.PoolTests` tests every pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from forebay.engine.events import Event
from forebay.engine.job import Assignment


class Pool(ABC):
    """Workers of one kind. All methods but `wake` are called from one thread.

    Attributes:
        at_rest: Whether `wait` is waiting and has received nothing, so that an exception from a
            signal handler loses nothing. At any other time the pool may be left inconsistent.
        group_s: Seconds of work to send to a worker at a time if tasks are short, so that it still
            has tasks while its answers are on their way.
    """

    at_rest = False
    group_s = 0.1

    @abstractmethod
    def start(self, incarnation: int, worker_id: int) -> None:
        """Start a worker; `wait` returns `WorkerStarted` or `WorkerDied` for it later."""

    @abstractmethod
    def send(self, incarnation: int, assignments: Sequence[Assignment]) -> None:
        """Send tasks, to be run in this order; never blocks; no-op for a dead worker."""

    def send_to_all(self, groups: Sequence[tuple[int, Sequence[Assignment]]]) -> None:
        """Send tasks to several workers, as pairs of incarnation and tasks; otherwise as `send`."""
        for incarnation, assignments in groups:
            self.send(incarnation, assignments)

    @abstractmethod
    def kill(self, incarnation: int) -> None:
        """Kill a worker that hangs; `WorkerDied`, with the stack of the hang, follows."""

    @abstractmethod
    def stop(self, incarnation: int) -> None:
        """Let an idle worker close its job and end; never blocks; no-op for a dead worker.

        Its end is not reported. An event that was on its way may still come. A worker that has not
        started may end before it opens its job.
        """

    @abstractmethod
    def wait(self, timeout: float | None) -> list[Event]:
        """Return what happened; wait up to `timeout` seconds for an event (None: without limit).

        It may return early without events. The events of one worker come in the order in which
        they happened, its death last.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make `wait` return, now or at its next call. Any thread may call this."""

    @abstractmethod
    def close(self) -> None:
        """Stop every worker within seconds, by force if necessary. Safe to call twice."""
