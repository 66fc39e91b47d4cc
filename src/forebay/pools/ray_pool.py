"""Workers on the nodes of a Ray cluster: another pool for the same engine.

    engine ── start, send, kill ──> RayPool ── order() ──> host (an actor), host, …
       ^                               ^                     │
       └────────── events ─────────────┴──── events() <──────┘   one listener thread per host

Where answers are small, the workers that are placed on a node together share a host, and all their
tasks and answers share messages: with a host for each of a thousand workers, Ray's messages would
take all of the driver's time. Batches are large: each worker has a host and a stream of its own.

Ray only starts and connects hosts. It never restarts them or retries their calls, since the flow
owns every retry. If a host is lost, with its node or alone, no input is to blame; the deaths of
workers are reported by their hosts (see `ray_nodes.py`).
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from forebay.errors import OptionError, WorkerDiedError
from forebay.failures import Failure
from forebay.options import Ray, worker_resources
from forebay.pools import ray_cluster
from forebay.pools.base import Pool
from forebay.pools.events import (
    Assignment,
    Event,
    StacksTaken,
    TaskFailed,
    TaskFinished,
    WorkerDied,
    WorkersResized,
    as_received,
)
from forebay.pools.ray_cluster import Node, capacity, place, shutdown_guard, why_waiting
from forebay.pools.ray_nodes import (
    PATIENCE_S,
    ClusterLost,
    ClusterState,
    Host,
    HostEnded,
    Hosting,
    Message,
    NodeCheck,
    check_nodes,
    environment_of,
    listen,
    monitor,
)
from forebay.pools.worker import failure_of

# How long a host may take to kill its worker before the host is killed.
KILL_S = 10.0
# How long a host may wait for its resources, if others took some of them, before its workers are
# placed again. It includes the start of the actor.
PENDING_S = 60.0
# How long `close` gives workers and hosts to clean up.
CLOSE_S = 2.0
# How long workers may wait for room before a message says so, and between such messages.
SAY_S, SAY_AGAIN_S = 5.0, 60.0
# How long a pool without a single worker waits: for a node that is large enough, and for hosts to
# start on nodes that have room. There is no limit while others use all that the nodes have.
ROOM_S, HOSTS_S = 900.0, 3 * PENDING_S
# How long `wait` may hear nothing at all: the monitor alone reports every second. And how long to
# wait for that at a time, so that a pause of this process counts only once.
SILENT_S, LISTEN_S = 90.0, 5.0


@dataclass(slots=True)
class _Host:
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


class AnswerReceiver:
    """Takes answers out of the object store, in the thread of `wait`; here there are none."""

    def receive(self, host: int, event: TaskFinished, *, is_here: bool) -> TaskFinished:
        """Return the answer for the engine, which must not refer to the object store."""
        return event

    def host_ended(self, host: int) -> None:
        """Record that a host has ended; no more answers come from it."""


@final
class RayPool(Pool):
    """Runs each worker on some node of a cluster.

    Args:
        most: Maximum number of workers; None for as many as there is room for, also on nodes that
            join later.
        receiver: Handles answers that refer to the object store; None if there are none.

    Attributes:
        num_workers: How many workers there is room for now, within `most`; at least 1.
    """

    def __init__(
        self,
        hosting: Hosting,
        where: Ray,
        check: NodeCheck,
        most: int | None,
        *,
        grows: bool = True,
        ahead: int = -1,
        receiver: AnswerReceiver | None = None,
        say: Callable[[str], None],
    ) -> None:
        """Join the cluster, and check its nodes."""
        ray_cluster.join_cluster(where.address, say)
        import ray

        self._ray = ray
        self._say = say
        self._where = where
        self._need = worker_resources(where)
        self._most = most if most is not None else where.max_workers
        self._grows = grows
        self._ahead = ahead
        self._receiver = receiver or AnswerReceiver()
        self._messages: queue.SimpleQueue[
            Message | HostEnded | ClusterState | ClusterLost | None
        ] = queue.SimpleQueue()
        self._hosts: dict[int, _Host] = {}
        self._hosts_started = 0
        self._members: dict[int, int] = {}  # the host of each worker that has one, by incarnation
        self._to_place = False
        self._waiting: deque[tuple[int, int]] = deque()  # incarnations without a node, worker IDs
        self._waiting_since: float | None = None
        self._idle_since: float | None = None  # without a worker, or hope of one
        self._silent_s = 0.0
        self._said_at = 0.0
        self._fresh: Counter[str] = Counter()  # placed since the nodes were polled
        self._gone: str | None = None
        self._closed = threading.Event()
        self._owner = os.getpid()
        # Ray has no fractions above one, and a host's GPUs would be visible to all its workers.
        whole = all(float(each).is_integer() for each in self._need.values())
        self._is_shared = hosting.is_shared and whole and not where.num_gpus
        self._collect_s_of = hosting.collect_s
        self._monitor: threading.Thread | None = None
        # Ray disconnects when the interpreter exits, and any later call ends the process. Exit
        # handlers run in reverse order, so this one runs before Ray's.
        atexit.register(self.close)
        try:
            self._actor = _actor_of(where)
            self._node = ray.get_runtime_context().get_node_id()
            alive = partial(self._messages.put, Message(None, []))
            checks = partial(
                check_nodes, known=set(), where=where, check=check, over=self._closed, alive=alive
            )

            def prepare() -> tuple[tuple[str, str], list[Node], Any]:
                session, nodes = ray_cluster.session(), ray_cluster.nodes()
                for error in checks(nodes).values():
                    raise error
                with ray_cluster.up():
                    return session, nodes, ray.put(hosting)

            limit_s = PATIENCE_S + SILENT_S
            session, self._nodes, self._hosting = ray_cluster.call_within(
                limit_s, "a first look at its nodes", prepare
            )
            thread = threading.Thread(
                target=monitor,
                args=(session, checks, self._messages.put, self._closed),
                name="forebay-monitor",
                daemon=True,
            )
            thread.start()
            self._monitor = thread
            self.num_workers = max(self._within(capacity(self._nodes, self._need)), 1)
            self._adapt()
        except ConnectionError as error:
            self.close()
            raise WorkerDiedError(
                f"the Ray cluster is gone: {error}\n"
                "  Nothing was started. Make the same call again, on a cluster or on this machine."
            ) from error
        except BaseException:
            self.close()
            raise

    def start(self, incarnation: int, worker_id: int) -> None:
        """Have `wait` place the worker on a node; it waits longer if there is no room."""
        self._waiting.append((incarnation, worker_id))
        self._to_place = True

    def send(self, incarnation: int, assignments: Sequence[Assignment]) -> None:
        """Order the worker's host to send the tasks to it."""
        self.send_to_all([(incarnation, assignments)])

    def send_to_all(self, groups: Sequence[tuple[int, Sequence[Assignment]]]) -> None:
        """Send one order to each of the workers' hosts."""
        orders: dict[int, list[tuple[int, list[Any]]]] = {}
        for incarnation, assignments in groups:
            if incarnation in self._members:
                order = incarnation, [tuple(each) for each in assignments]
                orders.setdefault(self._members[incarnation], []).append(order)
        for number, payload in orders.items():
            self._order(number, "send", payload)

    def kill(self, incarnation: int) -> None:
        """Order the host to kill its worker; kill the host later if it does not."""
        if incarnation in self._members:
            number = self._members[incarnation]
            self._hosts[number].hanging.add(incarnation)
            self._hosts[number].kill_at = time.monotonic() + KILL_S
            self._order(number, "kill", incarnation)

    def take_stacks(self, incarnation: int) -> None:
        """Order the host to take the stacks of its worker; one without a host waits for room."""
        if incarnation in self._members:
            self._order(self._members[incarnation], "stacks", incarnation)
        elif self._waiting:
            why = why_waiting(self._nodes, self._need, len(self._waiting))
            self._messages.put(Message(None, [StacksTaken(incarnation, why)]))

    def stop(self, incarnation: int) -> None:
        """Order the worker's host to stop it; a worker that waits for room is no longer wanted."""
        self._waiting = deque(each for each in self._waiting if each[0] != incarnation)
        if incarnation in self._members:
            number, host = self._remove(incarnation)
            if host.workers:
                self._order(number, "stop", incarnation)
            else:
                host.kill_at = time.monotonic() + KILL_S
                self._order(number, "close")
        self._to_place = True

    def wait(self, timeout: float | None) -> list[Event]:
        """Return the events of hosts, and place workers that wait for room."""
        until = None if timeout is None else time.monotonic() + timeout
        events: list[Event] = []
        while not events:
            if self._to_place:
                self._place_waiting()
            if self._gone is not None:
                raise WorkerDiedError(
                    f"{self._gone}\n  All workers are lost with it; nothing counts as failed.\n"
                    "  Make the same call again, on a cluster or on this machine."
                )
            now = time.monotonic()
            if until is not None and now > until:
                break
            due = [host.kill_at for host in self._hosts.values() if host.kill_at is not None]
            due += [until] if until is not None else []
            due += [now + SAY_S] if self._waiting else []
            patience_s = max(min([*due, now + LISTEN_S]) - now, 0.0)
            try:
                message = self._messages.get(timeout=patience_s)
            except queue.Empty:
                self._silent_s += patience_s
                if self._silent_s >= SILENT_S:
                    self._gone = (
                        f"the Ray cluster is gone: nothing was heard of it for {SILENT_S:g} s"
                    )
                if until is not None and time.monotonic() >= until:
                    until = now  # check what is due again, then return
                self._meet_deadlines()
                continue
            self._silent_s = 0.0
            events += self._handle(message)
            while not self._messages.empty():
                events += self._handle(self._messages.get_nowait())
            self._meet_deadlines()
            if message is None:
                break
        return events

    def wake(self) -> None:
        """Put an empty message into the queue."""
        self._messages.put(None)

    def close(self) -> None:
        """Tell every host to stop, kill those that do not, and leave a cluster that we started."""
        if self._closed.is_set() or os.getpid() != self._owner:
            return  # in a fork of the driver: the hosts belong to the driver
        self._closed.set()
        try:
            for number in self._hosts:
                self._order(number, "close")
            self._join_listeners(CLOSE_S)
        finally:  # also if Ctrl-C ends that wait
            for host in self._hosts.values():
                self._kill(host)
            self._join_listeners(CLOSE_S)
            with suppress(ConnectionError), shutdown_guard().held():
                self._hosts.clear()
                self._hosting, self._receiver = None, AnswerReceiver()  # which may hold memory
            if self._monitor is not None:
                self._monitor.join(CLOSE_S)
            atexit.unregister(self.close)
            ray_cluster.leave_cluster()

    def _join_listeners(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        for host in self._hosts.values():
            while host.listener.is_alive() and time.monotonic() < until:
                while not self._messages.empty():
                    message = self._messages.get_nowait()
                    if isinstance(message, Message):
                        message.taken.set()
                host.listener.join(0.01)

    # ---- placing workers -----------------------------------------------------------------------

    def _adapt(self) -> None:
        """Have hosts that start from now on collect answers for longer if there are many."""
        hosts = len(self._nodes) if self._is_shared else self.num_workers
        self._collect_s = self._collect_s_of(hosts)
        self.group_s = Pool.group_s + 5 * self._collect_s

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
        for node, count in shares:
            self._start_host(node, self._take_waiting(count))
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

    def _start_host(self, node: str, workers: list[tuple[int, int]]) -> None:
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
                ).remote(self._hosting, self._collect_s, os.getcwd(), list(sys.path))
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
        self._hosts[number] = _Host(node, actor, order, listener, room, {}, pending_since=now)
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
            # Otherwise the host or Ray is gone: the listener reports that.

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

    def _kill(self, host: _Host) -> None:
        with suppress(Exception), ray_cluster.up():  # the host or Ray is gone
            self._ray.kill(host.actor)

    # ---- events --------------------------------------------------------------------------------

    def _handle(
        self, message: Message | HostEnded | ClusterState | ClusterLost | None
    ) -> list[Event]:
        match message:
            case Message():
                host = None if message.number is None else self._hosts.get(message.number)
                if host is not None:
                    host.pending_since = None
                events = [self._event(event, message.number) for event in message.events]
                message.events.clear()
                message.taken.set()
                return events
            case HostEnded():
                return self._lose_host(message)
            case ClusterState():
                return self._update_nodes(message)
            case ClusterLost():
                self._gone = message.why
        return []

    def _event(self, sent: Any, host_number: int | None) -> Event:
        """Return an event as the engine is to have it."""
        event: Event = as_received(sent)
        if isinstance(event, TaskFinished):
            assert host_number is not None, "only hosts have answers"
            host = self._hosts.get(host_number)
            is_here = host is not None and host.node == self._node
            return self._receiver.receive(host_number, event, is_here=is_here)
        if not isinstance(event, WorkerDied) or event.incarnation not in self._members:
            return event
        number, host = self._remove(event.incarnation)
        if not host.hanging:
            host.kill_at = None
        if not host.workers:
            del self._hosts[number]
            self._kill(host)
        return self._located(event, host.node)

    def _remove(self, incarnation: int) -> tuple[int, _Host]:
        """Forget a worker that has a host; return the host, with its number."""
        number = self._members.pop(incarnation)
        host = self._hosts[number]
        del host.workers[incarnation]
        host.hanging.discard(incarnation)
        return number, host

    def _lose_host(self, ended: HostEnded) -> list[Event]:
        """Return the deaths of the workers that a host had."""
        self._to_place = True  # its resources are free, unless its node is lost
        self._receiver.host_ended(ended.number)
        host = self._hosts.pop(ended.number, None)
        if host is None:
            return []
        self._kill(host)  # it may be alive, and unable to reach us
        deaths: list[Event] = []
        for incarnation in sorted(host.workers):
            del self._members[incarnation]
            # A host that was killed because this worker hung does not count as lost.
            external = ended.external and incarnation not in host.hanging
            death = WorkerDied(incarnation, ended.failure, external, not ended.external)
            deaths.append(self._located(death, host.node))
        return deaths

    def _located(self, death: WorkerDied, node: str) -> WorkerDied:
        """Add the node to a death; poll a node that lost a host before it is used again."""
        name = next((each.name for each in self._nodes if each.id == node), node[:8])
        if death.external:
            self._nodes = [each for each in self._nodes if each.id != node]
        message = f"{death.failure.message} (on node {name})"
        return death._replace(failure=death.failure._replace(message=message))

    def _update_nodes(self, state: ClusterState) -> list[Event]:
        for error in state.refused.values():
            self._say(f"a node that joined is not used: {error}")
        self._nodes = state.nodes
        self._fresh.clear()
        self._to_place = True
        self._give_up_pending()
        events: list[Event] = []
        now = self._within(capacity(state.nodes, self._need))
        if now > self.num_workers:
            self.num_workers = now
            self._adapt()
            if self._grows:
                events.append(WorkersResized(now, self.group_s))
        return events

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

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        for host in self._hosts.values():
            if host.kill_at is not None and host.kill_at <= now:
                host.kill_at = None
                self._kill(host)
        since = self._waiting_since
        if since is not None and now - since >= SAY_S and now - self._said_at >= SAY_AGAIN_S:
            self._said_at = now
            self._say(why_waiting(self._nodes, self._need, len(self._waiting)))
        idle_s = 0.0 if self._idle_since is None else now - self._idle_since
        if self._hosts and idle_s >= HOSTS_S:
            names = {each.id: each.name for each in self._nodes}
            where = ", ".join(sorted({names.get(h.node, h.node[:8]) for h in self._hosts.values()}))
            self._gone = (
                f"Ray has started no worker for {HOSTS_S:g} s, although there is room: on {where}\n"
                "  raylet.out and dashboard_agent.log there, in Ray's folder of logs, say why; "
                "restart Ray on that node."
            )
        elif not self._hosts and idle_s >= ROOM_S:
            why = why_waiting(self._nodes, self._need, len(self._waiting))
            self._gone = f"no node was large enough for {ROOM_S / 60:g} minutes: {why}"

    def _within(self, count: int) -> int:
        return count if self._most is None else min(count, self._most)


def _actor_of(where: Ray) -> Any:
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
