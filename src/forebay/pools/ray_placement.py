"""The hosts of a pool, as the driver sees them: placed on nodes, given orders, and listened to."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import OptionError
from forebay.failures import Failure
from forebay.options import Ray, worker_resources
from forebay.pools import ray_cluster
from forebay.pools.events import Event, TaskFailed, WorkerDied
from forebay.pools.ray_cluster import Node, capacity, place
from forebay.pools.ray_host import Host, Hosting
from forebay.pools.ray_internals import CALL_S, as_argument, shutdown_guard, stream_options
from forebay.pools.ray_nodes import PATIENCE_S, ClusterLost, ClusterState, environment_of
from forebay.pools.worker import failure_of

# How long a host may wait for its resources, if others took some of them, before its workers are
# placed again. It includes the start of the actor.
PENDING_S = 60.0


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


@dataclass(slots=True)
class PlacedHost:
    """A host: its node, the actor and its `order`, its listener, and how many workers it may have.

    `workers` are worker IDs by incarnation; a host without any is about to end. Those in `hanging`
    are to be killed. The host is killed at `kill_at` if it has not carried out its order by then.
    """

    node: str
    actor: Any
    order: Any
    listener: threading.Thread
    room: int
    workers: dict[int, int]
    pending_since: float | None
    kill_at: float | None = None
    hanging: set[int] = field(default_factory=set)


def actor_of(where: Ray) -> Any:
    """Return the class of hosts as an actor's; have Ray check what each of them will ask for."""
    import ray

    remote: Any = ray.remote
    actor = remote(concurrency_groups={"orders": 1}, max_restarts=0, max_task_retries=0)(Host)
    try:
        actor.options(
            num_cpus=where.num_cpus,
            num_gpus=where.num_gpus,
            resources=dict(where.resources or {}),
            **environment_of(where),
        )
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"Ray refuses the settings of a worker: {ray_cluster.first_line(error)}\n"
            f"  Nothing was started. They were: {where!r}"
        ) from error
    return actor


