"""Worker processes as users of torch know them: `iterator._workers[0].pid`."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from forebay.engine.pools.processes import ProcessPool
from forebay.loading.feed import Feed


class WorkerHandle:
    """One worker process, with the few methods of a process that torch's users know.

    Attributes:
        name: Its name.
    """

    def __init__(self, feed: Feed, worker: int) -> None:
        """Stand for worker number `worker`."""
        self.name = f"forebay-worker-{worker}"
        self._feed = feed
        self._worker = worker

    @property
    def pid(self) -> int | None:
        """The process's number; None for a thread."""
        pool = self._feed.pool
        if not isinstance(pool, ProcessPool):
            return None
        until = time.monotonic() + 30.0
        while self._worker not in pool.pids and self._feed.is_open and time.monotonic() < until:
            self._feed.look(0.05)
        return pool.pids.get(self._worker)

    @property
    def exitcode(self) -> int | None:
        """What the process ended with; None while it lives."""
        pool = self._feed.pool
        return pool.exit_codes.get(self._worker) if isinstance(pool, ProcessPool) else None

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
