"""Tars, as WebDataset writes and reads them: members of one sample follow each other.

    dir/0001.jpg  dir/0001.cls  dir/0002.jpg  …
    └── key ──┘ └ extension

The key of a member is its name up to the first dot of the last part; the rest, in lower case, is
its extension. Consecutive members with one key are a sample; where others lie between them, each
part is one, with a warning. Members that are no files, and those without an extension, are left
out; so are names with two underscores before and behind, which are metadata. A sample is read from
its own stretch of the tar, headers and all.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from forebay.errors import InputError
from forebay.shards.format import (
    BlockDecoder,
    FoundBlocks,
    ShardFile,
    ShardFormat,
    blocks_of,
    warn_of_shard,
)
from forebay.shards.tar_members import RECORD, key_and_extension, members_of, padded

# Of a header: the name, the digits of the size, the type, and the first byte of the name's prefix.
_HEADER = struct.Struct("100s 24x 12s 20x c 188x c 166x")
# Records of PAX that say where a member is, or what it is called.
_matters = re.compile(rb"path=|size=|GNU\.sparse\.").search
_ANY = "surrogateescape"


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
        known, divided = dict[str, frozenset[str]](), list[str]()
        try:
            for member in members_of(shard.read(0, shard.size), is_checked=True):
                end = member.offset + padded(member.size)
                if (named := key_and_extension(member.name)) is None:
                    continue
                if named[0] != key:
                    begins.append(member.begin)
                    _note_divided(known, divided, key, seen)
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
        _note_divided(known, divided, key, seen)
        if divided:
            warn_of_shard(
                shard.name,
                f"other files lie between those of sample {divided[0]!r}, and of "
                f"{len(divided) - 1:,} more\n  Each part counts as a sample, as in WebDataset. "
                "Write the tar in the order of its names: tar --sort=name.",
            )
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
        for member in members_of(data, is_checked=False):
            if (named := key_and_extension(member.name)) is not None:
                if found.setdefault("__key__", named[0]) != named[0]:
                    raise ValueError(f"it has the files of {found['__key__']!r} and {named[0]!r}")
                found[named[1]] = bytes(data[member.offset : member.offset + member.size])
        if not found:
            raise ValueError("it has no file")
        return found


def _usual(data: memoryview) -> dict[str, Any] | None:
    """Return a sample whose members have short names and plain headers, as nearly all have.

    This takes a fifth of the time of what follows every rule; None where a rule is needed.
    """
    found: dict[str, Any] = {}
    at, start, end = 0, b"", len(data)
    while at < end:
        begin = at + RECORD
        if begin > end:
            return None
        field, digits, kind, prefix = _HEADER.unpack_from(data, at)
        if not digits[:11].isdigit() or digits[11] > ord(" "):
            return None
        if (stop := begin + int(digits[:11], 8)) > end:
            return None
        at = begin + (stop - begin + RECORD - 1) // RECORD * RECORD
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


@lru_cache(1024)
def _same(extensions: frozenset[str]) -> frozenset[str]:
    return extensions  # most samples have the same ones, of which one set is kept


def _note_divided(
    known: dict[str, frozenset[str]], divided: list[str], key: str | None, seen: set[str]
) -> None:
    """Note a sample that ends if it was there before with other files: one that lies in parts."""
    own = _same(frozenset(seen))
    if key is not None and known.setdefault(key, own).isdisjoint(own):
        divided.append(key)