class RayHosts:
    """The hosts of a pool, the workers that each of them has, and the workers that wait for room.

    Attributes:
        num_workers: How many workers there is room for now, within the limit; at least 1.
    """

    num_workers = 1
    _actor: Any  # the class of hosts, as Ray's
    _nodes: list[Node]

    def __init__(self, hosting: Hosting, where: Ray, most: int | None, ahead: int) -> None:
        """Begin without a host."""
        import ray

        self._ray = ray
        self._hosting = hosting
        self._where = where
        self._need = worker_resources(where)
        self._most = most
        self._ahead = ahead
        self._messages: queue.SimpleQueue[
            Message | HostEnded | ClusterState | ClusterLost | None
        ] = queue.SimpleQueue()
        self._hosts: dict[int, PlacedHost] = {}
        self._hosts_started = 0
        self._members: dict[int, int] = {}  # the host of each worker that has one, by incarnation
        self._to_place = False
        self._waiting: deque[tuple[int, int]] = deque()  # incarnations without a node, worker IDs
        self._waiting_since: float | None = None
        self._idle_since: float | None = None  # without a worker, or hope of one
        self._fresh: Counter[str] = Counter()  # placed since the nodes were polled
        self._closed = threading.Event()
        # Ray has no fractions above one, and a host's GPUs would be visible to all its workers.
        whole = all(float(each).is_integer() for each in self._need.values())
        self._is_shared = hosting.is_shared and whole and not where.num_gpus
        self._collect_s_of = hosting.collect_s
        self._collect_s = 0.0

    def _place_waiting(self) -> None:
        """Place waiting workers, as far as there is room."""
        self._to_place = False
        if not self._ray.is_initialized():
            return  # the monitor reports that
        for number, host in self._hosts.items():  # replace workers that died
            count = host.room - len(host.workers) if host.workers else 0
            if found := self._take_waiting(count):
                self._add(number, found)
                self._order(number, "start", found)
        placed: Counter[str] = Counter()
        for host in self._hosts.values():
            placed[host.node] += host.room
        wanted = len(self._waiting)
        chosen = place(wanted, self._nodes, self._need, placed, self._fresh) if wanted else []
        self._fresh.update(chosen)
        shares = Counter(chosen).items() if self._is_shared else [(node, 1) for node in chosen]
        hosting = self._argument() if chosen else None
        for node, count in shares:
            self._start_host(node, self._take_waiting(count), hosting)
        if not self._waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = time.monotonic()
        has_hosts = any(host.pending_since is None for host in self._hosts.values())
        is_large_enough = bool(capacity(self._nodes, self._need))
        if has_hosts or (not self._hosts and (is_large_enough or not self._waiting)):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()

    def _take_waiting(self, most: int) -> list[tuple[int, int]]:
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def _add(self, number: int, workers: Sequence[tuple[int, int]]) -> None:
        for incarnation, worker_id in workers:
            self._hosts[number].workers[incarnation] = worker_id
            self._members[incarnation] = number

    def _argument(self) -> Any:
        """Return what hosts are given as an argument, or as a reference to that.

        Nothing holds the reference when they have started: it is to an object in the store of this
        machine, and when that is gone (`ray stop`), Ray ends a program that has objects there,
        without an exception.
        """
        with suppress(Exception), ray_cluster.up():  # Ray is gone, which the monitor reports
            return as_argument(self._hosting)
        return self._hosting

    def _start_host(self, node: str, workers: list[tuple[int, int]], hosting: Any) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where, room = self._where, len(workers)
        number, self._hosts_started = self._hosts_started, self._hosts_started + 1
        put, closed = self._messages.put, self._closed
        try:
            with ray_cluster.up():
                actor = self._actor.options(
                    num_cpus=where.num_cpus * room,
                    num_gpus=where.num_gpus * room,
                    resources={name: each * room for name, each in (where.resources or {}).items()},
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                    **environment_of(where),
                ).remote(hosting, self._collect_s, os.getcwd(), list(sys.path))
                order = actor.order.options(concurrency_group="orders")
            listener = threading.Thread(
                target=listen,
                args=(number, actor, room, workers, self._ahead, put, closed),
                name=f"forebay-listener-{number}",
                daemon=True,
            )
            listener.start()
        except Exception as error:  # noqa: BLE001 - Ray is gone, or the system has no more threads
            message = f"no host could be started for it: {ray_cluster.first_line(error)}"
            failure = Failure("crash", "WorkerDiedError", message)
            deaths = [WorkerDied(each, failure, external=True) for each, _ in workers]
            self._messages.put(Message(None, list(deaths)))
            return
        now = time.monotonic()
        self._hosts[number] = PlacedHost(node, actor, order, listener, room, {}, pending_since=now)
        self._add(number, workers)

    def _order(self, number: int, what: str, payload: Any = None) -> None:
        host = self._hosts.get(number)
        if host is None:
            return
        try:
            with ray_cluster.up():
                host.order.remote(what, payload)
        except Exception:  # noqa: BLE001 - whatever Ray raises
            if what == "send":
                self._send_portable(number, payload)

    def _send_portable(self, number: int, payload: Sequence[tuple[int, Sequence[Any]]]) -> None:
        """Fail the tasks of a message that cannot be pickled, and send the others."""
        import cloudpickle

        portable: list[tuple[int, list[Any]]] = []
        failed: list[Event] = []
        for incarnation, tasks in payload:
            good = []
            for task, attempt, what in tasks:
                try:
                    cloudpickle.dumps(what)
                except Exception as error:  # noqa: BLE001 - whatever the user's classes raise
                    failure = failure_of(error)
                    failed.append(TaskFailed(incarnation, task, attempt, failure, 0.0, final=True))
                else:
                    good.append((task, attempt, what))
            if good:
                portable.append((incarnation, good))
        if failed:
            self._messages.put(Message(None, failed))
            if portable:
                self._order(number, "send", portable)

    def _kill(self, host: PlacedHost) -> None:
        with suppress(Exception), ray_cluster.up():  # the host or Ray is gone
            self._ray.kill(host.actor)

    def _remove(self, incarnation: int) -> tuple[int, PlacedHost]:
        """Forget a worker that has a host; return the host, with its number."""
        number = self._members.pop(incarnation)
        host = self._hosts[number]
        del host.workers[incarnation]
        host.hanging.discard(incarnation)
        return number, host

    def _located(self, death: WorkerDied, node: str) -> WorkerDied:
        """Add the node to a death; poll a node that lost a host before it is used again."""
        name = next((each.name for each in self._nodes if each.id == node), node[:8])
        if death.external:
            self._nodes = [each for each in self._nodes if each.id != node]
        message = f"{death.failure.message} (on node {name})"
        return death._replace(failure=death.failure._replace(message=message))

    def _give_up_pending(self) -> None:
        """Have workers wait for room again if their host has waited for its resources for long."""
        before = time.monotonic() - PENDING_S
        for number, host in list(self._hosts.items()):
            if host.pending_since is not None and host.pending_since < before:
                del self._hosts[number]
                self._kill(host)
                for incarnation, worker_id in host.workers.items():
                    del self._members[incarnation]
                    self._waiting.append((incarnation, worker_id))

    def _within(self, count: int) -> int:
        return count if self._most is None else min(count, self._most)
