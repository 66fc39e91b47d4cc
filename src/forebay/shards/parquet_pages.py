"""What the pages of a Parquet column chunk claim to hold, before they are decompressed.

A few bytes of a page can stand for gigabytes, and the footer need not say so. Page headers are in
Thrift's compact protocol: of each the few numbers that matter are read, the rest is passed over.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Field types of the compact protocol.
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = *range(4), *range(7, 13)
# Of a page header, which of its fields are what; and of a data page, where its encoding is.
_DATA, _DICTIONARY, _DATA_2 = 5, 7, 8
_DELTA_BYTE_ARRAY = 7
_MOST_DEPTH = 16


class Claims(NamedTuple):
    """What the pages of a column chunk claim.

    Attributes:
        nbytes: Their bytes, decompressed.
        values: How many values they hold; of lists, each counts.
        repeatable: Bytes of the largest page of which one value may be given again and again.
    """

    nbytes: int
    values: int
    repeatable: int


def claims_of(chunk: memoryview) -> Claims:
    """Return what the pages of a column chunk claim; ValueError if they are not within it."""
    at = nbytes = values = repeatable = 0
    while at < len(chunk):
        header, at = _struct(chunk, at, 0)
        size, stored = header.get(2), header.get(3)
        if not (isinstance(size, int) and isinstance(stored, int) and size >= 0 and stored >= 0):
            raise ValueError("a page without a size")
        if stored > len(chunk) - at:
            raise ValueError(f"a page of {stored:,} bytes, {len(chunk) - at:,} bytes before an end")
        at, nbytes = at + stored, nbytes + size
        page = header.get(_DATA) or header.get(_DATA_2) or {}
        encoding = page.get(2 if _DATA in header else 4)
        values += page.get(1, 0)
        if _DICTIONARY in header or encoding == _DELTA_BYTE_ARRAY:
            repeatable = max(repeatable, size)
        if page.get(1, 0) < 0:
            raise ValueError("a page without a number of values")
    return Claims(nbytes, values, repeatable)


def _struct(data: memoryview, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Return the numbers and structs of a struct by field, and where it ends."""
    if depth > _MOST_DEPTH:
        raise ValueError("a page header that is nested too deeply")
    found: dict[int, Any] = {}
    field = 0
    while True:
        head, at = _byte(data, at)
        if head == _STOP:
            return found, at
        kind = head & 15
        if head >> 4:
            field += head >> 4
        else:
            field, at = _integer(data, at)
        found[field], at = _value(data, at, kind, depth, is_field=True)


def _value(data: memoryview, at: int, kind: int, depth: int, *, is_field: bool) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return None, at if is_field else at + 1
    if kind == _BYTE:
        return None, at + 1
    if kind < _DOUBLE:
        return _integer(data, at)
    if kind == _DOUBLE:
        return None, at + 8
    if kind == _BINARY:
        size, at = _varint(data, at)
        return None, at + size
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)
    if kind not in (_LIST, _SET):  # no page header has maps
        raise ValueError("no page header")
    head, at = _byte(data, at)
    size = head >> 4
    if size == 15:
        size, at = _varint(data, at)
    for _ in range(size):
        _, at = _value(data, at, head & 15, depth + 1, is_field=False)
        if at > len(data):
            raise ValueError("a page header that has no end")
    return None, at


def _byte(data: memoryview, at: int) -> tuple[int, int]:
    if at >= len(data):
        raise ValueError("a page header that has no end")
    return data[at], at + 1


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte, at = _byte(data, at)
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
        if shift > 63:
            raise ValueError("a page header with a number of more than 64 bits")


def _integer(data: memoryview, at: int) -> tuple[int, int]:
    found, at = _varint(data, at)
    return (found >> 1) ^ -(found & 1), at
