"""Some columns of a table, for batches by column.

Those in memory are used as they are, an Arrow file is mapped, and of a Parquet file only these
columns are read.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.base.arrow_arrays import array_of_numpy
from forebay.base.files import absolute, fetched, is_url
from forebay.base.formatting import byte_size, counted
from forebay.base.machine import memory_for_files
from forebay.base.table_files import refuse
from forebay.columns.arrow_columns import Columns
from forebay.columns.column_types import open_columns
from forebay.columns.row_groups import RowGroups, check_identity, file_identity
from forebay.errors import InputError, OptionError, shortened
from forebay.inputs.listing import is_table
from forebay.inputs.memory_tables import arrow_frame
from forebay.inputs.tables import find_table, read_memory_table, read_table

if TYPE_CHECKING:
    import pyarrow


_ARROW_SUFFIXES = (".arrow", ".feather")


def columns_of_table(table: Any, columns: Any) -> Columns | RowGroups:
    """Return some columns of a table; see `from_table`."""
    names = [columns] if isinstance(columns, str) else list(columns)
    if isinstance(columns, str) or not names or not all(isinstance(each, str) for each in names):
        raise OptionError(
            f"columns={shortened(columns)} is not valid; it must be a list of names of columns\n"
            '  Such as columns=["age", "label"].'
        )
    if len(set(names)) < len(names):
        raise OptionError(f"columns={shortened(names)} names a column twice\n  Name each once.")
    if not isinstance(table, str | os.PathLike):
        if not isinstance(table, Mapping) and not is_table(table):
            raise no_table(table)
        name = f"from_table: the {type(table).__name__}"
        return _checked(name, _in_memory(name, table, names), names)
    path = os.path.expanduser(os.fspath(table))
    if path.lower().endswith(_ARROW_SUFFIXES) and os.path.isfile(path):
        return _mapped(absolute(path), names)
    path = absolute(find_table(table))
    name = f"from_table: {path}"
    if not path.partition("::")[0].lower().endswith(".parquet"):
        return _checked(name, read_table(path), names)
    with fetched(path) if is_url(path) else nullcontext(Path(path)) as file:
        return _parquet(name, str(file), names, is_kept=not is_url(path))


def _checked(name: str, table: pyarrow.Table, columns: Sequence[str]) -> Columns:
    _check_chosen(name, table.column_names, columns, table.num_rows)
    return open_columns(table.select(columns), name)


def _check_chosen(name: str, known: Sequence[str], chosen: Sequence[str], rows: int) -> None:
    counts = Counter(known)
    for each in chosen:
        if counts[each] > 1:
            refuse(name, f"{counts[each]} columns are called {each!r}", "Rename all but one.")
        if not counts[each]:
            close = get_close_matches(each, counts, 1)
            reason = f"no column is called {each!r}" + f"; one is {close[0]!r}" * len(close)
            refuse(name, reason, f"There are {len(known):,}: {shortened(list(known))}.")
    if not rows:
        raise InputError(f"{name} has no rows\n  A dataset needs at least one.")


def _in_memory(name: str, table: Any, columns: Sequence[str]) -> pyarrow.Table:
    """Return a table with the columns and perhaps others."""
    import pyarrow

    if isinstance(table, list | tuple):
        return read_memory_table(table, os.curdir)[0]
    known = [str(each) for each in (table if isinstance(table, Mapping) else table.columns)]
    if hasattr(table, "column_names"):  # of pyarrow, where `columns` is the data
        known = table.column_names
    _check_chosen(name, known, columns, 1)
    pandas = sys.modules.get("pandas")
    advice = "Each column needs one type and a name. Convert it first."
    with _explained(name, "pyarrow cannot read it", advice):
        if isinstance(table, Mapping):
            return _table_of_arrays(name, {each: table[each] for each in columns})
        if pandas is not None and isinstance(table, pandas.DataFrame):
            return arrow_frame(table[[*columns]], mixes=False)
        return pyarrow.table(table)  # the other columns are not read


@contextmanager
def _explained(name: str, what: str, advice: str) -> Iterator[None]:
    """Raise InputError for whatever a library raises about a table."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - pyarrow's errors have no common root
        refuse(name, f"{what}: {error}", advice, error)


