"""Read samples of shards in folders: each shard is mapped when it is first read."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from forebay.caching.arrow_shards import MOST_MAPS, mapped_file
from forebay.caching.block_dataset import KEPT_BYTES
from forebay.errors import ChangedError, InputError
from forebay.shards.blocks import DAMAGED, ShardBlocks
from forebay.shards.index import ShardIndex
from forebay.shards.sources import OpenIndex

# Blocks whose place is remembered.
MOST_PLAIN = 1 << 16


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
    """The samples of local shards. Pickled as their folder and the place of the index."""

    def __init__(
        self,
        root: str,
        index: OpenIndex,
        columns: Sequence[str] | None,
        *,
        by_column: bool = False,
        is_copy: bool = False,
    ) -> None:
        """Read shards from a folder; those of a copy have times of their own."""
        self.location, self._index, self._columns = root, index, columns
        self._by_column, self._is_copy = by_column, is_copy
        self.blocks = ShardBlocks(index.index, columns, by_column=by_column)
        self._starts = memoryview(self.index.starts)
        self._plain: dict[int, _PlainBlock] = {}
        self._maps: dict[int, memoryview] = {}
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._kept_bytes = 0
        self.decoded = 0, 0  # blocks, and their rows

    @property
    def index(self) -> ShardIndex:
        """The index."""
        return self._index.index

    def __reduce__(self) -> Any:
        given = self.location, self._index, self._columns
        made = partial(LocalShards, by_column=self._by_column, is_copy=self._is_copy)
        return made, given

    def of_columns(self, columns: Sequence[str]) -> LocalShards:
        """Return a source of the same shards, of which a sample is a `ColumnRow`."""
        given = self.location, self._index, columns
        return LocalShards(*given, by_column=True, is_copy=self._is_copy)

    def sample(self, position: int, *, is_copy: bool = False) -> Any:
        """Return a sample."""
        block = int(self.blocks.first.searchsorted(position, "right")) - 1
        plain = self._plain.get(block) or self._plain_block(block)
        if plain is None:
            row = position - int(self.blocks.first[block])
            return self.blocks.samples(block, self._block(block), [row])[0]
        row = position - plain.first
        at, end = plain.at + row, plain.length
        begin, end = self._starts[at], self._starts[at + 1] if row + 1 < plain.rows else end
        try:
            if not begin <= end <= plain.length:
                raise ValueError("where a sample begins")
            return plain.decode(plain.data[begin:end])
        except DAMAGED as error:
            raise self.blocks.damaged(self.index.shard_of(block), error, position) from error

    def samples(self, positions: Sequence[int], *, are_copies: bool = False) -> list[Any]:
        """Return several samples; those of a block that is decoded as a whole at once."""
        found: list[Any] = [None] * len(positions)
        by_block: dict[int, list[int]] = {}
        numbers = self.blocks.first.searchsorted(np.asarray(positions), "right") - 1
        for at, block in enumerate(numbers.tolist()):
            if self._plain.get(block) or self._plain_block(block):
                found[at] = self.sample(positions[at])
            else:
                by_block.setdefault(block, []).append(at)
        for block, own in by_block.items():
            rows = [positions[at] - int(self.blocks.first[block]) for at in own]
            samples = self.blocks.samples(block, self._block(block), rows)
            for at, each in zip(own, samples, strict=True):
                found[at] = each
        return found

    def _plain_block(self, block: int) -> _PlainBlock | None:
        """Return a block whose samples are read by themselves; None for another one."""
        shard, index = self.index.shard_of(block), self.index
        at, stretches = int(index.starts_at[block]), self.blocks.stretches(block)
        if at < 0 or index.codecs[shard] or len(stretches) != 1:
            return None
        (offset, length), rows = stretches[0], self.blocks.rows(block)
        data = self._map(shard)[offset : offset + length]
        decode = self.blocks.decoder(shard).sample
        plain = _PlainBlock(int(index.first[block]), rows, at, length, data, decode)
        if len(self._plain) >= MOST_PLAIN:
            self._plain.clear()
        self._plain[block] = plain
        return plain

    def _block(self, block: int) -> memoryview:
        """Return what is read of a block: mapped, or decoded as a whole."""
        shard = self.index.shard_of(block)
        stretches = self.blocks.stretches(block)
        is_prepared = self.blocks.is_prepared(block)
        if len(stretches) == 1 and not is_prepared:
            offset, length = stretches[0]
            return self._map(shard)[offset : offset + length]
        if (known := self._kept.get(block)) is not None:
            with suppress(KeyError):  # another thread has dropped it
                self._kept.move_to_end(block)
            return known
        requests = self.blocks.requests(block)
        data = self._map(shard)
        self._check_unchanged(shard)
        self.decoded = self.decoded[0] + 1, self.decoded[1] + self.blocks.rows(block)
        parts = [data[offset : offset + length] for offset, length in requests]
        found = self.blocks.joined(block, parts)
        if is_prepared:
            try:
                found = self.blocks.prepared(block, found)
            except DAMAGED as error:
                raise self.blocks.damaged(shard, error) from error
        self._kept[block] = found
        self._kept_bytes += len(found)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            with suppress(KeyError):
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])
        return found

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
        is_same_time = self._is_copy or str(state.st_mtime_ns) == listed.tag
        if len(data) != listed.size or not is_same_time:
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
