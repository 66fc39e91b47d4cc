"""A CUDA device: a copy stream, events, and page-locking by the driver.

Only documented functions of torch and of the CUDA driver are used. Device memory comes from torch's
allocator, so it counts in `torch.cuda.memory_allocated()`, and stays ours while a slot exists.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch

from forebay.batches import moved, tensors_of
from forebay.devices.device_api import Copy, Event

# CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context of this process.
_PORTABLE = 1


class CudaDevice:
    """See `Device`.

    Args:
        device: Without an index it is the current device.
    """

    reuses = True

    def __init__(self, device: torch.device) -> None:
        index: int | None = device.index
        self._index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", self._index)
        self._copies = _stream_of_copies(self._index)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `Device`."""
        with torch.cuda.stream(self._copies):  # torch's allocator keeps this order
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def alias(self, memory: torch.Tensor, nbytes: int) -> tuple[torch.Tensor, Any]:
        """See `Device`."""
        owner = _Owner(memory, nbytes)
        return torch.as_tensor(owner, device=self.torch_device), owner

    def copy(
        self, memory: torch.Tensor, host: torch.Tensor, after: Event | None, *, is_pinned: bool
    ) -> Copy:
        """See `Device`."""
        if not is_pinned:
            # Page-locked memory of torch's, which it keeps until the copy from it has ended. If
            # there is none, the driver copies to its own, and has done so when it returns.
            with suppress(RuntimeError):
                pinned = torch.empty(len(host), dtype=torch.uint8, device="cpu", pin_memory=True)
                host = pinned.copy_(host)
        stream = self._copies
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            if after is not None:
                assert isinstance(after, torch.cuda.Event)
                stream.wait_event(after)
            began.record(stream)
            memory[: len(host)].copy_(host, non_blocking=True)
            ended.record(stream)
        return Copy(ended, partial(_seconds, began, ended))

    def lend(self, memory: torch.Tensor, copied: Event) -> None:
        """See `Device`."""
        stream = torch.cuda.current_stream(self.torch_device)
        assert isinstance(copied, torch.cuda.Event)
        stream.wait_event(copied)
        # For the moment at which the slot is discarded: torch's allocator then waits for it.
        memory.record_stream(stream)

    def consumer_event(self) -> Event:
        """See `Device`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def moved(self, batch: Any) -> Any:
        """See `Device`."""
        # On the consumer's stream: unknown objects may hold tensors that nobody could hand over.
        return moved(batch, self.torch_device, non_blocking=False)

    @contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        """See `Device`."""
        with torch.cuda.stream(self._copies):
            yield

    def hand_over(self, batch: Any) -> None:
        """See `Device`."""
        stream = torch.cuda.current_stream(self.torch_device)
        stream.wait_stream(self._copies)
        for tensor in tensors_of(batch):
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def default_generator(self) -> torch.Generator | None:
        """See `Device`."""
        return torch.cuda.default_generators[self._index]

    def register(self, address: int, nbytes: int) -> str | None:
        """See `Device`."""
        # The runtime's function would leave its error behind, for an innocent later call to find.
        driver = _driver()
        if driver is None:
            return "the CUDA driver's library, libcuda.so.1, cannot be loaded"
        with torch.cuda.device(self.torch_device):
            self._copies.query()  # makes the context of the device that of this thread
            code = driver.cuMemHostRegister_v2(address, nbytes, _PORTABLE)
        return None if code == 0 else _name_of(driver, code)

    def unregister(self, address: int) -> None:
        """See `Device`."""
        driver = _driver()
        if driver is not None:
            with torch.cuda.device(self.torch_device):
                driver.cuMemHostUnregister(address)


@cache
def _stream_of_copies(index: int) -> torch.cuda.Stream:
    """Return the stream of all copies to a device: torch keeps freed memory for its stream."""
    return torch.cuda.Stream(torch.device("cuda", index))


class _Owner:
    """Device memory as torch and others accept it without a copy, by the CUDA Array Interface."""

    def __init__(self, memory: torch.Tensor, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def _seconds(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    return float(began.elapsed_time(ended)) / 1000


@cache
def _driver() -> Any:
    """Return the driver's library; None if there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    driver.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    driver.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    driver.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return driver


def _name_of(driver: Any, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return f"the CUDA driver refused it: {(name.value or b'error').decode()} ({code})"
