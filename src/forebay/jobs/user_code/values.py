"""Reduce values to their parts, or to a hash, for a fingerprint."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import json
import os
import sys
from pathlib import PurePath
from typing import Any

PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, range)
HASH = "sha256:"
dumps = functools.partial(json.dumps, ensure_ascii=False, sort_keys=True)


def is_plain(value: object) -> bool:
    """Tell whether a value cannot change while it is used: a number, a string, a tuple of these."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


def type_name(value: object) -> str:
    """Return the full name of a value's type, such as "builtins.list"."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def state_of(value: Any) -> dict[str, Any]:
    """Return an object's state as pickle sees it: attributes, and other parts in parentheses."""
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - a lock, a file, a generator: it cannot be pickled
        return {}
    if isinstance(reduced, str):
        return {"(name)": reduced}
    make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    is_usual = make.__name__ in ("__newobj__", "__newobj_ex__")
    arguments = arguments[1:] if is_usual else (make, *arguments)
    parts = {"(arguments)": arguments, "(items)": items, "(pairs)": pairs}
    named = {name: list(part) for name, part in parts.items() if part}
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = {**(state[0] or {}), **state[1]}  # what __slots__ hold comes second
    if not isinstance(state, dict):
        state = {} if state is None else {"(state)": state}
    copied = functools.WRAPPER_ASSIGNMENTS  # by update_wrapper, and not the same in __main__
    return named | {str(name): part for name, part in state.items() if name not in copied}


def weights_of(value: Any) -> list[tuple[str, Any]]:
    """Return the named parameters and buffers of an nn.Module; [] for any other value."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return []
    return [*value.named_parameters(), *value.named_buffers()]


def hash_of_array(value: Any) -> Any:
    """Return the hash of a tensor's or an array's type, shape and bytes; None for all else."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            return None
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return sha256_of(f"{value.dtype} {tuple(value.shape)}".encode(), flat)
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    head = f"{value.dtype.descr} {value.shape}".encode()
    if value.dtype.hasobject:
        return [head.decode(), value.tolist()]
    if isinstance(value, numpy.memmap) and value.filename is not None:
        # Reading it might take hours; a file that is the same has the same content.
        status = os.stat(value.filename)
        where = f"{value.filename} {value.offset} {status.st_size} {status.st_mtime_ns}"
        return sha256_of(head, where.encode("utf-8", "surrogateescape"))
    return sha256_of(head, numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))


def sha256_of(*parts: Any) -> str:
    """Return "sha256:..." of the concatenated parts, which hold bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"{HASH}{digest.hexdigest()}"
