"""Find the blocks of a shard, local or in a bucket: what the index says of it."""

from __future__ import annotations

import mmap
import os
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from forebay.base.files import location_in, open_regular
from forebay.base.store_errors import store_advice
from forebay.caching.stores import BucketError, ObjectStore
from forebay.errors import InputError, shortened, shown_location
from forebay.shards.compression import codec_by_head, decompressed_stream
from forebay.shards.format import (
    HEAD_BYTES,
    FoundBlocks,
    ShardFile,
    format_by_head,
    format_by_suffix,
    format_named,
    most_rows,
)
from forebay.shards.index import IndexedShard
from forebay.shards.location import Listed, codec_of

# Requests of one shard at a time, their bytes, and the least bytes that are read of a bucket.
_THREADS, _PART_BYTES, _LEAST_BYTES = 8, 8 << 20, 64 << 10


def index_shard(
    root: str, listed: Listed, form: str | None, store: ObjectStore | None
) -> IndexedShard:
    """Return where the blocks of a shard are.

    Args:
        root: The folder of all shards.
        form: The name of its format; None to find it.
        store: Reads the folder if it is a URL's.

    Raises:
        InputError: The shard cannot be read as what it is; says where it is damaged.
    """
    where = shown_location(location_in(root, listed.name))
    codec, plain = codec_of(listed.name)
    known = format_named(form) if form is not None else format_by_suffix(plain)
    if store is not None and known is not None and codec is None and not known.reads_all:
        found = _checked(known.find(_InBucket(store, listed, where)), listed.size, where)
        return IndexedShard(listed, known.name, "", found, None)
    if not listed.size and codec is None and known is not None and known.may_be_empty:
        found = _checked(known.find(_InMemory(memoryview(b""), where)), 0, where)
        return IndexedShard(listed, known.name, "", found, None)
    with _local(root, listed, store, where) as data:
        codec = codec or codec_by_head(bytes(data[:HEAD_BYTES]))
        try:
            content = data if codec is None else decompressed_stream(data, codec)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from error
        known = known or format_by_head(bytes(content[:HEAD_BYTES]))
        if known is None:
            raise InputError(
                f"{where}: its format is not known by its name, nor by its first bytes\n"
                "  Name it: format=."
            )
        found = _checked(known.find(_InMemory(content, where)), len(content), where)
        crc32 = None
        if codec is not None:
            found = _whole(found, len(data), len(content), where)
        if store is not None or codec is not None:
            crc32 = _checksums(data, found)
        return IndexedShard(listed, known.name, codec or "", found, crc32)


def _checked(found: FoundBlocks, size: int, where: str) -> FoundBlocks:
    """Return what a format found, if it can be: a format may be anybody's."""
    rows, extents, blocks = found.rows, found.extents, len(found.rows)
    is_wrong = (
        (rows < 1).any()
        or not np.array_equal(np.unique(extents[:, 0]), np.arange(blocks))
        or (np.diff(extents[:, 0]) < 0).any()
        or (
            (extents[:, 1] < 0) | (extents[:, 2] < 0) | (extents[:, 1] > size - extents[:, 2])
        ).any()
    )
    if is_wrong:
        raise InputError(f"{where}: its blocks are said to be where they cannot be")
    sizes = np.bincount(extents[:, 0], extents[:, 2], blocks)
    if (rows > most_rows(np.maximum(sizes, 0 if found.nbytes is None else found.nbytes))).any():
        raise InputError(
            f"{where}: a block of it has {rows.max():,} samples, more than its bytes can hold\n"
            "  It is damaged, or has hardly any values: write it again, in smaller blocks."
        )
    return found


