"""Slots of device memory, which are used again and again.

A slot is leased to the batch that is copied into it. The lease ends when the last tensor over the
slot is gone, in whatever thread. The next copy into the slot then waits, on the device, until the
consumer's stream has done the work that it was given so far: that may still read the slot.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch

from forebay.devices.device_api import Copy, Device, Event


class DeviceSlab:
    """The slots of one device.

    **Threads.** A lease may end in any thread, at any point of a program; everything else is called
    by one thread at a time.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: dict[int, torch.Tensor] = {}
        self._unused: dict[int, Event] = {}  # when the consumer's stream will not use it any more
        self._lent: dict[int, int] = {}  # by slot: the number of the consumer's lease
        self._leases = 0
        # Slot and lease; finalizers add to it, even within other methods, so it has no lock.
        self._ended: deque[tuple[int, int]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots that are used again."""
        return sum(memory.nbytes for memory in list(self._memory.values()))

    def allocate(self, slot: int, nbytes: int) -> None:
        """Allocate a slot.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        self._memory[slot] = self._device.allocate(nbytes)

    def copy(self, slot: int, host: torch.Tensor, *, is_pinned: bool) -> Copy:
        """Start to copy host memory to a slot.

        Args:
            slot: A slot that is not lent.
            host: uint8 [nbytes]; it must not change until the copy has ended.
            is_pinned: Whether the host memory is page-locked.
        """
        after = self._unused.pop(slot, None)
        return self._device.copy(self._memory[slot], host, after, is_pinned=is_pinned)

    def lease(self, slot: int, nbytes: int) -> tuple[torch.Tensor, int]:
        """Return a view of the first bytes of a slot, and the number of its lease.

        The lease ends when no tensor with the view's storage exists any more.
        """
        view, owner = self._device.alias(self._memory[slot], nbytes)
        self._leases += 1
        if self._device.reuses:
            end = weakref.finalize(owner, self._ended.append, (slot, self._leases))
            end.atexit = False
        return view, self._leases

    def lend(self, slot: int, lease: int, copy: Copy) -> None:
        """Let the consumer's stream use the batch in a slot, after its copy."""
        memory = self._memory[slot]
        if self._device.reuses:
            self._lent[slot] = lease
        else:
            del self._memory[slot]
        self._device.lend(memory, copy.ended)

    def returned(self) -> list[int]:
        """Return the slots that were lent and are not used any more; call it as the consumer."""
        slots, ended = list[int](), self._ended
        while ended:
            slot, lease = ended.popleft()
            if self._lent.get(slot) == lease:  # and not the lease of a batch that was dropped
                del self._lent[slot]
                slots.append(slot)
        if slots:
            reached = self._device.consumer_event()
            self._unused.update(dict.fromkeys(slots, reached))
        return slots

    def discard(self, slot: int) -> None:
        """Give the memory of a slot back, as soon as nothing uses it any more."""
        self._unused.pop(slot, None)
        del self._memory[slot]

    def close(self) -> None:
        """Discard all slots."""
        self._memory.clear()
        self._unused.clear()
        self._lent.clear()
