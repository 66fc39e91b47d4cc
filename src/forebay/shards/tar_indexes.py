"""Indexes that other tools leave beside a tar: a tar in a bucket need not be read to find samples.

    train-000.tar.idx   of Megatron Energon: where each sample begins, and where the last one ends
    train-000.idx       of DALI and torchdata: a line for each sample, with its files

A few samples are read and compared; all others are when they are used, since a sample that has no
files, or those of two keys, is an error. The index of wids says how many samples there are, but not
where, so it saves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forebay.errors import shortened
from forebay.shards.format import FoundBlocks, ShardFile, blocks_of, warn_of_shard
from forebay.shards.tar_members import RECORD, check_sum, key_and_extension, members_of, padded

_VERSIONS = {b"v1.0": 3, b"v1.1": 3, b"v1.2": 4}  # words for each file
# How many samples are compared, and the most that is read of one.
_COMPARED, _MOST_BYTES = 4, 4 << 20

# Where each sample begins, its files if they are known, and where the last one ends.
_Samples = tuple[Sequence[int], Sequence[set[str]] | None, int]


def blocks_by_index(shard: ShardFile, beside: Callable[[str], bytes | None]) -> FoundBlocks | None:
    """Return the blocks of a tar by an index beside it; None if there is none that agrees."""
    name = shard.name.rpartition("/")[2]
    for other, read in ((f"{name}.idx", _of_energon), (f"{name.partition('.')[0]}.idx", _of_dali)):
        if (data := beside(other)) is None:
            continue
        try:
            begins, files, end = read(data)
            _compare(shard, begins, files, end)
        except (ValueError, OverflowError) as error:
            warn_of_shard(
                shard.name,
                f"{other} does not agree with it, and is not used: {shortened(error)}\n  The whole "
                "tar is read instead. Write its index again, or remove that.",
            )
            continue
        return blocks_of(begins, end)
    return None


def _of_energon(data: bytes) -> _Samples:
    if len(data) % 8 or len(data) < 16:
        raise ValueError(f"{len(data):,} bytes are no offsets")
    places = np.frombuffer(data, "<u8").tolist()
    return places[:-1], None, places[-1]


def _of_dali(data: bytes) -> _Samples:
    head, *lines = [*filter(None, data.split(b"\n"))] or [b""]
    version, _, count = head.partition(b" ")
    if version not in _VERSIONS or not count.isdigit():
        raise ValueError("it does not begin as an index")
    each, begins, files, end = _VERSIONS[version], list[int](), list[set[str]](), 0
    for line in lines:
        words = line.split(b" ")
        if len(words) % each:
            raise ValueError(f"the line {shortened(line)}")
        found, begin = set[str](), end
        for at in range(0, len(words), each):
            known = words[at + 3] if each == 4 else b"key." + words[at]
            name = known.decode("utf-8", "surrogateescape")
            offset, size = int(words[at + 1]), int(words[at + 2])
            if offset < end + RECORD or offset % RECORD or size < 0:
                raise ValueError(f"{name!r} is at byte {offset:,}, behind {end:,}")
            end = offset + padded(size)
            if (named := key_and_extension(name)) is not None:
                found.add(named[1])
        if found:  # others are no samples: what lies before one belongs to it
            begins.append(begin)
            files.append(found)
    if len(lines) != int(count):
        raise ValueError(f"{len(lines):,} samples instead of {int(count):,}")
    return begins, files, end


def _compare(
    shard: ShardFile, begins: Sequence[int], files: Sequence[set[str]] | None, end: int
) -> None:
    """Raise ValueError unless some of the samples are where an index has them."""
    places = np.array([*begins, end], np.int64)
    if not len(begins) or places[0] < 0 or (np.diff(places) < RECORD).any():
        raise ValueError("samples that are not behind each other")
    if (places % RECORD).any() or end > shard.size:
        raise ValueError(f"a sample that ends at byte {end:,} of {shard.size:,}")
    if end + RECORD <= shard.size and any(shard.read(end, RECORD)):
        raise ValueError(f"at byte {end:,}, there is more")
    before = None
    for at in np.unique(np.linspace(0, len(begins) - 1, _COMPARED, dtype=np.int64)).tolist():
        begin, length = int(places[at]), int(places[at + 1] - places[at])
        if length > _MOST_BYTES:
            check_sum(bytes(shard.read(begin, RECORD)), begin)
            continue
        named = [
            key_and_extension(each.name)
            for each in members_of(shard.read(begin, length), is_checked=True)
        ]
        keys = {each[0] for each in named if each is not None}
        found = {each[1] for each in named if each is not None}
        if len(keys) != 1 or keys == before or (files and files[at] != found):
            raise ValueError(f"at byte {begin:,}, there is no such sample")
        before = keys
