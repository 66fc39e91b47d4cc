"""A host: the actor that runs and supervises one worker on a node.

    driver ── order() ──> inbox ──┐
       ^                          v
       └── events() <── host ── ProcessPool ── zygote ── worker

The worker is a separate process in the same pool that is used on a single machine, so deaths and
hangs are reported in the same detail. Ray only knows the host, which runs no user code, so if a
host dies, no input is to blame. Events are sent as they happen, several at a time if they are
frequent; none is lost, since the host outlives its worker.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from forebay.engine.events import Event, TaskFinished, WorkerDied
from forebay.engine.job import Assignment
from forebay.engine.pools.base import Pool
from forebay.engine.pools.processes import ProcessPool
from forebay.engine.pools.ray.shipping import find_in, leave_out

# How long to collect answers before they are sent.
COLLECT_S = 0.003
# A message is sent once it has this many bytes of results.
MESSAGE_BYTES = 1 << 24


class Hosting(Protocol):
    """What a host needs to know about the work; sent by pickle, user code as bytes."""

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

    def order(self, what: str, incarnation: int, payload: Any = None) -> None:
        """Process an order for the worker: "send" (with assignments), "kill" or "close"."""
        if what == "send":
            self._inbox.append(lambda pool: pool.send(incarnation, self._incoming(payload)))
        elif what == "kill":
            self._inbox.append(lambda pool: pool.kill(incarnation))
        else:
            self._over = True
        if self._pool is not None:
            self._pool.wake()

    def _messages(self, events: Sequence[Event]) -> Iterator[list[Event]]:
        """Split events into messages that fit into any object store."""
        message, nbytes = [], 0
        for number, event in enumerate(events, 1):
            message.append(self._hosting.outgoing(event))
            nbytes += event.nbytes if isinstance(event, TaskFinished) else 0
            if nbytes >= MESSAGE_BYTES or number == len(events):
                yield message
                self._hosting.sent()
                message, nbytes = [], 0

    def _incoming(self, payload: Sequence[Any]) -> list[Assignment]:
        return [self._hosting.incoming(Assignment(*each)) for each in payload]

    def events(self, incarnation: int, worker_id: int) -> Iterator[list[Event]]:
        """Start the worker; yield its events until it dies or is closed."""
        pool = self._pool = self._hosting.pool()
        try:
            pool.start(incarnation, worker_id)
            is_alive = True
            while is_alive and not self._over:
                while self._inbox:
                    self._inbox.popleft()(pool)
                events = pool.wait(None)
                if len(events) > 1:  # they are frequent: collect more
                    time.sleep(COLLECT_S)
                    events += pool.wait(0.0)
                is_alive = not any(isinstance(event, WorkerDied) for event in events)
                yield from self._messages(events)
        finally:
            pool.close()
