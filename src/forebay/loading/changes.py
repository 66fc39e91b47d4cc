"""Detect changes made to a sampler or dataset after batches were planned.

    fingerprint(sampler)       attributes, by value or identity
    dataset_content(dataset)   what it reaches by attributes and items, by value where that is small

With a buffer, epochs are planned and made before they begin. What was made of a sampler or a
dataset that the user has changed since is dropped. No code of the user runs: a `__len__` may have
side effects. After a change that cannot be detected (an item of a long list, a large array modified
in place, a file), the user calls `DataLoader.refresh`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from forebay.base.batches import tensor_bytes
from forebay.base.generator_search import attributes_of, generator_kinds, variables_around
from forebay.base.torch_internals import version_of
from forebay.loading.samplers import length_of

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))
# Containers with more items, and data of more bytes, count by identity and size.
FEW_ITEMS, FEW_BYTES = 100, 4096
# How many values of a dataset are compared.
MOST_VALUES = 20_000


def fingerprint(thing: Any, ignored: frozenset[str] = frozenset()) -> Any:
    """Return a value that differs once the attributes of an object have changed."""
    known = {
        name: _token(value)
        for name, value in list(getattr(thing, "__dict__", {}).items())
        if name not in ignored and not isinstance(value, torch.Generator)
    }
    return id(thing), length_of(thing), known


def _token(value: Any) -> Any:
    if isinstance(value, _BY_VALUE):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value), None if value.is_nested else tuple(value.shape)
    if isinstance(value, np.ndarray):
        return id(value), value.shape
    # MONAI's `Compose.__len__` seeds all random transforms.
    is_built_in = not isinstance(getattr(type(value), "__len__", None), FunctionType)
    return id(value), length_of(value) if is_built_in else None


def dataset_content(dataset: Any) -> list[Any]:
    """Return values that differ once a dataset, or what it holds, has changed.

    Its generators do not count: they change when the user draws.
    """
    found: list[Any] = [length_of(dataset)]
    known, waiting, generators = dict[int, Any](), deque([dataset]), generator_kinds()
    while waiting and len(found) < MOST_VALUES:
        value = waiting.popleft()
        kind = type(value)
        if kind in _BY_VALUE:
            is_long = kind in (str, bytes) and len(value) > FEW_BYTES
            found.append((id(value), len(value)) if is_long else value)
        elif issubclass(kind, generators):
            found.append(id(value))
        elif issubclass(kind, torch.Tensor | np.ndarray):
            found.append((_token(value), _small_data(value)))
        else:
            found.append(id(value))
            if id(value) not in known:
                known[id(value)] = value
                waiting.extend(_held(value, kind, found))
    return found


def _small_data(value: Any) -> bytes | None:
    """Return the data of a small tensor or array: another process may have written to it."""
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and value.device.type == "cpu"
        if not is_plain or value.is_nested or value.numel() * value.element_size() > FEW_BYTES:
            return None
        return bytes(tensor_bytes(value))
    return value.tobytes() if value.nbytes <= FEW_BYTES and not value.dtype.hasobject else None


def _held(value: Any, kind: type, found: list[Any]) -> Iterable[Any]:
    """Return what an object holds; add what says that it has changed."""
    if issubclass(kind, type | ModuleType):
        return ()
    if kind is FunctionType:
        return [*(each for _, each in variables_around(value)), *(value.__defaults__ or ())]
    if kind is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if kind is MethodType:
        return (value.__self__,)
    if kind.__module__ in ("ctypes", "array"):  # also in memory that processes share
        found.append(bytes(memoryview(value).cast("B")[:FEW_BYTES]))
    for base in (dict, list, tuple, deque, set, frozenset):
        if issubclass(kind, base):
            length = base.__len__(value)
            found.append(length)
            if length > FEW_ITEMS:
                return ()
            items = dict.items(value) if base is dict else base.__iter__(value)
            inside = [part for item in items for part in item] if base is dict else [*items]
            return inside if kind is base else [*inside, *attributes_of(value, kind).values()]
    return attributes_of(value, kind).values()
