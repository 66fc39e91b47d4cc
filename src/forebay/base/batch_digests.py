"""Batches that are small enough to keep and to send: digests in place of their tensors."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
import torch

from forebay.base.batches import MAX_DEPTH, mapped


def with_digests(batch: Any, depth: int = 0) -> Any:
    """Return a batch with strings in place of tensors, arrays, bytes, images and other objects.

    Two that are equal in types, shapes and bits have equal strings; numbers and strings stay.
    """
    return mapped(lambda leaf: _digested(leaf, depth), batch)


def _digested(leaf: Any, depth: int) -> Any:
    kind = type(leaf).__qualname__
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested:
            return [_digested(each, depth) for each in leaf.unbind()]
        whole = leaf.detach() if leaf.layout is torch.strided else leaf.detach().to_dense()
        data = whole.cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
        return f"{kind} {leaf.dtype} {[*leaf.shape]} {leaf.device.type} {_hash(data.numpy())}"
    if isinstance(leaf, np.ndarray | np.generic):
        if leaf.dtype.hasobject:
            return [kind, leaf.shape, with_digests(leaf.tolist(), depth)]
        return f"{kind} {leaf.dtype} {[*leaf.shape]} {_hash(leaf.tobytes())}"
    if isinstance(leaf, bytes | bytearray | memoryview):
        return f"{kind} {len(leaf)} {_hash(bytes(leaf))}"
    if hasattr(leaf, "tobytes"):  # an image
        return f"{kind} {getattr(leaf, 'size', '')} {_hash(leaf.tobytes())}"
    if leaf is None or getattr(type(leaf), "__eq__", None) != object.__eq__:
        return leaf
    state = {} if isinstance(leaf, type) else _attributes(leaf)
    if not state or depth >= MAX_DEPTH:
        return re.sub(r" at 0x[0-9a-f]+", "", repr(leaf))
    return {"class": kind, **with_digests(state, depth + 1)}


def _attributes(value: Any) -> dict[str, Any]:
    slots = (getattr(each, "__slots__", ()) for each in type(value).__mro__)
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
