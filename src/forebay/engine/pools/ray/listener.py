"""The thread that receives the reports of one host and passes them on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.engine.pools.ray import cluster
from forebay.engine.pools.ray.ray_internals import stream_options
from forebay.engine.pools.ray.shutdown_guard import CALL_S, shutdown_guard
from forebay.failures import Failure


@dataclass(slots=True)
class Message:
    """Events that a host reported together, and whether the pool has processed them.

    Attributes:
        number: Which host; None for events that come from none.
        events: The events, in the form of `as_sent`.
        taken: Set when they have been processed.
    """

    number: int | None
    events: list[Any]
    taken: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class HostEnded:
    """A host and its workers ended.

    Attributes:
        number: Which host.
        failure: Why.
        external: Whether no task can be the cause.
    """

    number: int
    failure: Failure
    external: bool


def listen(
    number: int,
    host: Any,
    room: int,
    workers: Sequence[tuple[int, int]],
    ahead: int,
    complete: Callable[[list[Any]], list[Any]],
    report: Callable[[Message | HostEnded], None],
    closed: threading.Event,
) -> None:
    """Start the first workers of a host and pass on what the host reports, until it ends.

    Args:
        number: Which host.
        host: The actor.
        room: How many workers it may have.
        workers: Incarnations and worker IDs of the first ones.
        ahead: Messages that may wait on the host's node before it blocks, while one is processed
            here; -1 for any number, here and there.
        complete: Returns events with what the host has sent apart from their message.
        report: Called with each message, and with the end.
        closed: Set when a lost host need not be reported any more.
    """
    import ray

    stream = reference = message = None
    try:
        with cluster.up():
            stream = host.events.options(**stream_options(ahead)).remote(room, workers)
        while True:
            with cluster.up():
                reference = message = None
                if not ray.wait([stream], timeout=CALL_S, fetch_local=True)[0]:
                    continue
                reference = next(stream, None)
                if reference is None:
                    break
                message = Message(number, ray.get(reference))
            message.events = complete(message.events)
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
            f"Ray killed it because memory ran out: {cluster.first_line(error)}; with "
            "forebay.Ray(num_cpus=2), say, fewer share a node"
        )
        external = False
    except Exception as error:  # noqa: BLE001 - whatever Ray raises when something is lost
        why, external = f"its host was lost: {cluster.first_line(error)}", True
    if not closed.is_set():
        report(HostEnded(number, Failure("crash", "WorkerDiedError", why), external))
    with shutdown_guard().held(however_long=True):
        stream = reference = None
