"""Nodes of a cluster: what is sent to them, the hosts on them, and whether both can do the work."""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import sysconfig
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from forebay.base.file_stores import folder_at
from forebay.errors import ForebayError, OptionError, OutputError, WorkerDiedError
from forebay.failures import Failure
from forebay.options import Ray, worker_resources
from forebay.pools import ray_cluster
from forebay.pools.base import Pool
from forebay.pools.events import (
    Assignment,
    Event,
    TaskFailed,
    TaskFinished,
    TasksReturned,
    WorkerDied,
    as_sent,
)
from forebay.pools.processes import ProcessPool
from forebay.pools.ray_cluster import CALL_S, Node, fitting, shutdown_guard, stream_options
from forebay.pools.zygote_handle import pickled

# ---- shipping ------------------------------------------------------------------------------------
# Pickling code for machines that may not have it.
#
#     __main__, a notebook      by value, as cloudpickle does anyway
#     a module of the project   by value: it need not be on the nodes
#     an installed package      by name: every node must have it
#
# A module of the project is one that was loaded from a file outside of Python's own folders and
# outside of forebay. What a function imports when it runs is not known here, and not included:
# name its folder in `forebay.Ray(runtime_env={"py_modules": [...]})`.

_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


def shipped(thing: Any) -> bytes:
    """Pickle something, with the project's own code in it."""
    import cloudpickle

    already = cloudpickle.list_registry_pickle_by_value()
    # By name: `sys.modules` may have a module twice, or under another name than its own only.
    mine = {module.__name__: module for module in _project_modules()}
    mine = {name: each for name, each in mine.items() if name in sys.modules.keys() - already}
    for module in mine.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        return pickled(thing)
    finally:
        for module in mine.values():
            cloudpickle.unregister_pickle_by_value(module)


def find_in(path: Sequence[str]) -> None:
    """Add the driver's module folders to the path of a process on a node, after its own."""
    sys.path.extend(each for each in path if each not in sys.path)


def leave_out(folder: str, path: Sequence[str]) -> None:
    """Remove the driver's working folder from `sys.path`, unless the driver has it there too.

    Ray puts it first in each of its processes, before the standard library.
    """
    if folder not in path and "" not in path:
        sys.path[:] = [each for each in sys.path if each != folder]


def _project_modules() -> list[ModuleType]:
    paths = sysconfig.get_paths()
    ours = Path(__file__).resolve().parents[1]
    installed = [ours, *(Path(paths[name]).resolve() for name in ("stdlib", "platstdlib"))]
    found = []
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in modules:
        file = getattr(module, "__file__", None)
        if name in ("__main__", "__mp_main__") or not isinstance(file, str):
            continue
        if not isinstance(module, ModuleType):  # some packages put an object in their place
            continue
        path = Path(file).resolve()
        is_installed = any(path.is_relative_to(folder) for folder in installed)
        if not is_installed and _PACKAGE_FOLDERS.isdisjoint(path.parts):
            found.append(module)
    return found


# ---- host ----------------------------------------------------------------------------------------
# A host is the actor that runs and supervises workers on a node.
#
#     driver ── order() ──> inbox ──┐
#        ^                          v
#        └── events() <── host ── ProcessPool ── zygote ── workers
#
# The workers are processes in the same pool as on a single machine, so deaths and hangs are
# reported in the same detail. Ray only knows the host, which runs no user code, so if a host dies,
# no input is to blame.
#
# A message costs Ray about a millisecond of processor time, whatever its size. So while the workers
# have more to do, their answers are collected; the driver does not need them sooner. No event is
# lost, since the host outlives its workers.

# A message is sent once it has this many bytes of results.
MESSAGE_BYTES = 1 << 24
# Results of this size do not wait for others: sending them costs more than the message itself.
LARGE_BYTES = 1 << 20