def _whole(found: FoundBlocks, size: int, nbytes: int, where: str) -> FoundBlocks:
    """Return the blocks of a compressed shard as one, whose bytes are all of the shard."""
    if not len(found.rows):
        return found._replace(extents=np.empty((0, 3), np.int64))
    starts, total = found.starts, int(found.rows.sum())
    if starts is None:
        raise InputError(
            f"{where}: shards of its format are read in parts, and it is compressed as a whole\n"
            "  Decompress it; such files compress their columns themselves."
        )
    starts = starts + np.repeat(found.extents[:, 1], found.rows)
    return FoundBlocks(
        np.array([total]), np.array([[0, 0, size]]), found.info, starts, np.array([nbytes])
    )


def _checksums(data: memoryview, found: FoundBlocks) -> npt.NDArray[np.int64]:
    sums = np.zeros(len(found.rows), np.int64)
    for block, offset, length in found.extents.tolist():
        sums[block] = zlib.crc32(data[offset : offset + length], int(sums[block]))
    return sums


class _InMemory(ShardFile):
    def __init__(self, data: memoryview, name: str) -> None:
        self._data, self.name, self.size = data, name, len(data)

    def read(self, offset: int, length: int) -> memoryview:
        """See `ShardFile`."""
        _check_within(self, offset, length)
        return self._data[offset : offset + length]


class _InBucket(ShardFile):
    """Reads parts of an object, at least some kilobytes, which are kept."""

    def __init__(self, store: ObjectStore, listed: Listed, name: str) -> None:
        self._store, self._key, self.name, self.size = store, listed.name, name, listed.size
        self._begin, self._data = 0, memoryview(b"")

    def read(self, offset: int, length: int) -> memoryview:
        """See `ShardFile`."""
        _check_within(self, offset, length)
        at = offset - self._begin
        if at < 0 or at + length > len(self._data):
            # What a footer says is before it, and what a header says is behind.
            begin, end = offset, min(offset + max(length, _LEAST_BYTES), self.size)
            if offset + length == self.size:
                begin = max(min(offset, self.size - _LEAST_BYTES), 0)
            self._data = _part_of(self._store, self._key, begin, end - begin, self.name)
            self._begin, at = begin, offset - begin
        return self._data[at : at + length]


def _check_within(shard: ShardFile, offset: int, length: int) -> None:
    if not 0 <= offset <= offset + length <= shard.size:
        raise InputError(
            f"{shard.name}: bytes {offset:,} to {offset + length:,} are named in it, and it has "
            f"{shard.size:,}\n  It is truncated, or damaged."
        )


@contextmanager
def _local(
    root: str, listed: Listed, store: ObjectStore | None, where: str
) -> Iterator[memoryview]:
    """Yield the content of a shard, mapped: of one in a bucket, of a temporary file."""
    if not listed.size:
        raise InputError(f"{where} is empty\n  Write it again; or leave it out.")
    if store is None:
        with _mapped(os.path.join(root, listed.name), where) as data:
            if len(data) != listed.size:
                raise InputError(f"{where} was changed while it was read")
            yield data
        return
    with tempfile.TemporaryFile(prefix="forebay-") as file:
        os.posix_fallocate(file.fileno(), 0, listed.size)
        view = memoryview(mmap.mmap(file.fileno(), listed.size))

    def fetch(begin: int) -> None:
        length = min(_PART_BYTES, listed.size - begin)
        view[begin : begin + length] = _part_of(store, listed.name, begin, length, where)

    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(fetch, range(0, listed.size, _PART_BYTES)):
            pass
    yield view.toreadonly()


@contextmanager
def _mapped(path: str, where: str) -> Iterator[memoryview]:
    try:
        with open_regular(path) as file:
            mapped = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise InputError(f"{where} cannot be read: {shortened(error)}") from error
    yield mapped.data


def _part_of(store: ObjectStore, name: str, offset: int, length: int, where: str) -> memoryview:
    """Return bytes of an object; raise InputError."""
    try:
        return store.read(name, offset, length)
    except BucketError as error:
        advice = store_advice(error, "Check the bucket; then make the same call again.")
        raise InputError(f"{where} cannot be read: {error}\n  {advice}") from error
