"""A device that copies late and in any order that its streams allow, to test without a GPU.

Its memory is host memory, so its tensors can be read like any others. Nothing happens on a stream
when it is asked for: it happens at some later call, chosen by random numbers, or when somebody
waits for it. A missing wait, or memory that is used again too early, therefore gives a wrong batch.

    with forebay.DataLoader(dataset, num_workers=2, device=FakeDevice(seed=1)) as loader:
        for batch in loader:
            ...
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from forebay.base.batches import mapped
from forebay.devices.device import Copy, Event

# What memory contains before anything is copied to it.
POISON = 0xA5


class FakeEvent:
    """A point in the work of a stream of a `FakeDevice`.

    Attributes:
        is_reached: Whether all work before it has ended.
    """

    def __init__(self, device: FakeDevice) -> None:
        self.is_reached = False
        self._device = device

    def query(self) -> bool:
        """See `forebay.devices.device.Event`."""
        self._device.wander()
        return self.is_reached

    def synchronize(self) -> None:
        """See `forebay.devices.device.Event`."""
        self._device.run_until(lambda: self.is_reached)


class FakeDevice:
    """A device in host memory; see `forebay.devices.device.Device`.

    Args:
        seed: Decides what happens when.
        capacity: Bytes of its memory; None for no limit.
        defers: Whether the consumer's work is given to the device with `launch`, and done later, as
            on a GPU. If not, the consumer reads tensors itself, and waits for their copy before.
        refuses: The reason why memory cannot be page-locked; None if it can.

    Attributes:
        allocated: Bytes of memory that are in use.
        registered: Length of the page-locked memory, by address.
        staged: Number of copies from memory that was not page-locked.
        copied: Number of copies that were started.
        moved_alone: Number of tensors that were moved one by one.
    """

    reuses = True

    def __init__(
        self,
        seed: int = 0,
        *,
        capacity: int | None = None,
        defers: bool = False,
        refuses: str | None = None,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.allocated = self.staged = self.copied = self.moved_alone = 0
        self.registered: dict[int, int] = {}
        self._capacity, self._defers, self._refuses = capacity, defers, refuses
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._memory: dict[int, np.ndarray[Any, Any]] = {}  # by address
        self._streams: dict[str, deque[FakeEvent | Callable[[], None]]] = {
            "copies": deque(),
            "consumer": deque(),
        }

    # ---- what happens when ---------------------------------------------------------------------

    def launch(self, work: Callable[[], None]) -> None:
        """Give work to the consumer's stream, which does it later."""
        with self._lock:
            self._streams["consumer"].append(work)
            self.wander()

    def synchronize(self) -> None:
        """Do all work of all streams."""
        self.run_until(lambda: not any(self._streams.values()))

    def wander(self) -> None:
        """Do some work, or none."""
        with self._lock:
            for _ in range(self._random.choice((0, 0, 1, 3))):
                self._step(self._random.choice(list(self._streams)))

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Do work until a condition is met.

        Raises:
            AssertionError: It cannot be met: the streams wait for each other.
        """
        with self._lock:
            while not is_done():
                names = list(self._streams)
                self._random.shuffle(names)
                assert any(self._step(name) for name in names), "the streams cannot continue"

    def _step(self, name: str) -> bool:
        """Do the next work of a stream; return False if there is none, or if it has to wait."""
        stream = self._streams[name]
        if not stream or (isinstance(stream[0], FakeEvent) and not stream[0].is_reached):
            return False
        work = stream.popleft()
        if not isinstance(work, FakeEvent):
            work()
        return True

    def _record(self, name: str) -> FakeEvent:
        event = FakeEvent(self)
        self._streams[name].append(lambda: setattr(event, "is_reached", True))
        return event

    # ---- the interface of a device -------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `Device`."""
        with self._lock:
            self.wander()
            if self._capacity is not None and self.allocated + nbytes > self._capacity:
                raise torch.OutOfMemoryError(f"the fake device has no {nbytes} bytes left")
            self.allocated += nbytes
            memory = np.full(nbytes, POISON, np.uint8)
            address = memory.ctypes.data
            self._memory[address] = memory
            visible = memory[:]
            weakref.finalize(visible, self._free, address).atexit = False
            return torch.from_numpy(visible)

    def _free(self, address: int) -> None:
        """Free memory, as torch does: when the consumer's stream has done its work so far."""
        memory = self._memory.pop(address)
        self.allocated -= len(memory)
        if self._defers:  # without the lock: this may happen at any point
            self._streams["consumer"].append(lambda: memory.fill(POISON))

    def alias(self, memory: torch.Tensor, nbytes: int) -> tuple[torch.Tensor, Any]:
        """See `Device`."""
        owner = memory.numpy()[:nbytes]
        return torch.from_numpy(owner), owner

    def copy(
        self, memory: torch.Tensor, host: torch.Tensor, after: Event | None, *, is_pinned: bool
    ) -> Copy:
        """See `Device`."""
        with self._lock:
            self.copied += 1
            address, nbytes = host.data_ptr(), len(host)
            assert nbytes <= len(memory), "a copy beyond the end of a slot"
            staged = None
            if is_pinned:
                held = self.registered.get(address, 0)
                assert nbytes <= held, f"{nbytes} bytes are read, and {held} are page-locked"
            else:
                self.staged += 1
                staged = host.clone()
                address = staged.data_ptr()

            def work(_keep: Any = staged) -> None:  # no reference to `host`: it may be freed
                ctypes.memmove(memory.data_ptr(), address, nbytes)

            copies = self._streams["copies"]
            if after is not None:
                assert isinstance(after, FakeEvent)
                copies.append(after)
            copies.append(work)
            ended = self._record("copies")
            self.wander()
            return Copy(ended, lambda: 0.001)

    def lend(self, memory: torch.Tensor, copied: Event) -> None:
        """See `Device`."""
        assert isinstance(copied, FakeEvent)
        if self._defers:
            with self._lock:
                self._streams["consumer"].append(copied)
        else:
            copied.synchronize()

    def consumer_event(self) -> Event:
        """See `Device`."""
        with self._lock:
            return self._record("consumer")

    def moved(self, batch: Any) -> Any:
        """See `Device`."""
        return mapped(self._moved, batch)

    def _moved(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or self.holds(leaf):
            return leaf
        self.moved_alone += 1
        if leaf.layout is not torch.strided or leaf.is_nested or not leaf.nbytes:
            return leaf.clone()
        memory = self.allocate(leaf.nbytes).view(leaf.dtype).view(leaf.shape)
        return memory.copy_(leaf)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the memory of the device."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
        at = tensor.data_ptr()
        memory = list(self._memory.items())
        return any(address <= at < address + len(each) for address, each in memory)

    @contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        """See `Device`; all copies are done first, since the block's work is done at once."""
        self.run_until(lambda: not self._streams["copies"])
        yield

    def hand_over(self, batch: Any) -> None:
        """Do nothing: the work on the copy stream is done at once."""

    def default_generator(self) -> torch.Generator | None:
        """See `Device`."""
        return None

    def register(self, address: int, nbytes: int) -> str | None:
        """See `Device`."""
        with self._lock:
            if self._refuses is not None:
                return self._refuses
            for start, length in self.registered.items():
                assert address + nbytes <= start or start + length <= address, "registered twice"
            self.registered[address] = nbytes
            return None

    def unregister(self, address: int) -> None:
        """See `Device`."""
        with self._lock:
            del self.registered[address]