class Hosting:
    """What a host needs to know about the work; sent by pickle, user code as bytes.

    By default the workers of a node share a host, and payloads and results are sent as they are.
    """

    is_shared = True

    def __init__(self, job: bytes) -> None:
        self._job = job

    def collect_s(self, hosts: int) -> float:
        """Return how long each of `hosts` hosts collects answers while its workers hold tasks."""
        return max(0.03, hosts / 200)  # all hosts together send at most 200 messages per second

    def pool(self, max_workers: int) -> Pool:
        """Return the pool for the workers of a host."""
        return ProcessPool(self._job, max_workers)

    def incoming(self, assignment: Assignment) -> Assignment:
        """Return an assignment in the form for the worker."""
        return assignment

    def outgoing(self, event: Event) -> Event:
        """Return an event in the form in which it is sent."""
        return event

    def sent(self) -> None:
        """Record that all outgoing events were sent."""


class Host:
    """The actor. `order` is called from a separate concurrency group."""

    def __init__(
        self, hosting: Hosting, collect_s: float, folder: str, path: Sequence[str]
    ) -> None:
        """Start nothing yet."""
        with suppress(OSError):
            os.chdir(folder)
        find_in(path)
        leave_out(folder, path)
        self._hosting = hosting
        self._collect_s = collect_s
        self._inbox: deque[tuple[str, Any]] = deque()
        self._pool: Pool | None = None
        self._over = False
        self._ordered = threading.Event()
        self._alive: set[int] = set()  # incarnations
        self._held: Counter[int] = Counter()  # tasks that each worker has not answered or returned

    def order(self, what: str, payload: Any = None) -> None:
        """Process an order."""
        if what == "close":
            self._over = True
        else:
            self._inbox.append((what, payload))
        self._ordered.set()
        if self._pool is not None:
            self._pool.wake()

    def events(self, room: int, workers: Sequence[tuple[int, int]]) -> Iterator[list[Any]]:
        """Start workers; yield the events of all until none is left, or the host is closed.

        The first message is empty.
        """
        pool = self._pool = self._hosting.pool(room)
        try:
            yield []  # the actor has the resources that it asked for
            self._start(pool, workers)
            while not self._over and (self._alive or self._inbox):
                self._process_orders(pool)
                events = self._wait_for_events(pool, None)
                until = time.monotonic() + self._collect_s
                if sum(map(_size, events)) >= LARGE_BYTES:
                    until = 0.0
                while events and self._held and time.monotonic() < until:
                    # Orders do not wait: a worker may need one.
                    self._ordered.wait(until - time.monotonic())
                    self._process_orders(pool)
                events += self._wait_for_events(pool, 0.0)
                yield from self._messages(events)
        finally:
            pool.close()

    def _process_orders(self, pool: Pool) -> None:
        self._ordered.clear()
        while self._inbox:
            what, payload = self._inbox.popleft()
            match what:
                case "start":
                    self._start(pool, payload)
                case "send":
                    self._send(pool, payload)
                case "kill":
                    pool.kill(payload)
                case "stacks":
                    pool.take_stacks(payload)
                case "stop":
                    pool.stop(payload)
                    self._forget(payload)

    def _start(self, pool: Pool, workers: Sequence[tuple[int, int]]) -> None:
        for incarnation, worker_id in workers:
            pool.start(incarnation, worker_id)
            self._alive.add(incarnation)

    def _send(self, pool: Pool, payload: Sequence[tuple[int, Sequence[Any]]]) -> None:
        for incarnation, tasks in payload:
            if incarnation in self._alive:
                self._held[incarnation] += len(tasks)
                pool.send(incarnation, [self._hosting.incoming(Assignment(*t)) for t in tasks])

    def _wait_for_events(self, pool: Pool, timeout: float | None) -> list[Event]:
        """Return what happened, and count the tasks that workers no longer hold."""
        events = pool.wait(timeout)
        held = self._held
        for event in events:
            match event:
                case TaskFinished() | TaskFailed():
                    held[event.incarnation] -= 1
                case TasksReturned():
                    held[event.incarnation] -= len(event.tasks)
                case WorkerDied():
                    self._forget(event.incarnation)
                    continue
                case _:
                    continue
            if held[event.incarnation] <= 0:
                del held[event.incarnation]
        return events

    def _forget(self, incarnation: int) -> None:
        self._alive.discard(incarnation)
        self._held.pop(incarnation, None)

    def _messages(self, events: Sequence[Event]) -> Iterator[list[Any]]:
        """Split events into messages that fit into any object store."""
        message: list[Any] = []
        nbytes = 0
        for number, event in enumerate(events, 1):
            message.append(as_sent(self._hosting.outgoing(event)))
            nbytes += _size(event)
            if nbytes >= MESSAGE_BYTES or number == len(events):
                yield message
                self._hosting.sent()
                message, nbytes = [], 0


