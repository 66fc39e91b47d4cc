"""The files of a tar: where they are, and their names, also those of PAX and GNU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

RECORD = 512
_ZEROS = bytes(RECORD)
# The most bytes of a name or of PAX records: a header that says more is damaged.
_MOST_HEADER = 1 << 20
_named = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)").fullmatch
_is_metadata = re.compile(r"__[^/]*__(?:/|$)").match
_FILES, _WITHOUT_DATA = b"0\x007", b"123456"
_CHECKSUM = slice(148, 156)


class Member(NamedTuple):
    """A file in a tar: where its headers begin, and where its content is."""

    name: str
    begin: int
    offset: int
    size: int


def key_and_extension(name: str) -> tuple[str, str] | None:
    """Return key and extension of a member; None if it belongs to no sample."""
    found = None if _is_metadata(name) else _named(name)
    return None if found is None else (found[1], found[2].lower())


def members_of(data: memoryview, *, is_checked: bool) -> Iterator[Member]:
    """Yield the files of a tar, or of a stretch of one; ValueError says where it is damaged."""
    at, begin, longer = 0, 0, dict[str, str]()
    while at < len(data):
        header = bytes(data[at : at + RECORD])
        if header == _ZEROS:
            return
        if len(header) < RECORD:
            raise ValueError(f"at byte {at:,}: it ends within a header")
        if is_checked:
            check_sum(header, at)
        kind, size, offset = header[156:157], _number(header[124:136], at), at + RECORD
        if kind not in b"xgLK" and longer.get("size", "").isdecimal():
            size = int(longer["size"])
        if kind in _WITHOUT_DATA:
            size = 0
        if not 0 <= size <= len(data) - offset:
            raise ValueError(
                f"at byte {at:,}: a member of {size:,} bytes does not fit into the rest"
            )
        if kind in b"xgLK":
            if size > _MOST_HEADER:
                raise ValueError(f"at byte {at:,}: a header of {size:,} bytes")
            content = bytes(data[offset : offset + size])
            found = _pax(content, at) if kind in b"xg" else {"path": _text(content)}
            if kind == b"g" and found.keys() & {"path", "size"}:
                raise ValueError(f"at byte {at:,}: a global header renames members")
            longer |= found if kind in b"xL" else {}
        else:
            if kind == b"S" or any(each.startswith("GNU.sparse.") for each in longer):
                raise ValueError(
                    f"at byte {at:,}: a sparse member, of which holes are not stored; write the "
                    "tar without --sparse"
                )
            name = longer.get("path")
            name = _name(header) if name is None else name
            if kind in _FILES and not (kind == b"\0" and name.endswith("/")):
                yield Member(name, begin, offset, size)
            longer = {}
        at = offset + padded(size)
        if kind not in b"xgLK":
            begin = at


def check_sum(header: bytes, at: int) -> None:
    """Raise ValueError unless some bytes are the header of a member."""
    plain = sum(header) - sum(header[_CHECKSUM]) + 8 * ord(" ")
    try:
        said = _number(header[_CHECKSUM], at)
    except ValueError:
        said = -1
    if said != plain:
        signed = plain - 256 * sum(each > 127 for each in header)
        if said != signed + 256 * sum(each > 127 for each in header[_CHECKSUM]):
            raise ValueError(f"at byte {at:,}: there is no header of a member, or a damaged one")


def _number(field: bytes, at: int) -> int:
    if field[0] & 0x80:  # as GNU writes what is too large for octal digits
        return int.from_bytes(field[1:], "big") | (field[0] & 0x7F) << 8 * len(field[1:])
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        raise ValueError(f"at byte {at:,}: {field!r} is no number") from None


def _name(header: bytes) -> str:
    prefix, name = _text(header[345:500]), _text(header[:100])
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(data: bytes, at: int) -> dict[str, str]:
    """Return the records of a PAX header: each its own length, a key and a value."""
    found, position = {}, 0
    while position < len(data) and data[position]:
        digits, _, _ = data[position : position + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = data[position + len(digits) + 1 : position + length]
        key, equals, value = record.partition(b"=")
        if length <= len(digits) or not equals or not value.endswith(b"\n"):
            raise ValueError(f"at byte {at:,}: a damaged PAX header")
        found[key.decode("utf-8", "replace")] = value[:-1].decode("utf-8", "surrogateescape")
        position += length
    return found


def padded(size: int) -> int:
    """Return how many bytes of a tar content of a size takes."""
    return -(-size // RECORD) * RECORD
