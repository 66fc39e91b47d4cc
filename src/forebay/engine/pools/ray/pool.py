"""Workers on the nodes of a Ray cluster: another pool for the same engine.

    engine ── start, send, kill ──> RayPool ── order() ──> host (an actor), host, …
       ^                               ^                     │
       └────────── events ─────────────┴──── events() <──────┘   one listener thread per worker

Long because one class owns the record of which workers have, await or lost a node.

Ray only starts and connects hosts. It never restarts them or retries their calls, since the flow
owns every retry. If a host is lost, with its node or alone, no input is to blame; the deaths of
workers are reported by their hosts (see `host.py`).
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
from dataclasses import dataclass, replace
from typing import Any, final

from forebay.engine.events import Event, TaskFailed, TaskFinished, WorkerDied, WorkersResized
from forebay.engine.job import Assignment
from forebay.engine.pools.base import Pool
from forebay.engine.pools.ray import cluster
from forebay.engine.pools.ray.host import Host, Hosting
from forebay.engine.pools.ray.listener import Message, listen
from forebay.engine.pools.ray.monitor import (
    ClusterLost,
    ClusterMonitor,
    ClusterState,
    environment_of,
)
from forebay.engine.pools.ray.node_checks import NodeCheck
from forebay.engine.pools.ray.nodes import capacity, place, why_waiting
from forebay.engine.pools.ray.shutdown_guard import shutdown_guard
from forebay.engine.pools.worker import failure_of
from forebay.errors import WorkerDiedError
from forebay.failures import Failure
from forebay.options import Ray, worker_resources

# How long a host may take to kill its worker before the host is killed.
KILL_S = 10.0
# How long `close` gives workers and hosts to clean up.
CLOSE_S = 2.0
# How long workers may wait for room before a message says so, and between such messages.
SAY_S, SAY_AGAIN_S = 5.0, 60.0


@dataclass(slots=True)
class _Member:
    """A worker that has a node: the node, its host, the host's `order`, and its listener."""

    node: str
    host: Any
    order: Any
    listener: threading.Thread
    kill_at: float | None = None
    hangs: bool = False
    stopping: bool = False


