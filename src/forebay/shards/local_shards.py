"""Read samples of shards in folders: each shard is mapped when it is first read."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from forebay.caching.arrow_shards import MOST_MAPS, DecodedBlocks, mapped_file
from forebay.errors import ChangedError, InputError
from forebay.shards.blocks import ShardBlocks, damages
from forebay.shards.index import ShardIndex
from forebay.shards.sources import OpenIndex

# Blocks whose place is remembered.
MOST_PLAIN = 1 << 16

_Read = Callable[[Sequence[int]], list[Any]]


class _PlainBlock(NamedTuple):
    """A block whose samples are stretches of the file.

    Attributes:
        at: Where in the index the beginnings of its samples are.
        length: Its bytes.
    """

    first: int
    rows: int
    at: int
    length: int
    data: memoryview
    decode: Callable[[memoryview], Any]


class LocalShards:
    """The samples of local shards. Pickled as their folder and the place of the index.

    Args:
        kept: Bytes of decoded blocks that are kept.
        by_column: Whether a sample is a `ColumnRow`.
    """

    def __init__(
        self,
        root: str,
        index: OpenIndex,
        columns: Sequence[str] | None,
        kept: int,
        *,
        by_column: bool = False,
    ) -> None:
        self.location, self._index, self._columns, self._kept = root, index, columns, kept
        self._by_column = by_column
        self.blocks = ShardBlocks(index.index, columns, by_column=by_column)
        # As memory, since one number of an array takes longer than all else of a sample.
        self._first, self._starts = memoryview(self.blocks.first), memoryview(self.index.starts)
        self._plain: dict[int, _PlainBlock | None] = {}
        self._maps: dict[int, memoryview] = {}
        self._in_place: dict[int, _Read | None] = {}  # what reads blocks that are not decoded
        self._decoded = DecodedBlocks(kept)
        self.decoded = 0, 0  # blocks, and their rows

    @property
    def index(self) -> ShardIndex:
        """The index."""
        return self._index.index

    def __reduce__(self) -> Any:
        given = self.location, self._index, self._columns, self._kept
        return partial(LocalShards, by_column=self._by_column), given

    def of_columns(self, columns: Sequence[str]) -> LocalShards:
        """Return a source of the same shards, of which a sample is a `ColumnRow`."""
        given = self.location, self._index, columns, self._kept
        return LocalShards(*given, by_column=True)

    def sample(self, position: int, *, is_copy: bool = False) -> Any:
        """Return a sample."""
        block = bisect_right(self._first, position) - 1
        try:
            plain = self._plain[block]
        except KeyError:
            plain = self._plain_block(block)
        if plain is None:
            return self._reader(block)([position - self._first[block]])[0]
        first, rows, at, length, data, decode = plain
        row = position - first
        at += row
        begin, end = self._starts[at], self._starts[at + 1] if row + 1 < rows else length
        try:
            if not begin <= end <= length:
                raise ValueError("where a sample begins")
            return decode(data[begin:end])
        except damages() as error:
            raise self.blocks.damaged(self.index.shard_of(block), error, position) from error

    def samples(self, positions: Sequence[int], *, are_copies: bool = False) -> list[Any]:
        """Return several samples; those of a block that is decoded as a whole at once."""
        found: list[Any] = [None] * len(positions)
        by_block: dict[int, list[int]] = {}
        numbers = self.blocks.first.searchsorted(np.asarray(positions), "right") - 1
        for at, block in enumerate(numbers.tolist()):
            if self._plain.get(block) or (block not in self._plain and self._plain_block(block)):
                found[at] = self.sample(positions[at])
            else:
                by_block.setdefault(block, []).append(at)
        for block, own in by_block.items():
            rows = [positions[at] - int(self.blocks.first[block]) for at in own]
            samples = self._reader(block)(rows)
            for at, each in zip(own, samples, strict=True):
                found[at] = each
        return found

    def _plain_block(self, block: int) -> _PlainBlock | None:
        """Return a block whose samples are read by themselves; None for another one."""
        shard, index, plain = self.index.shard_of(block), self.index, None
        at, stretches = int(index.starts_at[block]), self.blocks.stretches(block)
        if at >= 0 and not index.codecs[shard] and len(stretches) == 1:
            (offset, length), rows = stretches[0], self.blocks.rows(block)
            data = self._map(shard)[offset : offset + length]
            decode = self.blocks.decoder(shard).sample
            plain = _PlainBlock(int(index.first[block]), rows, at, length, data, decode)
        if len(self._plain) >= MOST_PLAIN:
            self._plain.clear()
        self._plain[block] = plain
        return plain

    def _reader(self, block: int) -> _Read:
        """Return what reads samples of a block that is mapped, or decoded, as a whole."""
        try:
            found = self._in_place[block]
        except KeyError:
            found = self._reader_in_place(block)
        if found is None:
            found = self._decoded.get(block, partial(self._decode, block))
        return found

    def _reader_in_place(self, block: int) -> _Read | None:
        """Return what reads samples of a block where it lies; None if it has to be decoded."""
        stretches, found = self.blocks.stretches(block), None
        if len(stretches) == 1 and not self.blocks.is_prepared(block):
            offset, length = stretches[0]
            data = self._map(self.index.shard_of(block))[offset : offset + length]
            found = self.blocks.reader(block, data)
        if len(self._in_place) >= MOST_PLAIN:
            self._in_place.clear()
        self._in_place[block] = found
        return found

    def _decode(self, block: int) -> tuple[_Read, int]:
        """Return what reads samples of a block that is decoded now, and what it counts."""
        shard = self.index.shard_of(block)
        data = self._map(shard)
        self._check_unchanged(shard)
        self.decoded = self.decoded[0] + 1, self.decoded[1] + self.blocks.rows(block)
        parts = [data[begin : begin + length] for begin, length in self.blocks.requests(block)]
        found = self.blocks.joined(block, parts)
        if self.blocks.is_prepared(block):
            try:
                found = self.blocks.prepared(block, found)
            except damages() as error:
                raise self.blocks.damaged(shard, error) from error
        # A window has the blocks that the index says it has, which may take more: all are kept up
        # to twice as much, or each would be decoded again for each batch.
        return self.blocks.reader(block, found), max(
            int(self.blocks.nbytes[block]), len(found) // 2
        )

    def _map(self, shard: int) -> memoryview:
        if (known := self._maps.get(shard)) is not None:
            return known
        listed = self.index.listed(shard)
        path = os.path.join(self.location, listed.name)
        try:
            data = mapped_file(path).data
            state = os.stat(path)
        except OSError as error:
            raise InputError(
                f"{path!r} cannot be read: {error.strerror}\n"
                "  It was there when the shards were opened. Bring it back, or index the shards "
                "that are left: forebay.index_shards."
            ) from error
        if (len(data), str(state.st_mtime_ns)) != (listed.size, listed.tag):
            raise changed_error(path, listed.size, len(data))
        if len(self._maps) >= MOST_MAPS:
            with suppress(RuntimeError):  # another thread is removing one, too
                self._maps.pop(next(iter(self._maps)), None)
        self._maps[shard] = data
        return data

    def _check_unchanged(self, shard: int) -> None:
        """Raise ChangedError if a shard was written to after it was mapped."""
        listed = self.index.listed(shard)
        path = os.path.join(self.location, listed.name)
        with suppress(FileNotFoundError):  # its map is still what it was
            state = os.stat(path)
            if (state.st_size, str(state.st_mtime_ns)) != (listed.size, listed.tag):
                raise changed_error(path, listed.size, state.st_size)


def changed_error(path: str, size: int, there: int) -> ChangedError:
    """Return the error for a shard that is not what was indexed."""
    how = f"it has {there:,} bytes instead of {size:,}" if there != size else "it was written since"
    return ChangedError(
        f"{path!r} changed after it was indexed: {how}\n"
        "  Nothing of it was used. Index the shards again, which reads only those that changed: "
        "forebay.index_shards(location, index)."
    )
