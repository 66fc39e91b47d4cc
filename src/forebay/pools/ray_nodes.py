"""Check that a node can do the work before it gets any, also one that joins later.

    driver writes a nonce ──> node reads it, writes another ──> driver reads that

Outputs in a folder on a node's local disk would be lost. If a module were missing on one node,
every input that is sent there would fail.
"""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from forebay.base.file_stores import folder_at
from forebay.errors import ForebayError, OptionError, OutputError, WorkerDiedError
from forebay.options import Ray, worker_resources
from forebay.pools import ray_cluster
from forebay.pools.ray_cluster import Node, fitting
from forebay.pools.ray_internals import CALL_S
from forebay.pools.ray_shipping import find_in, leave_out

# How long a node may take to answer; importing a large library from a slow disk takes a while.
PATIENCE_S = 120.0
# The file of the driver in the output folder; a node adds its ID.
_PROBE = "node-check-{}"
_PACKAGES = ("forebay", "torch", "cloudpickle")


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """What to check on a node."""

    work: bytes
    folder: str | None = None  # that outputs are staged in, or its URL; None if there are none
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The results of the checks on a node."""

    versions: dict[str, str]
    unloadable: str
    folder: str
    missing: tuple[str, ...]


def check_nodes(
    nodes: Sequence[Node],
    known: set[str],
    where: Ray,
    check: NodeCheck,
    over: threading.Event,
    alive: Callable[[], None],
) -> dict[str, ForebayError]:
    """Check all large enough nodes that are not `known` yet at the same time; return the errors.

    Args:
        alive: Called every CALL_S while nodes are waited for.
    """
    need = worker_resources(where)
    nodes = [node for node in nodes if node.id not in known and fitting(node.total, need)]
    if not nodes:
        return {}
    known.update(node.id for node in nodes)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import ray

    nonce = secrets.token_hex(8)
    place = None if check.folder is None else folder_at(check.folder)
    if place is not None:
        place.write(_PROBE.format(nonce), nonce.encode())
    try:
        with ray_cluster.up():
            shared: Any = ray.put(check)
            inspect: Any = ray.remote(inspect_node)
            answers: Any = [
                inspect.options(
                    num_cpus=0,
                    max_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                    **environment_of(where),
                ).remote(shared, nonce, node.id, list(sys.path), os.getcwd())
                for node in nodes
            ]
        until = time.monotonic() + PATIENCE_S
        waiting = answers
        while waiting and not over.is_set() and time.monotonic() < until:
            with ray_cluster.up():
                _, waiting = ray.wait(answers, num_returns=len(answers), timeout=CALL_S)
            alive()
        with ray_cluster.up():
            verdicts = [
                _verdict(ray, node, answer, check, nonce)
                for node, answer in zip(nodes, answers, strict=True)
            ]
            shared = waiting = answers = None
    finally:
        if place is not None:
            with suppress(Exception):  # the file or the store no longer exists
                place.remove([_PROBE.format(nonce)])
    return {
        node.id: error for node, error in zip(nodes, verdicts, strict=True) if error is not None
    }


def inspect_node(
    check: NodeCheck, nonce: str, node: str, path: Sequence[str], working_folder: str
) -> NodeFacts:
    """Inspect a node, in a task on that node; the driver judges the result."""
    find_in(path)
    unloadable = folder = ""
    with_folder = list(sys.path)  # the process is shared with other tasks of the driver
    leave_out(working_folder, path)
    try:
        pickle.loads(check.work)  # noqa: S301 - from our own driver
    except BaseException as error:  # noqa: BLE001 - whatever importing user code raises
        unloadable = f"{type(error).__name__}: {error}"
    finally:
        sys.path[:] = with_folder
    if check.folder is not None:
        try:
            place, name = folder_at(check.folder), _PROBE.format(nonce)
            if place.read(name) == nonce.encode():
                place.write(f"{name}-{node}", nonce.encode())
            else:
                folder = "absent"
        except Exception as error:  # noqa: BLE001 - whatever a file system raises
            cause = error.__cause__ or error
            folder = f"{type(cause).__name__}: {cause}"
    missing = tuple(path for path in check.inputs if not os.path.exists(path))
    return NodeFacts(versions(), unloadable, folder, missing)


def versions() -> dict[str, str]:
    """Return the versions that all nodes must share."""
    found = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed, but on its path"
    return found


def _verdict(
    ray: Any, node: Node, answer: Any, check: NodeCheck, nonce: str
) -> ForebayError | None:
    """Return the error of a node; None if it may get work."""
    try:
        seen: NodeFacts = ray.get(answer, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return OptionError(
            f"node {node.name} did not answer within {PATIENCE_S:g} s\n"
            "  It was asked to load the work and to look at the folders. If it still installs its "
            "runtime environment, make the same call again later; otherwise see Ray's logs there, "
            "or stop Ray on that node."
        )
    except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):
        return WorkerDiedError(
            f"node {node.name} died while it was checked\n"
            "  It got no work. Ray's raylet.out there and the log of its system say why: memory "
            "ran out, perhaps, or the machine was taken away.\n"
            "  Make the same call again, with that node or without it."
        )
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        return WorkerDiedError(
            f"the process that checked node {node.name} died: {ray_cluster.first_line(error)}\n"
            "  The node got no work. It was loading the function and what that imports, which may "
            "have crashed or taken all memory: try to import it there, and see Ray's logs."
        )
    except Exception as error:  # noqa: BLE001 - forebay is not installed there, for example
        words = str(error).strip() or type(error).__name__
        return OptionError(
            f"node {node.name} cannot run forebay: {words.splitlines()[-1]}\n"
            "  Install the same forebay, with ray and torch, on every node."
        )
    return _folder_error(node, seen.folder, check.folder, nonce) or _facts_error(node, seen)


def _folder_error(node: Node, reason: str, folder: str | None, nonce: str) -> ForebayError | None:
    """Return why outputs of a node would be lost; `reason` is what it says itself."""
    if reason == "absent":
        return OutputError(
            f"node {node.name} does not see the output folder {folder!r}\n"
            "  A file that this process wrote there is not there. With several nodes the output "
            "must be a folder that all of them mount (NFS, Lustre, …) at the same path, or a "
            "bucket: output='s3://bucket/folder'."
        )
    if reason:
        return OutputError(
            f"node {node.name} cannot write to the output folder {folder!r}: {reason}\n"
            "  Check its mount and permissions there."
        )
    if folder is not None:
        place, its, agrees = folder_at(folder), f"{_PROBE.format(nonce)}-{node.id}", False
        with suppress(Exception):  # whatever a file system raises
            agrees = place.read(its) == nonce.encode()
            place.remove([its])
        if not agrees:
            return OutputError(
                f"what node {node.name} writes to the output folder {folder!r} does not "
                "appear on this machine\n  Mount the same folder everywhere, or use a bucket."
            )
    return None


def _facts_error(node: Node, seen: NodeFacts) -> ForebayError | None:
    """Return why inputs would fail on a node, by what it says itself."""
    ours = versions()
    differing = [
        f"{name} {seen.versions[name]} there and {ours[name]} here"
        for name in ours
        if seen.versions[name] != ours[name]
    ]
    if differing:
        return OptionError(
            f"node {node.name} has other versions: {', '.join(differing)}\n"
            "  Results would depend on the node. Install the same versions on every node."
        )
    if seen.unloadable:
        return OptionError(
            f"node {node.name} cannot load the work: {seen.unloadable}\n"
            "  Install what it imports there, or send it along: "
            "forebay.Ray(runtime_env={'py_modules': ['folder']})."
        )
    if seen.missing:
        return OptionError(
            f"node {node.name} does not see the inputs: {seen.missing[0]!r} is not there\n"
            "  Put them in a folder that every node mounts at the same path, or in a bucket."
        )
    return None


# ---- monitor -------------------------------------------------------------------------------------
# A thread that polls the nodes of the cluster and checks new ones.

# How often the cluster is polled for new nodes and free resources.
PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The nodes of the cluster now."""

    nodes: list[Node]
    refused: dict[str, ForebayError]


