"""Keep Ray from shutting down while one of forebay's threads calls it.

    listeners, orders ──> with cluster.up(): ──> Ray <── ray.shutdown(), which waits for them

While Ray shuts down, it frees the state that its calls depend on. A thread that is in a call at
that time, makes one, or drops a reference crashes the whole process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forebay.engine.pools.ray.ray_internals import replace_connection_lock

# How long a guarded call may take; a shutdown waits for it. Hosts collect answers for less, even on
# 64 nodes: a call that ends without a message takes half a millisecond of processor time.
CALL_S = 0.5
# How long a shutdown waits for calls, and calls for a shutdown or a connection in another thread:
# if the cluster is lost, either may never return.
PATIENCE_S = 10.0


class ShutdownGuard:
    """Replaces the lock that Ray holds while it connects and shuts down.

    Args:
        lock: That lock.
    """

    def __init__(self, lock: Any) -> None:
        """Begin with no call running."""
        self._lock = lock
        self._changed = threading.Condition()  # reentrant: a finalizer may run within
        self._running = 0
        self._shutting: int | None = None  # the thread in which Ray connects or shuts down
        self._began = 0.0  # when that began
        self._depth = 0

    def __enter__(self) -> None:
        """Block new calls and wait up to PATIENCE_S for running ones; Ray enters here."""
        self._lock.acquire()
        with self._changed:
            if not self._depth:
                self._shutting, self._began = threading.get_ident(), time.monotonic()
            self._depth += 1
            self._changed.wait_for(lambda: not self._running, PATIENCE_S)

    def __exit__(self, *error: object) -> None:
        """Allow calls again."""
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._shutting = None
                self._changed.notify_all()
        self._lock.release()

    @contextmanager
    def held(self, *, however_long: bool = False) -> Iterator[None]:
        """Keep Ray from connecting and shutting down in the block; many threads may hold this.

        Args:
            however_long: Wait without a limit for Ray to connect or to shut down; only for a thread
                that no other waits for.

        Raises:
            ConnectionError: Ray has been connecting or shutting down for PATIENCE_S.
        """
        thread = threading.get_ident()
        with self._changed:
            while self._shutting not in (None, thread):
                left = None if however_long else self._began + PATIENCE_S - time.monotonic()
                if left is not None and left <= 0:
                    raise ConnectionError(
                        f"another thread has shut it down or connected it for {PATIENCE_S:g} s"
                    )
                self._changed.wait(left)
            is_shutting = self._shutting == thread  # a finalizer that the shutdown itself runs
            self._running += not is_shutting
        try:
            yield
        finally:
            if not is_shutting:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()


def shutdown_guard() -> ShutdownGuard:
    """Return the guard of this process; the first call installs it."""
    return replace_connection_lock(ShutdownGuard, ShutdownGuard)
