"""Decompress a shard that is compressed as a whole, and no more of it than can be true."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

# What a shard may have, decompressed: so many times its own bytes, or so much; and never more than
# the last.
MOST_RATIO, LEAST_BYTES, MOST_BYTES = 100, 64 << 20, 4_000_000_000
_STEP_BYTES = 4 << 20
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def codec_by_head(head: bytes) -> str | None:
    """Return how a file is compressed, by its first bytes."""
    return next((codec for magic, codec in _MAGIC.items() if head.startswith(magic)), None)


def decompressed_stream(data: memoryview, codec: str) -> memoryview:
    """Return the content of a shard; ValueError if it is damaged, or too large."""
    parts, total = list[bytes](), 0
    try:
        for part in _streamed(data, codec):
            total += len(part)
            _check(total, len(data))
            parts.append(part)
    except (OSError, IndexError, pa.ArrowException, zlib.error) as error:
        raise ValueError(f"it cannot be decompressed as {codec}: {error}") from error
    found = np.empty(total, np.uint8)
    at = 0
    for part in parts:
        found[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return found.data


def _streamed(data: memoryview, codec: str) -> Iterator[bytes]:
    stream = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), codec)
    while part := stream.read(_STEP_BYTES):
        yield part


def _check(total: int, size: int) -> None:
    most = min(max(MOST_RATIO * size, LEAST_BYTES), MOST_BYTES)
    if total > most:
        raise ValueError(
            f"it decompresses to more than {most:,} bytes: a shard of {size:,} bytes may have "
            f"{MOST_RATIO} times as many, at least {LEAST_BYTES:,} and at most {MOST_BYTES:,}; "
            "decompress it first, or divide it"
        )
