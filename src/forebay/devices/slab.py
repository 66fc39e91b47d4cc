"""Slots of device memory, which are used again and again.

A slot is leased to the batch that is copied into it. The lease ends when the last tensor over the
slot is gone, in whatever thread. The next copy into the slot then waits, on the device, until the
consumer's stream has done the work that it was given so far: that may still read the slot.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import UserDict, deque
from typing import Any

import torch

from forebay.base.batches import opened, rebuilt
from forebay.base.formatting import byte_size
from forebay.devices.device import Copy, Device, Event


class DeviceSlab:
    """The slots of one device.

    **Threads.** A lease may end in any thread, at any point of a program; everything else is called
    by one thread at a time.
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
        """Allocate a slot."""
        self._memory[slot] = self._device.allocate(nbytes)

    def copy(self, slot: int, host: torch.Tensor, *, is_pinned: bool) -> Copy:
        """Start to copy host memory to a slot."""
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


# ---- device views --------------------------------------------------------------------------------
# Rebuild a batch over a copy of its memory.
#
#     host     | images     | labels |        a dict of image, label: tensors; name: a list
#     device   | images     | labels |   ──>  the same, its tensors over the copy
#
# All tensors of a batch from a worker lie in one slot of the slab. It is copied as a whole, and a
# tensor of the copy has the same offset, shape and strides.


class Rebuilding:
    """Rebuilds one batch over a copy of its memory.

    Args:
        address: Of the first byte that was copied.
    """

    def __init__(self, address: int, copied: torch.Tensor, method: str = "to") -> None:
        self.is_complete = True
        self._method = method
        self._address, self._nbytes = address, len(copied)
        self._storage, self._device = copied.untyped_storage(), copied.device

    def __call__(self, batch: Any) -> Any:
        """Return the batch over the copy; leaves that are not tensors are the same objects."""
        kind = type(batch)
        if kind is torch.Tensor:
            return self._tensor(batch)
        if isinstance(batch, torch.Tensor) or self._moves_itself(batch):
            self.is_complete = False
            return batch
        branch = opened(batch)
        if branch is None:
            return batch
        return rebuilt(batch, branch, [self(value) for value in branch.values])

    def _moves_itself(self, value: Any) -> bool:
        # The dicts of the transformers library only move their values.
        return callable(getattr(value, self._method, None)) and not isinstance(value, UserDict)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        # Others have no memory, several memories, or a history.
        if tensor.layout is torch.strided and not (tensor.is_nested or tensor.requires_grad):
            start = tensor.data_ptr() - self._address
            step = tensor.element_size()
            is_plain = tensor.is_cpu and not tensor.is_quantized
            if is_plain and 0 <= start < self._nbytes and start % step == 0:
                view = torch.empty(0, dtype=tensor.dtype, device=self._device)
                return view.set_(self._storage, start // step, tensor.shape, tensor.stride())
        self.is_complete = False
        return tensor


# ---- pinned window -------------------------------------------------------------------------------
# Page-locks slots of the slab, so that a device can copy from them by itself.
#
# Slots are registered one by one, when a batch is copied from them for the first time: its pages
# are there by then, and registering takes no longer than copying the batch once to page-locked
# memory. No copy spans two registrations, since a batch lies in one slot. The sum is limited;
# batches in other slots of a deep buffer are copied to page-locked memory first, so that the rest
# of the buffer needs none.

# Some drivers refuse large calls, and each blocks other CUDA calls of the machine for 0.1 s per GB.
MOST_PER_CALL = 1 << 30
# Page-locked memory cannot be swapped, so only as much as hides the copies.
MOST = 2 << 30
# The part of the memory that is available at the beginning.
SHARE = 8


class PinnedWindow:
    """The registered memory of one slab.

    Args:
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
                self.reason = f"no more than {byte_size(self._limit)} are page-locked"
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
