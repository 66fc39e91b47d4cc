"""Shards in a bucket: what the fetcher has to know of their blocks.

It decodes, or decompresses, a block once for all processes that it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from forebay.base.files import connect_url
from forebay.base.store_errors import MISSING, REFUSED
from forebay.caching.block_source import BlockSource, refused_by_bucket, span_of
from forebay.caching.fetch_policy import CHANGED, WRONG, GivenUp, Key, Unit
from forebay.caching.fetcher_process import Place
from forebay.caching.stores import BucketError, ObjectStore
from forebay.errors import ChangedError, ForebayError, InputError, shown_location
from forebay.shards.blocks import ShardBlocks, damages
from forebay.shards.index import UNKNOWN
from forebay.shards.location import Listed, tag_of
from forebay.shards.sources import OpenIndex

_MOST_AT_FIRST = 1 << 28
_AGAIN = "Call forebay.index_shards again, which reads only the shards that are new or changed."


@dataclass(frozen=True, slots=True)
class ShardPlace(Place):
    """Where shards are, which of their columns are read, and their index.

    Attributes:
        by_column: Whether a sample is a `ColumnRow`.
    """

    columns: tuple[str, ...] | None = None
    by_column: bool = False
    identity: str = ""
    opened: OpenIndex | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """See `Place`."""
        text = repr((self.url, self.columns, self.identity))
        return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    @property
    def blocks(self) -> ShardBlocks:
        """The blocks, opened anew."""
        assert self.opened is not None, "a place of shards has their index"
        return ShardBlocks(self.opened.index, self.columns, by_column=self.by_column)

    def source(self, read_all: Any) -> Any:
        """See `Place`."""
        return ShardSource(self.url, self.blocks, self.identity)


class ShardSource(BlockSource):
    """The blocks of shards in a bucket."""

    def __init__(self, url: str, blocks: ShardBlocks, identity: str) -> None:
        self.url, self._blocks, self._index = url, blocks, blocks.index
        self.samples, self.first, self.lengths = blocks.index.samples, blocks.first, blocks.length
        # An index may be anybody's; memory for a block that is larger is found when it is there.
        self.most_bytes = min(int(max(blocks.nbytes.max(), blocks.length.max())), _MOST_AT_FIRST)
        self.identity = f"{identity} {blocks.columns}"
        is_known = blocks.columns is None and (blocks.index.crc32 != UNKNOWN).all()
        self.has_checksums = bool(is_known)
        self.is_as_fetched = False

    def units(self, block: int) -> list[Unit]:
        """See `BlockSource`."""
        shard, requests = self._index.shard_of(block), self._blocks.requests(block)
        if len(requests) == 1:
            return [Unit(block, shard, *requests[0])]
        keys: list[Key] = [(block, at, len(requests)) for at in range(len(requests))]
        return [Unit(key, shard, *each) for key, each in zip(keys, requests, strict=True)]

    def name_of(self, number: int) -> str:
        """See `BlockSource`."""
        return self._index.listed(number).name

    def checksum(self, block: int) -> int | None:
        """See `BlockSource`: what was indexed is the whole block, of one stretch."""
        known = int(self._index.crc32[block])
        return None if known == UNKNOWN or self._blocks.columns is not None else known

    def tag(self, number: int) -> str | None:
        """See `BlockSource`; what other stores list has another form than what they answer."""
        return self._index.listed(number).tag if self.url.startswith("s3://") else None

    def tag_now(self, number: int) -> str:
        """See `BlockSource`."""
        try:
            return self._now(self._index.listed(number)).tag
        except Exception as error:
            raise BucketError.of(error) from error

    def _now(self, listed: Listed) -> Listed:
        """Return what an object has by now; raise what fsspec raises."""
        system, path = connect_url(f"{self.url}/{listed.name}")
        system.invalidate_cache()
        info = system.info(path)
        return listed._replace(size=int(info["size"]), tag=tag_of(info))

    def joined(self, block: int, parts: Sequence[memoryview]) -> memoryview:
        """See `BlockSource`."""
        return self._blocks.joined(block, parts)

    def fill(self, block: int, data: memoryview, view: memoryview) -> int | memoryview:
        """See `BlockSource`."""
        try:
            return self._blocks.prepared(block, data)
        except damages() as error:
            raise BucketError(REFUSED, f"it cannot be read as what it is: {error}") from error

    def error_of(self, lost: GivenUp, bucket: ObjectStore) -> ForebayError:
        """See `BlockSource`."""
        unit, kind = lost.unit, lost.kind
        listed = self._index.listed(unit.shard)
        where = f"{shown_location(self.url)}/{listed.name}"
        if kind in (WRONG, MISSING, REFUSED, CHANGED):
            now = listed
            with suppress(Exception):  # then what the bucket said is all that is known
                now = self._now(listed)
            if kind == CHANGED or now != listed:
                return ChangedError(
                    f"{where} changed after it was indexed: it has {now.size:,} bytes and the tag "
                    f"{now.tag!r} instead of {listed.size:,} and {listed.tag!r}\n"
                    f"  Nothing more was read. {_AGAIN}"
                )
        if kind == WRONG:
            return InputError(
                f"{where}: {span_of(unit)} have the checksum {lost.message}, and had another one "
                "when they were indexed, or first read\n"
                f"  They came like this twice, so the object is damaged. Write it again. {_AGAIN}"
            )
        return refused_by_bucket(
            f"{where}, {span_of(unit)}", kind, lost.message, f"Bring it back. {_AGAIN}"
        )
