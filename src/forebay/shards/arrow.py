"""Arrow files and streams as shards, also those of Hugging Face: a block is a record batch.

    stream: schema ─ dictionaries ─ record batch ─ record batch ─ …
    file:   ARROW1 ─ a stream ─ footer ─ ARROW1

Messages say how long they are, so only their metadata is read to index a shard. A batch that is
compressed, or has dictionaries, is decoded once per fetch; another one is read where it lies.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forebay.base.table_files import refuse
from forebay.caching.arrow_messages import (
    DICTIONARY,
    RECORD_BATCH,
    SCHEMA,
    ArrowMessage,
    claimed_bytes,
    prefix_of,
    read_message,
)
from forebay.shards.arrow_rows import (
    BatchDecoder,
    bytes_of_batch,
    has_dictionaries,
    refuse_claim,
)
from forebay.shards.format import (
    BlockDecoder,
    FoundBlocks,
    ShardFile,
    ShardFormat,
    check_names,
)

_MAGIC = b"ARROW1"
_OF_CACHE = b"forebay"  # the key in the schema of a cache's shard
_AGAIN = "If it is truncated, copy it again; otherwise, write it again."
# Of metadata, which lists columns and buffers; and of dictionaries, which the index keeps.
_MOST_METADATA, _MOST_DICTIONARIES = 64 << 20, 16 << 20
_MOST_ROWS = 1 << 40
_END = struct.pack("<iI", -1, 0)
_Stretch = tuple[int, int]  # offset and length


class ArrowShards(ShardFormat):
    """Arrow's files and streams; a sample is a dict of columns."""

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")
    reads_all = False

    def matches(self, head: bytes) -> bool:
        """See `ShardFormat`."""
        return head.startswith((_MAGIC, b"\xff\xff\xff\xff"))

    def find(self, shard: ShardFile) -> FoundBlocks:
        """See `ShardFormat`."""
        try:
            return _found(shard)
        except (pa.ArrowException, struct.error, ValueError, OSError) as error:
            refuse(shard.name, f"it is no Arrow file: {error}", _AGAIN, error)

    def chosen(
        self, info: bytes, extents: npt.NDArray[np.int64], columns: Sequence[str]
    ) -> npt.NDArray[np.bool_]:
        """See `ShardFormat`: whole batches are needed."""
        check_names(_schema_of(info).names, columns)
        return np.ones(len(extents), bool)

    def decoder(self, info: bytes, columns: Sequence[str] | None) -> BlockDecoder:
        """See `ShardFormat`."""
        return (_DecodedBatches if info[0] else _Batches)(info, columns)


def _schema_of(info: bytes) -> pa.Schema:
    # Before the messages in `info`: whether batches are decoded as a whole.
    return pa.ipc.read_schema(pa.py_buffer(info[1:]))


def _found(shard: ShardFile) -> FoundBlocks:
    """Return the record batches of a file or stream; raise what its bytes lead to."""
    first, info, rows, nbytes = b"", b"", list[int](), list[int]()
    batches = list[list[_Stretch]]()  # of each: dictionaries behind the first one, and itself
    later: dict[int, list[_Stretch]] = {}
    is_compressed = False
    for message, offset, length in _messages(shard):
        stretch = offset, length
        if message.is_big_endian:
            refuse(shard.name, "its numbers are big-endian", "Write it again on this machine.")
        if message.kind == SCHEMA and not first:
            first = info = bytes(shard.read(*stretch))
        elif message.kind == DICTIONARY and first and not rows:
            if len(info) + length > _MOST_DICTIONARIES:
                raise ValueError(f"dictionaries of more than {_MOST_DICTIONARIES:,} bytes")
            info += bytes(shard.read(*stretch))
        elif message.kind == DICTIONARY and first:
            known = later.setdefault(message.dictionary, [])
            known[:] = [*known, stretch] if message.is_delta else [stretch]
        elif message.kind == RECORD_BATCH and first:
            is_compressed |= message.is_compressed
            if not 0 <= (count := message.rows) < _MOST_ROWS:
                raise ValueError(f"a record batch of {count:,} rows")
            if count:
                before = sorted(each for live in later.values() for each in live)
                batches.append([*before, stretch])
                total = length + sum(size for _, size in before)
                nbytes.append(total * (2 if is_compressed else 1))
                rows.append(count)
        else:
            raise ValueError(f"a message of type {message.kind} at byte {offset:,}")
    if not first:
        raise ValueError("it has no schema")
    schema = pa.ipc.read_schema(pa.py_buffer(first))
    check_names(schema.names, None)
    if _OF_CACHE in (schema.metadata or {}):
        raise ValueError("it belongs to a cache of forebay, which forebay.open_cache reads")
    if schema.names == ["indices"] and shard.name.rpartition("/")[2].startswith("indices"):
        raise ValueError(
            "it has the indices of a dataset of Hugging Face, whose rows are in other files; "
            "save it with dataset.flatten_indices().save_to_disk(...)"
        )
    is_decoded = is_compressed or has_dictionaries(schema)
    extents = [(at, *each) for at, batch in enumerate(batches) for each in batch]
    return FoundBlocks(
        np.array(rows, np.int64),
        np.array(extents, np.int64).reshape(-1, 3),
        bytes([is_decoded]) + info,
        nbytes=np.array(nbytes, np.int64),
    )


