"""Decide which batch is copied into which slot of a device, and when memory is free. PURE.

    feed ────── arrived, advance, drop ──┐
    device ──── refuse ──────────────────┼─> TransferFlow ─> [Command, …]
    consumer ── want, take, release ─────┘

A copy reads a batch in host memory and writes it to a slot of device memory. Copies run one after
the other, in the order of their commands, on a stream of their own. The consumer uses another
stream, which waits for the copy of a batch before it uses the batch.

Guarantees, checked by a random state machine in the tests:
- a slot holds at most one batch that was not dropped or released;
- copies are started in the order in which batches arrive, except for one that is wanted earlier;
- after `want` the copy was started, so nobody waits until another batch is released;
- there are at most `ahead + 2` slots, or `ahead + 1` and those of the batches that are in use.

A batch that the consumer keeps therefore stays unchanged, and costs one more slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

# Slots are multiples of this size, so that small differences between batches need no new slot.
GRAIN = 1 << 12


class Discard(NamedTuple):
    """Give the memory of a slot back."""

    slot: int


class Allocate(NamedTuple):
    """Allocate device memory for a new slot."""

    slot: int
    nbytes: int


class StartCopy(NamedTuple):
    """Copy a batch into a slot, once the consumer's stream does not use the slot any more."""

    batch: int
    slot: int


Command = Discard | Allocate | StartCopy


@dataclass(slots=True)
class DeviceSlot:
    """A slot of device memory.

    Attributes:
        capacity: Its size in bytes.
    """

    capacity: int
    nbytes: int = 0


class TransferFlow:
    """Decides about the copies to one device; returns what to do, in this order."""

    def __init__(self, ahead: int = 1, *, reuses: bool = True) -> None:
        self.slots: dict[int, DeviceSlot] = {}
        self.largest = 0
        self._ahead, self._reuses = ahead, reuses
        self._waiting: dict[int, int] = {}  # bytes of the batches whose copy was not started
        self._started: dict[int, int] = {}  # slots of those whose copy was, and that are not taken
        self._free: deque[int] = deque()  # the slot that was used longest ago first
        self._next_slot = 0
        self._is_full = False  # the device had no memory for another slot

    def arrived(self, batch: int, nbytes: int) -> None:
        """Record a batch in host memory; they arrive in the order in which they are handed out."""
        self._waiting[batch] = nbytes
        self.largest = max(self.largest, nbytes)

    def advance(self) -> list[Command]:
        """Start one more copy ahead; return no commands if there is none to start."""
        if self._waiting and not self._is_full and len(self._started) < self._ahead:
            return self._start(next(iter(self._waiting)))
        return []

    def want(self, batch: int) -> list[Command]:
        """Start the copy of a batch that has arrived: the consumer waits for it."""
        return self._start(batch) if batch in self._waiting else []

    def take(self, batch: int) -> None:
        """Record that the consumer has a batch whose copy was started."""
        slot = self._started.pop(batch)
        if not self._reuses:
            del self.slots[slot]

    def drop(self, batch: int) -> list[Command]:
        """Forget a batch that has arrived and will not be taken."""
        if self._waiting.pop(batch, None) is not None:
            return []
        # If it is still being copied, a later copy to this slot runs after that.
        return self.release(self._started.pop(batch))

    def refuse(self, batch: int) -> None:
        """Record that the device has no memory for the new slot of a batch: it was not copied."""
        self._is_full = True
        nbytes = self.slots.pop(self._started.pop(batch)).nbytes
        self._waiting = {batch: nbytes, **self._waiting}

    def _start(self, batch: int) -> list[Command]:
        """Start the copy of a batch, to a free slot or a new one."""
        nbytes, commands = self._waiting.pop(batch), list[Command]()
        slot = next((each for each in self._free if self.slots[each].capacity >= nbytes), None)
        if slot is not None:
            self._free.remove(slot)
        else:
            if self._free:  # it is too small by now
                commands += self._discard(self._free.popleft())
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            capacity = -(-self.largest // GRAIN) * GRAIN if self._reuses else nbytes
            self.slots[slot] = DeviceSlot(capacity)
            commands.append(Allocate(slot, capacity))
        self.slots[slot].nbytes = nbytes
        self._started[batch] = slot
        return [*commands, StartCopy(batch, slot)]

    def release(self, slot: int) -> list[Command]:
        """Keep a slot for later batches, unless it is too small for them or one too many.

        No tensor of its batch exists any more.
        """
        self._is_full = False
        is_small = self.slots[slot].capacity < self.largest
        if len(self.slots) > self._ahead + 2 or is_small or not self._reuses:
            return self._discard(slot)
        self._free.append(slot)
        return []

    def _discard(self, slot: int) -> list[Command]:
        del self.slots[slot]
        return [Discard(slot)]
