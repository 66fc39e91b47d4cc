"""Workers on the nodes of a Ray cluster: another pool for the same engine.

    engine ── start, send, kill ──> RayPool ── order() ──> host (an actor), host, …
       ^                               ^                     │
       └────────── events ─────────────┴──── events() <──────┘   one listener thread per host

Where answers are small, the workers that are placed on a node together share a host, and all their
tasks and answers share messages: with a host for each of a thousand workers, Ray's messages would
take all of the driver's time. Batches are large: each worker has a host and a stream of its own.

Ray only starts and connects hosts. It never restarts them or retries their calls, since the flow
owns every retry. If a host is lost, with its node or alone, no input is to blame; the deaths of
workers are reported by their hosts (see `ray_host.py`).
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

from forebay.errors import WorkerDiedError
from forebay.options import Ray
from forebay.pools import ray_cluster
from forebay.pools.base import Pool
from forebay.pools.events import (
    Assignment,
    Event,
    StacksTaken,
    TaskFinished,
    WorkerDied,
    WorkersResized,
)
from forebay.pools.ray_cluster import Node, capacity, why_waiting
from forebay.pools.ray_host import Hosting
from forebay.pools.ray_internals import is_raylet_gone, shutdown_guard
from forebay.pools.ray_nodes import (
    PATIENCE_S,
    ClusterLost,
    ClusterState,
    NodeCheck,
    check_nodes,
    monitor,
)
from forebay.pools.ray_placement import PENDING_S, HostEnded, Message, RayHosts, actor_of
from forebay.pools.worker import as_received

# How long a host may take to kill its worker before the host is killed.
KILL_S = 10.0
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


_AGAIN = "  Make the same call again, on a cluster or on this machine."


def _not_started(error: ConnectionError) -> WorkerDiedError:
    """Return the error for a cluster that is gone before there is a worker."""
    advice = getattr(error, "advice", "")
    return WorkerDiedError(
        f"the Ray cluster is gone: {error}\n  Nothing was started.\n{advice}{_AGAIN}"
    )


class AnswerReceiver:
    """Takes answers out of the object store, in the thread of `wait`; here there are none."""

    def receive(self, host: int, event: TaskFinished, *, is_here: bool) -> TaskFinished:
        """Return the answer for the engine, which must not refer to the object store."""
        return event

    def host_ended(self, host: int) -> None:
        """Record that a host has ended; no more answers come from it."""


@final
class RayPool(RayHosts, Pool):
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
        try:
            ray_cluster.join_cluster(where.address, say)
        except ConnectionError as error:
            raise _not_started(error) from error
        import ray

        most = most if most is not None else where.max_workers
        super().__init__(hosting, where, most, ahead)
        self._say = say
        self._grows = grows
        self._receiver = receiver or AnswerReceiver()
        self._silent_s = 0.0
        self._said_at = 0.0
        self._gone: str | None = None
        self._advice = ""
        self._owner = os.getpid()
        self._monitor: threading.Thread | None = None
        # Ray disconnects when the interpreter exits, and any later call ends the process. Exit
        # handlers run in reverse order, so this one runs before Ray's.
        atexit.register(self.close)
        try:
            self._actor = actor_of(where)
            self._node = ray.get_runtime_context().get_node_id()
            alive = partial(self._messages.put, Message(None, []))
            checks = partial(
                check_nodes, known=set(), where=where, check=check, over=self._closed, alive=alive
            )

            def prepare() -> tuple[tuple[str, str], list[Node]]:
                session, nodes = ray_cluster.session(), ray_cluster.nodes()
                for error in checks(nodes).values():
                    raise error
                return session, nodes

            limit_s = PATIENCE_S + SILENT_S
            session, self._nodes = ray_cluster.call_within(
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
            raise _not_started(error) from error
        except BaseException:
            self.close()
            raise

    def start(self, incarnation: int, worker_id: int) -> None:
        """Have `wait` place the worker on a node; it waits longer if there is no room."""
        self._waiting.append((incarnation, worker_id))
        self._to_place = True

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
                    f"{self._advice}{_AGAIN}"
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
                if self._silent_s >= LISTEN_S and is_raylet_gone():
                    # Ray ends this program before a call of the monitor's would return.
                    gone = ray_cluster.RayletGoneError()
                    self._gone, self._advice = f"the Ray cluster is gone: {gone}", gone.advice
                    continue
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
                self._receiver = AnswerReceiver()  # the other one may hold memory
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

            # Otherwise the host or Ray is gone: the listener reports that.

    def _adapt(self) -> None:
        """Have hosts that start from now on collect answers for longer if there are many."""
        hosts = len(self._nodes) if self._is_shared else self.num_workers
        self._collect_s = self._collect_s_of(hosts)
        self.group_s = Pool.group_s + 5 * self._collect_s

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
                self._gone, self._advice = message.why, message.advice
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
