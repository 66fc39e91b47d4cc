"""Check that a node sees the same output folder and has the same code before it gets work.

    driver writes a nonce ──> node reads it, writes another ──> driver reads that

Outputs in a folder on a node's local disk would be lost. If a module were missing on one node,
every input that is sent there would fail.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from forebay.engine.pools.ray import cluster
from forebay.engine.pools.ray.nodes import Node
from forebay.engine.pools.ray.shipping import find_in, leave_out
from forebay.engine.pools.ray.shutdown_guard import CALL_S
from forebay.errors import ForebayError, OptionError, OutputError

# How long a node may take to answer; importing a large library from a slow disk takes a while.
PATIENCE_S = 120.0
_PACKAGES = ("forebay", "torch", "cloudpickle")


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """What to check on a node.

    Attributes:
        work: The job, pickled.
        folder: The folder or URL that outputs are staged in; None if there are none.
        inputs: Local paths that must exist.
        trainer: Host and port of the trainer, to which nodes connect; None if they do not.
    """

    work: bytes
    folder: str | None = None
    inputs: tuple[str, ...] = ()
    trainer: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The results of the checks on a node.

    Attributes:
        versions: Versions of Python and of the packages that affect results.
        unloadable: Why the work cannot be loaded there; "" if it can.
        folder: Why the folder cannot be used there; "" if it can, "absent" if it is another folder.
        missing: The inputs that do not exist there.
        unreachable: Why it cannot connect to the trainer; "" if it can.
    """

    versions: dict[str, str]
    unloadable: str
    folder: str
    missing: tuple[str, ...]
    unreachable: str


def check_nodes(
    nodes: Sequence[Node], check: NodeCheck, options: dict[str, Any], over: threading.Event
) -> dict[str, ForebayError]:
    """Check nodes, all at the same time.

    Args:
        nodes: Which nodes.
        check: What is checked.
        options: Further options of the task, such as its runtime environment.
        over: Set when nobody needs the answers any more.

    Returns:
        An error for each node that fails, by its ID.

    Raises:
        ConnectionError: Ray was shut down.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import ray

    nonce = secrets.token_hex(8)
    name = _probe(check.folder, nonce)
    if name is not None:
        _write(name, nonce)
    try:
        with cluster.up():
            shared: Any = ray.put(check)
            inspect: Any = ray.remote(inspect_node)
            answers: Any = [
                inspect.options(
                    num_cpus=0,
                    max_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                    **options,
                ).remote(shared, nonce, node.id, list(sys.path), os.getcwd())
                for node in nodes
            ]
        until = time.monotonic() + PATIENCE_S
        waiting = answers
        while waiting and not over.is_set() and time.monotonic() < until:
            with cluster.up():
                _, waiting = ray.wait(answers, num_returns=len(answers), timeout=CALL_S)
        with cluster.up():
            verdicts = [
                _verdict(ray, node, answer, check, nonce)
                for node, answer in zip(nodes, answers, strict=True)
            ]
            shared = waiting = answers = None
    finally:
        if name is not None:
            _remove(name)
    return {
        node.id: error for node, error in zip(nodes, verdicts, strict=True) if error is not None
    }


def inspect_node(
    check: NodeCheck, nonce: str, node: str, path: Sequence[str], working_folder: str
) -> NodeFacts:
    """Inspect a node, in a task on that node; the driver judges the result.

    Args:
        check: What is checked.
        nonce: The string that the driver wrote.
        node: The node's ID.
        path: The driver's `sys.path`.
        working_folder: The driver's.
    """
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
    name = _probe(check.folder, nonce)
    if name is not None:
        try:
            if _read(name) == nonce:
                _write(f"{name}-{node}", nonce)
            else:
                folder = "absent"
        except FileNotFoundError:
            folder = "absent"
        except Exception as error:  # noqa: BLE001 - whatever a file system raises
            folder = f"{type(error).__name__}: {error}"
    missing = tuple(path for path in check.inputs if not os.path.exists(path))
    unreachable = ""
    if check.trainer is not None:
        try:
            socket.create_connection(check.trainer, cluster.CONNECT_S).close()
        except OSError as error:
            unreachable = str(error)
    return NodeFacts(versions(), unloadable, folder, missing, unreachable)


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
    except Exception as error:  # noqa: BLE001 - forebay is not installed there, or the node was lost
        words = str(error).strip() or type(error).__name__
        return OptionError(
            f"node {node.name} cannot run forebay: {words.splitlines()[-1]}\n"
            "  Install the same forebay, with ray and torch, on every node."
        )
    return _folder_error(node, seen.folder, check.folder, nonce) or _facts_error(node, seen, check)


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
    name = _probe(folder, nonce)
    if name is not None:
        its = f"{name}-{node.id}"
        try:
            agrees = _read(its) == nonce
        except Exception:  # noqa: BLE001 - whatever a file system raises
            agrees = False
        _remove(its)
        if not agrees:
            return OutputError(
                f"what node {node.name} writes to the output folder {folder!r} does not "
                "appear on this machine\n  Mount the same folder everywhere, or use a bucket."
            )
    return None


def _facts_error(node: Node, seen: NodeFacts, check: NodeCheck) -> ForebayError | None:
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
    if seen.unreachable and check.trainer is not None:
        host, port = check.trainer
        return OptionError(
            f"node {node.name} cannot connect to the trainer at {host}, port {port}: "
            f"{seen.unreachable}\n  forebay.Ray(direct=True) needs that. Open the trainer's ports "
            "to the nodes, or leave `direct` out."
        )
    return None


def _probe(folder: str | None, nonce: str) -> str | None:
    return None if folder is None else f"{folder.rstrip('/')}/node-check-{nonce}"


def _write(name: str, text: str) -> None:
    import fsspec

    with fsspec.open(name, "w") as file:
        file.write(text)


def _read(name: str) -> str:
    import fsspec

    with fsspec.open(name, "r") as file:
        return str(file.read())


def _remove(name: str) -> None:
    import fsspec

    with suppress(Exception):  # the file or the store no longer exists
        files, path = fsspec.core.url_to_fs(name)
        files.rm_file(path)
