"""What a Parquet footer says of its chunks, and their pages of themselves, in Thrift's bytes.

A few bytes of a page can stand for gigabytes, and the footer need not say so. Both are in the
compact protocol. pyarrow ends the process for some footers that are damaged, once their columns are
looked at in Python; so that is done here, before anything is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Field types of the compact protocol.
_TRUE, _FALSE, _BYTE, I64, _DOUBLE, _BINARY, LIST, _SET, STRUCT = 1, 2, 3, 6, 7, 8, 9, 10, 12
# From here on, a byte of a number is not its last; a list as long as this says its length behind.
_MORE, _LONG = 128, 15
# Of a page header, which of its fields are what; and of a data page, where its encoding is.
_DATA, _DICTIONARY, _DATA_2 = 5, 7, 8
_DELTA_BYTE_ARRAY = 7
# Of a footer: its schema, and of an element of it: whether it may repeat, name, number of parts.
_SCHEMA, _REPETITION, _NAME, _PARTS, _REPEATED = 2, 3, 4, 5, 2
# Of a footer: its row groups; of those: chunks, bytes, rows; of a chunk: another file, metadata,
# where the index of its pages is; of metadata: bytes, and where pages begin.
_GROUPS, _CHUNKS, _GROUP_BYTES, _GROUP_ROWS, _FILE, _META = 4, 1, 2, 3, 1, 3
_INDEX, _INDEX_BYTES = 4, 5
_STORED, _PAGES, _DICTIONARY_PAGE = 7, 9, 11
_MOST_DEPTH = 16


class RowGroup(NamedTuple):
    """What a footer says of a row group.

    Attributes:
        chunks: Offset and length of each column's chunk.
        indexes: The same of the index of its pages; zeros if it has none.
    """

    rows: int
    nbytes: int
    chunks: list[tuple[int, int]]
    indexes: list[tuple[int, int]]


def row_groups(footer: bytes) -> Iterator[RowGroup]:
    """Yield the row groups of a footer; ValueError if it is damaged."""
    try:
        count, kind, at = _list(footer, _place(footer, _GROUPS))
        for _ in range(count):
            group, at = _value(footer, at, kind, 0, is_field=False)
            yield _row_group(group)
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError("its metadata has no end, or lacks sizes") from error


def schema_bytes(footer: bytes) -> bytes:
    """Return the bytes of the schema in a footer."""
    begin = _place(footer, _SCHEMA)
    _, end = _value(footer, begin, LIST, 0, is_field=True)
    return footer[begin:end]


def schema_elements(schema: bytes) -> Iterator[tuple[str, int, bool]]:
    """Yield of each element of a schema its name, how many parts it has, and if it may repeat."""
    for each in elements(schema):
        fields = raw_fields(each, 0)[0]
        size, begin = varint(fields[_NAME][1], 0)
        parts, repetition = (
            _integer(fields[at][1], 0)[0] if at in fields else 0 for at in (_PARTS, _REPETITION)
        )
        yield str(fields[_NAME][1][begin : begin + size], "utf-8"), parts, repetition == _REPEATED


def _place(footer: bytes, wanted: int) -> int:
    """Return where a field of a footer begins."""
    at = field = 0
    while head := footer[at]:
        field, at = field + (head >> 4), at + 1
        if field == wanted:
            return at
        _, at = _value(footer, at, head & 15, 0, is_field=True)
    raise LookupError(f"no field {wanted}")


def _row_group(group: dict[int, Any]) -> RowGroup:
    chunks, indexes = [], []
    for chunk in group.get(_CHUNKS, ()):
        meta = chunk[_META]
        if chunk.get(_FILE):
            raise ValueError("columns that are in another file")
        begin, before = meta[_PAGES], meta.get(_DICTIONARY_PAGE, 0)
        chunks.append((before if 0 < before < begin else begin, meta[_STORED]))
        indexes.append((chunk.get(_INDEX) or 0, chunk.get(_INDEX_BYTES) or 0))
    return RowGroup(group[_GROUP_ROWS], group[_GROUP_BYTES], chunks, indexes)


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


class Page(NamedTuple):
    """A page, by its header.

    Attributes:
        size: Its bytes, with the header.
        nbytes: Its bytes, decompressed.
        values: How many values it holds; None for a dictionary or an index.
        rows: How many rows these are, if it says that.
        is_repeatable: Whether one of its values may be given again and again.
    """

    size: int
    nbytes: int
    values: int | None
    rows: int | None
    is_repeatable: bool


def page_at(data: memoryview, at: int = 0) -> Page:
    """Return the page whose header begins there; IndexError if that has more than these bytes."""
    header, end = _struct(data, at, 0)
    nbytes, stored = header.get(2, -1), header.get(3, -1)
    page = header.get(_DATA) or header.get(_DATA_2)
    values, rows = page and page.get(1, 0), page.get(3) if page and _DATA_2 in header else None
    sizes = nbytes, stored, values or 0, rows or 0
    if not all(isinstance(each, int) and each >= 0 for each in sizes):
        raise ValueError("a page without a size, or a number of values")
    encoding = page and page.get(2 if _DATA in header else 4)
    is_repeatable = _DICTIONARY in header or encoding == _DELTA_BYTE_ARRAY
    return Page(end - at + stored, nbytes, values, rows, is_repeatable)


def page_locations(index: bytes) -> list[tuple[int, int, int]]:
    """Return offset, size and first row of each data page, as an offset index has them."""
    found = _struct(index, 0, 0)[0]
    return [(each[1], each[2], each[3]) for each in found.get(1, ())]


def claims_of(chunk: memoryview) -> Claims:
    """Return what the pages of a column chunk claim; ValueError if they are not within it."""
    at = nbytes = values = repeatable = 0
    while (left := len(chunk) - at) > 0:
        try:
            page = page_at(chunk, at)
        except IndexError as error:
            raise ValueError("a page header that has no end") from error
        if page.size > left:
            raise ValueError(f"a page of {page.size:,} bytes, {left:,} bytes before an end")
        at, nbytes, values = at + page.size, nbytes + page.nbytes, values + (page.values or 0)
        repeatable = max(repeatable, page.nbytes * page.is_repeatable)
    return Claims(nbytes, values, repeatable)


def _struct(data: bytes | memoryview, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct by number, and where it ends: of strings their lengths."""
    if depth > _MOST_DEPTH:
        raise ValueError("metadata that is nested too deeply")
    found: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _integer(data, at)
        kind = head & 15
        if not _BYTE < kind < _DOUBLE:
            found[field], at = _value(data, at, kind, depth, is_field=True)
        elif (byte := data[at]) < _MORE:  # most are small numbers
            found[field], at = (byte >> 1) ^ -(byte & 1), at + 1
        else:
            found[field], at = _integer(data, at)
    return found, at + 1