def _messages(shard: ShardFile) -> Iterator[tuple[ArrowMessage, int, int]]:
    """Yield each message, where it begins, and its bytes."""
    end, at, guess = shard.size, 0, 1024
    if end >= 8 and bytes(shard.read(0, 6)) == _MAGIC:
        at, tail = 8, bytes(shard.read(end - 10, 10)) if end >= 18 else b""
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != _MAGIC or length > end - 18:
            raise ValueError("it does not end as an Arrow file")
        end -= 10 + length
    while at + 8 <= end:
        data = shard.read(at, min(guess, end - at))
        before, length = prefix_of(data)
        if not length:
            return
        guess = before + length
        if not 0 < guess <= min(end - at, _MOST_METADATA):
            raise ValueError(f"metadata of {length:,} bytes at byte {at:,}")
        if guess > len(data):
            data = shard.read(at, guess)
        message = read_message(data)
        if not 0 <= message.body <= end - at - guess:
            raise ValueError(f"a message of {message.body:,} bytes at byte {at:,}, beyond its end")
        yield message, at, guess + message.body
        at += guess + message.body
    if at < end:
        raise ValueError(f"it ends within the message at byte {at:,}")


class _Batches(BatchDecoder):
    """Record batches without compression and dictionaries, read where they lie."""

    def __init__(self, info: bytes, columns: Sequence[str] | None) -> None:
        self._info, self._whole = info[1:], _schema_of(info)
        check_names(self._whole.names, columns)
        self._names = self._whole.names if columns is None else [*columns]
        self._known = set[int]()

    @property
    def schema(self) -> pa.Schema:
        """See `BlockDecoder`."""
        return pa.schema([self._whole.field(each) for each in self._names])

    def record_batch(self, block: int, data: memoryview) -> pa.RecordBatch:
        """See `BlockDecoder`."""
        if block not in self._known:
            if read_message(data).is_compressed:
                raise ValueError("a record batch is compressed, which the index does not say")
            self._known.add(block)
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), self._whole)
        return batch.select(self._names)


class _DecodedBatches(_Batches):
    """Record batches that are decompressed, or put together, before rows are read."""

    record_batch = BatchDecoder.record_batch

    def prepared(self, block: int, data: memoryview) -> Any:
        """Return a record batch, as bytes."""
        parts = list[Any]()
        for stream in (memoryview(self._info), data):
            at = 0
            while at < len(stream):
                before, length = prefix_of(stream[at:])
                head = stream[at : (begin := at + before + length)]
                message = read_message(head)
                if not (begin > at and 0 <= message.body <= len(stream) - begin):
                    raise ValueError(f"a message of {message.body:,} bytes in {len(stream):,}")
                at = begin + message.body
                parts += head, (body := stream[begin:at])
                if message.is_compressed:
                    claimed = claimed_bytes(head, body, message.batch)
                    refuse_claim("a record batch", claimed, len(head) + len(body))
        columns = [self._whole.get_field_index(each) for each in self._names]
        options = pa.ipc.IpcReadOptions(included_fields=columns, use_threads=False)
        whole = pa.py_buffer(b"".join((*parts, _END)))
        batch = pa.ipc.open_stream(whole, options=options).read_next_batch().select(self._names)
        batch.validate(full=True)
        return bytes_of_batch(batch)