@dataclass(frozen=True, slots=True)
class ClusterLost:
    """The cluster does not answer, or this process disconnected from it.

    Attributes:
        advice: What to do before the call is made again, as a line of a message; empty for nothing.
    """

    why: str
    advice: str = ""


def monitor(
    session: tuple[str, str],
    check_new: Callable[[list[Node]], dict[str, ForebayError]],
    report: Callable[[ClusterState | ClusterLost], None],
    over: threading.Event,
) -> None:
    """Poll the cluster every PERIOD_S, in a separate thread, because it may answer slowly."""
    bad: set[str] = set()
    while not over.wait(PERIOD_S):
        try:
            nodes = ray_cluster.nodes()
            if ray_cluster.session() != session:
                raise ConnectionError("Ray was shut down, and connected again")
            refused = check_new(nodes)
        except Exception as error:  # noqa: BLE001 - whatever Ray raises when the cluster is gone
            if not over.is_set():
                why = f"the Ray cluster is gone: {ray_cluster.first_line(error)}"
                report(ClusterLost(why, getattr(error, "advice", "")))
            return
        bad |= refused.keys()
        report(ClusterState([node for node in nodes if node.id not in bad], refused))


def environment_of(where: Ray) -> dict[str, Any]:
    """Return the option of Ray's that sets the runtime environment, if one is asked for."""
    return {} if where.runtime_env is None else {"runtime_env": dict(where.runtime_env)}
