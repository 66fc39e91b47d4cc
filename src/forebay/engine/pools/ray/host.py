"""A host: the actor that runs and supervises one worker on a node.

    driver ── order() ──> inbox ──┐
       ^                          v
       └── events() <── host ── ProcessPool ── zygote ── worker

The worker is a separate process in the same pool that is used on a single machine, so deaths and
hangs are reported in the same detail. Ray only knows the host, which runs no user code, so if a
host dies, no input is to blame.

A message costs Ray about a millisecond of processor time, whatever its size. So while the worker
has more to do, its answers are collected; the driver does not need them sooner. No event is lost,
since the host outlives its worker.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from forebay.engine.events import Event, TaskFailed, TaskFinished, TasksReturned, WorkerDied
from forebay.engine.job import Assignment
from forebay.engine.pools.base import Pool
from forebay.engine.pools.processes import ProcessPool
from forebay.engine.pools.ray.shipping import find_in, leave_out

# A message is sent once it has this many bytes of results.
MESSAGE_BYTES = 1 << 24


class Hosting(Protocol):
    """What a host needs to know about the work; sent by pickle, user code as bytes.

    Attributes:
        collect_s: How long to collect answers while the worker holds more tasks. As the driver
            refills a worker when half of `Limits.group_s` is left, it should be well below that.
    """

    collect_s: float

    def pool(self) -> Pool:
        """Return the pool for the one worker."""
        ...

    def incoming(self, assignment: Assignment) -> Assignment:
        """Return an assignment in the form for the worker."""
        ...

    def outgoing(self, event: Event) -> Event:
        """Return an event in the form in which it is sent."""
        ...

    def sent(self) -> None:
        """Record that all outgoing events were sent."""


class PlainHosting:
    """Hosts a job whose payloads and results are sent as they are.

    Args:
        job: The job, pickled (`shipped`).
    """

    collect_s = 0.03

    def __init__(self, job: bytes) -> None:
        self._job = job

    def pool(self) -> Pool:
        """Return a pool of processes."""
        return ProcessPool(self._job, 1)

    def incoming(self, assignment: Assignment) -> Assignment:
        """Change nothing."""
        return assignment

    def outgoing(self, event: Event) -> Event:
        """Change nothing."""
        return event

    def sent(self) -> None:
        """Do nothing."""


class Host:
    """The actor. `order` is called from a separate concurrency group.

    Args:
        hosting: See `Hosting`.
        folder: The driver's working folder, used if it exists.
        path: The driver's `sys.path`, for modules of its machine.
    """

    def __init__(self, hosting: Hosting, folder: str, path: Sequence[str]) -> None:
        """Start nothing yet."""
        with suppress(OSError):
            os.chdir(folder)
        find_in(path)
        leave_out(folder, path)
        self._hosting = hosting
        self._inbox: deque[Callable[[Pool], None]] = deque()
        self._pool: Pool | None = None
        self._over = False
        self._ordered = threading.Event()
        self._held = 0  # tasks that were sent to the worker and not answered or returned yet

    def order(self, what: str, incarnation: int, payload: Any = None) -> None:
        """Process an order for the worker: "send" (with assignments), "kill" or "close"."""
        if what == "send":
            self._inbox.append(lambda pool: pool.send(incarnation, self._incoming(payload)))
        elif what == "kill":
            self._inbox.append(lambda pool: pool.kill(incarnation))
        else:
            self._over = True
        self._ordered.set()
        if self._pool is not None:
            self._pool.wake()

    def _messages(self, events: Sequence[Event]) -> Iterator[list[Any]]:
        """Split events into messages that fit into any object store.

        An answer becomes a plain tuple: Ray's pickler calls Python code for each named one.
        """
        message: list[Any] = []
        nbytes = 0
        for number, event in enumerate(events, 1):
            sent = self._hosting.outgoing(event)
            message.append(tuple(sent) if type(sent) is TaskFinished else sent)
            nbytes += event.nbytes if isinstance(event, TaskFinished) else 0
            if nbytes >= MESSAGE_BYTES or number == len(events):
                yield message
                self._hosting.sent()
                message, nbytes = [], 0

    def _incoming(self, payload: Sequence[Any]) -> list[Assignment]:
        self._held += len(payload)
        return [self._hosting.incoming(Assignment(*each)) for each in payload]

    def events(self, incarnation: int, worker_id: int) -> Iterator[list[Any]]:
        """Start the worker; yield its events until it dies or is closed."""
        pool = self._pool = self._hosting.pool()
        try:
            pool.start(incarnation, worker_id)
            is_alive = True
            while is_alive and not self._over:
                self._process_orders(pool)
                events = self._look(pool, None)
                until = time.monotonic() + self._hosting.collect_s
                while events and self._held and time.monotonic() < until:
                    # An order is for the worker, and so does not wait.
                    self._ordered.wait(until - time.monotonic())
                    self._process_orders(pool)
                events += self._look(pool, 0.0)
                is_alive = not any(isinstance(event, WorkerDied) for event in events)
                yield from self._messages(events)
        finally:
            pool.close()

    def _process_orders(self, pool: Pool) -> None:
        self._ordered.clear()
        while self._inbox:
            self._inbox.popleft()(pool)

    def _look(self, pool: Pool, timeout: float | None) -> list[Event]:
        """Return what happened, and count the tasks that the worker no longer holds."""
        events = pool.wait(timeout)
        for event in events:
            if isinstance(event, TaskFinished | TaskFailed):
                self._held -= 1
            elif isinstance(event, TasksReturned):
                self._held -= len(event.tasks)
        return events
