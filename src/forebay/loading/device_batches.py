"""Copy batches from the slab to a device before they are taken.

    feed ── arrived ──> TransferFlow ── commands ──> device ── open ──> the batch on the device
                             ^                          │
                             └─────── released ─────────┘

A slot of the slab is copied as a whole, in one copy, and the batch is rebuilt over the copy.
That happens in the thread that runs the engine, so with a background thread it happens while
the trainer is busy with the batch before. Opening a batch only makes the trainer's stream wait
for its copy.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forebay.base.machine import usable_memory
from forebay.devices.device import Copy, Device
from forebay.devices.flow import Allocate, Command, Discard, StartCopy, TransferFlow
from forebay.devices.slab import MOST, SHARE, DeviceSlab, PinnedWindow, Rebuilding
from forebay.loading.messages import BatchResult
from forebay.loading.workers import BatchSlots
from forebay.memory.packed_batch import unpack
from forebay.observe.measurements import Transfers


@dataclass(slots=True)
class _Copied:
    """A batch whose copy was started.

    Attributes:
        batch: The batch over the slot of the device; None if rebuilding it raised.
        view: The bytes of the slot, which keep the lease.
    """

    batch: Any
    slot: int
    lease: int
    view: torch.Tensor
    copy: Copy
    is_complete: bool = True
    error: Exception | None = None


class DeviceBatches:
    """The batches of one feed that are on a device or on their way.

    It has the methods of `BatchSlots`, which holds the batches until they are copied.

    **Threads.** `settle`, `advance` and `free` are called by the thread that runs the engine, and
    `open` by the consumer, whose current stream it uses; a lock lets one of them work at a time.
    A garbage collection within them may close the feed, so the lock may be taken twice.
    """

    def __init__(self, device: Device, slots: BatchSlots, transfers: Transfers) -> None:
        self._device, self._slots, self._transfers = device, slots, transfers
        self.slab = slots.slab
        self._flow = TransferFlow(reuses=device.reuses)
        self._slab = DeviceSlab(device)
        self._lock = threading.RLock()
        self._is_closed = False
        self._error: Exception | None = None  # of the device: nothing can be copied any more
        self._results: dict[int, BatchResult] = {}  # that have arrived, and were not started
        self._copied: dict[int, _Copied] = {}  # that were started, and not taken
        self._host: dict[int, tuple[memoryview, Copy]] = {}  # that are being copied
        reason = None
        if slots.is_on_disk:
            reason = "a buffer with directory= is on a disk, which cannot be page-locked"
        memory = usable_memory()
        limit = MOST if memory is None else min(MOST, memory // SHARE)
        self._window = PinnedWindow(device, limit, reason)
        if device.reuses:
            slots.slab.before_free = partial(_forget, self._window, transfers)

    # ---- the engine's thread -------------------------------------------------------------------

    def settle(self, task: int, result: BatchResult) -> None:
        """Note a batch that has arrived, and free the part of its slot that it does not need."""
        self._slots.settle(task, result)
        nbytes = result.batch.end
        if not nbytes:  # no tensors, or none that fit into the slot
            return
        with self._lock:
            self._results[task] = result
            self._flow.arrived(task, nbytes)

    def advance(self) -> None:
        """Start the copies of the next batches, and free the memory of those that have ended."""
        with self._lock:
            if self._is_closed or self._error is not None:
                return
            with suppress(torch.OutOfMemoryError):  # it is tried again when the batch is taken
                self._note_ended()
                while commands := self._flow.advance():
                    self._perform(commands)

    def free(self, task: int) -> None:
        """Forget a batch that will not be taken; its slot is freed, if need be after its copy."""
        with self._lock:
            known = self._results.pop(task, None) or self._copied.pop(task, None)
            if known is not None:
                self._perform(self._flow.drop(task))
        self._slots.free(task)

    # ---- the consumer --------------------------------------------------------------------------

    def open(self, task: int, result: BatchResult) -> BatchResult:
        """Return a result with the batch on the device; the current stream waits for the copy.

        If the device has no memory for it, the batch is in host memory, and `refused` says why.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            self._note_ended()
            for slot in self._slab.returned():
                self._perform(self._flow.release(slot))
            if task not in self._results and task not in self._copied:
                result = self._slots.open(task, result)
                return result._replace(batch=self._device.moved(result.batch), is_moved=True)
            try:
                self._perform(self._flow.want(task))
            except torch.OutOfMemoryError as error:
                self._flow.drop(task)
                self._results.pop(task)
                return self._slots.open(task, result)._replace(
                    refused=error.with_traceback(None), is_moved=False
                )
            copied = self._copied.pop(task)
            self._slab.lend(copied.slot, copied.lease, copied.copy)
            self._flow.take(task)
        if copied.error is not None:
            raise copied.error
        batch = copied.batch if copied.is_complete else self._device.moved(copied.batch)
        return result._replace(batch=batch, is_inline=result.batch.body is not None, is_moved=True)

    def close(self) -> None:
        """Wait for the copies that were started, and give all memory back but that in use."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for copy in [each for _, each in self._host.values()]:
                copy.ended.synchronize()
            self._slots.slab.before_free = None
            self._window.close()
            for known in (self._results, self._copied, self._host):
                known.clear()
            self._slab.close()
        self._slots.close()

    # ---- commands ------------------------------------------------------------------------------

    def _note_ended(self) -> None:
        for task, (_, copy) in list(self._host.items()):
            if copy.ended.query():
                self._transfers.copy_s += copy.seconds()
                del self._host[task]

    def _perform(self, commands: list[Command]) -> None:
        """Perform commands."""
        try:
            for command in commands:
                self._perform_one(command)
        except torch.OutOfMemoryError:
            start = commands[-1]
            assert isinstance(start, StartCopy), "it comes after Allocate"
            self._flow.refuse(start.batch)
            raise
        except Exception as error:
            self._error = error
            raise

    def _perform_one(self, command: Command) -> None:
        match command:
            case Allocate(slot, nbytes):
                self._slab.allocate(slot, nbytes)
            case StartCopy(task, slot):
                self._start(task, slot)
            case Discard(slot):
                self._slab.discard(slot)

    def _start(self, task: int, slot: int) -> None:
        """Start to copy a batch, and rebuild it over the copy meanwhile."""
        packed = self._results.pop(task).batch
        host_slot = self._slots.by_task.get(task)
        memory = self._slots.memory_of(task, packed)
        host = torch.frombuffer(memory, dtype=torch.uint8)[: packed.end]
        is_pinned = False
        if host_slot is not None and self._device.reuses:
            room = min(host_slot.capacity, self._flow.largest)
            is_pinned = self._window.covers(host.data_ptr(), len(host), room)
        copy = self._slab.copy(slot, host, is_pinned=is_pinned)
        self._host[task] = memory, copy
        transfers = self._transfers
        transfers.copied_batches += 1
        transfers.copied_bytes += packed.end
        transfers.staged_bytes += 0 if is_pinned else packed.end
        transfers.pinned_bytes = self._window.nbytes
        transfers.pinned_reason = self._window.reason or ""
        view, lease = self._slab.lease(slot, packed.end)
        copied = self._copied[task] = _Copied(None, slot, lease, view, copy)
        # A device whose memory is not used again is page-locked host memory.
        method = "to" if self._device.reuses else "pin_memory"
        rebuilt = Rebuilding(host.data_ptr(), view, method)
        try:
            copied.batch = rebuilt(unpack(packed, memory))
        except Exception as error:  # noqa: BLE001 - a class of the user's; it is raised by `open`
            copied.error = error
        copied.is_complete = rebuilt.is_complete


def _forget(window: PinnedWindow, transfers: Transfers, address: int, nbytes: int) -> None:
    """Unlock the pages of a slot that is freed; this refers to no batches, which keep the slab."""
    window.forget(address, nbytes)
    transfers.pinned_bytes = window.nbytes
