"""All private parts of Ray that forebay uses.

Each of them has a test in `tests/ray/test_ray_internals.py` that fails, and says why, when a new
version of Ray changes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

_Lock = TypeVar("_Lock")


def replace_connection_lock(kind: type[_Lock], make: Callable[[Any], _Lock]) -> _Lock:
    """Replace the lock that Ray holds while it connects and shuts down.

    Args:
        kind: Class of the new lock; a lock of that class is not replaced.
        make: Called with Ray's lock; returns the other one.

    Returns:
        The lock that Ray uses now.
    """
    from ray._private import worker

    known: Any = worker
    with _replacing:
        lock = getattr(known, "_connect_or_shutdown_lock", None) or threading.RLock()
        if not isinstance(lock, kind):
            lock = known._connect_or_shutdown_lock = make(lock)
    return lock


_replacing = threading.Lock()


def set_auto_connect(on: bool) -> bool:
    """Set whether calls connect to a cluster implicitly; return the earlier setting."""
    from ray._private import auto_init_hook

    was: bool = auto_init_hook.enable_auto_connect
    auto_init_hook.enable_auto_connect = on
    return was


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each node, by its ID; Ray's public function adds them up."""
    from ray._private import state

    look: Any = state.available_resources_per_node
    found: dict[str, dict[str, float]] = look()
    return found


def stream_options(ahead: int) -> dict[str, Any]:
    """Return the options of a generator call that blocks while `ahead` results are not fetched."""
    return {"_generator_backpressure_num_objects": ahead}
