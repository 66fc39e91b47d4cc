"""A batch cut in two, where it can be told how."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def halves(batch: Any, count: int) -> tuple[Any, Any] | None:
    """Cut a batch of `count` samples after its first half.

    Args:
        batch: Tensors and arrays whose first dimension is the batch, lists of one item a sample,
            and dicts, lists, tuples and NamedTuples of these.
        count: How many samples it has, at least 2.

    Returns:
        Views of both halves; None if it cannot be told where to cut.
    """
    middle = count // 2
    try:
        return _cut(batch, count, slice(0, middle)), _cut(batch, count, slice(middle, count))
    except _UnknownError:
        return None


class _UnknownError(Exception):
    """There is no telling which samples a value is of."""


def _cut(value: Any, count: int, which: slice) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim == 0 or value.shape[0] != count:
            raise _UnknownError
        return value[which]
    if type(value) is dict:
        return {key: _cut(item, count, which) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(item, count, which) for item in value))
    if type(value) in (list, tuple):
        if all(isinstance(item, str | bytes | int | float) for item in value):
            if len(value) != count:
                raise _UnknownError
            return value[which]
        return type(value)(_cut(item, count, which) for item in value)
    raise _UnknownError
