"""The cluster as Ray knows it: joining it, looking at its nodes, leaving it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from forebay.engine.pools.ray.nodes import Node
from forebay.errors import OptionError

# Where `ray start` put a cluster's address, and what asks Ray for it.
_AUTO = "auto"
# How long an address may take to answer at all.
KNOCK_S = 10.0
# How many pools rely on the connection as it is.
_guards = 0
_guards_lock = threading.Lock()
_was_automatic = True


def join(address: str | None, say: Callable[[str], None]) -> bool:
    """Connect to a cluster; return whether one was started for it here.

    Args:
        address: Where it is; None for the one that this process is connected to, the one that
            runs on this machine, or a new one.
        say: Called with a line for people.

    Raises:
        OptionError: Ray is not installed, or nothing answers at the address.
    """
    ray = _ray()
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": True, "configure_logging": False}
    try:
        _knock(address)
        ray.init(address or _AUTO, **options)
    except (OSError, ValueError, RuntimeError) as error:
        if address is not None:
            raise OptionError(
                f"no Ray cluster answers at {address!r}: {first_line(error)}\n"
                "  Nothing was started. On the cluster's first node: ray start --head --port=6379; "
                "then give that address, or 'auto' on one of its nodes."
            ) from error
    else:
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody was asked
    ray.init(include_dashboard=False, **options)
    say(f"no Ray cluster was found, so one was started on this machine: {_summary(ray)}")
    return True


def leave(began: bool) -> None:
    """Shut down a cluster that `join` started."""
    if began and _ray().is_initialized():
        _ray().shutdown()


def hold(on: bool) -> None:
    """While held, no call of Ray's joins or starts a cluster by itself.

    It would otherwise, wherever a thread of ours asks something of Ray after the user has shut it
    down.
    """
    from ray._private import auto_init_hook

    global _guards, _was_automatic  # noqa: PLW0603 - Ray's own switch is one for the process
    with _guards_lock:
        if on and not _guards:
            _was_automatic = auto_init_hook.enable_auto_connect
            auto_init_hook.enable_auto_connect = False
        _guards += 1 if on else -1
        if not _guards:
            auto_init_hook.enable_auto_connect = _was_automatic


def session() -> str | None:
    """Return what tells this connection to a cluster from a later one; None if there is none."""
    ray = _ray()
    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else None


def nodes() -> list[Node]:
    """Look at the nodes that are alive.

    Raises:
        ConnectionError: The cluster is gone.
    """
    ray = _ray()
    from ray._private import state

    look: Any = state.available_resources_per_node  # the public ones add all nodes up
    if not ray.is_initialized():
        raise ConnectionError("Ray was shut down")
    try:
        free = look()
        listed = ray.nodes()
    except Exception as error:  # whatever Ray raises when its head does not answer
        raise ConnectionError(first_line(error)) from error
    return [
        Node(
            each["NodeID"],
            f"{each['NodeManagerAddress']} ({each['NodeID'][:8]})",
            each["Resources"],
            free.get(each["NodeID"], {}),
        )
        for each in listed
        if each["Alive"]
    ]


def _knock(address: str | None) -> None:
    """Raise OSError where nothing listens at an address; Ray itself would ask for a minute."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "://" not in host:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()


def _summary(ray: Any) -> str:
    resources = ray.cluster_resources()
    return f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise OptionError(
            "backend='ray' needs Ray, which is not installed\n"
            "  Nothing was started. Install it on every node: pip install 'forebay[ray]'"
        ) from error
    return ray


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
