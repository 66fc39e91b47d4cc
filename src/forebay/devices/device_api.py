"""The interface of a device: an implementation is a class with these methods.

A device has two streams: its own copy stream, and the consumer's, which is the current stream of
the thread that calls a method. Work on a stream runs in the order in which it was given, later than
the call; work on different streams runs in any order, except where one waits for an event.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Return whether all work before this point has ended."""
        ...

    def synchronize(self) -> None:
        """Wait until all work before this point has ended."""
        ...


class Copy(NamedTuple):
    """A copy that was started.

    Attributes:
        ended: The point at which it has ended.
        seconds: Called after that; returns how long the copy took on the device, or 0 if that is
            not known.
    """

    ended: Event
    seconds: Callable[[], float]


@runtime_checkable
class Device(Protocol):
    """A device to which batches are copied.

    Attributes:
        torch_device: Where the tensors of a batch are in the end.
        reuses: Whether memory is used for several batches, one after the other. If not, it belongs
            to a batch for good, and torch frees it.
    """

    torch_device: torch.device
    reuses: bool

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory of the device: uint8 [nbytes], its values unset.

        It is used by copies, and by the consumers that `lend` names. When the last reference to it
        is gone, it is used for something else only after their work with it.

        Raises:
            torch.OutOfMemoryError: There is too little.
        """
        ...

    def alias(self, memory: torch.Tensor, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Return the first bytes of memory as a tensor with a storage of its own, and its owner.

        The owner is an object that exists as long as the storage, and thus as long as any tensor
        over it, and that can be weakly referenced. It keeps the memory.
        """
        ...

    def copy(
        self, memory: torch.Tensor, host: torch.Tensor, after: Event | None, *, is_pinned: bool
    ) -> Copy:
        """Start to copy host memory to the start of `memory`, on the copy stream.

        Args:
            memory: From `allocate`.
            host: uint8 [nbytes]; it must not change until the copy has ended.
            after: The copy waits for this event; None for none.
            is_pinned: Whether the device can read `host` by itself: it is page-locked. If not, it
                is first copied to memory that is.
        """
        ...

    def lend(self, memory: torch.Tensor, copied: Event) -> None:
        """Make the consumer's stream wait for a copy, and record that it uses the memory."""
        ...

    def consumer_event(self) -> Event:
        """Return the point that the consumer's stream has reached: after all its work so far."""
        ...

    def moved(self, batch: Any) -> Any:
        """Return a batch with those of its tensors on the device that are not there yet.

        Host memory is not read any more when it returns.
        """
        ...

    def on_copy_stream(self) -> AbstractContextManager[None]:
        """Make the copy stream the current one in the block."""
        ...

    def hand_over(self, batch: Any) -> None:
        """Make the consumer's stream wait for all work on the copy stream so far.

        Args:
            batch: Made there; its tensors are used by the consumer's stream from now on.
        """
        ...

    def default_generator(self) -> torch.Generator | None:
        """Return the generator that functions on the device draw from by default.

        None if that is `torch.default_generator`.
        """
        ...

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock host memory of whole pages, so that the device can read it by itself.

        Returns:
            None, or the reason why this is not possible.
        """
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        ...
