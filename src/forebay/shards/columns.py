"""Some columns of Parquet or Arrow files that are read by blocks, for batches by column.

    indices ──> blocks ── each opened once ──> columns ── take ──> parts ── joined ──> a batch

Sources of shards read rows of a block with one call. Here a row says where in that call's record
batch it is, so the batches are joined, and no row is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.base.origins import Origin
from forebay.columns.arrow_columns import Columns, row_numbers
from forebay.columns.column_types import open_columns
from forebay.errors import InputError, OptionError, shown_location
from forebay.shards.arrow_rows import ColumnRow

# What has a number of items; a string does not, in tokens.
_COUNTED = (list, np.ndarray)
# A warning is due if so many blocks were decoded for less than one row in so many of theirs.
_BLOCKS_READ, _ROWS_READ = 16, 16


class BlockColumns:
    """What `Columns` is, for shards.

    Args:
        dataset: A `ShardDataset` of which a sample is a `ColumnRow`.

    Attributes:
        types: The type of each column, by name.
        nbytes: About how many bytes they have in memory.

    Raises:
        InputError: Two shards have different types for a column; it names both.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        blocks = dataset.blocks
        self.types = {field.name: str(field.type) for field in _schema_of(dataset)}
        self.nbytes = int(blocks.nbytes.sum())
        self._asked = 0

    def __reduce__(self) -> Any:
        return BlockColumns, (self.dataset,)

    def __len__(self) -> int:
        return len(self.dataset)

    def origins(self, reads: bool) -> Sequence[Origin]:
        """See `Columns`."""
        found: Sequence[Origin] = self.dataset.origins(reads=reads)
        return found

    def take(self, index: Any) -> dict[str, Any]:
        """See `Columns.take`."""
        columns, order = self._read(index)
        return columns.take(order)

    def each(self, index: Any) -> dict[str, Sequence[Any]]:
        """See `Columns.each`."""
        columns, order = self._read(index)
        return columns.each(order)

    def counts(self, name: str) -> Any:
        """See `Columns.counts`; reads this column only."""
        only = BlockColumns(self.dataset.of_columns([name]))
        found = [only._read(rows)[0].counts(name) for rows in _rows_of_blocks(self.dataset)]
        is_listed = any(isinstance(each, list) for each in found)
        return [*chain.from_iterable(found)] if is_listed else np.concatenate(found)

    def _read(self, index: Any) -> tuple[Columns, list[int]]:
        """Return the columns of some rows, and where in them each of the rows is."""
        numbers = row_numbers(index, len(self)).tolist()
        rows: list[ColumnRow] = self.dataset.__getitems__(numbers or [0])
        self._asked += len(numbers)
        self._warn_of_order()
        parts = {id(each.batch): each.batch for each in rows}
        begins = dict(zip(parts, accumulate(map(len, parts.values()), initial=0), strict=False))
        table = pa.Table.from_batches([*parts.values()])
        with suppress(pa.ArrowNotImplementedError):  # of some types, parts remain
            table = table.combine_chunks()
        order = [begins[id(each.batch)] + each.row for each in rows]
        return open_columns(table, "from_table"), order if numbers else []

    def _warn_of_order(self) -> None:
        blocks, rows = self.dataset.decoded
        if blocks < _BLOCKS_READ or rows < _ROWS_READ * self._asked:
            return
        warnings.warn(
            f"from_table: {shown_location(self.dataset.location)}: the columns do not fit into "
            f"memory, so row groups are read as needed, {blocks:,} so far with {rows:,} rows, of "
            f"which {self._asked:,} were used: the order is random\n  Nothing is wrong, but slow. "
            "Shuffle by a DataLoader with seed=, which reads row group by row group; or write an "
            "Arrow file, which is mapped: see docs/how-to/tables.md.",
            RuntimeWarning,
            stacklevel=2,
        )
        self._asked = 1 << 62  # once


def _schema_of(dataset: Any) -> pa.Schema:
    """Return the columns' types, which all shards need to have."""
    blocks, first, where = dataset.blocks, None, ""
    index = blocks.index
    for shard in range(len(index.sizes)):
        if index.first_block(shard) == index.block_ends[shard]:  # it has no rows
            continue
        schema = blocks.decoder(shard).schema
        name = f"{dataset.location.rstrip('/')}/{index.listed(shard).name}"
        if first is None:
            first, where = schema, name
        for own, other in zip(first, schema, strict=True):
            if own.type != other.type:
                raise different_types(own.name, (own.type, where), (other.type, name))
    assert first is not None, "a dataset of shards has a sample"
    return first


def different_types(column: str, one: tuple[Any, str], other: tuple[Any, str]) -> InputError:
    """Return the error for two files with different types, given the types and the files."""
    return InputError(
        f"from_table: column {column!r} is of type {one[0]} in {shown_location(one[1])!r}, and of "
        f"type {other[0]} in {shown_location(other[1])!r}\n"
        "  The files of one dataset need the same types. Write one of them again, or make a "
        "dataset of each and use torch's ConcatDataset."
    )


def _rows_of_blocks(dataset: Any) -> Iterator[range]:
    first = np.append(dataset.blocks.first, len(dataset)).tolist()
    return (range(*each) for each in pairwise(first))


def counts_of(dataset: Any, name: str) -> Any:
    """Return the number in a column or field of each sample, or the length of what is there.

    Of shards with columns, only this one is read. The content of a tar's member counts by its
    bytes.

    Raises:
        OptionError: There is no such column or field, or its values have no length.
    """
    blocks, index = dataset.blocks, dataset.blocks.index
    if all(blocks.decoder(at).schema is not None for at in range(len(index.sizes))):
        return BlockColumns(dataset.of_columns([name])).counts(name)
    found: list[int] = []
    for rows in _rows_of_blocks(dataset):
        for at, sample in zip(rows, dataset.samples(rows), strict=True):
            if not isinstance(sample, dict) or name not in sample:
                known = f"; its fields are: {', '.join(sample)}" if isinstance(sample, dict) else ""
                raise OptionError(f"sample {at} has no field {name!r}{known}")
            value = sample[name]
            if not isinstance(value, (*_COUNTED, bytes, int)) or isinstance(value, bool):
                raise OptionError(
                    f"{name!r} of sample {at} is a {type(value).__name__}, which has no number of "
                    "tokens\n  Name a field of integers, of lists or of bytes."
                )
            found.append(value if isinstance(value, int) else len(value))
    return np.array(found)