def _value(
    data: bytes | memoryview, at: int, kind: int, depth: int, *, is_field: bool
) -> tuple[Any, int]:
    if _BYTE < kind < _DOUBLE:
        return _integer(data, at)
    if kind == STRUCT:
        return _struct(data, at, depth + 1)
    if kind == _BINARY:
        size, at = varint(data, at)
        return size, at + size
    if kind in (_TRUE, _FALSE):
        return None, at if is_field else at + 1
    if kind == _BYTE:
        return None, at + 1
    if kind == _DOUBLE:
        return None, at + 8
    if kind not in (LIST, _SET):  # neither headers nor footers have maps
        raise ValueError("no metadata of Parquet")
    count, kind, at = _list(data, at)
    found = []
    for _ in range(count):
        each, at = _value(data, at, kind, depth + 1, is_field=False)
        found.append(each)
    return found, at


def _list(data: bytes | memoryview, at: int) -> tuple[int, int, int]:
    """Return how many elements a list has, their type, and where they begin."""
    head = data[at]
    count, at = head >> 4, at + 1
    if count == _LONG:
        count, at = varint(data, at)
    if count > len(data) - at:  # each takes a byte
        raise ValueError(f"a list of {count:,} in {len(data) - at:,} bytes")
    return count, head & 15, at


def varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, and where it ends; IndexError if that is not there."""
    found = shift = 0
    while (byte := data[at]) >= _MORE:
        found |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
    return found | byte << shift, at + 1


def _integer(data: bytes | memoryview, at: int) -> tuple[int, int]:
    found, at = varint(data, at)
    return (found >> 1) ^ -(found & 1), at


# ---- parts as they are, and written --------------------------------------------------------------


def raw_fields(data: bytes, at: int) -> tuple[dict[int, tuple[int, bytes]], int]:
    """Return type and bytes of each field of a struct, and where it ends."""
    found: dict[int, tuple[int, bytes]] = {}
    field = 0
    while head := data[at]:
        field, at = (field + (head >> 4), at + 1) if head >> 4 else _integer(data, at + 1)
        _, end = _value(data, at, head & 15, 0, is_field=True)
        found[field], at = (head & 15, data[at:end]), end
    return found, at + 1


def elements(data: bytes) -> Iterator[bytes]:
    """Yield the bytes of each element of a list."""
    count, kind, at = _list(data, 0)
    for _ in range(count):
        _, end = _value(data, at, kind, 0, is_field=False)
        yield data[at:end]
        at = end


def struct_of(fields: Sequence[tuple[int, int, bytes]]) -> bytes:
    """Return a struct of fields: number, type and bytes of each, in order."""
    out, last = bytearray(), 0
    for field, kind, data in fields:
        out += bytes([(field - last) << 4 | kind]) + data
        last = field
    return bytes(out + b"\0")


def list_of(structs: Sequence[bytes]) -> bytes:
    """Return a list of structs."""
    short = len(structs) < _LONG
    head = bytes([(len(structs) if short else _LONG) << 4 | STRUCT])
    return head + (b"" if short else _varint(len(structs))) + b"".join(structs)


def number(value: int) -> bytes:
    """Return a number that is not negative."""
    return _varint(2 * value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= _MORE:
        out.append(value & 127 | _MORE)
        value >>= 7
    return bytes([*out, value])
