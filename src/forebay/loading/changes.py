"""Detect changes made to a sampler or dataset after batches were planned.

With a buffer, epochs are planned before they begin. Such a plan depends on a sampler's weights or
the length of a dataset, and is dropped when those change. The comparison is shallow: attributes by
value or identity, tensors also by their version, built-in containers also by their length. No code
of an attribute's own class runs: a `__len__` may have side effects. After a change that it cannot
detect (an array modified in place, an attribute of an attribute), the user calls
`DataLoader.refresh`.
"""

from __future__ import annotations

from collections.abc import Sized
from types import FunctionType
from typing import Any

import numpy as np
import torch

from forebay.torch_internals import version_of

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))


def attributes(thing: Any) -> dict[str, Any]:
    """Return a comparable value for each attribute of an object, by name.

    Generators are left out, since drawing from them changes them.
    """
    known = getattr(thing, "__dict__", {})
    return {
        name: _token(value)
        for name, value in list(known.items())
        if not isinstance(value, torch.Generator)
    }


def fingerprint(thing: Any, ignored: frozenset[str] = frozenset()) -> Any:
    """Return a value that differs once the object has changed.

    Args:
        thing: A sampler or a dataset.
        ignored: Attributes that may change.
    """
    known = {name: token for name, token in attributes(thing).items() if name not in ignored}
    return id(thing), _length(thing), known


def _token(value: Any) -> Any:
    if isinstance(value, _BY_VALUE):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value), None if value.is_nested else tuple(value.shape)
    if isinstance(value, np.ndarray):
        return id(value), value.shape
    # MONAI's `Compose.__len__` seeds all random transforms.
    is_built_in = not isinstance(getattr(type(value), "__len__", None), FunctionType)
    return id(value), _length(value) if is_built_in else None


def _length(thing: Any) -> int | None:
    if not isinstance(thing, Sized):
        return None
    try:
        return len(thing)
    except Exception:  # noqa: BLE001 - the user's class may raise anything; it has no length then
        return None
