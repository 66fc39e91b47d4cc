"""The rows of parts and their files: written by row groups, read again, and widened."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from forebay.base.arrow_arrays import array_of, check_memory
from forebay.base.files import local_file, location_in
from forebay.base.formatting import counted
from forebay.base.value_classes import MisfitError
from forebay.base.value_inference import named_misfit, widened_alike
from forebay.base.value_types import Spec, arrow_type, nulls, type_from_json, type_to_json
from forebay.errors import OutputError, shown_location
from forebay.ledger.database import DAMAGES
from forebay.ledger.records import Taken
from forebay.predicting.data import INDEX

# Size of the rows in one row group of the file.
GROUP_BYTES = 16 * 2**20
# The key in a file's schema under which the types of the predictions are described.
KEY = "forebay"


# The type of each column, by name.
Types = dict[str, Spec]


def checked_types(known: Types, found: Types, index: int) -> Types:
    """Return the types for both; raise OutputError if there are none.

    Args:
        index: A sample of those that were found.
    """
    try:
        return joined_types(known, found)
    except MisfitError as error:
        raise OutputError(
            f"sample {index}: {error}\n"
            "  A column has one type. Nothing of this part was kept. Have the model return the "
            "same for every sample. To switch to the new columns, start over: redo='*', or "
            "--redo '*'."
        ) from error


class Rows(NamedTuple):
    """Predictions of some samples, with the types that their columns have here."""

    indices: list[int]
    types: Types
    columns: dict[str, pa.Array | pa.ChunkedArray]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(int(column.nbytes) for column in self.columns.values())

    def some(self, first: int, end: int) -> Rows:
        """Return the rows between two places."""
        if (first, end) == (0, len(self.indices)):
            return self
        columns = {name: each.slice(first, end - first) for name, each in self.columns.items()}
        return Rows(self.indices[first:end], self.types, columns)

    def as_types(self, types: Types) -> dict[str, pa.ChunkedArray]:
        """Return all columns of a table with types that hold these rows."""
        found = {}
        for name, spec in types.items():
            column = self.columns.get(name)
            if column is None:
                found[name] = pa.chunked_array([nulls(len(self.indices), arrow_type(spec))])
                continue
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            wide = [widened_column(chunk, self.types[name], spec) for chunk in chunks]
            found[name] = pa.chunked_array(wide, arrow_type(spec))
        return found


def widened_column(array: pa.Array, own: Spec, wanted: Spec) -> pa.Array:
    """Return a column of one type as one of another, which holds its values, too."""
    if own == wanted:
        return array
    from forebay.base.value_readers import widened_array

    return widened_array(array, own, wanted)


def joined_types(known: Types, found: Types) -> Types:
    """Return the types of columns that hold the rows of both; MisfitError if there are none."""
    types = dict(known)
    for name, spec in found.items():
        types[name] = joined_type(name, types.get(name, Spec("none")), spec)
    return types


def joined_type(name: str, known: Spec, found: Spec) -> Spec:
    """Return the type for the values of both; MisfitError, with the column's name, if none is."""
    if known in (found, Spec("none")):
        return found
    try:
        return widened_alike(known, found)
    except MisfitError as error:
        raise named_misfit(name, error) from None


def types_to_json(types: Types) -> dict[str, Any]:
    """Return the types of columns as JSON values."""
    return {name: type_to_json(spec) for name, spec in types.items()}


def types_from_json(found: Any) -> Types:
    """Return the types that `types_to_json` described."""
    return {str(name): type_from_json(spec) for name, spec in found.items()}


def part_name(number: int) -> str:
    """Return the name of a part's file."""
    return f"part-{number:05d}.parquet"


