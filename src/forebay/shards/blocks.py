"""The blocks of an index as samples are read from them: of some columns, by the shards' formats."""

from __future__ import annotations

import itertools
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import InputError, OptionError, shown_location
from forebay.shards.format import BlockDecoder, ShardFormat, format_named
from forebay.shards.index import CODEC_NAMES, ShardIndex

# Stretches of a block are fetched with what is between them, up to so large a share more.
GAP_SHARE = 0.1
# Decoders that a process keeps: each has what its shard's footer says.
MOST_DECODERS = 4096
_DAMAGES = (
    *(RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(UnicodeError, OSError, struct.error),
)


class ShardBlocks:
    """The blocks of an index, in order of samples; a `BlockTable`.

    Attributes:
        first: The index of each block's first sample.
        length: Bytes of its stretches.
        nbytes: About what each takes in memory.
        offset, size: Where each stretch begins in its shard, and its bytes.
        ends: After how many stretches each block ends.
    """

    def __init__(
        self,
        index: ShardIndex,
        columns: Sequence[str] | None,
        *,
        by_column: bool = False,
    ) -> None:
        """Choose the stretches of columns.

        Args:
            columns: Their names; None for all.
            by_column: Whether a sample is a `ColumnRow`.
        """
        self._by_column = by_column
        self.index, self.columns = index, None if columns is None else [*columns]
        self.first = index.first
        self.offset, self.size, self.ends = index.offset, index.length, index.extent_ends
        whole = self._sums(self.size)
        self.length, self.nbytes = whole, index.nbytes
        if self.columns is not None:
            is_chosen = np.concatenate([np.zeros(0, np.bool_), *map(self._chosen, self._shards())])
            counts = np.append(0, np.cumsum(is_chosen))
            self.offset, self.size = self.offset[is_chosen], self.size[is_chosen]
            self.ends = counts[self.ends]
            self.length = self._sums(self.size)
            share = self.length / np.maximum(whole, 1)
            self.nbytes = np.maximum(index.nbytes * share, 1).astype(np.int64)
        self._decoders: OrderedDict[int, BlockDecoder] = OrderedDict()

    def _shards(self) -> Iterable[int]:
        return range(len(self.index.sizes))

    def _chosen(self, shard: int) -> npt.NDArray[np.bool_]:
        known, columns = self.index.indexed(shard), self.columns or []
        if not len(known.found.rows):
            return np.zeros(0, np.bool_)
        found = known.found
        try:
            chosen = self._form(shard).chosen(found.info, found.extents, columns)
        except OptionError:
            raise
        except damages() as error:
            raise self.damaged(shard, error) from error
        return np.asarray(chosen, np.bool_)

    def _form(self, shard: int) -> ShardFormat:
        return format_named(self.index.forms[self.index.formats[shard]])

    def _sums(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if len(sizes) == len(self.ends):  # each block is one stretch
            return sizes
        totals = np.append(0, np.cumsum(sizes, dtype=np.int64))
        ends: npt.NDArray[np.int64] = np.append(0, self.ends)
        found: npt.NDArray[np.int64] = totals[ends[1:]] - totals[ends[:-1]]
        return found

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that an epoch reads."""
        return int(self.length.sum())

    @cached_property
    def mean_bytes(self) -> float:
        """Bytes of a block in memory, on average."""
        return max(float(self.nbytes.sum()), 1.0) / max(len(self), 1)

    def rows(self, block: int) -> int:
        """Return how many samples a block has."""
        return self.index.rows(block)

    def stretches(self, block: int) -> list[tuple[int, int]]:
        """Return offset and length of each stretch that is needed of a block.

        Stretches that follow each other are one.
        """
        own = slice(int(self.ends[block - 1]) if block else 0, int(self.ends[block]))
        found = list[tuple[int, int]]()
        for offset, length in zip(self.offset[own].tolist(), self.size[own].tolist(), strict=True):
            if found and sum(found[-1]) == offset:
                found[-1] = found[-1][0], found[-1][1] + length
            elif length or not found:
                found.append((offset, length))
        return found

    def requests(self, block: int) -> list[tuple[int, int]]:
        """Return the stretches of a block in order of offset, with those near to each other joined.

        What is fetched between them is at most a tenth of what is needed.
        """
        stretches = sorted(self.stretches(block))
        gaps = sorted(
            (max(after[0] - sum(before), 0), at)
            for at, (before, after) in enumerate(itertools.pairwise(stretches))
        )
        room, joined = GAP_SHARE * sum(length for _, length in stretches), set[int]()
        for gap, at in gaps:
            if (room := room - gap) < 0:
                break
            joined.add(at)
        found = stretches[:1]
        for at, (offset, length) in enumerate(stretches[1:]):
            if at in joined:
                first = found[-1][0]
                found[-1] = first, max(sum(found[-1]), offset + length) - first
            else:
                found.append((offset, length))
        return found

    def joined(self, block: int, parts: Sequence[memoryview]) -> memoryview:
        """Return the stretches of a block behind each other, given what its requests brought."""
        requests, stretches = self.requests(block), self.stretches(block)
        if len(requests) == 1 and requests == stretches:
            return parts[0]
        found, at = np.empty(int(self.length[block]), np.uint8), 0
        for offset, length in stretches:
            number = next(
                at
                for at, (begin, size) in enumerate(requests)
                if begin <= offset and offset + length <= begin + size
            )
            begin = offset - requests[number][0]
            found[at : at + length] = np.frombuffer(parts[number], np.uint8, length, begin)
            at += length
        return found.data

    # ---- samples -------------------------------------------------------------------------------

    def decoder(self, shard: int) -> BlockDecoder:
        """Return what reads the blocks of a shard."""
        if (found := self._decoders.get(shard)) is None:
            try:
                found = self._form(shard).decoder(self.index.info(shard), self.columns)
            except damages() as error:
                raise self.damaged(shard, error) from error
            self._decoders[shard] = found
            while len(self._decoders) > MOST_DECODERS:
                self._decoders.popitem(last=False)
        return found

    def is_prepared(self, block: int) -> bool:
        """Return whether what lies in memory of a block differs from its stretches."""
        shard = self.index.shard_of(block)
        is_plain = type(self.decoder(shard)).prepared is BlockDecoder.prepared
        return not is_plain or bool(self.index.codecs[shard])

    def prepared(self, block: int, data: memoryview) -> memoryview:
        """Return what lies in memory of a block, given its stretches; ValueError if it is wrong."""
        shard = self.index.shard_of(block)
        if codec := CODEC_NAMES[self.index.codecs[shard]]:
            from forebay.shards.compression import decompressed_stream  # loads Arrow

            return decompressed_stream(data, codec)
        number = block - self.index.first_block(shard)
        return memoryview(self.decoder(shard).prepared(number, data)).cast("B")

    def is_read_by_sample(self, block: int) -> bool:
        """Return whether samples are stretches of a block; others are read by Arrow or a format."""
        return not self._by_column and int(self.index.starts_at[block]) >= 0

    def reader(self, block: int, data: memoryview) -> Callable[[Sequence[int]], list[Any]]:
        """Return what reads samples of a block, given what `prepared` returned.

        It raises InputError for those that cannot be read.
        """
        shard = self.index.shard_of(block)
        decoder, number = self.decoder(shard), block - self.index.first_block(shard)
        starts = self.index.sample_starts(block) if self.is_read_by_sample(block) else None
        if starts is None:
            return self._reader(shard, decoder, number, data)
        first, at = int(self.first[block]), [*starts.tolist(), len(data)]

        def read(rows: Sequence[int]) -> list[Any]:
            found = list[Any]()
            try:
                for row in rows:
                    found.append(decoder.sample(_part(data, at[row], at[row + 1])))
            except damages() as error:
                raise self.damaged(shard, error, first + rows[len(found)]) from error
            return found

        return read

    def _reader(
        self, shard: int, decoder: BlockDecoder, number: int, data: memoryview
    ) -> Callable[[Sequence[int]], list[Any]]:
        """Return what returns samples of a block that is decoded as a whole."""
        own: Callable[[Sequence[int]], list[Any]]
        try:
            if self._by_column:
                from forebay.shards.arrow_rows import reader_by_column

                where = f"from_table: {shown_location(self.index.listed(shard).name)}"
                own = reader_by_column(decoder.record_batch(number, data), where)
            else:
                own = decoder.reader(number, data)
        except damages() as error:
            raise self.damaged(shard, error) from error

        def read(rows: Sequence[int]) -> list[Any]:
            try:
                return own(rows)
            except damages() as error:
                raise self.damaged(shard, error) from error

        return read

    def damaged(self, shard: int, error: Exception, sample: int | None = None) -> InputError:
        """Return the error for bytes that are not those of a block, or of one sample."""
        name, what = shown_location(self.index.listed(shard).name), "a block"
        if sample is not None:
            what = self.decoder(shard).place_of(sample - self._first_of(shard))
        if isinstance(error, InputError):
            return InputError(f"{name}: {error}" if sample is None else f"{name}: {what}: {error}")
        words = str(error).partition("\n")[0] or type(error).__name__
        return InputError(
            f"{name}: {what} cannot be read as what the index says: {words}\n"
            "  The shard is damaged, or the index is of another one: call forebay.index_shards "
            "again."
        )

    def place_of(self, sample: int) -> str:
        """Return where a sample is: of which shard, and where in that."""
        shard = self.index.shard_of(int(self.first.searchsorted(sample, "right")) - 1)
        place = self.decoder(shard).place_of(sample - self._first_of(shard))
        return f"{place} of {shown_location(self.index.listed(shard).name)}"

    def _first_of(self, shard: int) -> int:
        return int(self.first[self.index.first_block(shard)])


def damages() -> tuple[type[Exception], ...]:
    """Return the exceptions of NumPy, Arrow and formats for bytes that are not those of a block."""
    arrow = sys.modules.get("pyarrow")  # a process that reads tars does without
    return _DAMAGES if arrow is None else (*_DAMAGES, arrow.ArrowException)


def _part(data: memoryview, begin: int, end: int) -> memoryview:
    if not 0 <= begin <= end <= len(data):
        raise ValueError(f"a sample from byte {begin:,} to {end:,} of {len(data):,}")
    return data[begin:end]
