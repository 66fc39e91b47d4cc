"""The blocks that a fetcher fetches: where they are in a bucket, and what becomes of them.

`CacheSource` is that of a cache; shards that others wrote have one, too.
"""

from __future__ import annotations

import json
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any
from zlib import crc32

import numpy.typing as npt

from forebay.base.output_names import PRIVATE
from forebay.base.process import memory_file_of
from forebay.base.store_errors import BROKEN, MISSING, REFUSED, THROTTLED, store_advice
from forebay.caching.arrow_messages import decompressed
from forebay.caching.fetch_policy import WRONG, GivenUp, Unit
from forebay.caching.layout import BLOCKS, DAMAGES, INDEX, Blocks, shard_name
from forebay.caching.stores import BucketError, ObjectStore
from forebay.errors import ChangedError, ForebayError, InputError, shortened, shown_location

# Reads several small objects at once.
ReadAll = Callable[[Sequence[str]], Sequence[bytes]]


class BlockSource(ABC):
    """What a fetcher has to know of the blocks that it fetches.

    Attributes:
        url: Of the folder of their objects.
        samples: How many there are.
        first: The first sample of each block.
        lengths: Bytes of each block as they are fetched, and kept on disk.
        most_bytes: About what the largest has in memory.
        identity: What differs for other blocks: files of these are not used.
        descriptors: Of what readers need.
        has_checksums: Whether each block's checksum is known before it is fetched.
    """

    url: str
    samples: int
    first: npt.NDArray[Any]
    lengths: npt.NDArray[Any]
    most_bytes: int
    identity: str
    descriptors: Sequence[int] = ()
    has_checksums = True
    is_as_fetched = True  # whether blocks are in memory as they are fetched

    @abstractmethod
    def units(self, block: int) -> list[Unit]:
        """Return what to fetch of a block; the key of a single unit is the block."""

    @abstractmethod
    def name_of(self, number: int) -> str:
        """Return the name of an object."""

    @abstractmethod
    def checksum(self, block: int) -> int | None:
        """Return the CRC-32 of a block's bytes; None if it is not known."""

    def tag(self, number: int) -> str | None:
        """Return the ETag that an object must have; None if it is not known."""
        return None

    def tag_now(self, number: int) -> str:
        """Return the ETag of an object where answers do not say it; raise BucketError."""
        return ""

    def joined(self, block: int, parts: Sequence[memoryview]) -> memoryview:
        """Return the bytes of a block, given those of its units, which may have more."""
        return parts[0]

    def fill(self, block: int, data: memoryview, view: memoryview) -> int | memoryview:
        """Return a block as it is read, or write it into memory and return its bytes.

        Raises:
            BucketError: It cannot be read as what it is.
        """
        return data

    @abstractmethod
    def error_of(self, lost: GivenUp, bucket: ObjectStore) -> ForebayError:
        """Return the error for a unit that does not come."""


