"""Tables in memory as manifests: of pandas, polars or pyarrow, or a list of dicts.

forebay imports neither pandas nor polars. A table is recognised by the columns that it has and by
Arrow's PyCapsule interface, which all of them offer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from forebay.base.arrow_arrays import Row, table_of_rows
from forebay.base.files import absolute, is_url
from forebay.base.row_values import json_value, python_rows
from forebay.base.table_files import refuse
from forebay.base.table_formats import LocatedRow, check_types
from forebay.columns.column_types import without_view
from forebay.errors import InputError, shortened
from forebay.inputs.manifests import Manifest, check_columns
from forebay.inputs.other_inputs import is_table, rows_in
from forebay.inputs.row_paths import DESTINATION, file_columns

if TYPE_CHECKING:
    import pyarrow


_BATCH_ROWS = 1024


def memory_manifest(table: Any, folder: str | os.PathLike[str] | None) -> tuple[Manifest, str]:
    """Return the manifest of a table in memory, and where its relative `destination` starts."""
    values: Callable[[], Iterable[Row]]
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(table, pandas.DataFrame):
        table = with_labels(table)
    if not is_table(table) or isinstance(table, list | tuple):
        is_list = isinstance(table, list | tuple)
        name = "the list of dicts" if is_list else f"the {type(table).__name__}"
        total = len(table) if hasattr(table, "__len__") else None
        values = rows_in(table)
        columns = _list_columns(name, values())
    elif pandas is not None and isinstance(table, pandas.DataFrame):
        # Not by way of Arrow: so a value is the one that `to_dict("records")` would give.
        name, total = "the DataFrame", len(table)
        columns = tuple(map(str, table.columns))
        values = partial(_frame_rows, table, columns)
    else:
        arrow = arrow_table(table)
        name, total = f"the {type(table).__name__}", arrow.num_rows
        columns, values = tuple(arrow.column_names), partial(_arrow_rows, arrow)
        check_types(name, arrow.schema)

    def rows() -> Iterator[LocatedRow]:
        return ((f"row {number}", row) for number, row in enumerate(values(), 1))

    check_columns(name, columns)
    if next(rows(), None) is None:
        refuse(name, "no rows", "A manifest needs one row for each input.")
    start = start_of(folder, (row.get(DESTINATION) for _, row in rows()), name)
    local = None if is_url(start) else start
    watched = file_columns(columns, (row for _, row in rows()), local)
    manifest = Manifest(name, columns, local, lambda skipped: islice(rows(), skipped, None), total)
    return replace(manifest, watched=watched), start


def with_labels(frame: Any) -> Any:
    """Return a DataFrame of pandas with its row labels as columns, if they have names."""
    names = [*frame.index.names]
    if None in names or not {*names}.isdisjoint(frame.columns):
        return frame
    return frame.reset_index()


def arrow_table(table: Any) -> pyarrow.Table:
    """Return a table of pandas, polars or pyarrow as pyarrow's, with named row labels of pandas."""
    import pyarrow

    # A DataFrame cannot exist before its library is imported.
    pandas, polars = map(sys.modules.get, ("pandas", "polars"))
    try:
        objects = polars is not None and isinstance(table, polars.DataFrame) and polars.Object
        if objects and objects in table.dtypes:  # Arrow would be given their addresses
            raise TypeError("a column holds Python objects")
        if pandas is not None and isinstance(table, pandas.DataFrame):
            arrow = arrow_frame(with_labels(table))
        else:
            arrow = pyarrow.table(table)
        arrow.validate(full=True)  # or a string that is not UTF-8 would be found in a worker
    except Exception as error:  # noqa: BLE001 - ArrowException, ValueError, TypeError, UnicodeError
        advice = "Each column needs one type and a name, and strings are UTF-8. Convert it first."
        refuse(f"the {type(table).__name__}", f"pyarrow cannot read it: {error}", advice, error)
    arrow = arrow.replace_schema_metadata(None)
    if "_view" in str(arrow.schema):  # polars; pyarrow cannot select rows of these types
        arrow = arrow.cast(pyarrow.schema(map(_without_views, arrow.schema)))
    return arrow


