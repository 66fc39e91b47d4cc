"""How a cache is laid out: its files, and the blocks in them.

.forebay/cache.json    the index, written last: how samples are divided into shards
.forebay/blocks.bin    32 bytes for each block, in order of samples, little-endian

A block is a record batch, which is read, and checked, without the rest of its shard.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from forebay.base.output_names import PRIVATE

INDEX, BLOCKS = f"{PRIVATE}/cache.json", f"{PRIVATE}/blocks.bin"
# The most of an index that is read: more than a million shards take.
INDEX_BYTES = 64 << 20
# Exceptions of wrong types, missing keys and items, huge numbers and deep nesting.
DAMAGES = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError)

BLOCK = np.dtype(
    [
        *(("first", "<u8"), ("offset", "<u8"), ("nbytes", "<u8")),
        *(("length", "<u4"), ("crc32", "<u4")),
    ]
)
# A block has a little more than its values: its length has to fit in 32 bits.
MOST_BLOCK_BYTES = 4_000_000_000
MOST_MEMORY_BYTES = 1 << 32
LEAST_BLOCK_BYTES = 64  # Arrow's metadata alone has more
MOST_SHARD_BYTES = 1 << 62
# How many bytes a codec makes of one at most: what claims more is not decompressed.
MOST_TIMES = {"lz4": 256, "zstd": 1 << 15}


class Blocks:
    """Where the blocks of a cache are, in order of samples; ValueError if that cannot be.

    Attributes:
        first: The index of each block's first sample.
        offset: Where its message begins in the file of its shard, in bytes.
        length: Bytes of the message, metadata and body.
        nbytes: Bytes that it has in memory, where it is not compressed.
        crc32: The CRC-32 of these bytes.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        samples: int,
        per_shard: int,
        sizes: Sequence[int],
        known: tuple[int, int] | None = None,
        compression: str | None = None,
    ) -> None:
        """Check the table: it may be anybody's.

        Args:
            data: The content of its file.
            samples: Of the whole cache.
            per_shard: Samples of each shard but the last.
            sizes: Bytes of each shard.
            known: How many blocks there are, and the CRC-32 of the file; None for any.
            compression: How the blocks are compressed.
        """
        if known is not None and (len(data) // BLOCK.itemsize, zlib.crc32(data)) != known:
            raise ValueError("its checksum or size is not that of the index")
        table = np.frombuffer(data, BLOCK)
        self.first, self.offset = table["first"].view("<i8"), table["offset"].view("<i8")
        self.length, self.crc32 = table["length"], table["crc32"]
        self.nbytes = table["nbytes"].view("<i8")
        self._samples, self._per_shard = samples, min(per_shard, samples)
        first, offset, length = self.first, self.offset, self.length.astype(np.int64)
        rows = np.diff(first, append=samples)
        shard = np.clip(first // self._per_shard, 0, len(sizes) - 1)
        size = np.array(sizes, np.int64)[shard]
        begins = np.flatnonzero(np.diff(shard, prepend=-1))
        starts = np.arange(len(sizes)) * self._per_shard
        if not np.array_equal(first[begins], starts):
            raise ValueError("not every shard begins with a block")
        is_next = np.diff(shard, prepend=-1) == 0
        most = np.minimum(length * MOST_TIMES.get(compression or "", 1), MOST_MEMORY_BYTES)
        least = 0 if compression else length
        for is_wrong, what in (
            ((first < 0) | (rows <= 0), "is not in order of samples"),
            ((offset < 0) | (length == 0) | (offset > size - length), "lies outside its shard"),
            (is_next & (offset < np.roll(offset + length, 1)), "overlaps the block before it"),
            ((self.nbytes < least) | (self.nbytes > most), "has another size in memory"),
        ):
            if is_wrong.any():
                raise ValueError(f"block {int(is_wrong.argmax()):,} {what}")

    def __len__(self) -> int:
        return len(self.first)

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks, as they are fetched."""
        return int(self.length.sum(dtype=np.int64))

    @property
    def mean_bytes(self) -> float:
        """Bytes of a block in memory, on average."""
        return int(self.nbytes.sum()) / len(self)

    def rows(self, block: int) -> int:
        """Return how many samples a block holds."""
        end = self.first[block + 1] if block + 1 < len(self) else self._samples
        return int(end - self.first[block])


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05}.arrow"


def is_shard(name: str) -> bool:
    """Return whether a file has the name of a shard."""
    return name.startswith("shard-") and name.endswith(".arrow") and "/" not in name
