"""The layout of slots in the slab, and of buffers in a slot. Pure arithmetic, no memory.

    slab    | extent                                      | extent . . .
    extent  |  slot  |  slot  |        slot        |  room not yet cut . . .
    slot    | buffer | buffer | . . . . |

Addresses cost nothing until they are written, so the first slots are far larger than most batches;
the others are cut for the batches seen so far. The slot that was returned last, whose pages are
warm, is used next. When the capacity changes, the slots of the old one are outdated: they are not
used again, their pages are freed and their ranges are divided again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# Buffers are aligned to cache lines, which suffices for every dtype and vector unit.
ALIGN = 64
# Until the first batch was seen. This is address space only: pages are allocated when written.
FIRST_CAPACITY = 1 << 30
LEAST_CAPACITY = 1 << 16
# The first slots may get batches of any size. They take half of the usual extent.
LARGE_CAPACITY = 1 << 33
LARGE_SLOTS = 4
# Slack for batches that are larger than those seen so far, in slots that are cut for these.
SLACK = 4
# An extent must hold several slots, even a small one.
LEAST_SLOTS = 8


class Slot(NamedTuple):
    """A piece of the slab, for one batch.

    Attributes:
        offset: Where it begins, in bytes from the slab's first.
        capacity: Its size in bytes.
    """

    offset: int
    capacity: int


class Cursor:
    """Allocates the bytes of one slot, from its start onwards.

    Attributes:
        refused: Why the system had no room for bytes of the slot; None if it had.
    """

    __slots__ = ("_capacity", "_reserve", "refused", "used")

    def __init__(
        self, capacity: int, reserve: Callable[[int, int], str | None] | None = None
    ) -> None:
        """Start at the slot's first byte.

        Args:
            reserve: Called with a start and a length before they are allocated; returns the error
                if that is impossible. None if no reservation is needed.
        """
        self._capacity = capacity
        self._reserve = reserve
        self.refused: str | None = None
        self.used = 0

    def take(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` new bytes in the slot, or None if they do not fit."""
        start = (self.used + ALIGN - 1) & -ALIGN
        if start + nbytes > self._capacity or self.refused is not None:
            return None
        if self._reserve is not None:
            self.refused = self._reserve(start, nbytes)
            if self.refused is not None:
                return None
        self.used = start + nbytes
        return start


def capacity_for(largest: int | None, size: int) -> int:
    """Return how large slots should be in extents of `size` bytes.

    Args:
        largest: Bytes of the largest batch seen; None before the first.
    """
    needed = largest or 0
    wanted = FIRST_CAPACITY if largest is None else 1 << max(0, SLACK * needed - 1).bit_length()
    while wanted * LEAST_SLOTS > size and wanted // 2 >= needed and wanted > LEAST_CAPACITY:
        wanted //= 2
    return max(LEAST_CAPACITY, wanted)


class Space:
    """Cuts the slab's addresses into slots.

    Invariants: a byte belongs to at most one of the slots in use, the idle slots and the room; and
    a slot is in one extent.
    """

    def __init__(self, extent: int) -> None:
        self._extent = extent
        self.extents = 1
        self.largest: int | None = None
        self.capacity = capacity_for(None, extent)
        self.large_left = LARGE_SLOTS if extent > LARGE_CAPACITY * LARGE_SLOTS else 0
        self._room = [Slot(0, extent)]
        self._idle: list[Slot] = []
        self._out: set[Slot] = set()

    @property
    def out(self) -> int:
        """Number of slots in use."""
        return len(self._out)

    def grow(self) -> None:
        """Add an extent."""
        self._room.append(Slot(self.extents * self._extent, self._extent))
        self.extents += 1

    def record_size(self, nbytes: int) -> list[Slot]:
        """Record a batch's size."""
        if self.largest is not None and nbytes <= self.largest:
            return []
        self.largest = nbytes
        capacity = capacity_for(nbytes, self._extent)
        if capacity == self.capacity:
            return []
        self.capacity = capacity
        # Capacities only grow from here on, so smaller pieces of room cannot be used any more.
        self._room = [piece for piece in self._room if piece.capacity >= capacity]
        outdated = [slot for slot in self._idle if not self._is_usable(slot)]
        self._idle = [slot for slot in self._idle if self._is_usable(slot)]
        for slot in outdated:
            self._let_go(slot)
        return outdated

    def _is_usable(self, slot: Slot) -> bool:
        return slot.capacity == self.capacity or slot.capacity >= max(LARGE_CAPACITY, self.capacity)

    def take(self) -> Slot | None:
        """Return the unused slot that was used last, or None if there is none."""
        slot = self._idle.pop() if self._idle else None
        if slot is None and self.large_left:
            slot = self._cut(max(LARGE_CAPACITY, self.capacity))
            self.large_left -= 1
        slot = slot or self._cut(self.capacity)
        if slot is not None:
            self._out.add(slot)
        return slot

    def give_back(self, slot: Slot, *, is_last: bool = False) -> bool:
        """Return a slot that is in use; with `is_last`, all other unused ones are taken before."""
        self._out.remove(slot)
        if self._is_usable(slot):
            self._idle.insert(0 if is_last else len(self._idle), slot)
            return True
        self._let_go(slot)
        return False

    def trim(self) -> list[Slot]:
        """Stop keeping idle slots; return those that were kept, whose pages can be freed."""
        idle, self._idle = self._idle, []
        for slot in idle:
            self._let_go(slot)
        return idle

    def _let_go(self, slot: Slot) -> None:
        if slot.capacity >= self.capacity:
            self._room.append(slot)

    def _cut(self, capacity: int) -> Slot | None:
        """Cut a slot from the room; small pieces of earlier slots are used first."""
        if not self._out:
            # There is no idle slot either, so all small pieces can be merged into whole extents.
            starts = range(0, self.extents * self._extent, self._extent)
            self._room = [Slot(start, self._extent) for start in reversed(starts)]
        for at in range(len(self._room) - 1, -1, -1):
            start, length = self._room[at]
            if length < capacity:
                continue
            if length == capacity:
                del self._room[at]
            else:
                self._room[at] = Slot(start + capacity, length - capacity)
            return Slot(start, capacity)
        return None
