"""Page-locks slots of the slab, so that a device can copy from them by itself.

Slots are registered one by one, when a batch is copied from them for the first time: its pages are
there by then, and registering takes no longer than copying the batch once to page-locked memory.
No copy spans two registrations, since a batch lies in one slot. The sum is limited; batches in
other slots of a deep buffer are copied to page-locked memory first, so that the rest of the buffer
needs none.
"""

from __future__ import annotations

import mmap
import threading

from forebay.devices.device_api import Device

# Some drivers refuse large calls, and each blocks other CUDA calls of the machine for 0.1 s per GB.
MOST_PER_CALL = 1 << 30
# Page-locked memory cannot be swapped, so only as much as hides the copies.
MOST = 2 << 30
# The part of the memory that is available at the beginning.
SHARE = 8


class PinnedWindow:
    """The registered memory of one slab.

    Args:
        device: Registers the memory.
        limit: The most bytes to register.
        reason: Why nothing can be registered, in words; None if it may be tried.
    """

    def __init__(self, device: Device, limit: int, reason: str | None = None) -> None:
        self.reason = reason
        self._device, self._limit = device, limit
        self._lengths: dict[int, int] = {}  # by address
        self._is_refused = reason is not None
        self._lock = threading.Lock()  # the slab frees memory in other threads

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        return sum(list(self._lengths.values()))

    def covers(self, address: int, nbytes: int, room: int) -> bool:
        """Return whether memory is registered; register it if there is room.

        Args:
            address: Of a slot, at the start of a page.
            nbytes: The bytes of the batch in it.
            room: The bytes to register, unless there are more in it: those of the largest batch so
                far, if the slot has room for it.
        """
        with self._lock:
            known = self._lengths.get(address, 0)
            if known >= nbytes:
                return True
            if self._is_refused:
                return False
            length = -(-max(nbytes, room) // mmap.PAGESIZE) * mmap.PAGESIZE
            if length > MOST_PER_CALL:
                self.reason = f"batches of more than {MOST_PER_CALL >> 30} GiB are not page-locked"
                return False
            if self.nbytes - known + length > self._limit:
                return False
            if known:
                self._unregister(address)
            refused = self._device.register(address, length)
            if refused is not None:
                self._is_refused, self.reason = True, refused
                return False
            self._lengths[address] = length
            return True

    def forget(self, start: int, length: int) -> None:
        """Undo what was registered in a range of addresses, before its pages are freed."""
        with self._lock:
            for address in [each for each in self._lengths if start <= each < start + length]:
                self._unregister(address)

    def close(self) -> None:
        """Undo all registrations; nothing is registered any more."""
        with self._lock:
            self._is_refused = True
            for address in list(self._lengths):
                self._unregister(address)

    def _unregister(self, address: int) -> None:
        del self._lengths[address]
        self._device.unregister(address)
