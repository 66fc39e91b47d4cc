"""An ear: the thread that listens to one host, and hands on what it tells."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forebay.engine.events import Cause, Event, WorkerDied
from forebay.engine.pools.ray import cluster
from forebay.engine.pools.ray.door import STAY_S, door


@dataclass(slots=True)
class Message:
    """What a host told at once, and whether it was taken in."""

    events: list[Event]
    taken: threading.Event = field(default_factory=threading.Event)


def listen(
    worker: int,
    lane: int,
    host: Any,
    ahead: int,
    tell: Callable[[Message], None],
    closed: threading.Event,
) -> None:
    """Start a host's worker and hand on what the host tells, until it has no more to tell.

    Args:
        worker: The worker's number.
        lane: Its lane.
        host: The actor.
        ahead: Messages that may wait on the host's node before it is held up; -1 for any number.
        tell: Takes what is told. The next message is fetched when this one was taken.
        closed: Set when nobody wants to hear of a lost host any more.
    """
    import ray

    told = False
    stream = reference = message = None
    try:
        options = {"_generator_backpressure_num_objects": ahead}
        with cluster.up():
            stream = host.events.options(**options).remote(worker, lane)
        while True:
            with cluster.up():
                if not ray.wait([stream], timeout=STAY_S, fetch_local=True)[0]:
                    continue
                reference = next(stream, None)
                if reference is None:
                    break
                message = Message(ray.get(reference))
            told = told or any(isinstance(event, WorkerDied) for event in message.events)
            tell(message)
            # One message of each worker at a time: what lies in the object store here could keep
            # the batch that all wait for from coming.
            message.taken.wait()
            with cluster.up():
                reference = message = None
        why, blameless = "its host ended", True
    except ray.exceptions.OutOfMemoryError as error:
        # Ray's memory monitor chose it, and it goes by age: several at once, the hungry one or not.
        why = (
            f"Ray killed it for want of memory: {cluster.first_line(error)}; with "
            "forebay.Ray(num_cpus=2), say, fewer share a node"
        )
        blameless = False
    except Exception as error:  # noqa: BLE001 - whatever Ray raises when something is lost
        why, blameless = f"its host was lost: {cluster.first_line(error)}", True
    finally:
        with door().held():
            stream = reference = None
    if not told and not closed.is_set():
        cause = Cause("crash", "WorkerDiedError", why)
        tell(Message([WorkerDied(worker, cause, blameless, doubtful=not blameless)]))
