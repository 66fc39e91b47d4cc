"""The door between this process and its cluster: nobody is in it while Ray is shut down.

    ears, orders ──> with up(): ──> Ray <── ray.shutdown(), which waits until they are out

Ray frees what its calls stand on while it shuts down. A thread that waits in one just then, asks
for something, or lets go of a reference, takes the whole process along.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# How long a call inside may take where it waits for something; a shutdown waits for it.
STAY_S = 0.25
# How long a shutdown waits for them at most: the cluster may be so lost that no call comes back.
PATIENCE_S = 10.0


class Door:
    """Stands in for the lock that Ray takes to come up and to shut down.

    Args:
        lock: That lock.
    """

    def __init__(self, lock: Any) -> None:
        """Let all in."""
        self._lock = lock
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._shutter: int | None = None  # the thread that Ray comes up or shuts down in
        self._depth = 0

    def __enter__(self) -> None:
        """Be Ray: let nobody in any more, and wait until all are out, or patience is."""
        self._lock.acquire()
        with self._changed:
            self._shutter = threading.get_ident()
            self._depth += 1
            self._changed.wait_for(lambda: not self._inside, PATIENCE_S)

    def __exit__(self, *error: object) -> None:
        """Let them in again."""
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._shutter = None
                self._changed.notify_all()
        self._lock.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have Ray neither come up nor be shut down meanwhile; many may, at the same time."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._shutter in (None, me))
            is_shutter = self._shutter == me  # a finalizer, in the midst of it
            self._inside += not is_shutter
        try:
            yield
        finally:
            if not is_shutter:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()


def door() -> Door:
    """Return the door of this process; it is put in at the first call, and stays."""
    from ray._private import worker

    known: Any = worker
    with _putting_in:
        lock = getattr(known, "_connect_or_shutdown_lock", None) or threading.RLock()
        if not isinstance(lock, Door):
            lock = known._connect_or_shutdown_lock = Door(lock)
    return lock


_putting_in = threading.Lock()
