"""Devices: what is needed of one, which one an argument names, CUDA, page-locked memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from forebay.base.batches import moved, pinned, tensors_of
from forebay.errors import OptionError

# ---- device api ----------------------------------------------------------------------------------
# The interface of a device: an implementation is a class with these methods. Those without a result
# do nothing by default, as for memory that has no streams.
#
# A device has two streams: its own copy stream, and the consumer's, which is the current stream
# of the thread that calls a method. Work on a stream runs in the order in which it was given,
# later than the call; work on different streams runs in any order, except where one waits for an
# event.


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Return whether all work before this point has ended."""

    def synchronize(self) -> None:
        """Wait until all work before this point has ended."""


class Copy(NamedTuple):
    """A copy that was started."""

    ended: Event
    seconds: Callable[[], float]


@runtime_checkable
class Device(Protocol):
    """A device to which batches are copied."""

    torch_device: torch.device
    reuses: bool

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory of the device: uint8 [nbytes], its values unset.

        It is used by copies, and by the consumers that `lend` names. When the last reference to it
        is gone, it is used for something else only after their work with it.
        """

    def alias(self, memory: torch.Tensor, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Return the first bytes of memory as a tensor with a storage of its own, and its owner.

        The owner is an object that exists as long as the storage, and thus as long as any tensor
        over it, and that can be weakly referenced. It keeps the memory.
        """

    def copy(
        self, memory: torch.Tensor, host: torch.Tensor, after: Event | None, *, is_pinned: bool
    ) -> Copy:
        """Start to copy host memory to the start of `memory`, on the copy stream.

        Args:
            after: The copy waits for this event; None for none.
        """

    def lend(self, memory: torch.Tensor, copied: Event) -> None:
        """Make the consumer's stream wait for a copy, and record that it uses the memory."""
        return

    def consumer_event(self) -> Event:
        """Return the point that the consumer's stream has reached: after all its work so far."""

    def moved(self, batch: Any) -> Any:
        """Return a batch with those of its tensors on the device that are not there yet.

        Host memory is not read any more when it returns.
        """

    def on_copy_stream(self) -> AbstractContextManager[Any]:
        """Make the copy stream the current one in the block, if there is one."""
        return nullcontext()

    def hand_over(self, batch: Any) -> None:
        """Make the consumer's stream wait for all work on the copy stream so far."""
        return

    def default_generator(self) -> torch.Generator | None:
        """Return the generator that functions on the device draw from by default.

        None if that is `torch.default_generator`.
        """
        return None

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock host memory of whole pages, so that the device can read it by itself."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        return


# ---- which device --------------------------------------------------------------------------------
# The device that a user names.


def device_of(device: Any) -> torch.device | None:
    """Return the device that the user named; None for none."""
    if isinstance(device, Device):
        return device.torch_device
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise OptionError(
            f"device={device!r} is not valid: {reason}\n"
            "  Nothing was started. Name one such as 'cpu', 'cuda' or 'cuda:1'."
        ) from error


def check_device(device: torch.device | None) -> None:
    """Make sure that a device is on this machine."""
    if device is None or device.type != "cuda":
        return
    # This does not initialize CUDA, after which forked workers could not use it.
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise OptionError(
            f"device={str(device)!r} is not available: torch finds {count} CUDA devices here\n"
            f"  Nothing was started. Use device='cpu'; or look at torch.version.cuda (it is "
            f"{torch.version.cuda}), the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES."
        )


def check_loader_device(device: Any) -> None:
    """Make sure that a loader can return batches on a device."""
    named = device_of(device)
    check_device(named)
    if named is not None and named.type not in ("cpu", "cuda"):
        raise OptionError(
            f"device={str(named)!r} is not possible: batches are copied to 'cpu' or 'cuda'\n"
            "  Nothing was started. Leave device out, and move each batch in the training loop."
        )


def copying_device(device: Any, *, pins: bool = False) -> Device | None:
    """Return the device to which batches have to be copied; None if they stay in host memory."""
    if isinstance(device, Device):
        return device
    named = device_of(device)
    if named is not None and named.type == "cuda":
        return CudaDevice(named)
    if pins and named is None and torch.cuda.is_available():
        return PinnedMemory()
    return None


# ---- cuda ----------------------------------------------------------------------------------------
# A CUDA device: a copy stream, events, and page-locking by the driver.
#
# Only documented functions of torch and of the CUDA driver are used. Device memory comes from
# torch's allocator, so it counts in `torch.cuda.memory_allocated()`, and stays ours while a slot
# exists.

# CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context of this process.
_PORTABLE = 1


class CudaDevice:
    """See `Device`."""

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
        return Copy(ended, lambda: began.elapsed_time(ended) / 1000)

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

    def on_copy_stream(self) -> AbstractContextManager[Any]:
        """See `Device`."""
        return torch.cuda.stream(self._copies)

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


# ---- pinned memory -------------------------------------------------------------------------------
# Page-locked host memory as a device: for `pin_memory=True`, without a copy in the trainer.
#
# The memory is torch's. It is used again only after the copies from it that torch knows of, on any
# stream, so a batch may be copied to a device as one that torch's DataLoader pinned.


class PinnedMemory(Device):
    """Page-locked memory of this process; copies to it end before `copy` returns."""

    reuses = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `Device`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise torch.OutOfMemoryError(
                f"{nbytes:,} bytes of page-locked memory for a batch: {error}"
            ) from error

    def alias(self, memory: torch.Tensor, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Return the memory itself: torch decides when to use it again."""
        return memory[:nbytes], memory

    def copy(
        self, memory: torch.Tensor, host: torch.Tensor, after: Event | None, *, is_pinned: bool
    ) -> Copy:
        """Copy host memory now."""
        memory[: len(host)].copy_(host)
        return Copy(_Reached(), lambda: 0.0)

    def consumer_event(self) -> Event:
        """See `Device`."""
        return _Reached()

    def moved(self, batch: Any) -> Any:
        """See `Device`."""
        return pinned(batch)

    def register(self, address: int, nbytes: int) -> str | None:
        """See `Device`; there is nothing to gain."""
        return "batches are copied to memory that is page-locked"


class _Reached:
    """A point at which all work has ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass
