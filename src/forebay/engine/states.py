"""The life of a task, as data: its states and the only moves between them. PURE.

The diagram in `docs/explanation/flow.md` is drawn from `TRANSITIONS`.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where a task is. A slot is held from RUNNING until RELEASED."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    LEASED = "leased"
    RELEASED = "released"
    FAILED = "failed"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs Python code


class Move(Enum):
    """A transition of a task from one state to the next."""

    SENT = "sent to a worker"
    RETURNED = "given back before it began"
    ORPHANED = "its worker died while running another task"
    SUSPECTED = "its worker died, perhaps because of another task"
    RETRIED = "failed, attempts left"
    FINISHED = "answered"
    FAILED = "failed, no attempts left"
    ABANDONED = "blocked by an earlier failure of its worker"
    DELIVERED = "passed to the consumer"
    RELEASED = "released by the consumer"
    FORGOTTEN = "no longer needed"

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[State, Move], State] = {
    (State.QUEUED, Move.SENT): State.RUNNING,
    (State.RUNNING, Move.RETURNED): State.QUEUED,
    (State.RUNNING, Move.ORPHANED): State.QUEUED,
    (State.RUNNING, Move.SUSPECTED): State.QUEUED,
    (State.RUNNING, Move.RETRIED): State.QUEUED,
    (State.RUNNING, Move.FINISHED): State.READY,
    (State.RUNNING, Move.FAILED): State.FAILED,
    (State.READY, Move.DELIVERED): State.LEASED,
    (State.LEASED, Move.RELEASED): State.RELEASED,
    (State.QUEUED, Move.ABANDONED): State.FAILED,
    (State.QUEUED, Move.FORGOTTEN): State.RELEASED,
    (State.RUNNING, Move.FORGOTTEN): State.RELEASED,
    (State.READY, Move.FORGOTTEN): State.RELEASED,
}

MEANING: dict[State, str] = {
    State.QUEUED: "waits for a worker; holds no slot",
    State.RUNNING: "a worker has it, begun or next in line; holds a slot",
    State.READY: "its result waits for the consumer; holds a slot",
    State.LEASED: "the consumer uses its result; holds a slot",
    State.RELEASED: "finished; its slot is free",
    State.FAILED: "finished without a result; holds no slot",
}


class IllegalMoveError(AssertionError):
    """The state of a task does not allow a move: a bug in forebay."""


def diagram() -> str:
    """Return the table as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.QUEUED.value}"]
    lines += [
        f"    {before.value} --> {after.value}: {move.value}"
        for (before, move), after in TRANSITIONS.items()
    ]
    lines += [f"    {end.value} --> [*]" for end in (State.RELEASED, State.FAILED)]
    return "\n".join(lines) + "\n"