class CacheSource(BlockSource):
    """The blocks of a cache in a bucket."""

    def __init__(self, url: str, read_all: ReadAll) -> None:
        """Read its index."""
        self.url = url
        self._index_bytes, blocks = read_all((INDEX, BLOCKS))
        # Written once for all readers: of a large cache, it has tens of megabytes.
        self.descriptors = (
            memory_file_of("index", self._index_bytes),
            memory_file_of("blocks", blocks),
        )
        del blocks
        try:  # readers look at the rest of the index, and say more
            index = json.loads(self._index_bytes)
            samples, per_shard = (int(index["plan"][name]) for name in ("samples", "per_shard"))
            known = int(index["blocks"]["count"]), int(index["blocks"]["crc32"])
            sizes, compression = [*map(int, index["sizes"])], index["plan"]["compression"]
            data = memoryview(mmap.mmap(self.descriptors[1], 0, access=mmap.ACCESS_READ))
            self._blocks = Blocks(data, samples, per_shard, sizes, known, compression)
        except DAMAGES as error:
            raise InputError(
                f"{shown_location(url)}/{PRIVATE}: the index of the cache is damaged: "
                f"{shortened(error)}\n  Call forebay.cache with the same dataset and URL."
            ) from error
        self.samples, self._per_shard, self._compression = samples, per_shard, compression
        self.first, self.lengths = self._blocks.first, self._blocks.length
        self.is_as_fetched = compression is None
        self.most_bytes = int(self._blocks.nbytes.max())
        self.identity = f"{crc32(self._index_bytes):08x}{crc32(data):08x}"

    def units(self, block: int) -> list[Unit]:
        """See `BlockSource`."""
        place = int(self.first[block]) // self._per_shard, int(self._blocks.offset[block])
        return [Unit(block, *place, int(self.lengths[block]))]

    def name_of(self, number: int) -> str:
        """See `BlockSource`."""
        return shard_name(number)

    def checksum(self, block: int) -> int:
        """See `BlockSource`."""
        return int(self._blocks.crc32[block])

    def fill(self, block: int, data: memoryview, view: memoryview) -> int | memoryview:
        """See `BlockSource`: blocks are decompressed for all who read them."""
        if self._compression is None:
            return super().fill(block, data, view)
        try:
            return decompressed(data, self._schemas[self.units(block)[0].shard], self._compression)
        except ValueError as error:  # its checksum is that of the index: no other bytes will come
            raise BucketError(REFUSED, str(error)) from error

    @cached_property
    def _schemas(self) -> list[Any]:
        """The types of the columns of each shard: what is not compressed needs none."""
        from forebay.base.value_types import schema_of
        from forebay.caching.index import Index

        layouts = Index.from_json(self._index_bytes, shown_location(self.url)).layouts
        return [schema_of(each.names, each.specs) for each in layouts]

    def error_of(self, lost: GivenUp, bucket: ObjectStore) -> ForebayError:
        """See `BlockSource`."""
        unit, kind = lost.unit, lost.kind
        where = f"{shown_location(self.url)}/{shard_name(unit.shard)}"
        span = span_of(unit)
        if kind in (WRONG, MISSING):
            with suppress(BucketError):
                if bucket.read(INDEX) != self._index_bytes:
                    return ChangedError(
                        f"{where}: the cache was written anew while it was read\n"
                        "  Samples of both would mix, so nothing more was read. Open it again, and "
                        "begin the epoch anew."
                    )
        if kind == MISSING and _is_there(bucket, shard_name(unit.shard)):
            return ChangedError(
                f"{where}: the object ends before {span}, and was longer when it was written\n"
                "  Nothing more was read. If the cache is being written anew, open it again after "
                "that; otherwise remove the object and call forebay.cache again, with the same "
                "dataset and URL: it writes that shard again."
            )
        if kind == WRONG:
            assert isinstance(unit.key, int)  # a part of a block has no checksum
            return InputError(
                f"{where}: {span} have the checksum {lost.message} instead of "
                f"{self.checksum(unit.key):08x}\n"
                "  They arrived like this twice, so the object is damaged. Remove it and call "
                "forebay.cache again, with the same dataset and URL: it writes that shard again."
            )
        again = (
            "Call forebay.cache again, with the same dataset and URL: it writes what is missing."
        )
        return refused_by_bucket(f"{where}, {span}", kind, lost.message, again)


def span_of(unit: Unit) -> str:
    """Return in words which bytes of an object a unit is."""
    return f"bytes {unit.offset:,} to {unit.offset + unit.length - 1:,}"


def _is_there(bucket: ObjectStore, name: str) -> bool:
    with suppress(BucketError):
        return bool(bucket.read(name, 0, 1))
    return False


def refused_by_bucket(where: str, kind: str, words: str, if_missing: str = "") -> InputError:
    """Return the error for what a bucket does not give."""
    known = {
        MISSING: if_missing,
        THROTTLED: "Lower the number of nodes that read, or keep more of it on disk: disk=.",
    }
    otherwise = known.get(kind) or "Check the bucket; then make the same call again."
    advice = store_advice(BucketError(kind, words), otherwise)
    what = "it cannot be read" if kind in (BROKEN, REFUSED) else kind
    return InputError(f"{where}: {what}: {words}\n  {advice}")
