"""When to take the state of a user's object, if it takes long; how a state is kept.

    object ── state_dict() ──> Snapshots.take ──> a state, or None: count what is read since

A dataset, a stream or a sampler may have a state of many megabytes, which only a checkpoint needs.
A worker takes such a state now and then; what it read since is read again on a resume. A state
that takes microseconds is taken after every batch, so that nothing is read again.
"""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AnySet
from itertools import islice
from typing import Any, NamedTuple

# What a state may take after every batch, in seconds; the share of the time that others take.
CHEAP_S = 0.0001
SHARE = 0.05
# A first call that takes longer than this is believed; a shorter one may have been interrupted.
BELIEVED_S = 0.001

# Estimates of what it takes to copy a state, in seconds; so many of its values are looked at.
BYTE_S, VALUE_S = 2e-9, 50e-9
LOOKED_AT = 256


class Schedule:
    """Decides after which batches a state is taken: as often as `SHARE` allows.

    Attributes:
        cost_s: How long a state takes; None before the first one.
    """

    def __init__(self) -> None:
        self.cost_s: float | None = None
        self._since = 0.0

    @property
    def is_cheap(self) -> bool:
        """Return whether a state may be taken after every batch, as far as is known."""
        return self.cost_s is None or self.cost_s <= CHEAP_S

    def is_due(self, now: float) -> bool:
        """Return whether to take a state after this batch."""
        return self.is_cheap or (now - self._since) * SHARE >= (self.cost_s or 0.0)

    def put_off(self, now: float, call_s: float, copy_s: float) -> bool:
        """Return whether to leave the first state until its time is a small share.

        Args:
            call_s: How long the call took that returned it.
            copy_s: An estimate of what it takes to copy it.
        """
        if self.cost_s is not None:
            return False
        self.cost_s, self._since = copy_s + (call_s if call_s > BELIEVED_S else 0.0), now
        return not self.is_cheap

    def took(self, now: float, seconds: float) -> None:
        """Note that a state was taken."""
        # One that was interrupted does not make a cheap state a costly one.
        if self.cost_s is not None and self.is_cheap:
            seconds = min(seconds, max(2 * self.cost_s, CHEAP_S / 4))
        self.cost_s, self._since = seconds, now


class Snapshots:
    """Takes the states of one object.

    Args:
        keep: Makes what is kept of a state: the object may change what it returned.
        clock: Returns seconds.
    """

    def __init__(self, keep: Callable[[Any], Any], clock: Callable[[], float]) -> None:
        self.schedule = Schedule()
        self._keep, self._clock = keep, clock

    def take(self, state: Callable[[], Any], *, must: bool = False) -> Any:
        """Return what is kept of a state; None if it is not taken after this batch.

        Args:
            must: Whether to take it in any case.
        """
        schedule, clock = self.schedule, self._clock
        began = clock()
        if not schedule.is_due(began) and not must:
            return None
        found = state()
        if schedule.put_off(began, clock() - began, time_to_copy(found)) and not must:
            return None
        kept = self._keep(found)
        now = clock()
        schedule.took(now, now - began)
        return kept


def time_to_copy(state: Any) -> float:
    """Return about how many seconds it takes to copy a state, without looking at all of it."""
    nbytes = values = 0
    todo, left = deque([state]), LOOKED_AT
    while todo and left:
        value, left = todo.popleft(), left - 1
        if (size := _nbytes(value)) is not None:
            nbytes += size
        elif isinstance(value, Mapping):
            values += len(value)
            todo.extend(islice(value.values(), left))
        elif isinstance(value, list | tuple | AnySet | deque):
            values += len(value)
            todo.extend(islice(value, left))
        elif type(own := getattr(value, "__dict__", None)) is dict:
            todo.append(own)
    return nbytes * BYTE_S + values * VALUE_S


def _nbytes(value: Any) -> int | None:
    """Return the bytes of an array, a tensor or a string; None for anything else."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    try:
        size = value.nbytes
    except Exception:  # noqa: BLE001 - the user's class may raise anything
        return None
    return size if isinstance(size, int) else None


# ---- kept states ---------------------------------------------------------------------------------


class UnknownState(NamedTuple):
    """In place of a state: why it is not known, in words."""

    why: str


class Pickled(NamedTuple):
    """A state from a worker process, unpickled only if it is asked for."""

    body: bytes


def as_bytes(state: Any) -> Pickled | None:
    """Return a state as bytes, with which the trainer has little to do; None for no state."""
    return None if state is None else Pickled(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))


def unpickled(state: Any) -> Any:
    """Return a copy of a kept state that is nobody else's."""
    if isinstance(state, Pickled):
        return pickle.loads(state.body)  # noqa: S301 - from our own worker
    return copy.deepcopy(state)
