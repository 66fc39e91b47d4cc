"""Arrow's messages as bytes: where they are, what they have, and what they claim to become.

A message is a FlatBuffers table: each field is found by an offset, which may lead anywhere in the
bytes at hand; what is outside of them raises `struct.error`. Arrow compresses each buffer by
itself, behind its size, and decompresses whatever claims to be compressed: so the claims are added
up first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from forebay.caching.layout import MOST_MEMORY_BYTES, MOST_TIMES

if TYPE_CHECKING:
    import pyarrow as pa

# Which message it is.
SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3
# Where FlatBuffers has a field: offsets of the tables `Footer`, `Message`, `Schema`,
# `DictionaryBatch` and `RecordBatch` of Arrow's formats; and the bytes of a `Block`, which begins
# with an offset, and of a `Buffer`.
_DICTIONARIES, _BATCHES = 2, 3
_KIND, _HEADER, _BODY, _CUSTOM = 1, 2, 3, 4
_ENDIANNESS = 0
_ID, _DATA, _IS_DELTA = 0, 1, 2
_ROWS, _BUFFERS, _COMPRESSION = 0, 2, 3
_BLOCK_BYTES, _BUFFER_BYTES = 24, 16
# Before a message, where it is as Arrow has it since version 0.15.
_CONTINUED = -1


class ArrowMessage(NamedTuple):
    """One message of a stream.

    Attributes:
        kind: SCHEMA, DICTIONARY, RECORD_BATCH or another number.
        body: Bytes of its body.
        batch: Where its table `RecordBatch` is; 0 if it has none.
        rows: How many rows that says it has.
        is_compressed: Whether its buffers are compressed.
        dictionary: The number of the dictionary that it has.
        is_delta: Whether it adds to that.
        is_big_endian: Whether it is the schema of numbers that begin with their largest byte.
    """

    kind: int
    body: int
    batch: int
    rows: int
    is_compressed: bool
    dictionary: int
    is_delta: bool
    is_big_endian: bool


def prefix_of(data: memoryview) -> tuple[int, int]:
    """Return the bytes before a message, and those of its metadata: 0 at the end of a stream."""
    length = _number_at(data, "i", 0)
    return (8, _number_at(data, "i", 4)) if length == _CONTINUED else (4, length)


def read_message(data: memoryview, start: int = 0) -> ArrowMessage:
    """Return what a message is, given its bytes or those of its metadata."""
    before = 8 if _number_at(data, "i", start) == _CONTINUED else 4
    table = _target_at(data, start + before)
    kind = _value(data, table, _KIND, "B")
    header = _target_at(data, _field_at(data, table, _HEADER))
    batch = number = is_delta = is_big_endian = 0
    if kind == DICTIONARY:
        number, is_delta = _value(data, header, _ID, "q"), _value(data, header, _IS_DELTA, "B")
        batch = _target_at(data, _field_at(data, header, _DATA))
    elif kind == RECORD_BATCH:
        batch = header
    elif kind == SCHEMA:
        is_big_endian = _value(data, header, _ENDIANNESS, "h")
    # As Arrow has it, and as Arrow 0.17 had it.
    is_compressed = batch and (
        _field_at(data, batch, _COMPRESSION) or _field_at(data, table, _CUSTOM)
    )
    body, rows = _value(data, table, _BODY, "q"), _value(data, batch, _ROWS, "q") if batch else 0
    flags = bool(is_delta), bool(is_big_endian)
    return ArrowMessage(kind, body, batch, rows, bool(is_compressed), number, *flags)


def claimed_bytes(head: memoryview, body: memoryview, batch: int) -> int:
    """Return how many bytes a compressed record batch says it becomes.

    Args:
        head: Its metadata, with what is before.
        body: What follows.
        batch: As `ArrowMessage` has it.
    """
    total = 0
    for start, length in _buffer_places(head, batch):
        if not 0 <= start <= len(body) - length <= len(body):
            raise ValueError("a buffer that is outside of its message")
        total += max(_number_at(body, "q", start), length) if length >= 8 else 0
    return total


def _buffer_places(data: memoryview, batch: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each buffer, as the metadata has them."""
    if at := _field_at(data, batch, _BUFFERS):
        first = _target_at(data, at) + 4
        count = _number_at(data, "I", first - 4)
        for place in range(first, first + count * _BUFFER_BYTES, _BUFFER_BYTES):
            start, length = struct.unpack_from("<qq", data, place)
            yield start, length


def _number_at(data: memoryview, form: str, at: int) -> int:
    """Return a number, in the form that `struct` names."""
    return int(struct.unpack_from(f"<{form}", data, at)[0])


def _target_at(data: memoryview, at: int) -> int:
    """Return where an offset leads."""
    return at + _number_at(data, "I", at)


def _field_at(data: memoryview, table: int, index: int) -> int:
    """Return where a field of a table is; 0 if the table does not have it."""
    fields, at = table - _number_at(data, "i", table), 4 + 2 * index
    is_there = at < _number_at(data, "H", fields)
    offset = _number_at(data, "H", fields + at) if is_there else 0
    return offset and table + offset


def _value(data: memoryview, table: int, index: int, form: str) -> int:
    """Return a number of a table; 0, which is not stored, if the table does not have it."""
    at = _field_at(data, table, index)
    return _number_at(data, form, at) if at else 0


# ---- record batches of a cache -------------------------------------------------------------------


def record_batches(data: memoryview, *, is_compressed: bool) -> list[tuple[int, int]]:
    """Return offset and length of each record batch of a file.

    Raises:
        ValueError: One is compressed, or is not, against what it should be.
    """
    end = len(data) - 10  # its length, and "ARROW1"
    footer = _target_at(data, end - _number_at(data, "i", end))
    dictionaries = _field_at(data, footer, _DICTIONARIES)
    if dictionaries and _number_at(data, "I", _target_at(data, dictionaries)):
        raise ValueError("it has dictionaries")
    blocks, found = _target_at(data, _field_at(data, footer, _BATCHES)), []
    for block in range(_number_at(data, "I", blocks)):
        start, metadata, body = struct.unpack_from(
            "<qi4xq", data, blocks + 4 + block * _BLOCK_BYTES
        )
        check_compression(data, start, is_compressed=is_compressed)
        found.append((start, metadata + body))
    return found


def check_compression(data: memoryview, start: int = 0, *, is_compressed: bool) -> None:
    """Raise ValueError if a record batch is compressed, or is not, against what it should be."""
    if read_message(data, start).is_compressed != is_compressed:
        are = "are not" if is_compressed else "are"
        raise ValueError(f"its columns {are} compressed, against what the index says")


def decompressed(data: memoryview, schema: pa.Schema, compression: str) -> memoryview:
    """Return a compressed record batch as one without compression, as bytes.

    Raises:
        ValueError: It is not compressed, or claims more than its codec can make of its bytes.
    """
    import pyarrow as pa  # a fetcher of what is not compressed does without

    try:
        check_compression(data, is_compressed=True)
        begin = sum(prefix_of(data))
        claimed = claimed_bytes(data[:begin], data[begin:], read_message(data).batch)
        if claimed > min(len(data) * MOST_TIMES[compression], MOST_MEMORY_BYTES):
            raise ValueError(f"a block of {len(data):,} bytes cannot become {claimed:,}")
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
        return memoryview(batch.serialize()).cast("B")
    except (struct.error, OSError, IndexError, pa.ArrowException) as error:
        raise ValueError(f"its columns cannot be decompressed: {error}") from error
