"""Where batches are made: the pool for each backend, and worker handles as in torch."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Literal

from forebay.engine.pools.base import Pool
from forebay.engine.pools.processes import ProcessPool
from forebay.engine.pools.threads import ThreadPool
from forebay.loading.batch_job import BatchJob, ProcessJob
from forebay.loading.batch_slots import BatchSlots
from forebay.loading.messages import BatchSpec
from forebay.options import Ray
from forebay.randomness import ThreadTurns

if TYPE_CHECKING:
    from forebay.loading.feed import Feed


@dataclass(frozen=True, slots=True)
class Workers:
    """Where batches are made.

    Attributes:
        backend: "process", "thread" or "ray".
        count: How many there are at once, at most.
        start: How processes start, see `ProcessPool`.
        directory: Where the batches of processes lie; None for memory.
        cluster: Which cluster, for "ray".
    """

    backend: Literal["process", "thread", "ray"]
    count: int
    start: Literal["fork"] | BaseContext = "fork"
    directory: str | os.PathLike[str] | None = None
    cluster: Ray | None = None

    @property
    def start_s(self) -> float:
        """Seconds that a worker may take to start; a cluster's may have to wait for room."""
        return 10.0 if self.cluster is None else 120.0


def pool_for(spec: BatchSpec, workers: Workers, turns: bool, slots: BatchSlots | None) -> Pool:
    """Return a pool whose workers make batches, in the slab if there is one.

    Args:
        spec: How batches are made.
        workers: Where.
        turns: Whether each request is for one worker alone.
        slots: The slab that is shared with the workers, and which slot each batch has; None for
            threads.
    """
    if workers.backend == "thread":
        thread_turns = ThreadTurns()
        return ThreadPool(
            BatchJob(spec, keeps_tasks=turns, turns=thread_turns), thread_turns.abandon
        )
    assert slots is not None
    if workers.cluster is not None:
        from forebay.loading.remote import pool_on_cluster

        return pool_on_cluster(spec, workers.cluster, workers.count, slots.slab, slots.by_task)
    return ProcessPool(
        ProcessJob(spec, slots.slab, keeps_tasks=turns), workers.count, workers.start
    )


class WorkerHandle:
    """One worker process, with the methods of a process that torch's users rely on.

    Attributes:
        name: Its name.
    """

    def __init__(self, feed: Feed, incarnation: int) -> None:
        """Refer to one of the first workers of a feed."""
        self.name = f"forebay-worker-{incarnation}"
        self._feed = feed
        self._incarnation = incarnation

    @property
    def pid(self) -> int | None:
        """The process's number; None for a thread."""
        pool = self._feed.pool
        if not isinstance(pool, ProcessPool):
            return None
        until = time.monotonic() + 30.0
        while self._incarnation not in pool.pids and self._feed.is_open:
            if time.monotonic() > until or not pool.hosts(self._incarnation):
                break
            self._feed.look(0.05)
        return pool.pids.get(self._incarnation)

    @property
    def exitcode(self) -> int | None:
        """What the process ended with; None while it lives."""
        pool = self._feed.pool
        return pool.exit_codes.get(self._incarnation) if isinstance(pool, ProcessPool) else None

    def is_alive(self) -> bool:
        """Tell whether the process exists."""
        pid = self.pid
        if pid is None or self.exitcode is not None:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process is gone."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (until is None or time.monotonic() < until):
            if self._feed.is_open:
                self._feed.look(0.01)
            else:
                time.sleep(0.01)

    def terminate(self) -> None:
        """Kill the process if it is still there."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid or 0, signal.SIGTERM)

    kill = terminate
