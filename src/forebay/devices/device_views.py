"""Rebuild a batch over a copy of its memory.

    host     | images     | labels |        {"image": tensor, "label": tensor, "name": [...]}
    device   | images     | labels |   ──>  {"image": tensor, "label": tensor, "name": [...]}

All tensors of a batch from a worker lie in one slot of the slab. It is copied as a whole, and a
tensor of the copy has the same offset, shape and strides.
"""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch

from forebay import trees


class Rebuilding:
    """Rebuilds one batch over a copy of its memory.

    Args:
        address: Of the first byte that was copied.
        copied: The copy, uint8 [nbytes], with a storage of its own.
        method: Objects that have a method of this name, such as a PackedSequence or a graph, are
            moved by that, and are the same objects as before.

    Attributes:
        is_complete: Whether every tensor that was found lies in the copy. If not, the others are
            the same objects as before, to be moved one by one.
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
        branch = trees.opened(batch)
        if branch is None:
            return batch
        return trees.rebuilt(batch, branch, [self(value) for value in branch.values])

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
