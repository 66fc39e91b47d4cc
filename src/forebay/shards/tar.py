"""Tars, as WebDataset writes and reads them: members of one sample follow each other.

    dir/0001.jpg  dir/0001.cls  dir/0002.jpg  …
    └── key ──┘ └ extension

The key of a member is its name up to the first dot of the last part; the rest, in lower case, is
its extension. Consecutive members with one key are a sample. Members that are no files, and those
without an extension, are left out; so are names with two underscores before and behind, which are
metadata. A sample is read from its own stretch of the tar, headers and all.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from forebay.errors import InputError
from forebay.shards.format import (
    BlockDecoder,
    FoundBlocks,
    ShardFile,
    ShardFormat,
    blocks_of,
)

_RECORD = 512
_ZEROS = bytes(_RECORD)
# The most bytes of a name or of PAX records: a header that says more is damaged.
_MOST_HEADER = 1 << 20
_named = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)").fullmatch
_is_metadata = re.compile(r"__[^/]*__(?:/|$)").match
_FILES, _WITHOUT_DATA = b"0\x007", b"123456"
_CHECKSUM = slice(148, 156)
# Of a header: the name, the digits of the size, the type, and the first byte of the name's prefix.
_HEADER = struct.Struct("100s 24x 12s 20x c 188x c 166x")
# Records of PAX that say where a member is, or what it is called.
_matters = re.compile(rb"path=|size=|GNU\.sparse\.").search
_ANY = "surrogateescape"


class _Member(NamedTuple):
    """A file in a tar: where its headers begin, and where its content is."""

    name: str
    begin: int
    offset: int
    size: int


class TarShards(ShardFormat):
    """Tars; a sample is a dict of `__key__` and the content of its members, as bytes."""

    name = "tar"
    suffixes = (".tar",)

    def matches(self, head: bytes) -> bool:
        """See `ShardFormat`."""
        return head[257:262] == b"ustar"

    def find(self, shard: ShardFile) -> FoundBlocks:
        """See `ShardFormat`."""
        begins: list[int] = []
        end, key, seen = 0, None, set[str]()
        try:
            for member in _members(shard.read(0, shard.size), is_checked=True):
                end = member.offset + _padded(member.size)
                if (named := _key_of(member.name)) is None:
                    continue
                if named[0] != key:
                    begins.append(member.begin)
                    key, seen = named[0], set()
                if named[1] in seen:
                    raise ValueError(
                        f"at byte {member.begin:,}: sample {key!r} has {named[1]!r} twice"
                    )
                seen.add(named[1])
        except ValueError as error:
            raise InputError(
                f"{shard.name} cannot be read as a tar: {error}\n  Write it again; or leave it out."
            ) from error
        return blocks_of(begins, min(end, shard.size))

    def decoder(self, info: bytes, columns: Sequence[str] | None) -> BlockDecoder:
        """See `ShardFormat`."""
        return _TarSamples()


class _TarSamples(BlockDecoder):
    def sample(self, data: memoryview) -> Any:
        """See `BlockDecoder`."""
        if (usual := _usual(data)) is not None:
            return usual
        found: dict[str, Any] = {}
        for member in _members(data, is_checked=False):
            if (named := _key_of(member.name)) is not None:
                found.setdefault("__key__", named[0])
                found[named[1]] = bytes(data[member.offset : member.offset + member.size])
        return found


def _usual(data: memoryview) -> dict[str, Any] | None:
    """Return a sample whose members have short names and plain headers, as nearly all have.

    This takes a fifth of the time of what follows every rule; None where a rule is needed.
    """
    found: dict[str, Any] = {}
    at, start, end = 0, b"", len(data)
    while at < end:
        begin = at + _RECORD
        if begin > end:
            return None
        field, digits, kind, prefix = _HEADER.unpack_from(data, at)
        if not digits[:11].isdigit() or digits[11] > ord(" "):
            return None
        if (stop := begin + int(digits[:11], 8)) > end:
            return None
        at = begin + (stop - begin + _RECORD - 1) // _RECORD * _RECORD
        if kind == b"x":  # WebDataset writes one for a time that has fractions of a second
            if _matters(data[begin:stop]):
                return None
            continue
        name = field.partition(b"\0")[0]
        if kind != b"0" or prefix != b"\0":
            return None
        if not start:
            slash = name.rfind(b"/") + 1
            dot = name.find(b".", slash)
            if dot <= slash or name.startswith(b"__") or b"\n" in name:
                return None
            start, found["__key__"] = name[: dot + 1], name[:dot].decode("utf-8", _ANY)
        extension = name[len(start) :]
        if not name.startswith(start) or b"/" in extension:
            return None
        found[extension.decode("utf-8", _ANY).lower()] = data[begin:stop].tobytes()
    return found if start else None


def _key_of(name: str) -> tuple[str, str] | None:
    """Return key and extension of a member; None if it belongs to no sample."""
    found = None if _is_metadata(name) else _named(name)
    return None if found is None else (found[1], found[2].lower())


def _members(data: memoryview, *, is_checked: bool) -> Iterator[_Member]:
    """Yield the files of a tar, or of a stretch of one; ValueError says where it is damaged."""
    at, begin, longer = 0, 0, dict[str, str]()
    while at < len(data):
        header = bytes(data[at : at + _RECORD])
        if header == _ZEROS:
            return
        if len(header) < _RECORD:
            raise ValueError(f"at byte {at:,}: it ends within a header")
        if is_checked:
            _check_sum(header, at)
        kind, size, offset = header[156:157], _number(header[124:136], at), at + _RECORD
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
                yield _Member(name, begin, offset, size)
            longer = {}
        at = offset + _padded(size)
        if kind not in b"xgLK":
            begin = at


def _check_sum(header: bytes, at: int) -> None:
    plain = sum(header) - sum(header[_CHECKSUM]) + 8 * ord(" ")
    said = _number(header[_CHECKSUM], at)
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


def _padded(size: int) -> int:
    return -(-size // _RECORD) * _RECORD