def start_of(folder: str | os.PathLike[str] | None, destinations: Iterable[Any], name: str) -> str:
    """Return the folder or URL in which relative destinations of a table in memory start.

    Args:
        folder: What the user named; None for the working folder.
    """
    if folder is not None:
        text = absolute(os.path.expanduser(os.fspath(folder)))
        return text.rstrip("/") if is_url(text) else text
    here = os.getcwd()
    texts = (each for each in destinations if isinstance(each, str) and each)
    first = next((each for each in texts if not is_url(each) and not os.path.isabs(each)), None)
    path = os.path.join(here, first or "")
    if first is None or "\0" in first or os.path.lexists(path):
        return here
    raise InputError(
        f"{name}: its destination {shortened(first)} is not in the working folder {here}\n"
        "  A table in memory does not say in which folder its outputs are. Name it, as in "
        "folder=report.output, or pass the output folder instead of the table."
    )


def _list_columns(name: str, table: Iterable[Any]) -> tuple[str, ...]:
    columns: dict[Any, None] = {}
    for number, row in enumerate(table, 1):
        if not isinstance(row, Mapping):
            got = f"got {type(row).__name__} instead of a dict"
            refuse(f"{name}, row {number}", got, "The first row is a dict, so all must be.")
        columns.update(dict.fromkeys(row))
    for column in columns:
        if not isinstance(column, str):
            got = f"the key {column!r} is not a string"
            refuse(name, got, "The keys are the names of columns.")
    return tuple(columns)


def _arrow_rows(table: pyarrow.Table) -> Iterator[Row]:
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        yield from python_rows(batch)


def _frame_rows(frame: Any, columns: Sequence[str]) -> Iterator[Row]:
    for first in range(0, len(frame), _BATCH_ROWS):
        part = frame.iloc[first : first + _BATCH_ROWS]
        values = [part.iloc[:, at].tolist() for at in range(len(columns))]
        for each in zip(*values, strict=True):
            yield dict(zip(columns, each, strict=True))


def arrow_frame(frame: Any, *, mixes: bool = True) -> pyarrow.Table:
    """Return a DataFrame of pandas as pyarrow's table, without its row labels.

    Arrow would make numbers of periods and intervals, and refuses some columns of Python objects:
    these have the values that they have in rows.

    Args:
        mixes: Whether a column of Python objects may hold several types.

    Raises:
        Exception: pyarrow cannot read a column; there is no common base class.
    """
    import pyarrow

    arrays = []
    for at, dtype in enumerate(frame.dtypes):
        column = frame.iloc[:, at]
        known = str(getattr(getattr(dtype, "categories", dtype), "dtype", dtype))
        if not known.startswith(("period", "interval")):
            try:
                arrays.append(pyarrow.Array.from_pandas(column))
                continue
            except Exception:
                if not mixes or str(dtype) != "object":
                    raise
        values = [{"": json_value(each)} for each in column.tolist()]
        arrays.append(table_of_rows(partial(iter, values)).column(0))
    return pyarrow.table(arrays, names=[*map(str, frame.columns)])


def _without_views(field: Any) -> Any:
    """Return an Arrow field whose strings and bytes are of the types that pyarrow computes with."""
    import pyarrow

    kind, types = field.type, pyarrow.types
    if "_view" not in str(kind):
        return field
    if types.is_dictionary(kind):
        kind = _without_views(field.with_type(kind.value_type)).type
    elif types.is_struct(kind):
        kind = pyarrow.struct([_without_views(kind.field(k)) for k in range(kind.num_fields)])
    elif types.is_fixed_size_list(kind):
        kind = pyarrow.list_(_without_views(kind.value_field), kind.list_size)
    elif types.is_large_list(kind) or types.is_list(kind):
        make = pyarrow.large_list if types.is_large_list(kind) else pyarrow.list_
        kind = make(_without_views(kind.value_field))
    else:
        kind = without_view(kind)
    return field.with_type(kind)
