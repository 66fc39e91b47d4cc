"""Shards in memory, read through the methods of their format alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.errors import InputError
from forebay.shards.format import FoundBlocks, ShardFile, ShardFormat


class BytesShard(ShardFile):
    """A shard in memory, which counts the bytes that are read of it."""

    def __init__(self, data: bytes, name: str = "a shard") -> None:
        self.data, self.name, self.size = memoryview(data), name, len(data)
        self.was_read = 0

    def read(self, offset: int, length: int) -> memoryview:
        """Return a part, as `ShardFile` has it."""
        if not 0 <= offset <= offset + length <= self.size:
            raise InputError(f"{self.name}: {length} bytes at {offset} are not in its {self.size}")
        self.was_read += length
        return self.data[offset : offset + length]


class ReadShard:
    """The samples of a shard, by position.

    Attributes:
        found: What `find` returned.
        fetched: Bytes of all stretches that are needed for the columns.
    """

    def __init__(
        self, form: ShardFormat, shard: BytesShard, columns: Sequence[str] | None = None
    ) -> None:
        self.found: FoundBlocks = form.find(shard)
        self._shard, self._ends = shard, np.cumsum(self.found.rows)
        extents = self.found.extents
        if columns is not None:
            extents = extents[form.chosen(self.found.info, extents, columns)]
        self._extents = extents
        self.fetched = int(extents[:, 2].sum())
        self._decoder = form.decoder(self.found.info, columns)
        self._prepared: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, positions: Sequence[int]) -> list[Any]:
        """Return samples, those of a block at once."""
        found: dict[int, Any] = {}
        blocks = self._ends.searchsorted(positions, "right")
        for block in dict.fromkeys(blocks.tolist()):
            first = int(self._ends[block] - self.found.rows[block])
            ours = [at for at, each in zip(positions, blocks, strict=True) if each == block]
            rows = [at - first for at in ours]
            found |= zip(ours, self._of_block(block, first, rows), strict=True)
        return [found[at] for at in positions]

    def _of_block(self, block: int, first: int, rows: Sequence[int]) -> list[Any]:
        stretches = [
            self._shard.read(offset, length)
            for at, offset, length in self._extents.tolist()
            if at == block
        ]
        data = memoryview(b"".join(stretches))
        if (starts := self.found.starts) is not None:
            ends = np.append(starts[first + 1 :], 0)
            ends[int(self.found.rows[block]) - 1] = len(data)
            return [self._decoder.sample(data[starts[first + at] : ends[at]]) for at in rows]
        if block not in self._prepared:
            self._prepared[block] = self._decoder.prepared(block, data)
        return self._decoder.reader(block, memoryview(self._prepared[block]))(rows)
