"""Arrow's messages as bytes: where their parts are, and what compressed record batches become.

    compressed  metadata │ size, zstd │ size, zstd │ …
                    └─ decompress ──> metadata │ bytes │ bytes │ …

A message is a FlatBuffers table: each field is found by an offset, which may lead anywhere in the
bytes at hand; what is outside of them raises `struct.error`.

Arrow compresses each buffer by itself, behind its size, and would decompress whatever claims to be
compressed: a few bytes may become gigabytes. So forebay decompresses, after it has compared the
sizes with the index. What comes out is a record batch without compression, which is read like any
other.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from forebay.caching.layout import MOST_TIMES

# Which message it is.
SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3
# Where FlatBuffers has a field: offsets of the tables `Footer`, `Message`, `DictionaryBatch`,
# `RecordBatch` and `BodyCompression` of Arrow's formats; and the bytes of a `Block`, which begins
# with an offset, and of a `Buffer`.
_DICTIONARIES, _BATCHES = 2, 3
_KIND, _HEADER, _BODY, _CUSTOM = 1, 2, 3, 4
_ID, _DATA, _IS_DELTA = 0, 1, 2
_ROWS, _BUFFERS, _COMPRESSION, _CODEC = 0, 2, 3, 0
_BLOCK_BYTES, _BUFFER_BYTES = 24, 16
# Before a message, where it is as Arrow has it since version 0.15.
_CONTINUED = -1
# As Arrow numbers them.
_CODECS = {"lz4": 0, "zstd": 1}
# Where decompressed buffers begin; as Arrow recommends.
_ALIGNMENT = 64


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
    """

    kind: int
    body: int
    batch: int
    rows: int
    is_compressed: bool
    dictionary: int
    is_delta: bool


def prefix_of(data: memoryview) -> tuple[int, int]:
    """Return the bytes before a message, and those of its metadata: 0 at the end of a stream."""
    length = number_at(data, "i", 0)
    return (8, number_at(data, "i", 4)) if length == _CONTINUED else (4, length)


def read_message(data: memoryview, start: int = 0) -> ArrowMessage:
    """Return what a message is, given its bytes or those of its metadata."""
    table = _table_of(data, start)
    kind = _value(data, table, _KIND, "B")
    header = target_at(data, field_at(data, table, _HEADER))
    batch = number = is_delta = 0
    if kind == DICTIONARY:
        number, is_delta = _value(data, header, _ID, "q"), _value(data, header, _IS_DELTA, "B")
        batch = target_at(data, field_at(data, header, _DATA))
    elif kind == RECORD_BATCH:
        batch = header
    # As Arrow has it, and as Arrow 0.17 had it.
    is_compressed = batch and (
        field_at(data, batch, _COMPRESSION) or field_at(data, table, _CUSTOM)
    )
    body, rows = _value(data, table, _BODY, "q"), _value(data, batch, _ROWS, "q") if batch else 0
    return ArrowMessage(kind, body, batch, rows, bool(is_compressed), number, bool(is_delta))


def decompressed_sizes(head: memoryview, body: memoryview, batch: int) -> Iterator[int]:
    """Yield how many bytes each compressed buffer of a record batch says it becomes.

    Args:
        head: Its metadata, with what is before.
        body: What follows.
        batch: As `ArrowMessage` has it.
    """
    for _, start, length in _buffer_places(head, batch):
        if not 0 <= start <= len(body) - length <= len(body):
            raise ValueError("a buffer that is outside of its message")
        if length >= 8:
            yield max(number_at(body, "q", start), length)


def column_starts(head: memoryview, message: ArrowMessage, counts: Sequence[int]) -> list[int]:
    """Return where the buffers of each column of a record batch begin in its body, and its end.

    Args:
        head: Its metadata, with what is before.
        counts: How many buffers each column has.

    Raises:
        ValueError: They do not lie there one column after the other.
    """
    buffers, found, end = [*_buffer_places(head, message.batch)], [0], 0
    if len(buffers) != sum(counts):
        raise ValueError(f"{len(buffers):,} buffers instead of {sum(counts):,}")
    places = iter(buffers)
    for column, count in enumerate(counts):
        own = [(start, length) for _, start, length in islice(places, count) if length]
        begin = min(own, default=(end, 0))[0]
        if begin < end or any(length < 0 for _, length in own):
            raise ValueError("buffers that are not in the order of their columns")
        found += [begin] if column else []
        end = max(map(sum, own), default=end)
    if end > message.body:
        raise ValueError("a buffer that is outside of its message")
    return [*found, message.body]