class PartWriter:
    """Writes one file of rows, in order of their samples; without rows there is no file.

    Args:
        table: The metadata columns, a row per sample; None if there are none.
        types: Those of the columns of the samples before.

    Attributes:
        types: Those of the columns of this file, which may become wider.
    """

    def __init__(
        self, path: Callable[[], Any], table: pa.Table | None, types: Types | None = None
    ) -> None:
        self._path, self._metadata = path, table
        self._own = [INDEX] if table is None else [INDEX, *table.column_names]
        self.types: Types = dict(types or {})
        self._file: parquet.ParquetWriter | None = None
        self._written: Types = {}  # the types of the file
        self._at: Any = None
        self._held: list[Rows] = []
        self._held_bytes = 0
        self._earlier: Rows | None = None
        self._taken = 0  # of the earlier rows

    def take_over(self, rows: Rows) -> None:
        """Have rows of an earlier file added where they belong."""
        self._earlier = rows
        self.types = checked_types(self.types, rows.types, rows.indices[0])

    def add(self, rows: Rows) -> None:
        """Add rows; OutputError if a column cannot hold them."""
        earlier, at = [] if self._earlier is None else self._earlier.indices, 0
        while at < len(rows.indices):
            self._add_earlier(bisect_left(earlier, rows.indices[at]))
            following = earlier[self._taken] if self._taken < len(earlier) else math.inf
            end = bisect_left(rows.indices, following, at)
            self._hold(rows.some(at, end))
            at = end

    def _add_earlier(self, end: int) -> None:
        """Add the earlier rows up to a place."""
        if self._earlier is not None and end > self._taken:
            self._hold(self._earlier.some(self._taken, end))
            self._taken = end

    def _hold(self, rows: Rows) -> None:
        for name in rows.types.keys() & self._own:
            raise OutputError(
                f"two columns would be called {name!r}: one that the model returned, and one "
                "of the table or forebay\n  Return it under another name, in a dict."
            )
        self.types = checked_types(self.types, rows.types, rows.indices[0])
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        indices = [index for rows in self._held for index in rows.indices]
        try:
            index = array_of(indices, pa.int64())
            columns: dict[str, Any] = {INDEX: index}
            if self._metadata is not None:
                chosen = self._metadata.take(index)
                columns.update(zip(chosen.column_names, chosen.columns, strict=True))
            pieces = [rows.as_types(self.types) for rows in self._held]
            for name, spec in self.types.items():
                chunks = [chunk for piece in pieces for chunk in piece[name].chunks]
                columns[name] = pa.concat_arrays(chunks) if chunks else nulls(0, arrow_type(spec))
            rows = pa.table(columns)
            check_memory(rows.nbytes)
            if self._file is None:
                self._open(rows.schema)
            elif self._written != self.types:
                self._widen(rows.schema)
            assert self._file is not None
            self._file.write_table(rows, row_group_size=len(rows))
            self._held, self._held_bytes = [], 0
        except MemoryError as error:  # Arrow's is one
            raise OutputError(
                f"predictions of {counted(len(indices), 'sample')} cannot be written: "
                f"{str(error) or 'there is not enough memory'}\n"
                "  Free some memory, and repeat the call to continue."
            ) from error

    def _open(self, schema: pa.Schema) -> None:
        self._at = self._path() if self._at is None else self._at
        described = {KEY: json.dumps(types_to_json(self.types))}
        # Dictionary encoding does not help predictions: their values rarely repeat.
        self._file = parquet.ParquetWriter(
            self._at, schema.with_metadata(described), use_dictionary=self._own[1:] or False
        )
        self._written = dict(self.types)

    def _widen(self, schema: pa.Schema) -> None:
        """Write the row groups that the file has again, with the wider types."""
        assert self._file is not None
        self._file.close()
        narrow = f"{self._at}.narrow"
        os.rename(self._at, narrow)
        self._open(schema)
        with parquet.ParquetFile(narrow) as file:
            for group in widened_groups(file, self.types):
                self._file.write_table(group, row_group_size=len(group))
        os.unlink(narrow)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._earlier is not None:
            self._add_earlier(len(self._earlier.indices))
        if self._held and kind is None:
            self._write()
        if self._file is not None:
            self._file.close()


def types_in(file: parquet.ParquetFile) -> Types:
    """Return the types of the predictions in a file."""
    return types_from_json(json.loads((file.schema_arrow.metadata or {})[KEY.encode()]))


def widened_groups(file: parquet.ParquetFile, types: Types) -> Iterator[pa.Table]:
    """Yield the row groups of a file, with wider types."""
    own = types_in(file)
    for number in range(file.num_row_groups):
        table = file.read_row_group(number)
        columns = {name: table[name] for name in table.column_names if name not in own}
        predicted = {name: table[name] for name in own}
        rows = Rows([*range(len(table))], own, predicted)
        yield pa.table({**columns, **rows.as_types(types)})


def earlier_predictions(taken: Sequence[Taken]) -> Rows:
    """Return the predictions that earlier files have, in order of the samples."""
    pieces, indices, types = list[Rows](), list[int](), Types()
    for each in taken:
        try:
            with local_file(each.location) as path, parquet.ParquetFile(path) as file:
                own = types_in(file)
                table = file.read([INDEX, *own])
            places = table[INDEX].to_numpy() - each.first
            chosen = table.take(np.searchsorted(places, each.rows))
            pieces.append(Rows(each.indices, own, {name: chosen[name] for name in own}))
            types = joined_types(types, own)
        except (OSError, pa.ArrowException, *DAMAGES) as error:
            raise OutputError(
                f"{shown_location(each.location)!r} cannot be read: {error}\n"
                f"  It has the predictions of {counted(len(each.indices), 'sample')}, made by an "
                "earlier run. To make all predictions again: redo='*', or --redo '*'."
            ) from error
        indices += each.indices
    order = np.argsort(indices)
    found = [rows.as_types(types) for rows in pieces]
    columns = {}
    for name in types:
        chunks = [chunk for piece in found for chunk in piece[name].chunks]
        columns[name] = pa.concat_arrays(chunks).take(order)
    return Rows(np.array(indices)[order].tolist(), types, columns)


class WidenWork:
    """Writes the file of a part again, with the types that the columns have in all parts.

    Args:
        output: The output folder, or its URL.
        records: The record of each part, by its first sample.
    """

    def __init__(
        self, output: str, size: int, types: Types, records: Mapping[int, dict[str, Any]]
    ) -> None:
        self._output, self._size, self._types, self._records = output, size, types, records

    def __call__(self, row: dict[str, int], out: Any) -> Any:
        """Write the file; return the record of the part."""
        name = part_name(row["first"] // self._size)
        described = {KEY: json.dumps(types_to_json(self._types))}
        with (
            local_file(location_in(self._output, name)) as path,
            parquet.ParquetFile(path) as file,
        ):
            groups = widened_groups(file, self._types)
            first = next(groups)
            own = [each for each in first.column_names if each not in (INDEX, *self._types)]
            schema = first.schema.with_metadata(described)
            with parquet.ParquetWriter(
                out.file(name), schema, use_dictionary=own or False
            ) as writer:
                for group in (first, *groups):
                    writer.write_table(group, row_group_size=len(group))
        return {**self._records[row["first"]], "columns": types_to_json(self._types)}
