"""Record batches as they lie in Arrow's files: where they are, and whether they are compressed.

    compressed  metadata │ size, zstd │ size, zstd │ …
                    └─ decompress ──> metadata │ bytes │ bytes │ …

Arrow compresses each buffer by itself, behind its size, and would decompress whatever claims to be
compressed: a few bytes may become gigabytes. So forebay decompresses, after it has compared the
sizes with the index. What comes out is a record batch without compression, which is read like any
other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from forebay.base.arrow_messages import entry_at, field_at, number_at, target_at
from forebay.caching.layout import MOST_TIMES

# As Arrow numbers them.
_CODECS = {"lz4": 0, "zstd": 1}
# Where FlatBuffers has a field: the offsets of the tables `Footer`, `Message`, `RecordBatch` and
# `BodyCompression` of Arrow's file format, and the bytes of a `Block`, which begins with an offset,
# and of a `Buffer`.
_DICTIONARIES, _BATCHES, _HEADER, _BODY_LENGTH, _CUSTOM = 2, 3, 2, 3, 4
_ROWS, _BUFFERS, _COMPRESSION, _CODEC = 0, 2, 3, 0
_BLOCK_BYTES, _BUFFER_BYTES = 24, 16
# Where decompressed buffers begin; as Arrow recommends.
_ALIGNMENT = 64


def record_batches(data: memoryview, compression: str | None = None) -> list[tuple[int, int]]:
    """Return offset and length of each record batch of a file.

    Raises:
        ValueError: One is not compressed as it should be.
    """
    end = len(data) - 10  # its length, and "ARROW1"
    footer = target_at(data, end - number_at(data, "i", end))
    if (at := field_at(data, footer, _DICTIONARIES)) and number_at(data, "I", target_at(data, at)):
        raise ValueError("it has dictionaries")
    blocks, found = target_at(data, field_at(data, footer, _BATCHES)), []
    for block in range(number_at(data, "I", blocks)):
        start, metadata, body = struct.unpack_from(
            "<qi4xq", data, blocks + 4 + block * _BLOCK_BYTES
        )
        check_compression(data, compression, start)
        found.append((start, metadata + body))
    return found


def check_compression(data: memoryview, compression: str | None, start: int = 0) -> None:
    """Raise ValueError if a record batch is not compressed as it should be.

    Args:
        compression: "zstd", "lz4", or None for a record batch that is not compressed.
        start: Where it begins.
    """
    message, batch = _tables(data, start)
    at = field_at(data, batch, _COMPRESSION)
    if field_at(data, message, _CUSTOM):  # as Arrow 0.17 had it
        raise ValueError("its columns are compressed")
    if compression is None:
        if at:
            raise ValueError("its columns are compressed, and the index says that they are not")
        return
    if not at:
        raise ValueError(f"its columns are not compressed, and the index says {compression!r}")
    codec = field_at(data, target_at(data, at), _CODEC)
    if (number_at(data, "b", codec) if codec else 0) != _CODECS[compression]:
        raise ValueError(f"its columns are compressed, but not with {compression!r}")


def rows_of(data: memoryview, start: int = 0) -> int:
    """Return how many rows a record batch says that it has."""
    at = field_at(data, _tables(data, start)[1], _ROWS)
    return number_at(data, "q", at) if at else 0


class _Buffer(NamedTuple):
    """A buffer of a compressed record batch.

    Attributes:
        place: Where the metadata says where it is.
        data: Its bytes.
        start: Where it begins in the decompressed record batch.
        size: Bytes that it has there.
        is_plain: Whether it is not compressed, since that would not make it smaller.
    """

    place: int
    data: memoryview
    start: int
    size: int
    is_plain: bool


def decompressed_bytes(data: memoryview, compression: str) -> int:
    """Return how many bytes a compressed record batch says that it has when it is decompressed."""
    head, end = _head_bytes(data), 0
    for buffer in _buffers(data, compression):
        end = buffer.start + buffer.size
    return max(head, end)


def decompress(data: memoryview, compression: str, into: memoryview) -> None:
    """Decompress a record batch.

    Args:
        into: Where to; as long as the index says, which is checked before anything is written.

    Raises:
        ValueError: The record batch is not compressed like that, or has another size.
    """
    try:
        check_compression(data, compression)
        found = decompressed_bytes(data, compression)
        if found != len(into):
            raise ValueError(f"its columns have {found:,} bytes instead of {len(into):,}")
        head = _head_bytes(data)
        into[:head] = data[:head]
        for buffer in _buffers(data, compression):
            part = into[buffer.start : buffer.start + buffer.size]
            struct.pack_into("<qq", into, buffer.place, buffer.start - head, buffer.size)
            if buffer.is_plain:
                part[:] = buffer.data
                continue
            with pa.CompressedInputStream(pa.BufferReader(buffer.data), compression) as stream:
                if stream.readinto(part) != buffer.size:
                    raise ValueError("a buffer has fewer bytes than it says")
        message, batch = _tables(into, 0)
        struct.pack_into("<q", into, field_at(into, message, _BODY_LENGTH), len(into) - head)
        struct.pack_into("<H", into, entry_at(into, batch, _COMPRESSION), 0)  # it has none now
    except (struct.error, OSError, IndexError) as error:
        raise ValueError(f"its columns cannot be decompressed: {error}") from error


def _buffers(data: memoryview, compression: str) -> Iterator[_Buffer]:
    """Yield the buffers that have bytes, once their sizes are checked."""
    start = _head_bytes(data)
    body, batch = data[start:], _tables(data, 0)[1]
    at = field_at(data, batch, _BUFFERS)
    first = target_at(data, at) + 4
    if not at or first + number_at(data, "I", first - 4) * _BUFFER_BYTES > start:
        raise ValueError("its buffers are not in its metadata")
    for place in range(
        first, first + number_at(data, "I", first - 4) * _BUFFER_BYTES, _BUFFER_BYTES
    ):
        offset, length = struct.unpack_from("<qq", data, place)
        if not length:
            continue
        if offset < 0 or length < 8 or offset + length > len(body):
            raise ValueError("a buffer lies outside of its block")
        size, inner = number_at(body, "q", offset), body[offset + 8 : offset + length]
        is_plain = size == -1
        if is_plain:
            size = len(inner)
        elif not 0 <= size <= len(inner) * MOST_TIMES[compression]:
            raise ValueError(
                f"a buffer of {length:,} bytes cannot become {size:,}: {compression} makes of a "
                f"byte at most {MOST_TIMES[compression]:,}"
            )
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
        yield _Buffer(place, inner, start, size, is_plain)
        start += size


def _head_bytes(data: memoryview) -> int:
    """Return how many bytes the metadata of a record batch has, with its length before it."""
    size = 8 + number_at(data, "i", 4)
    if number_at(data, "i", 0) != -1 or not 8 < size <= len(data):
        raise ValueError("its metadata lies outside of its block")
    return size


def _tables(data: memoryview, start: int) -> tuple[int, int]:
    """Return where the tables `Message` and `RecordBatch` of a record batch are."""
    message = target_at(data, start + (8 if number_at(data, "i", start) == -1 else 4))
    return message, target_at(data, field_at(data, message, _HEADER))
