"""A model of the nodes of a cluster: workers, their hosts, messages, losses. PURE: no clock.

    driver ── start, send ──> SimulatedNodes ── due(now) ──> messages, as lists of events

Each worker runs its tasks one after another. The host of a node collects answers as
`pools/ray_nodes.py` does: for `collect_s` after the first one if its workers hold more tasks,
and not at all otherwise. A message and an order take `latency_s`. A node that is lost takes with it
what its host has not sent; the driver is told after `notice_s`. Not modelled: the network's
bandwidth, shared storage, a host's own processor time, and inputs of more than 0.2 s, behind which
a worker returns the tasks that it holds.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.failures import Failure
from forebay.pools.events import Event, TaskFinished, WorkerDied, WorkerStarted
from forebay.pools.ray_host import Hosting

LOST = Failure("crash", "WorkerDiedError", "its node was lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is simulated.

    Attributes:
        nodes: Number of nodes at the beginning.
        workers: Workers of each node.
        input_s: Mean duration of an input.
        spread: Durations are uniform between `1 - spread` and `1 + spread` times the mean.
        latency_s: Duration of a message, and of an order.
        start_s: How long a worker takes to start.
        notice_s: How long until the loss of a node is noticed.
        losses: When a node is lost: seconds since the beginning.
        joins: When a node joins.
        seed: Of the durations, and of which nodes are lost.
    """

    nodes: int
    workers: int
    input_s: float
    spread: float = 0.5
    latency_s: float = 0.002
    start_s: float = 2.0
    notice_s: float = 5.0
    losses: tuple[float, ...] = ()
    joins: tuple[float, ...] = ()
    seed: int = 0

    @property
    def collect_s(self) -> float:
        """How long a host collects answers."""
        return Hosting(b"").collect_s(self.nodes)


@dataclass(slots=True)
class _Worker:
    incarnation: int
    free_at: float
    pending: deque[tuple[float, TaskFinished]] = field(default_factory=deque)  # by their ends


@dataclass(slots=True)
class _Host:
    """The workers of a node, and the number of the host's next look, to void earlier ones."""

    node: int
    workers: list[_Worker] = field(default_factory=list)
    look: int = 0
    collecting: bool = False


class SimulatedNodes:
    """The nodes; all times are seconds since the beginning, and never decrease.

    Attributes:
        messages: Messages that reached the driver.
        orders: Orders that the driver sent.
        finished_in_vain: Tasks that lost nodes had finished, but not reported.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.messages = self.orders = self.finished_in_vain = 0
        self._cluster = cluster
        self._random = random.Random(cluster.seed)
        self._calendar: list[tuple[float, int, str, Any]] = []
        self._entries = 0
        self._room = dict.fromkeys(range(cluster.nodes), cluster.workers)
        self._waiting: deque[int] = deque()
        self._hosts: dict[int, _Host] = {}  # by node
        self._host_of: dict[int, _Host] = {}  # by incarnation
        self._worker_of: dict[int, _Worker] = {}
        for at in cluster.losses:
            self._enter(at, "lose", None)
        for number, at in enumerate(cluster.joins):
            self._enter(at, "join", cluster.nodes + number)

    def start(self, now: float, incarnation: int) -> None:
        """Start a worker on the emptiest node; it waits if there is no room."""
        self._waiting.append(incarnation)
        self._place(now)

    def node_of(self, incarnation: int) -> int | None:
        """Return the node that orders for a worker go to; None if it has none."""
        host = self._host_of.get(incarnation)
        return None if host is None else host.node

    def send(self, now: float, tasks: Iterable[tuple[int, Sequence[tuple[int, int]]]]) -> None:
        """Send one order with tasks, as `(task, attempt)`, for workers of one host."""
        self.orders += 1
        self._enter(now + self._cluster.latency_s, "order", list(tasks))

    def next_at(self) -> float | None:
        """Return when something happens next; None if nothing will."""
        return self._calendar[0][0] if self._calendar else None

    def due(self, now: float) -> list[list[Event]]:
        """Return the messages that have reached the driver."""
        messages: list[list[Event]] = []
        while self._calendar and self._calendar[0][0] <= now:
            at, _, what, about = heapq.heappop(self._calendar)
            match what:
                case "message":
                    messages.append(about)
                case "order":
                    self._receive(at, about)
                case "look":
                    self._look(at, *about)
                case "lose":
                    self._lose(at)
                case "join":
                    self._room[about] = self._cluster.workers
                    self._place(at)
        self.messages += len(messages)
        return messages

    def _enter(self, at: float, what: str, about: Any) -> None:
        self._entries += 1
        heapq.heappush(self._calendar, (at, self._entries, what, about))

    def _place(self, now: float) -> None:
        while self._waiting and any(self._room.values()):
            node = max(self._room, key=self._room.__getitem__)
            self._room[node] -= 1
            incarnation = self._waiting.popleft()
            host = self._hosts.setdefault(node, _Host(node))
            worker = _Worker(incarnation, now + self._cluster.start_s)
            host.workers.append(worker)
            self._host_of[incarnation], self._worker_of[incarnation] = host, worker
            started_at = worker.free_at + self._cluster.latency_s
            self._enter(started_at, "message", [WorkerStarted(incarnation)])

    def _receive(self, now: float, order: list[tuple[int, Sequence[tuple[int, int]]]]) -> None:
        """Have workers run the tasks of an order behind those that they hold."""
        low, high = 1 - self._cluster.spread, 1 + self._cluster.spread
        for incarnation, tasks in order:
            worker = self._worker_of.get(incarnation)
            if worker is None:  # lost meanwhile, and so are the tasks
                continue
            for task, attempt in tasks:
                seconds = self._cluster.input_s * self._random.uniform(low, high)
                worker.free_at = max(worker.free_at, now) + seconds
                metadata = f'[{{"n":{task}}}]'
                result = ((), metadata)
                answer = TaskFinished(incarnation, task, attempt, result, len(metadata), seconds)
                worker.pending.append((worker.free_at, answer))
            host = self._host_of[incarnation]
            if not host.collecting:
                self._plan(host)

    def _plan(self, host: _Host) -> None:
        """Plan when a host sees the next answer."""
        firsts = [worker.pending[0][0] for worker in host.workers if worker.pending]
        host.collecting = False
        host.look += 1
        if firsts:
            self._enter(min(firsts), "look", (host, host.look))

    def _look(self, now: float, host: _Host, look: int) -> None:
        """Collect answers if there are more to come, or send those that have come."""
        if look != host.look:
            return
        holds_more = any(each.pending and each.pending[-1][0] > now for each in host.workers)
        if holds_more and not host.collecting:
            host.collecting = True
            self._enter(now + self._cluster.collect_s, "look", (host, look))
            return
        events: list[Event] = []
        for worker in host.workers:
            while worker.pending and worker.pending[0][0] <= now:
                events.append(worker.pending.popleft()[1])
        self._enter(now + self._cluster.latency_s, "message", events)
        self._plan(host)

    def _lose(self, now: float) -> None:
        """Lose a node that has workers, chosen at random."""
        host = self._hosts.pop(self._random.choice(sorted(self._hosts)))
        del self._room[host.node]
        host.look += 1  # void
        deaths: list[Event] = []
        for worker in host.workers:
            self.finished_in_vain += sum(ended <= now for ended, _ in worker.pending)
            del self._worker_of[worker.incarnation]
            deaths.append(WorkerDied(worker.incarnation, LOST, external=True))
        self._enter(now + self._cluster.notice_s, "message", deaths)