def _size(event: Event) -> int:
    return event.nbytes if isinstance(event, TaskFinished) else 0


# ---- node checks ---------------------------------------------------------------------------------
# Check that a node sees the same output folder and has the same code before it gets work.
#
#     driver writes a nonce ──> node reads it, writes another ──> driver reads that
#
# Outputs in a folder on a node's local disk would be lost. If a module were missing on one node,
# every input that is sent there would fail.

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
    """The cluster does not answer, or this process disconnected from it."""

    why: str


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
                report(ClusterLost(f"the Ray cluster is gone: {ray_cluster.first_line(error)}"))
            return
        bad |= refused.keys()
        report(ClusterState([node for node in nodes if node.id not in bad], refused))


def environment_of(where: Ray) -> dict[str, Any]:
    """Return the option of Ray's that sets the runtime environment, if one is asked for."""
    return {} if where.runtime_env is None else {"runtime_env": dict(where.runtime_env)}


# ---- listener ------------------------------------------------------------------------------------
# The thread that receives the reports of one host and passes them on.


@dataclass(slots=True)
class Message:
    """Events that a host reported together, and whether the pool has processed them."""

    number: int | None  # of the host; None for events that come from none
    events: list[Any]
    taken: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class HostEnded:
    """A host and its workers ended."""

    number: int
    failure: Failure
    external: bool


def listen(
    number: int,
    host: Any,
    room: int,
    workers: Sequence[tuple[int, int]],
    ahead: int,
    report: Callable[[Message | HostEnded], None],
    closed: threading.Event,
) -> None:
    """Start the first workers of a host and pass on what the host reports, until it ends."""
    import ray

    stream = reference = message = None
    try:
        with ray_cluster.up():
            stream = host.events.options(**stream_options(ahead)).remote(room, workers)
        while True:
            with ray_cluster.up():
                reference = message = None
                if not ray.wait([stream], timeout=CALL_S, fetch_local=True)[0]:
                    continue
                reference = next(stream, None)
                if reference is None:
                    break
                message = Message(number, ray.get(reference, timeout=PATIENCE_S))
            report(message)
            if ahead >= 0:
                # One message of each worker at a time: others would fill the local object store,
                # and the batch that is needed next might not fit.
                while not (message.taken.wait(CALL_S) or closed.is_set()):
                    pass
        why, external = "its host ended", True
    except ray.exceptions.OutOfMemoryError as error:
        # Ray's memory monitor chooses by age, not by use, and may kill several at once.
        why = (
            f"Ray killed it because memory ran out: {ray_cluster.first_line(error)}; with "
            "forebay.Ray(num_cpus=2), say, fewer share a node"
        )
        external = False
    except Exception as error:  # noqa: BLE001 - whatever Ray raises when something is lost
        why, external = f"its host was lost: {ray_cluster.first_line(error)}", True
    if not closed.is_set():
        report(HostEnded(number, Failure("crash", "WorkerDiedError", why), external))
    with shutdown_guard().held(however_long=True):
        stream = reference = None
