"""A host: the actor that runs and supervises workers on a node of a cluster.

    driver ── order() ──> inbox ──┐
       ^                          v
       └── events() <── host ── ProcessPool ── zygote ── workers

The workers are processes in the same pool as on a single machine, so deaths and hangs are reported
in the same detail. Ray only knows the host, which runs no user code, so if a host dies, no input is
to blame.

A message costs Ray about a millisecond of processor time, whatever its size. So while the workers
have more to do, their answers are collected; the driver does not need them sooner. No event is
lost, since the host outlives its workers.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from forebay.pools.base import Pool
from forebay.pools.events import (
    Assignment,
    Event,
    TaskFailed,
    TaskFinished,
    TasksReturned,
    WorkerDied,
)
from forebay.pools.processes import ProcessPool
from forebay.pools.ray_shipping import find_in, leave_out
from forebay.pools.worker import as_sent

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
