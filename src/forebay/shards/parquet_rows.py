"""Decode row groups of Parquet, or pieces of them, to record batches; within what is credible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from forebay.shards.arrow_rows import (
    batch_of_bytes,
    bytes_of_batch,
    has_dictionaries,
    most_bytes,
    refuse_claim,
    samples_of_batch,
)
from forebay.shards.format import BlockDecoder
from forebay.shards.parquet_info import IS_WHOLE, MAGIC, FileInfo, flat_leaves, leaves_of_columns
from forebay.shards.parquet_pages import Claims, claims_of
from forebay.shards.parquet_pieces import PieceFooters

# Where a file ends of which only stretches are there: each read is checked by itself.
_END = 1 << 62
# What a value takes at least while it is decoded: its levels, its place, its number.
_VALUE_BYTES = 16


class RowGroups(BlockDecoder):
    """The row groups of a file, decoded to record batches."""

    def __init__(self, info: bytes, columns: Sequence[str] | None) -> None:
        self._info = FileInfo.of(info)
        self._leaves = leaves_of_columns(self._info.metadata, columns)
        schema = self._info.metadata.schema.to_arrow_schema()
        self._names = schema.names if columns is None else [*columns]
        self._schema = pa.schema([schema.field(each) for each in self._names])
        self._is_stream = has_dictionaries(self._schema)
        self._footers: PieceFooters | None = None
        # Leaves of which each value is a row, so that pages say how many they have.
        self._flat = flat_leaves(self._info.metadata)

    @property
    def schema(self) -> pa.Schema:
        """See `BlockDecoder`."""
        return self._schema

    def prepared(self, block: int, data: memoryview) -> Any:
        """Return the record batch of a row group, or of a piece of one, as bytes."""
        rows, chunks = self._info.rows[block], self._info.chunks[block].tolist()
        file, claims, at = _Stretches(), dict[int, Claims](), 0
        for leaf in self._leaves:
            begin, size = _place(chunks[leaf])
            file.stretches[begin] = part = data[at : at + size]
            claims[leaf], at = claims_of(part), at + size
        if at != len(data):
            raise ValueError(f"a row group of {at:,} bytes instead of {len(data):,}")
        nbytes = sum(each.nbytes + _VALUE_BYTES * each.values for each in claims.values())
        refuse_claim("a row group", nbytes, len(data))
        # Of what may be given again and again, so many rows take a part of what is allowed.
        repeatable = sum(each.repeatable for each in claims.values())
        most = max(most_bytes(len(data)) // max(repeatable, 1), 1)
        group, columns = self._info.groups[block], dict[str, pa.ChunkedArray]()
        for (skipped, count), leaves in self._runs(chunks).items():
            metadata = self._info.metadata
            if skipped != IS_WHOLE:
                if any(claims[each].values != count for each in self._flat.intersection(leaves)):
                    raise ValueError(f"pages that do not have {count:,} rows")
                metadata, group = self._metadata_of(block, count, chunks, claims), 0
            table = _table(file, metadata, group, leaves, min(most, count), len(data))
            if table.num_rows != count:
                raise ValueError(f"{table.num_rows:,} rows instead of {count:,}")
            table = table.slice(max(skipped, 0), rows)
            columns |= zip(table.column_names, table.columns, strict=True)
        table = pa.table({name: columns[name] for name in self._names}).combine_chunks()
        (batch,) = table.cast(self._schema).to_batches()
        if batch.num_rows != rows:
            raise ValueError(f"{batch.num_rows:,} rows instead of {rows:,}")
        batch.validate(full=True)  # strings of other writers may not be UTF-8
        return bytes_of_batch(batch)

    def _runs(self, chunks: list[list[int]]) -> dict[tuple[int, int], list[int]]:
        """Return the leaves whose pages have the same rows: how many before the piece, and all."""
        found: dict[tuple[int, int], list[int]] = {}
        for leaf in self._leaves:
            found.setdefault((chunks[leaf][4], chunks[leaf][5]), []).append(leaf)
        return found

    def _metadata_of(
        self, block: int, rows: int, chunks: list[list[int]], claims: dict[int, Claims]
    ) -> parquet.FileMetaData:
        """Return the metadata of a file that has only the pages of a piece."""
        if self._footers is None:
            self._footers = PieceFooters(self._info.footer)
        places = []
        for leaf, each in enumerate(chunks):
            begin, size = _place(each)
            values = claims[leaf].values if leaf in claims else 0
            places.append((values, begin, each[1], size))
        footer = self._footers.footer(self._info.groups[block], rows, places)
        length = len(footer).to_bytes(4, "little")
        return parquet.read_metadata(pa.BufferReader(b"".join((MAGIC, footer, length, MAGIC))))

    def record_batch(self, block: int, data: memoryview) -> pa.RecordBatch:
        """See `BlockDecoder`."""
        return batch_of_bytes(data, self._schema, self._is_stream)

    def samples(self, block: int, data: memoryview, rows: Sequence[int]) -> list[Any]:
        """See `BlockDecoder`."""
        return self.reader(block, data)(rows)

    def reader(self, block: int, data: memoryview) -> Callable[[Sequence[int]], list[Any]]:
        """See `BlockDecoder`."""
        return partial(samples_of_batch, self.record_batch(block, data))


def _place(chunk: list[int]) -> tuple[int, int]:
    """Return where the pages of a leaf begin, and their bytes, with those of their dictionary."""
    return chunk[0] if chunk[1] else chunk[2], chunk[1] + chunk[3]


def _table(
    file: _Stretches,
    metadata: parquet.FileMetaData,
    group: int,
    leaves: list[int],
    rows: int,
    stored: int,
) -> pa.Table:
    """Decode a row group, so many rows at a time."""
    reader = parquet.ParquetFile(
        pa.PythonFile(file, "r"), metadata=metadata, pre_buffer=False
    ).reader
    batches, total = [], 0
    for batch in reader.iter_batches(
        rows, row_groups=[group], column_indices=leaves, use_threads=False
    ):
        total += batch.nbytes
        refuse_claim("a row group", total, stored)
        batches.append(batch)
    return pa.Table.from_batches(batches)


class _Stretches:
    """A file of which only some stretches are there, as pyarrow reads it: each at once."""

    closed = False

    def __init__(self) -> None:
        self.stretches: dict[int, memoryview] = {}
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = _END if whence else offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read_buffer(self, size: int) -> pa.Buffer:
        found = self.stretches.get(self._at, memoryview(b""))[:size]
        if len(found) < size:
            raise ValueError(f"{size:,} bytes at {self._at:,}, which are in no column")
        self._at += size
        return pa.py_buffer(found)

    read = read_buffer

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        pass