@final
class RayPool(Pool):
    """Runs each worker on some node of a cluster.

    Args:
        hosting: What each host does, with the job in it; sent once, to be shared by all.
        where: Which cluster, and the resources of one worker.
        check: What is checked on each node before it gets work.
        most: Maximum number of workers; None for as many as there is room for, also on nodes that
            join later.
        grows: Whether `wait` returns `WorkersResized` when there is room for more workers within
            `most`. Otherwise their number is the caller's, and those without room wait for it.
        ahead: Messages of a worker that may wait to be received before it blocks.
        arrive: Called, in the thread of `wait`, with each answer; returns the answer for the
            engine, which must not refer to the object store. None if answers never do.
        say: Called, in the thread of `wait`, with lines for the user.

    Attributes:
        num_workers: How many workers there is room for now, within `most`; at least 1.

    Raises:
        OptionError: There is no such cluster, or a node has other versions or lacks code.
        OutputError: A node does not share the output folder.
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
        arrive: Callable[[TaskFinished], TaskFinished] | None = None,
        say: Callable[[str], None],
    ) -> None:
        """Join the cluster, and check its nodes."""
        self._began = cluster.join(where.address, say)
        import ray

        self._ray = ray
        self._say = say
        self._where = where
        self._need = worker_resources(where)
        self._most = most if most is not None else where.max_workers
        self._grows = grows
        self._ahead = ahead
        self._arrive = arrive
        self._messages: queue.SimpleQueue[Message | ClusterState | ClusterLost | None] = (
            queue.SimpleQueue()
        )
        self._members: dict[int, _Member] = {}
        self._waiting: deque[tuple[int, int]] = deque()  # incarnations without a node, worker IDs
        self._waiting_since: float | None = None
        self._said_at = 0.0
        self._fresh: Counter[str] = Counter()  # placed since the nodes were polled
        self._gone: str | None = None
        self._closed = threading.Event()
        self._owner = os.getpid()
        cluster.hold(True)
        try:
            self._monitor = ClusterMonitor(where, check, self._messages.put)
        except BaseException:
            self._leave()
            raise
        self._nodes = self._monitor.nodes
        self.num_workers = max(self._within(capacity(self._nodes, self._need)), 1)
        remote: Any = ray.remote
        self._host = remote(concurrency_groups={"orders": 1})(Host)
        self._hosting: Any = ray.put(hosting)
        # Ray disconnects when the interpreter exits, and any later call ends the process. Exit
        # handlers run in reverse order, so this one runs before Ray's.
        atexit.register(self.close)

    def start(self, incarnation: int, worker_id: int) -> None:
        """Place the worker on a node; it waits if there is no room."""
        self._waiting.append((incarnation, worker_id))
        self._place_waiting()

    def send(self, incarnation: int, assignments: Sequence[Assignment]) -> None:
        """Order the worker's host to send the tasks to it."""
        self._order(incarnation, "send", [tuple(each) for each in assignments])

    def kill(self, incarnation: int) -> None:
        """Order the host to kill its worker; kill the host later if it does not."""
        member = self._members.get(incarnation)
        if member is not None:
            member.kill_at, member.hangs = time.monotonic() + KILL_S, True
        self._order(incarnation, "kill")

    def stop(self, incarnation: int) -> None:
        """Order the worker's host to end; a worker that waits for room is no longer wanted."""
        self._waiting = deque(each for each in self._waiting if each[0] != incarnation)
        member = self._members.get(incarnation)
        if member is not None:
            member.kill_at, member.stopping = time.monotonic() + KILL_S, True
            self._order(incarnation, "close")
        self._place_waiting()

    def wait(self, timeout: float | None) -> list[Event]:
        """Return the events of hosts, and place workers that wait for room.

        Raises:
            WorkerDiedError: The cluster is gone.
        """
        until = None if timeout is None else time.monotonic() + timeout
        events: list[Event] = []
        while not events:
            if self._gone is not None:
                raise WorkerDiedError(
                    f"{self._gone}\n  The run was stopped; completed work is kept, and no input is "
                    "blamed.\n  Make the same call again, on a cluster or on this machine."
                )
            now = time.monotonic()
            if until is not None and now > until:
                break
            due = [member.kill_at for member in self._members.values() if member.kill_at]
            due += [until] if until is not None else []
            due += [now + SAY_S] if self._waiting else []
            try:
                message = self._messages.get(timeout=max(min(due) - now, 0.0) if due else None)
            except queue.Empty:
                if until is not None and time.monotonic() >= until:
                    until = now  # check once more what is due, then return
                self._meet_deadlines()
                continue
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
        for incarnation in self._members:
            self._order(incarnation, "close")
        self._join_listeners(CLOSE_S)
        for member in self._members.values():
            self._kill(member)
        self._join_listeners(CLOSE_S)
        with shutdown_guard().held():
            self._members.clear()
            self._hosting = None
        self._monitor.close(CLOSE_S)
        atexit.unregister(self.close)
        self._leave()

    def _join_listeners(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        for member in self._members.values():
            while member.listener.is_alive() and time.monotonic() < until:
                while not self._messages.empty():
                    message = self._messages.get_nowait()
                    if isinstance(message, Message):
                        message.taken.set()
                member.listener.join(0.01)

    def _leave(self) -> None:
        cluster.hold(False)
        cluster.leave(self._began)

    # ---- placing workers -----------------------------------------------------------------------

    def _place_waiting(self) -> None:
        """Place waiting workers, as far as there is room."""
        if not self._ray.is_initialized():
            return  # the monitor reports that
        placed = Counter(member.node for member in self._members.values())
        wanted = len(self._waiting)
        for node in place(wanted, self._nodes, self._need, placed, self._fresh) if wanted else ():
            self._fresh[node] += 1
            self._start_host(*self._waiting.popleft(), node)
        if not self._waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = time.monotonic()

    def _start_host(self, incarnation: int, worker_id: int, node: str) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        try:
            with cluster.up():
                host = self._host.options(
                    num_cpus=self._where.num_cpus,
                    num_gpus=self._where.num_gpus,
                    resources=dict(self._where.resources or {}),
                    max_restarts=0,
                    max_task_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                    **environment_of(self._where),
                ).remote(self._hosting, os.getcwd(), list(sys.path))
                order = host.order.options(concurrency_group="orders")
        except Exception as error:  # noqa: BLE001 - whatever Ray raises when it is gone
            message = f"no host could be started for it: {cluster.first_line(error)}"
            failure = Failure("crash", "WorkerDiedError", message)
            self._messages.put(Message([WorkerDied(incarnation, failure, external=True)]))
            return
        listener = threading.Thread(
            target=listen,
            args=(incarnation, worker_id, host, self._ahead, self._messages.put, self._closed),
            name=f"forebay-listener-{incarnation}",
            daemon=True,
        )
        self._members[incarnation] = _Member(node, host, order, listener)
        listener.start()

    def _order(self, incarnation: int, what: str, payload: Any = None) -> None:
        member = self._members.get(incarnation)
        if member is None:
            return
        try:
            with cluster.up():
                member.order.remote(what, incarnation, payload)
        except Exception:  # noqa: BLE001 - whatever Ray raises
            if what == "send":
                self._send_portable(incarnation, payload)
            # Otherwise the host or Ray is gone: the listener reports that.

    def _send_portable(self, incarnation: int, payload: Sequence[tuple[int, int, Any]]) -> None:
        """Fail the tasks of a message that cannot be pickled, and send the others."""
        import cloudpickle

        portable, failed = [], []
        for task, attempt, what in payload:
            try:
                cloudpickle.dumps(what)
            except Exception as error:  # noqa: BLE001 - whatever the user's classes raise
                failed.append(
                    TaskFailed(incarnation, task, attempt, failure_of(error), 0.0, final=True)
                )
            else:
                portable.append((task, attempt, what))
        if failed:
            self._messages.put(Message(list(failed)))
            if portable:
                self._order(incarnation, "send", portable)

    def _kill(self, member: _Member) -> None:
        with suppress(Exception), cluster.up():  # the host or Ray is gone
            self._ray.kill(member.host)

    # ---- events --------------------------------------------------------------------------------

    def _handle(self, message: Message | ClusterState | ClusterLost | None) -> list[Event]:
        match message:
            case Message():
                events = [each for event in message.events if (each := self._event(event))]
                message.events.clear()
                message.taken.set()
                return events
            case ClusterState():
                return self._update_nodes(message)
            case ClusterLost():
                self._gone = message.why
        return []

    def _event(self, event: Any) -> Event | None:
        """Return an event as the engine is to have it; None for the end of a stopped worker."""
        if type(event) is tuple:
            answer = TaskFinished(*event)
            return answer if self._arrive is None else self._arrive(answer)
        if not isinstance(event, WorkerDied):
            other: Event = event
            return other
        member = self._members.pop(event.incarnation, None)
        if member is None:
            return event
        self._kill(member)
        return None if member.stopping else self._located(event, member)

    def _located(self, death: WorkerDied, member: _Member) -> WorkerDied:
        """Add the node to a death; poll a node that lost a host before it is used again."""
        node = member.node
        name = next((each.name for each in self._nodes if each.id == node), node[:8])
        if death.external:
            self._nodes = [each for each in self._nodes if each.id != node]
        message = f"{death.failure.message} (on node {name})"
        where = replace(death.failure, message=message)
        # A host that was killed because its worker hung does not count as lost.
        external = death.external and not member.hangs
        return WorkerDied(death.incarnation, where, external, death.maybe_external)

    def _update_nodes(self, state: ClusterState) -> list[Event]:
        for error in state.refused.values():
            self._say(f"a node that joined is not used: {error}")
        self._nodes = state.nodes
        self._fresh.clear()
        events: list[Event] = []
        now = self._within(capacity(state.nodes, self._need))
        if now > self.num_workers:
            self.num_workers = now
            if self._grows:
                events.append(WorkersResized(now))
        self._place_waiting()
        return events

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        for member in self._members.values():
            if member.kill_at is not None and member.kill_at <= now:
                member.kill_at = None
                self._kill(member)
        since = self._waiting_since
        if since is not None and now - since >= SAY_S and now - self._said_at >= SAY_AGAIN_S:
            self._said_at = now
            self._say(why_waiting(self._nodes, self._need, len(self._waiting)))

    def _within(self, count: int) -> int:
        return count if self._most is None else min(count, self._most)
