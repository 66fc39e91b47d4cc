"""Tables in memory as manifests: of pandas, polars or pyarrow, or a list of dicts.

forebay imports neither pandas nor polars. A table is recognised by the columns that it has and by
Arrow's PyCapsule interface, which all of them offer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from forebay.errors import InputError, shortened
from forebay.jobs.inputs.manifest import LocatedRow, Manifest, check_columns, check_types, refuse
from forebay.jobs.inputs.row_paths import DESTINATION
from forebay.jobs.packed.reader import packed_identity

if TYPE_CHECKING:
    import pyarrow

_BATCH_ROWS = 1024


def is_table(value: object) -> bool:
    """Tell whether a value is a table in memory; a list is one if its first element is a dict."""
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping)
    kind = type(value)  # a property of an instance might compute something
    return hasattr(kind, "columns") and (
        hasattr(kind, "__arrow_c_stream__") or hasattr(kind, "__dataframe__")
    )


def memory_manifest(table: Any, folder: str | os.PathLike[str] | None) -> tuple[Manifest, str]:
    """Return the manifest of a table in memory, and where its relative `destination` starts.

    Args:
        table: The table; `is_table` is true.
        folder: A folder or URL; None for the working folder.

    Raises:
        InputError: The table has no rows or unusable columns; or `folder` is None, and the first
            relative destination is not in the working folder.
    """
    name = "the list of dicts" if isinstance(table, list | tuple) else _name_of(table)
    rows: Callable[[], Iterator[LocatedRow]]
    if isinstance(table, list | tuple):
        columns, rows = _list_columns(name, table), partial(_list_rows, table)
    else:
        arrow = arrow_table(table)
        columns, rows = tuple(arrow.column_names), partial(_arrow_rows, arrow)
        check_types(name, arrow.schema)
    check_columns(name, columns)
    if next(rows(), None) is None:
        refuse(name, "no rows", "A manifest needs one row for each input.")
    start = start_of(folder, (row.get(DESTINATION) for _, row in rows()), name)
    local = None if "://" in start else start
    total = len(table) if isinstance(table, list | tuple) else arrow.num_rows
    manifest = Manifest(name, columns, local, lambda skipped: islice(rows(), skipped, None), total)
    return manifest, start


def arrow_table(table: Any) -> pyarrow.Table:
    """Return a table of pandas, polars or pyarrow as pyarrow's, without row labels of pandas.

    Raises:
        InputError: A column has values of several types, or a string is not UTF-8; or two columns
            of a DataFrame have the same name.
    """
    import pyarrow

    # A DataFrame cannot exist before its library is imported.
    pandas, polars = map(sys.modules.get, ("pandas", "polars"))
    try:
        objects = polars is not None and isinstance(table, polars.DataFrame) and polars.Object
        if objects and objects in table.dtypes:  # Arrow would be given their addresses
            raise TypeError("a column holds Python objects")
        if pandas is not None and isinstance(table, pandas.DataFrame):
            # Otherwise row labels would be a column or not, depending on how rows were selected.
            arrow = pyarrow.Table.from_pandas(table, preserve_index=False)
        else:
            arrow = pyarrow.table(table)
        arrow.validate(full=True)  # or a string that is not UTF-8 would be found in a worker
    except Exception as error:  # noqa: BLE001 - ArrowException, ValueError, TypeError, UnicodeError
        advice = "Each column needs one type and a name, and strings are UTF-8. Convert it first."
        refuse(_name_of(table), f"pyarrow cannot read it: {error}", advice, error)
    arrow = arrow.replace_schema_metadata(None)
    if "_view" in str(arrow.schema):  # polars; pyarrow cannot select rows of these types
        arrow = arrow.cast(pyarrow.schema(map(_without_views, arrow.schema)))
    return arrow


def start_of(folder: str | os.PathLike[str] | None, destinations: Iterable[Any], name: str) -> str:
    """Return the folder or URL in which relative destinations of a table in memory start.

    Args:
        folder: What the user named; None for the working folder.
        destinations: Those of the table. If no folder is named, the first relative one must exist.
        name: What to call the table in the message.

    Raises:
        InputError: The first relative destination does not exist in the working folder.
    """
    if folder is not None:
        text = os.path.expanduser(os.fspath(folder))
        return text.rstrip("/") if "://" in text else os.path.abspath(text)
    here = os.getcwd()
    texts = (each for each in destinations if isinstance(each, str) and each)
    first = next((each for each in texts if "://" not in each and not os.path.isabs(each)), None)
    path = os.path.join(here, first or "")
    if first is None or "\0" in first or os.path.lexists(path) or packed_identity(path):
        return here
    raise InputError(
        f"{name}: its destination {shortened(first)} is not in the working folder {here}\n"
        "  A table in memory does not say in which folder its outputs are. Name it, as in "
        "folder=report.output, or pass the output folder instead of the table."
    )


def _name_of(table: object) -> str:
    return f"the {type(table).__name__}"


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


def _list_rows(table: Iterable[Mapping[str, Any]]) -> Iterator[LocatedRow]:
    return ((f"row {number}", row) for number, row in enumerate(table, 1))


def _arrow_rows(table: pyarrow.Table) -> Iterator[LocatedRow]:
    number = 0
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", row


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
        kind = {"string_view": pyarrow.large_string(), "binary_view": pyarrow.large_binary()}.get(
            str(kind), kind
        )
    return field.with_type(kind)
