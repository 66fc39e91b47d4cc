"""Allocate a tensor for the current batch: in its slot, in a worker that has one, or on the heap.

    collate_into(packer) ── set_allocator(packer's) ──┐
    collate.pad ─────────── new_tensor(shape, dtype) ─┴──> in the slot, or torch.empty

A collate function need not know whether it runs in a worker. A tensor that is created in the slot
is not copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

# Returns a tensor in the slot, or None if that is impossible.
Allocator = Callable[[Sequence[int], torch.dtype], torch.Tensor | None]

# The last one is used. It is global, like torch's table of collate functions: a worker makes one
# batch at a time.
_allocators: list[Allocator] = []


def new_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor in this process's memory, its values unset, to be written to.

    It must be returned in the batch: in a worker, its memory may be used again once the batch is
    gone.
    """
    made = _allocators[-1](shape, dtype) if _allocators else None
    return torch.empty(tuple(shape), dtype=dtype, device="cpu") if made is None else made


def set_allocator(allocator: Allocator) -> Callable[[], None]:
    """Make `new_tensor` call `allocator` first.

    Returns:
        A function that undoes it.
    """
    _allocators.append(allocator)
    return partial(_allocators.remove, allocator)
