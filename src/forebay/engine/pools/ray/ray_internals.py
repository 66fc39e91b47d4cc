"""Every part of Ray that forebay uses and Ray does not promise, in one place.

Each of them has a test in `tests/ray/test_ray_internals.py` that fails, with a sentence, when a new
version of Ray changes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

_Lock = TypeVar("_Lock")


def replace_connection_lock(kind: type[_Lock], make: Callable[[Any], _Lock]) -> _Lock:
    """Put another lock in the place of the one that Ray holds while it connects and shuts down.

    Args:
        kind: Its class; one of that class stays.
        make: Called with Ray's lock; returns the other one.

    Returns:
        The lock that is there afterwards.
    """
    from ray._private import worker

    known: Any = worker
    with _replacing:
        lock = getattr(known, "_connect_or_shutdown_lock", None) or threading.RLock()
        if not isinstance(lock, kind):
            lock = known._connect_or_shutdown_lock = make(lock)
    return lock


_replacing = threading.Lock()


def connects_by_itself(on: bool) -> bool:
    """Set whether a call connects to a cluster where there is none; return how it was."""
    from ray._private import auto_init_hook

    was: bool = auto_init_hook.enable_auto_connect
    auto_init_hook.enable_auto_connect = on
    return was


def free_resources() -> dict[str, dict[str, float]]:
    """Return what is free on each node, by its ID; the public function adds all nodes up."""
    from ray._private import state

    look: Any = state.available_resources_per_node
    found: dict[str, dict[str, float]] = look()
    return found


def stream_options(ahead: int) -> dict[str, Any]:
    """Return the options of a call that yields, for at most so many results not yet fetched."""
    return {"_generator_backpressure_num_objects": ahead}