def _table_of_arrays(name: str, arrays: Mapping[str, Any]) -> pyarrow.Table:
    """Return arrays, tensors or lists as the columns of a table, with the memory of arrays."""
    import pyarrow

    found = {}
    advice = "Give an array, a tensor in host memory or a list, of numbers or of strings."
    for column, values in arrays.items():
        with _explained(name, f"column {column!r} cannot be read", advice):
            array: Any = values if isinstance(values, list | tuple) else np.asarray(values)
            is_plain = isinstance(array, np.ndarray) and array.dtype.kind in "biuf"
            found[column] = array_of_numpy(array) if is_plain else pyarrow.array(array)
    lengths = {column: len(values) for column, values in found.items()}
    if len(set(lengths.values())) > 1:
        advice = "Each needs a value for each row."
        refuse(name, f"columns have different lengths: {shortened(lengths)}", advice)
    return pyarrow.table(found)


def _mapped(path: str, columns: Sequence[str], identity: str | None = None) -> Columns:
    """Return columns of an Arrow file, of either of the two formats, without reading the rows."""
    import pyarrow

    name, identity = f"from_table: {path}", identity or file_identity(path)
    check_identity(name, path, identity)
    with _explained(name, "it cannot be mapped", "If it is damaged, write it again."):
        source = pyarrow.memory_map(path)
        try:
            schema, opened = pyarrow.ipc.open_file(source).schema, pyarrow.ipc.open_file
        except pyarrow.ArrowInvalid:  # as the library `datasets` writes it
            source.seek(0)
            schema, opened = pyarrow.ipc.open_stream(source).schema, pyarrow.ipc.open_stream
        _check_chosen(name, schema.names, columns, 1)
        numbers = [schema.get_field_index(each) for each in columns]
        source.seek(0)
        options = pyarrow.ipc.IpcReadOptions(included_fields=numbers)
        table = opened(source, options=options).read_all().select(columns)
    _check_chosen(name, columns, columns, table.num_rows)
    return open_columns(table, name, partial(_mapped, path, columns, identity))


def _parquet(name: str, path: str, columns: Sequence[str], *, is_kept: bool) -> Columns | RowGroups:
    """Return columns of a Parquet file, which are read now if they fit into memory."""
    advice = "If it is truncated or has another format, write it again."
    with _explained(name, "it cannot be read", advice):
        from pyarrow import parquet

        identity = file_identity(path)
        with parquet.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            _check_chosen(name, file.schema_arrow.names, columns, rows)
            needed, free = _bytes_of(file, columns), memory_for_files()
            if free is None or needed <= free:
                # A name also stands for columns "name.…", which are left out again.
                table = file.read(columns).select(columns)
                table.validate(full=True)  # strings of other writers may not be UTF-8
                return open_columns(table, name)
        if not is_kept:
            size = f"{byte_size(needed)} or more, and {byte_size(free)} of memory are free"
            what = f"the {counted(len(columns), 'column')} of {rows:,} rows take {size}"
            refuse(name, what, "Download it: row groups of a local file are read as needed.")
        return RowGroups(path, columns, name, identity)


def _bytes_of(file: Any, columns: Sequence[str]) -> int:
    """Return about how many bytes of memory columns of a Parquet file take, rather too few."""
    footer, schema, sizes = file.metadata, file.schema_arrow, dict.fromkeys(columns, 0)
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if (root := column.path_in_schema.partition(".")[0]) in sizes:
                sizes[root] += column.total_uncompressed_size
    for each in columns:  # values that repeat take less in the file
        with suppress(ValueError):
            sizes[each] = max(sizes[each], footer.num_rows * schema.field(each).type.bit_width // 8)
    return sum(sizes.values())


def no_table(table: object) -> InputError:
    """Return the error for what is no table."""
    return InputError(
        f"from_table: got {type(table).__name__} instead of a table\n  Give a .csv, .jsonl or "
        ".parquet file, the output folder of preprocess, a DataFrame, a pyarrow.Table, or a "
        "list with at least one dict; with columns= also an .arrow file or a dict of arrays."
    )
