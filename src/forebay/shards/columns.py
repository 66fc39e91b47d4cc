"""Some columns of Parquet or Arrow files that are read by blocks, for batches by column.

    indices ──> blocks ── each opened once ──> columns ── take ──> parts ── joined ──> a batch

Sources of shards read rows of a block with one call. Here a row says which part of that call's
columns it is, so the parts are joined column by column, and no row is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.columns.arrow_columns import ragged, row_numbers
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

    def take(self, index: Any) -> dict[str, Any]:
        """See `Columns.take`."""
        return self._read(index, is_batch=True)

    def each(self, index: Any) -> dict[str, Sequence[Any]]:
        """See `Columns.each`."""
        return self._read(index, is_batch=False)

    def counts(self, name: str) -> Any:
        """See `Columns.counts`; reads this column only."""
        only = BlockColumns(self.dataset.of_columns([name]))
        found = [_counts(only.each(rows)[name]) for rows in _rows_of_blocks(self.dataset)]
        return _listed(found)

    def _read(self, index: Any, *, is_batch: bool) -> dict[str, Any]:
        numbers = row_numbers(index, len(self)).tolist()
        rows: list[ColumnRow] = self.dataset.__getitems__(numbers or [0])
        self._asked += len(numbers)
        self._warn_of_order()
        parts = {id(each.columns): each.columns for each in rows}
        sizes = [len(next(iter(each.values()))) for each in parts.values()]
        begins = dict(zip(parts, np.append(0, np.cumsum(sizes)).tolist(), strict=False))
        order = [begins[id(each.columns)] + each.row for each in rows]
        found = {}
        for name in rows[0].columns:
            values = _joined(name, [each[name] for each in parts.values()], is_batch=is_batch)
            if not numbers:
                values = values[:0]
            elif order != [*range(len(order))]:
                values = _in_order(values, order)
            found[name] = values
        return found

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


def _joined(name: str, parts: list[Any], *, is_batch: bool) -> Any:
    """Return the values of several blocks: an array if all have one shape, else a list.

    Raises:
        InputError: They are lists of numbers of different lengths, which make no batch.
    """
    shapes = {None if isinstance(each, list) else each.shape[1:] for each in parts}
    if None not in shapes and len(shapes) == 1:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    values = [*chain.from_iterable(parts)]
    arrays = [each for each in values if isinstance(each, np.ndarray)]
    if is_batch and arrays:
        one, two = ([*dict.fromkeys(each.shape for each in arrays)] * 2)[:2]
        is_list = len(one) == len(two) == 1
        raise ragged(
            name,
            f"a list of {one[0]} and one of {two[0]}"
            if is_list
            else f"an array of shape {one} and one of {two}",
        )
    return values


def _in_order(values: Any, order: list[int]) -> Any:
    return [values[at] for at in order] if isinstance(values, list) else values[order]


def _counts(values: Any) -> Any:
    """Return the number in each row, or the length of its list or array; strings as they are."""
    if isinstance(values, np.ndarray):
        return values if values.ndim == 1 else np.full(len(values), values.shape[1])
    if values and isinstance(values[0], str | bytes):
        return values
    return np.array([len(each) if isinstance(each, _COUNTED) else 1 for each in values])


def _listed(parts: list[Any]) -> Any:
    is_listed = any(isinstance(each, list) for each in parts)
    return [*chain.from_iterable(parts)] if is_listed else np.concatenate(parts)


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
