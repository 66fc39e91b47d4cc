"""Read samples of shards in a bucket, from blocks that the fetcher has decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forebay.base.value_readers import Bytes
from forebay.caching.bucket_reader import BucketReader, Shared
from forebay.caching.fetcher_process import FetcherProcess
from forebay.caching.link import Link
from forebay.errors import InputError
from forebay.shards.blocks import ShardBlocks
from forebay.shards.bucket_shards import ShardPlace
from forebay.shards.index import ShardIndex


class ShardReader(BucketReader):
    """The samples of shards in a bucket."""

    place: ShardPlace

    def __init__(self, place: ShardPlace, process: FetcherProcess | None = None) -> None:
        self._blocks = place.blocks
        super().__init__(place, process)

    @property
    def blocks(self) -> ShardBlocks:
        """Where the blocks are."""
        return self._blocks

    @property
    def index(self) -> ShardIndex:
        """The index."""
        return self._blocks.index

    @property
    def decoded(self) -> tuple[int, int]:
        """None were decoded in this process: the fetcher does that once for all."""
        return 0, 0

    def of_columns(self, columns: Sequence[str]) -> ShardReader:
        """Return a source of the same shards, of which a sample is a `ColumnRow`."""
        return ShardReader(replace(self.place, columns=tuple(columns), by_column=True))

    def _share(self, link: Link) -> Shared:
        return Shared(link)

    def _decode(self, block: int, whole: Bytes) -> Callable[[Sequence[int]], list[Any]]:
        return self._blocks.reader(block, whole.data)

    def _has_parts(self, block: int) -> bool:
        index = self.index
        return (
            int(index.starts_at[block]) >= 0
            and not index.codecs[index.shard_of(block)]
            and len(self._blocks.stretches(block)) == 1
            and not self._blocks.is_prepared(block)
        )

    def _may_change(self, block: int) -> bool:
        return self._blocks.is_read_by_sample(block)

    def _place_of(self, block: int) -> tuple[int, int]:
        return self.index.shard_of(block), self._blocks.stretches(block)[0][0]

    def _read_parts(
        self, link: Link, wanted: dict[int, list[tuple[int, int]]], found: list[Any]
    ) -> None:
        """Read a few samples, each a stretch of its block."""
        buffers, spans = {}, dict[tuple[int, int], tuple[int, int]]()
        for block, rows in wanted.items():
            length = int(self._blocks.length[block])
            buffers[block] = np.zeros(length, np.uint8)  # memory only where something is written
            starts = self.index.sample_starts(block)
            assert starts is not None, "a block of which parts are read"
            ends = np.append(starts[1:], length)
            spans |= {(block, row): (int(starts[row]), int(ends[row])) for row, _ in rows}
        if any(begin > end for begin, end in spans.values()):
            raise self._damaged(next(iter(wanted)))
        asked = ((block, begin, end - begin) for (block, _), (begin, end) in spans.items())
        self._fill(link, buffers, {each for each in asked if each[2]})
        for block, rows in wanted.items():
            samples = self._blocks.reader(block, buffers[block].data)([row for row, _ in rows])
            for (_, at), each in zip(rows, samples, strict=True):
                found[at] = each

    def _damaged(self, block: int) -> InputError:
        error = ValueError("its samples are not where the index says")
        return self._blocks.damaged(self.index.shard_of(block), error)
