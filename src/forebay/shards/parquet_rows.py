"""Decode row groups of Parquet, or pieces of them, to record batches; within what is credible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from forebay.shards.arrow_rows import BatchDecoder, bytes_of_batch, most_bytes, refuse_claim
from forebay.shards.parquet_info import IS_WHOLE, MAGIC, FileInfo, metadata_of, of_piece
from forebay.shards.parquet_pages import Claims, claims_of
from forebay.shards.parquet_pieces import PieceFooters

if TYPE_CHECKING:
    from pyarrow import parquet

# Where a file ends of which only stretches are there: each read is checked by itself.
_END = 1 << 62
# What a value takes at least while it is decoded: its levels, its place, its number.
_VALUE_BYTES = 16


class RowGroups(BatchDecoder):
    """The row groups of a file, decoded to record batches."""

    def __init__(self, info: bytes, columns: Sequence[str] | None) -> None:
        self._info = FileInfo.of(info)
        known = self._info.columns
        self._leaves, self._flat = known.chosen(columns), known.flat
        self._names = [*known.chunks] if columns is None else [*columns]
        self._footers: PieceFooters | None = None

    @cached_property
    def _metadata(self) -> parquet.FileMetaData:
        return metadata_of(self._info.footer)

    @cached_property
    def schema(self) -> pa.Schema:
        """See `BlockDecoder`."""
        whole = self._metadata.schema.to_arrow_schema()
        return pa.schema([whole.field(each) for each in self._names])

    def prepared(self, block: int, data: memoryview) -> Any:
        """Return the record batch of a row group, or of a piece of one, as bytes."""
        rows = self._info.rows[block]
        chunks = of_piece(self._info.chunks[block], rows).tolist()
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
            metadata = self._metadata
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
        (batch,) = table.cast(self.schema).to_batches()
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
            self._footers = PieceFooters(self._info.footer[:-8])
        places = []
        for leaf, each in enumerate(chunks):
            begin, size = _place(each)
            values = claims[leaf].values if leaf in claims else 0
            places.append((values, begin, each[1], size))
        footer = self._footers.footer(self._info.groups[block], rows, places)
        return metadata_of(b"".join((footer, len(footer).to_bytes(4, "little"), MAGIC)))


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
    from pyarrow import parquet  # not for processes that read what others have decoded

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
