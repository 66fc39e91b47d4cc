"""Create the pool of workers for each backend, and handles of workers as in torch."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

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


def _generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
    return generator


# Its own state is a tensor in shared memory, which is gone before a spawned worker can map it.
ForkingPickler.register(
    torch.Generator,
    lambda each: (_generator, (str(each.device), each.get_state().numpy().tobytes())),
)


@dataclass(frozen=True, slots=True)
class Workers:
    """Where workers run, and how many.

    Attributes:
        backend: "process", "thread" or "ray".
        count: The largest number of workers at a time.
        start: How processes start, see `ProcessPool`.
        directory: The folder for the batches of worker processes; None for memory.
        cluster: The cluster, for "ray".
    """

    backend: Literal["process", "thread", "ray"]
    count: int
    start: Literal["fork"] | BaseContext = "fork"
    directory: str | os.PathLike[str] | None = None
    cluster: Ray | None = None

    @property
    def start_s(self) -> float:
        """Seconds that a worker may take to start; on a cluster it may wait for free resources."""
        return 10.0 if self.cluster is None else 120.0


def pool_for(
    spec: BatchSpec, workers: Workers, turns: bool, slots: BatchSlots | None, *, to_device: bool
) -> Pool:
    """Return a pool whose workers make batches, in the slab if there is one.

    Args:
        spec: How to make batches.
        workers: Where the workers run, and how many.
        turns: Whether each request is for one worker only.
        slots: The slab that is shared with the workers, and the slot of each batch; None for
            threads.
        to_device: Whether batches are copied to a device, which is faster from that slab.
    """
    if workers.backend == "thread":
        thread_turns = ThreadTurns()
        return ThreadPool(
            BatchJob(spec, keeps_tasks=turns, turns=thread_turns), thread_turns.abandon
        )
    assert slots is not None
    if workers.cluster is not None:
        from forebay.loading.remote import pool_on_cluster

        borrows = not (to_device or slots.is_on_disk)
        return pool_on_cluster(spec, workers.cluster, workers.count, slots, borrows=borrows)
    return ProcessPool(
        ProcessJob(spec, slots.slab, keeps_tasks=turns), workers.count, workers.start
    )


class WorkerHandle:
    """One worker process, with the methods of `multiprocessing.Process` that torch's users call.

    Attributes:
        name: Its name.
    """

    def __init__(self, feed: Feed, incarnation: int) -> None:
        """Create a handle of one of the first workers of a feed."""
        self.name = f"forebay-worker-{incarnation}"
        self._feed = feed
        self._incarnation = incarnation

    @property
    def pid(self) -> int | None:
        """The process ID; None for a thread."""
        pool = self._feed.pool
        if not isinstance(pool, ProcessPool):
            return None
        until = time.monotonic() + 30.0
        while self._incarnation not in pool.pids and self._feed.is_open:
            if time.monotonic() > until or not pool.hosts(self._incarnation):
                break
            self._feed.poll(0.05)
        return pool.pids.get(self._incarnation)

    @property
    def exitcode(self) -> int | None:
        """The exit code of the process; None while it runs."""
        pool = self._feed.pool
        if not isinstance(pool, ProcessPool):
            return None
        pid = self.pid
        # It may be gone before the process that forked it has reported how it ended.
        while pid and not _exists(pid) and pool.hosts(self._incarnation) and self._feed.is_open:
            self._feed.poll(0.05)
        return pool.exit_codes.get(self._incarnation)

    def is_alive(self) -> bool:
        """Return whether the process exists."""
        pid = self.pid
        return pid is not None and self.exitcode is None and _exists(pid)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (until is None or time.monotonic() < until):
            if self._feed.is_open:
                self._feed.poll(0.01)
            else:
                time.sleep(0.01)

    def terminate(self) -> None:
        """Send SIGTERM to the process if it still exists."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid or 0, signal.SIGTERM)

    kill = terminate


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
