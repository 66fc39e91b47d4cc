"""Page-locked host memory as a device: for `pin_memory=True`, without a copy in the trainer.

The memory is torch's. It is used again only after the copies from it that torch knows of, on any
stream, so a batch may be copied to a device as one that torch's DataLoader pinned.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from forebay.batches import pinned
from forebay.devices.device_api import Copy, Event


class PinnedMemory:
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

    def lend(self, memory: torch.Tensor, copied: Event) -> None:
        """Do nothing: the copy has ended."""

    def consumer_event(self) -> Event:
        """See `Device`."""
        return _Reached()

    def moved(self, batch: Any) -> Any:
        """See `Device`."""
        return pinned(batch)

    def on_copy_stream(self) -> AbstractContextManager[None]:
        """See `Device`."""
        return nullcontext()

    def hand_over(self, batch: Any) -> None:
        """Do nothing: there is no stream."""

    def default_generator(self) -> torch.Generator | None:
        """See `Device`."""
        return None

    def register(self, address: int, nbytes: int) -> str | None:
        """See `Device`; there is nothing to gain."""
        return "batches are copied to memory that is page-locked"

    def unregister(self, address: int) -> None:
        """Do nothing."""


class _Reached:
    """A point at which all work has ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass
