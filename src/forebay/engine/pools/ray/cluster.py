"""The cluster as Ray knows it: joining it, looking at its nodes, leaving it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from forebay.engine.pools.ray.nodes import Node
from forebay.errors import OptionError

# Where `ray start` put a cluster's address, and what asks Ray for it.
_AUTO = "auto"


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
        ray.init(address or _AUTO, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
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
