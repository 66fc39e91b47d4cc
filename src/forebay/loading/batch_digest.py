"""A number that depends on a batch: do two readings of a stream give the same?

All of what is small counts, and a part of what is large, so that it takes microseconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from forebay.base.batches import tensor_bytes

# Of a batch, so many values are looked at, and so many numbers of each array or bytes.
MOST_VALUES, MOST_NUMBERS = 64, 64


def stream_digest(batch: Any) -> int:
    """Return 32 bits that depend on a batch, the same in each process."""
    found, todo, left = 0, [batch], MOST_VALUES
    while todo and left:
        value, left = todo.pop(), left - 1
        if isinstance(value, Mapping):
            todo.extend(list(value.items())[:left])
        elif isinstance(value, list | tuple):
            todo.extend(value[:left])
        else:
            for part in _bytes_of(value):
                found = zlib.crc32(part, found)
    return found


def _bytes_of(value: Any) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        yield repr((value.dtype, value.is_nested or tuple(value.shape))).encode()
        if value.layout is torch.strided and not value.is_nested and value.numel():
            flat = value.detach().reshape(-1)
            yield tensor_bytes(flat[:: max(len(flat) // MOST_NUMBERS, 1)]).tobytes()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield repr((value.dtype, value.shape)).encode()
        yield value.reshape(-1)[:: max(value.size // MOST_NUMBERS, 1)].tobytes()
    elif isinstance(value, bytes | bytearray | str):
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        yield b"%d" % len(text)
        yield text[:: max(len(text) // MOST_NUMBERS, 1)]
    elif isinstance(value, bool | int | float | complex | np.generic):
        yield repr(value).encode()
