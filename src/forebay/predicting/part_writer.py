"""One file of predictions: the rows of a part, in order, new ones and those of earlier files."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from forebay.base.arrow_arrays import array_of, array_of_numpy, check_memory
from forebay.base.earlier_rows import Taken
from forebay.base.files import local_file
from forebay.base.formatting import counted
from forebay.errors import OutputError, shown_location
from forebay.predicting.reader import INDEX, Columns

# Size of the rows in one row group of the file.
GROUP_BYTES = 16 * 2**20


def earlier_predictions(taken: Sequence[Taken], columns: list[str]) -> tuple[list[int], pa.Table]:
    """Return samples of which earlier files have predictions, in order, and these."""
    tables, indices = list[pa.Table](), list[int]()
    for each in taken:
        try:
            with local_file(each.location) as path, parquet.ParquetFile(path) as file:
                rows = file.read([INDEX, *columns])
            places = rows[INDEX].to_numpy() - each.first
            tables.append(rows.select(columns).take(np.searchsorted(places, each.rows)))
        except (OSError, pa.ArrowException, LookupError) as error:
            raise OutputError(
                f"{shown_location(each.location)!r} cannot be read: {error}\n"
                f"  It has the predictions of {counted(len(each.indices), 'sample')}, made by an "
                "earlier run. To make all predictions again: resume=False, or --restart."
            ) from error
        indices += each.indices
    order = np.argsort(indices)
    whole = pa.concat_tables([each.replace_schema_metadata(None) for each in tables])
    return np.array(indices)[order].tolist(), whole.take(order).combine_chunks()


class PartWriter:
    """Writes one file of rows, in order of their samples; without rows there is no file.

    Args:
        table: The metadata columns, a row per sample; None if there are none.
    """

    def __init__(self, path: Callable[[], Any], table: pa.Table | None) -> None:
        self._path, self._metadata = path, table
        self._own = [INDEX] if table is None else [INDEX, *table.column_names]
        self._file: parquet.ParquetWriter | None = None
        self._indices: list[int] = []
        self._held: list[Columns | pa.Table] = []
        self._held_bytes = 0
        self._earlier: tuple[list[int], pa.Table | None] = [], None
        self._taken = 0  # of the earlier rows

    def take_over(self, indices: list[int], predictions: pa.Table) -> None:
        """Have rows of an earlier file added where they belong, with the same columns."""
        self._earlier = indices, predictions

    def add(self, indices: list[int], predictions: Columns) -> None:
        """Add rows, which have the same columns each time; the arrays must not change later."""
        earlier, at = self._earlier[0], 0
        while at < len(indices):
            self._add_earlier(bisect_left(earlier, indices[at]))
            following = earlier[self._taken] if self._taken < len(earlier) else math.inf
            end = bisect_left(indices, following, at)
            some = slice(at, end)
            columns = {name: array[some] for name, array in predictions.items()}
            self._hold(indices[some], predictions if some == slice(0, len(indices)) else columns)
            at = end

    def _add_earlier(self, end: int) -> None:
        """Add the earlier rows up to a place."""
        indices, rows = self._earlier
        if rows is not None and end > self._taken:
            self._hold(indices[self._taken : end], rows.slice(self._taken, end - self._taken))
            self._taken = end

    def _hold(self, indices: list[int], predictions: Columns | pa.Table) -> None:
        if not self._held and isinstance(predictions, dict):
            for name in predictions.keys() & self._own:
                raise OutputError(
                    f"two columns would be called {name!r}: one that the model returned, and one "
                    "of the table or forebay\n  Return it under another name, in a dict."
                )
        self._indices += indices
        self._held.append(predictions)
        arrays = predictions.values() if isinstance(predictions, dict) else predictions.columns
        self._held_bytes += sum(array.nbytes for array in arrays)
        if self._held_bytes >= GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        try:
            index = array_of(self._indices, pa.int64())
            columns: dict[str, Any] = {INDEX: index}
            if self._metadata is not None:
                chosen = self._metadata.take(index)
                columns.update(zip(chosen.column_names, chosen.columns, strict=True))
            first = self._held[0]
            for name in first if isinstance(first, dict) else first.column_names:
                columns[name] = _joined([each[name] for each in self._held])
            rows = pa.table(columns)
            check_memory(rows.nbytes)
            if self._file is None:
                # Dictionary encoding does not help predictions: their values rarely repeat.
                self._file = parquet.ParquetWriter(
                    self._path(), rows.schema, use_dictionary=self._own[1:] or False
                )
            self._file.write_table(rows, row_group_size=len(rows))
            self._indices, self._held, self._held_bytes = [], [], 0
        except MemoryError as error:  # Arrow's is one
            raise OutputError(
                f"predictions of {counted(len(self._indices), 'sample')} cannot be written: "
                f"{str(error) or 'there is not enough memory'}\n"
                "  Free some memory, and repeat the call to continue."
            ) from error

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._add_earlier(len(self._earlier[0]))
        if self._held and kind is None:
            self._write()
        if self._file is not None:
            self._file.close()


def _joined(pieces: list[Any]) -> pa.Array:
    """Return pieces of a column as one array: those of a model's outputs, and those of a table."""
    arrays: list[pa.Array] = []
    for is_new, some in groupby(pieces, lambda each: isinstance(each, np.ndarray)):
        if is_new:
            arrays.append(array_of_numpy(np.concatenate([*some])))
        else:
            arrays += [chunk for each in some for chunk in each.chunks]
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
