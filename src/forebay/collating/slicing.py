"""Make whole batches by indexing, for datasets that only consist of tensors or arrays in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate


def slicing(dataset: Any, collate_fn: Any) -> Callable[[Any], Any] | None:
    """Return a function that makes a batch of a list of indices; None if indexing does not suffice.

    The result is what torch's default_collate gives for the single samples, bit for bit.
    """
    return _slicing(dataset) if collate_fn is default_collate else None


def _slicing(dataset: Any) -> Callable[[Any], Any] | None:
    if type(dataset) is Subset:
        inner, chosen = _slicing(dataset.dataset), dataset.indices
        if inner is None:
            return None
        return lambda index: inner([chosen[one] for one in index])
    if type(dataset) is TensorDataset and dataset.tensors:
        tensors = dataset.tensors
        if all(map(_is_plain, tensors)):
            # A list, since default_collate turns tuples into lists.
            return lambda index: _pick(tensors, index)
    if _is_plain(dataset) and dataset.dim() > 0:
        return lambda index: _pick((dataset,), index)[0]
    if type(dataset) is np.ndarray and dataset.ndim > 1 and dataset.dtype.kind in "biufc":
        return _slicing(torch.from_numpy(dataset)) if dataset.flags.writeable else None
    return None


def _pick(tensors: tuple[torch.Tensor, ...], index: Any) -> list[torch.Tensor]:
    rows = torch.as_tensor(index, dtype=torch.int64)
    try:
        return [torch.index_select(tensor, 0, rows) for tensor in tensors]
    except IndexError:  # index_select does not accept negative indices, but is five times as fast
        return [tensor[rows] for tensor in tensors]


def _is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
        and not value.is_nested
        and not value.is_quantized
    )