def with_columns(
    head: memoryview, message: ArrowMessage, counts: Sequence[int], columns: Container[int]
) -> memoryview:
    """Return the metadata of a record batch whose body has the buffers of some columns only.

    Args:
        counts: As for `column_starts`, which raises if it cannot be.
        columns: Their numbers; the buffers of others become empty.
    """
    starts, found = column_starts(head, message, counts), bytearray(head)
    places, body = _buffer_places(head, message.batch), 0
    for column, count in enumerate(counts):
        is_there = column in columns
        for place, start, length in islice(places, count):
            moved = (body + start - starts[column], length) if is_there and length else (0, 0)
            struct.pack_into("<qq", found, place, *moved)
        body += (starts[column + 1] - starts[column]) * is_there
    struct.pack_into("<q", found, field_at(head, _table_of(head, 0), _BODY), body)
    return memoryview(found)


def _buffer_places(data: memoryview, batch: int) -> Iterator[tuple[int, int, int]]:
    """Yield of each buffer where the metadata says where it is, its offset and its length."""
    if at := field_at(data, batch, _BUFFERS):
        first = target_at(data, at) + 4
        end = first + number_at(data, "I", first - 4) * _BUFFER_BYTES
        for place in range(first, end, _BUFFER_BYTES):
            yield place, *struct.unpack_from("<qq", data, place)


def number_at(data: memoryview, form: str, at: int) -> int:
    """Return a number, in the form that `struct` names."""
    return int(struct.unpack_from(f"<{form}", data, at)[0])


def target_at(data: memoryview, at: int) -> int:
    """Return where an offset leads."""
    return at + number_at(data, "I", at)


def field_at(data: memoryview, table: int, index: int) -> int:
    """Return where a field of a table is; 0 if the table does not have it."""
    at = entry_at(data, table, index)
    offset = number_at(data, "H", at) if at else 0
    return offset and table + offset


def entry_at(data: memoryview, table: int, index: int) -> int:
    """Return where it is written where a field is; 0 if that is nowhere."""
    fields, at = table - number_at(data, "i", table), 4 + 2 * index
    return fields + at if at < number_at(data, "H", fields) else 0


def _table_of(data: memoryview, start: int) -> int:
    """Return where the table `Message` of a message is."""
    return target_at(data, start + (8 if number_at(data, "i", start) == _CONTINUED else 4))


def _value(data: memoryview, table: int, index: int, form: str) -> int:
    """Return a number of a table; 0, which is not stored, if the table does not have it."""
    at = field_at(data, table, index)
    return number_at(data, form, at) if at else 0


# ---- record batches ------------------------------------------------------------------------------


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
    import pyarrow as pa  # a fetcher of what is not compressed does without

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
        struct.pack_into("<q", into, field_at(into, message, _BODY), len(into) - head)
        struct.pack_into("<H", into, entry_at(into, batch, _COMPRESSION), 0)  # it has none now
    except (struct.error, OSError, IndexError) as error:
        raise ValueError(f"its columns cannot be decompressed: {error}") from error


def _buffers(data: memoryview, compression: str) -> Iterator[_Buffer]:
    """Yield the buffers that have bytes, once their sizes are checked."""
    start = _head_bytes(data)
    head, body = data[:start], data[start:]
    for place, offset, length in _buffer_places(head, _tables(data, 0)[1]):
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
    if number_at(data, "i", 0) != _CONTINUED or not 8 < size <= len(data):
        raise ValueError("its metadata lies outside of its block")
    return size


def _tables(data: memoryview, start: int) -> tuple[int, int]:
    """Return where the tables `Message` and `RecordBatch` of a record batch are."""
    message = _table_of(data, start)
    return message, target_at(data, field_at(data, message, _HEADER))
