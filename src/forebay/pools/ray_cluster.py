"""The connection to a Ray cluster: join it, look at its nodes, leave it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from forebay.base.process import handler_kept
from forebay.errors import OptionError
from forebay.pools.ray_internals import (
    ask_head,
    free_resources,
    is_raylet_gone,
    kill_own_cluster,
    set_auto_connect,
    shutdown_guard,
    use_known_token,
)


class RayletGoneError(ConnectionError):
    """Ray's process on this machine has ended."""

    advice = (
        "  Ray cannot connect this program again, and may end it within a minute: save what it "
        "has, and start it again.\n"
    )

    def __init__(self) -> None:
        """Say what may have happened."""
        super().__init__(
            "Ray was stopped on this machine, or its raylet died, and raylet.out says why"
        )


# ---- nodes ---------------------------------------------------------------------------------------
# Choose the node for the next worker: a pure function of plain records.


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster when it was last polled."""

    id: str
    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def fitting(resources: Mapping[str, float], need: Mapping[str, float]) -> int:
    """Return how many workers fit into resources."""
    # With a tolerance, because thirds of a GPU do not add up to exactly one.
    return min(int(resources.get(name, 0.0) / each + 1e-9) for name, each in need.items())


def place(
    wanted: int,
    nodes: Sequence[Node],
    need: Mapping[str, float],
    placed: Mapping[str, int],
    fresh: Mapping[str, int],
) -> list[str]:
    """Choose nodes for new workers, those with the most room first."""
    held = {node.id: placed.get(node.id, 0) for node in nodes}
    left = {
        node.id: min(
            fitting(node.total, need) - held[node.id],
            fitting(node.free, need) - fresh.get(node.id, 0),
        )
        for node in nodes
    }
    chosen: list[str] = []
    while len(chosen) < wanted and (open_ones := [each for each in left if left[each] > 0]):
        best = min(open_ones, key=lambda each: (held[each], -left[each]))
        left[best] -= 1
        held[best] += 1
        chosen.append(best)
    return chosen


def capacity(nodes: Iterable[Node], need: Mapping[str, float]) -> int:
    """Return how many workers the nodes could hold if nothing else ran on them."""
    return sum(max(fitting(node.total, need), 0) for node in nodes)


def why_waiting(nodes: Sequence[Node], need: Mapping[str, float], wanted: int) -> str:
    """Return a message that says what workers without a node are waiting for."""
    wish = ", ".join(f"{amount:g} {name}" for name, amount in need.items())
    if not any(fitting(node.total, need) for node in nodes):
        hint = "No node has that much: start a larger one, or ask for less."
    else:
        hint = "All of it is in use: the run continues when resources are freed or a node joins."
    lines = [f"  {node.name}: {_free(node, need)}" for node in nodes] or ["  there are no nodes"]
    plural = "s wait" if wanted != 1 else " waits"
    return "\n".join(
        [f"{wanted} worker{plural} for room on the cluster; each needs {wish}", *lines, f"  {hint}"]
    )


def _free(node: Node, need: Mapping[str, float]) -> str:
    return ", ".join(
        f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name} free"
        for name in need
    )


_Result = TypeVar("_Result")
# The file in which `ray start` stores a cluster's address, and the name that means it.
_AUTO = "auto"
# The address that makes Ray start a cluster.
_LOCAL = "local"
# Added to messages if the address was not an argument.
_BY_ENVIRONMENT = ", which RAY_ADDRESS names"
_BY_RAY = ", the address of the last one on this machine"
_START_ONE = (
    "  Nothing was started. On the cluster's first node: ray start --head --port=6379; then give "
    "that address, or 'auto' on one of its nodes."
)
# How long an address may take to accept a connection.
CONNECT_S = 10.0
# How long a cluster that was started here may take to shut down before it is killed.
SHUTDOWN_S = 30.0
# How many pools use the connection, and its `session` if the cluster was started for them.
_pools = 0
_ours: tuple[str, str] | None = None
_was_automatic = True
_joining = threading.RLock()  # a finalizer may close a pool within


def join_cluster(address: str | None, say: Callable[[str], None]) -> None:
    """Connect to a cluster for a pool, which must leave it with `leave_cluster`.

    Until the last pool has left, no call to Ray joins or starts a cluster implicitly. Otherwise a
    call in one of forebay's threads would do so after the user has shut Ray down.

    Args:
        address: Where it is; None for the one that this process is connected to, the one that
            runs on this machine, or a new one.
    """
    global _pools, _ours, _was_automatic  # noqa: PLW0603 - Ray's connection is global, too
    ray = _ray()
    with _joining:  # of two threads, the second joins what the first has started
        if not _pools:
            _was_automatic = set_auto_connect(False)
        _pools += 1
        try:
            if ray.is_initialized():
                if is_raylet_gone():
                    raise RayletGoneError
                _check_connection(address)
            else:
                _ours = None
                if _connect(address, say):
                    _ours = session()
        except BaseException:
            leave_cluster()
            raise


def leave_cluster() -> None:
    """Leave the cluster; the last pool shuts it down if `join_cluster` has started it."""
    global _pools, _ours  # noqa: PLW0603 - Ray's connection is global, too
    with _joining:
        _pools -= 1
        if _pools:
            return
        set_auto_connect(_was_automatic)
        ours, _ours = _ours, None
        if ours is not None:
            with suppress(ConnectionError):  # the user has shut it down
                if session() == ours:
                    _shut_down()


def _shut_down() -> None:
    shutdown = _ray().shutdown
    try:
        call_within(SHUTDOWN_S, "ray.shutdown()", shutdown)
    except ConnectionError:
        # Calls to a process of Ray's that is stuck end when it is killed.
        kill_own_cluster()
        call_within(SHUTDOWN_S, "ray.shutdown()", shutdown)


def call_within(limit_s: float, what: str, call: Callable[[], _Result]) -> _Result:
    """Return what a call to Ray returns; raise ConnectionError if it is stuck.

    It runs in a thread of its own, since some calls cannot be interrupted.
    """
    result: futures.Future[_Result] = futures.Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            result.set_exception(error)

    thread = threading.Thread(target=run, name="forebay-cluster", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, or the system has no more threads
        return call()
    if futures.wait([result], limit_s).not_done:
        raise ConnectionError(f"{what} did not return within {limit_s:g} s")
    return result.result()


def _check_connection(address: str | None) -> None:
    """Raise OptionError if this process is connected to another cluster than the one at `address`.

    Only an address with a port can be compared.
    """
    here = _ray().get_runtime_context().gcs_address
    if address is not None and _split(address)[1] and _resolved(address) != _resolved(here):
        raise OptionError(
            f"this process is connected to the Ray cluster at {here!r}, not at {address!r}\n"
            "  Nothing was started. Leave the address out to use that cluster, or call "
            "ray.shutdown() first."
        )


def _connect(address: str | None, say: Callable[[str], None]) -> bool:
    """Connect to a cluster; return whether one was started for it here."""
    ray = _ray()
    options: dict[str, Any] = {"log_to_driver": True, "configure_logging": False}
    at, whose = _lookup(address)
    missing = "no Ray cluster was found"
    if at == _AUTO:
        raise OptionError(f"no Ray cluster runs on this machine: address='auto'\n{_START_ONE}")
    if at is not None:
        try:
            _check_port(at)
        except OSError as error:
            missing = f"no Ray cluster answers at {at!r}{whose}"
            if address is not None or whose == _BY_ENVIRONMENT:
                raise OptionError(f"{missing}: {first_line(error)}\n{_START_ONE}") from error
        else:
            if whose == _BY_RAY:
                use_known_token()
            _connect_to(address or _AUTO, at, options)
            return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no consent was given
    try:
        with handler_kept(signal.SIGTERM):
            ray.init(_LOCAL, include_dashboard=False, **options)
    except Exception as error:  # Ray raises Exception itself when a process of its own died
        raise OptionError(
            f"{missing}, and none could be started on this machine: {first_line(error)}\n"
            "  Nothing was processed. Ray's logs, /tmp/ray/session_latest/logs, say why; a machine "
            "with much other work may be too slow.\n"
            "  Make the same call again, or leave backend='ray' out."
        ) from error
    resources = ray.cluster_resources()
    say(
        f"{missing}, so one was started on this machine: {resources.get('CPU', 0):g} CPUs, "
        f"{resources.get('GPU', 0):g} GPUs"
    )
    return True


def _lookup(address: str | None) -> tuple[str | None, str]:
    """Return the address to connect to, and where it comes from, for messages.

    The address is "auto" if a running cluster was requested but there is none, and None if a new
    one is to be started. Ray's file outlives the cluster, and Ray would retry there for minutes.
    """
    given, whose = address, ""
    if address in (None, _AUTO):
        given, whose = os.environ.get("RAY_ADDRESS") or _AUTO, _BY_ENVIRONMENT
    if given == _LOCAL:
        return None, whose
    if given != _AUTO:
        return given, whose
    from ray._private import services

    known: Any = services
    known.find_gcs_addresses.cache_clear()
    try:
        return known.canonicalize_bootstrap_address(_AUTO), _BY_RAY
    except (OSError, ValueError):  # there is none
        return address, ""


def _connect_to(address: str, at: str, options: dict[str, Any]) -> None:
    ray = _ray()
    try:
        if "://" not in at:
            ask_head(at)
        with handler_kept(signal.SIGTERM):
            ray.init(address, **options)
    # Ray says the same of another version as of a token that the cluster refuses.
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise OptionError(
            f"the Ray cluster at {at!r} cannot be joined: {first_line(error)}\n"
            "  Nothing was started. It must run the same Ray as this process. If it asks for a "
            "token, this process needs RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN. "
            "forebay.Ray(address='local') works on this machine alone."
        ) from error


@contextmanager
def up() -> Iterator[None]:
    """Make sure that Ray is running and is not shut down meanwhile; for short calls only."""
    with shutdown_guard().held():
        if not _ray().is_initialized():
            raise ConnectionError("Ray was shut down")
        yield


def session() -> tuple[str, str]:
    """Return an ID of this connection to a cluster: jobs of each cluster count from 1."""
    with up():
        here = _ray().get_runtime_context()
        return here.get_node_id(), here.get_job_id()


def nodes() -> list[Node]:
    """Return the nodes that are alive."""
    ray = _ray()
    try:
        with up():
            free = free_resources()
            listed = ray.nodes()
            here = ray.get_runtime_context().get_node_id()
        for each in listed:
            if each["NodeID"] == here:
                _check_own_node(each)
    except RayletGoneError:
        raise
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


def _check_own_node(node: Mapping[str, Any]) -> None:
    """Raise RayletGoneError if Ray's process for this machine has died."""
    is_dead = not node["Alive"]
    if os.path.exists(node["RayletSocketName"]):  # of a `ray://` address it is another machine's
        try:
            at = node["NodeManagerAddress"], node["NodeManagerPort"]
            socket.create_connection(at, 1.0).close()
        except ConnectionRefusedError:
            is_dead = True
        except OSError:  # too busy to answer: Ray's head decides about that
            pass
    if is_dead:
        raise RayletGoneError


def _check_port(address: str) -> None:
    """Raise OSError if nothing listens at an address; Ray itself would retry for minutes."""
    host, port = _split(address)
    if port:
        socket.create_connection((host, port), CONNECT_S).close()


def _split(address: str) -> tuple[str, int]:
    """Return host and port of an address; the port is 0 if it has none, or is a URL."""
    host, _, port = address.rpartition(":")
    is_plain = host and port.isdecimal() and "://" not in address
    return host.strip("[]"), int(port) if is_plain else 0


def _resolved(address: str) -> tuple[str, int]:
    """Return an address with the IP address of its host, as Ray names this machine."""
    host, port = _split(address)
    with suppress(OSError):
        host = socket.gethostbyname(host)
    if host.startswith("127."):
        host = _ray().util.get_node_ip_address()
    return host, port


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise OptionError(
            "backend='ray' needs Ray, which is not installed\n"
            "  Nothing was started. On every node, in a clone of forebay: pip install '.[ray]'"
        ) from error
    return ray


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
