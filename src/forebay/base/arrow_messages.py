"""Arrow's messages as bytes: where their parts are, without Arrow.

A message is a FlatBuffers table: each field is found by an offset, which may lead anywhere in the
bytes at hand; what is outside of them raises `struct.error`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

# Which message it is.
SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3
# Where FlatBuffers has a field: offsets of the tables `Message`, `DictionaryBatch` and
# `RecordBatch` of Arrow's formats, and the bytes of a `Buffer`.
_KIND, _HEADER, _BODY, _CUSTOM = 1, 2, 3, 4
_ID, _DATA, _IS_DELTA = 0, 1, 2
_ROWS, _BUFFERS, _COMPRESSION = 0, 2, 3
_BUFFER_BYTES = 16
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
    table = target_at(data, start + (8 if number_at(data, "i", start) == _CONTINUED else 4))
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


def decompressed_sizes(data: memoryview, message: ArrowMessage) -> Iterator[int]:
    """Yield how many bytes each compressed buffer of a record batch says it becomes."""
    body = len(data) - message.body
    if not (at := field_at(data, message.batch, _BUFFERS)):
        return
    buffers = target_at(data, at)
    for each in range(number_at(data, "I", buffers)):
        start, length = struct.unpack_from("<qq", data, buffers + 4 + each * _BUFFER_BYTES)
        if not 0 <= start <= message.body - length <= message.body:
            raise ValueError("a buffer that is outside of its message")
        if length >= 8:
            yield max(number_at(data, "q", body + start), length)


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


def _value(data: memoryview, table: int, index: int, form: str) -> int:
    """Return a number of a table; 0, which is not stored, if the table does not have it."""
    at = field_at(data, table, index)
    return number_at(data, form, at) if at else 0
