"""All private parts of Ray that forebay uses, and the guard of its shutdown.

Each of them has a test in `tests/ray/test_ray_internals.py` that fails, and says why, when a new
version of Ray changes it.

    listeners, orders ──> with cluster.up(): ──> Ray <── ray.shutdown(), which waits for them

While Ray shuts down, it frees the state that its calls depend on. A thread that is in a call at
that time, makes one, or drops a reference crashes the whole process.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_replacing = threading.Lock()


def shutdown_guard() -> ShutdownGuard:
    """Return the guard of this process; the first call installs it in place of Ray's lock."""
    from ray._private import worker

    known: Any = worker
    with _replacing:
        lock = getattr(known, "_connect_or_shutdown_lock", None) or threading.RLock()
        if not isinstance(lock, ShutdownGuard):
            lock = known._connect_or_shutdown_lock = ShutdownGuard(lock)
    return lock


def set_auto_connect(on: bool) -> bool:
    """Set whether calls connect to a cluster implicitly; return the earlier setting."""
    from ray._private import auto_init_hook

    was: bool = auto_init_hook.enable_auto_connect
    auto_init_hook.enable_auto_connect = on
    return was


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each node, by its ID; Ray's public function adds them up."""
    from ray._private import state

    look: Callable[[], dict[str, dict[str, float]]] = state.available_resources_per_node
    return look()


def is_raylet_gone() -> bool:
    """Return whether Ray's process on this machine, which this one is connected to, has ended.

    No call to Ray can tell: it would wait until Ray ends this process, or crash it.
    """
    from ray._private import worker

    node: Any = worker._global_node
    path = None if node is None else node.raylet_socket_name
    if path is None:
        return False
    with socket.socket(socket.AF_UNIX) as own:
        try:
            own.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except OSError:  # too busy to answer
            return False
    return False


def use_known_token() -> None:
    """Have a token of this user sent to a cluster of this machine, as `ray.init("auto")` does."""
    try:
        from ray._private.authentication import authentication_token_setup
    except ImportError:  # an earlier Ray
        return
    known: Any = authentication_token_setup
    known.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def ask_head(address: str) -> None:
    """Raise what Ray raises, after 40 s, if the head of a cluster accepts connections but is stuck.

    `ray.init` would try again for a quarter of an hour.
    """
    from ray import _raylet

    known: Any = _raylet
    known.GcsClient(address=address)


def kill_own_cluster() -> None:
    """Kill Ray's processes that `ray.init` started for this one."""
    from ray._private import worker

    node: Any = worker._global_node
    if node is not None:
        node.kill_all_processes(check_alive=False, allow_graceful=False)


# Ray sends arguments of less than 100 KiB with a call, unless they are 10 MiB together.
SMALL_BYTES = 64 << 10


def as_argument(value: Any) -> Any:
    """Return a value as an argument of several calls: itself if it is small, or a reference."""
    import cloudpickle

    import ray

    return value if len(cloudpickle.dumps(value)) < SMALL_BYTES else ray.put(value)


def stream_options(ahead: int) -> dict[str, Any]:
    """Return the options of a generator call that blocks while `ahead` results are not fetched."""
    return {"_generator_backpressure_num_objects": ahead}


# The modules of Ray Train that prepare loaders, in either of its versions.
TRAIN = ("ray.train.torch.train_loop_utils", "ray.train.v2.torch.train_loop_utils")


def replace_train_wrapper(function: Callable[..., Any]) -> None:
    """Replace the class of the loader that `prepare_data_loader` puts around one, for a device.

    Args:
        function: Is called with Ray's class and the arguments for it.
    """
    for name in TRAIN:
        module: Any = sys.modules.get(name)
        former = None if module is None else module._WrappedDataLoader
        if former is not None and not isinstance(former, partial):
            module._WrappedDataLoader = partial(function, former)


# How long a guarded call may take; a shutdown waits for it. Hosts collect answers for less, even on
# 64 nodes: a call that ends without a message takes half a millisecond of processor time.
CALL_S = 0.5
# How long a shutdown waits for calls, and calls for a shutdown or a connection in another thread:
# if the cluster is lost, either may never return.
PATIENCE_S = 10.0


class ShutdownGuard:
    """Replaces the lock that Ray holds while it connects and shuts down."""

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
        """Keep Ray from connecting and shutting down in the block; many threads may hold this."""
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
