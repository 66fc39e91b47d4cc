"""Rows of Arrow record batches as samples, and record batches as the bytes that a block has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from forebay.base.arrow_arrays import array_of_numpy
from forebay.base.row_values import python_values
from forebay.columns.column_types import open_columns, without_view
from forebay.errors import shortened
from forebay.shards.format import BlockDecoder

# What a block may have once it is decoded: so many times its own bytes, or so much; and never more
# than the last, beyond which Arrow cannot have it in one batch.
MOST_RATIO, LEAST_BYTES, MOST_BYTES = 200, 256 << 20, (2 << 30) - 1
# Rows that are taken one by one, rather than by a copy of their columns, for which all of the block
# has to be checked: so many, or one of so many.
_FEW, _FEW_OF = 3, 32


def most_bytes(stored: int) -> int:
    """Return how many bytes so many stored ones may become."""
    return min(max(MOST_RATIO * stored, LEAST_BYTES), MOST_BYTES)


def refuse_claim(what: str, claimed: int, stored: int) -> None:
    """Raise ValueError if stored bytes claim to become more than is credible."""
    if claimed > most_bytes(stored):
        raise ValueError(
            f"{what} would take {claimed:,} bytes or more: one of {stored:,} bytes may take "
            f"{MOST_RATIO} times as many, at least {LEAST_BYTES:,} and at most {MOST_BYTES:,}; "
            "choose fewer columns, or write fewer rows to each"
        )


def has_dictionaries(kind: pa.DataType | pa.Schema) -> bool:
    """Return whether there are values that are numbers of entries elsewhere."""
    if isinstance(kind, pa.Schema):
        return any(has_dictionaries(each.type) for each in kind)
    if isinstance(kind, pa.BaseExtensionType):
        return has_dictionaries(kind.storage_type)
    parts = range(kind.num_fields)
    return pa.types.is_dictionary(kind) or any(
        has_dictionaries(kind.field(at).type) for at in parts
    )


def bytes_of_batch(batch: pa.RecordBatch) -> pa.Buffer:
    """Return a batch as the bytes of a stream, with its types and dictionaries."""
    batch, size = batch.replace_schema_metadata(None), pa.MockOutputStream()
    _write(batch, size)
    found = pa.allocate_buffer(size.size())
    _write(batch, pa.FixedSizeBufferWriter(found))
    return found


def _write(batch: pa.RecordBatch, out: pa.NativeFile) -> None:
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)


class BatchDecoder(BlockDecoder):
    """Reads blocks that are record batches once they are prepared."""

    def record_batch(self, block: int, data: memoryview) -> pa.RecordBatch:
        """See `BlockDecoder`: what `bytes_of_batch` wrote."""
        return pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()

    def reader(self, block: int, data: memoryview) -> Callable[[Sequence[int]], list[Any]]:
        """See `BlockDecoder`."""
        return partial(_samples_of_batch, self.record_batch(block, data))


def _samples_of_batch(batch: pa.RecordBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows as dicts, with values as `from_table` has them.

    The batch may be from anybody: what is read of it is checked.
    """
    first, count = rows[0] if rows else 0, len(rows)
    if count and not 0 <= min(rows) <= max(rows) < batch.num_rows:
        raise ValueError(
            f"a block of {batch.num_rows:,} rows, of which {shortened([*rows])} are read"
        )
    if count == 1 or [*rows] == [*range(first, first + count)]:
        return _dicts(batch.slice(first, count))
    if count <= max(_FEW, batch.num_rows // _FEW_OF):
        return [_dicts(batch.slice(row, 1))[0] for row in rows]
    batch.validate(full=True)
    return _dicts(batch.take(array_of_numpy(np.array(rows, np.int64))))


class ColumnRow(NamedTuple):
    """A row of a record batch, which it shares with rows that were read with it."""

    batch: pa.RecordBatch
    row: int


def reader_by_column(
    batch: pa.RecordBatch, where: str
) -> Callable[[Sequence[int]], list[ColumnRow]]:
    """Return what returns rows of a record batch, copied by column: for many calls.

    The batch may be from anybody.

    Args:
        where: What errors begin with.

    Raises:
        InputError: A column has a type that no batch can have, or a null where none is possible.
    """
    batch.validate(full=True)
    for at, name in enumerate(batch.schema.names):
        if (plain := without_view(batch.schema.types[at])) is not batch.schema.types[at]:
            batch = batch.set_column(at, name, batch.column(at).cast(plain))
    open_columns(pa.Table.from_batches([batch]), where)  # with the shard's name, and its rows

    def read(rows: Sequence[int]) -> list[ColumnRow]:
        found = batch.take(array_of_numpy(np.array(rows, np.int64)))
        return [ColumnRow(found, at) for at in range(len(rows))]

    return read


def _dicts(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    batch.validate(full=True)  # offsets lead anywhere, and strings need not be UTF-8
    names = batch.schema.names
    if batch.num_rows == 1:
        values = [python_values(each)[0] for each in batch.columns]
        return [dict(zip(names, values, strict=True))]
    columns = [python_values(each) for each in batch.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
