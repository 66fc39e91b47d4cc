"""Some columns of a table, for batches by column.

Those in memory are used as they are, an Arrow file is mapped, and of a Parquet file only these
columns are read.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.base.arrow_arrays import array_of_numpy
from forebay.base.files import absolute, fetched, file_name, is_url, names_among
from forebay.base.formatting import byte_size, counted
from forebay.base.machine import memory_for_files
from forebay.base.origins import Origin
from forebay.base.output_names import SUFFIXES, TABLES
from forebay.base.table_files import refuse
from forebay.columns.arrow_columns import Columns
from forebay.columns.column_types import open_columns
from forebay.errors import InputError, OptionError, shortened, shown_location
from forebay.inputs.listing import list_inputs
from forebay.inputs.memory_tables import arrow_frame, with_labels
from forebay.inputs.other_inputs import is_table
from forebay.inputs.row_paths import seen_identity
from forebay.inputs.tables import find_table, read_memory_table, read_table

if TYPE_CHECKING:
    import pyarrow

    from forebay.shards.columns import BlockColumns


_ARROW_SUFFIXES, _PARQUET_SUFFIXES = (".arrow", ".feather", ".ipc"), (".parquet", ".pq")
_PATTERN = frozenset("*?[{")


def columns_of_table(table: Any, columns: Any) -> Columns | BlockColumns:
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
        if isinstance(table, list | tuple) and table and isinstance(table[0], str | os.PathLike):
            return _columns_of_files(table, names)
        if not isinstance(table, Mapping) and not is_table(table):
            raise no_table(table)
        name = f"from_table: the {type(table).__name__}"
        return _checked(name, _in_memory(name, table, names), names)
    path = os.path.expanduser(os.fspath(table))
    if path.lower().endswith(_ARROW_SUFFIXES) and os.path.isfile(path):
        return _mapped([absolute(path)], names)
    if _is_several(path):
        return _columns_of_files(path, names)
    path = absolute(find_table(table))
    name = f"from_table: {path}"
    stamps = [one.identity for one in list_inputs([path])]  # before it is read
    if not path.partition("::")[0].lower().endswith(".parquet"):
        return _checked(name, read_table(path), names, [path], stamps)
    if not is_url(path):
        return _parquet([path], names, stamps)
    with fetched(path) as file:
        return _parquet([str(file)], names, stamps, url=path)


def _is_several(path: str) -> bool:
    """Return whether a path or URL stands for files: a pattern, or a folder without a table."""
    if not _PATTERN.isdisjoint(path) and (is_url(path) or not os.path.lexists(path)):
        return True
    if file_name(path).lower().endswith(SUFFIXES):
        return False
    if names_among(path, TABLES) != []:  # no folder, or with a table
        return False
    from forebay.inputs.unfinished import has_only_data

    return is_url(path) or has_only_data(path)


def _columns_of_files(location: Any, columns: Sequence[str]) -> Columns | BlockColumns:
    """Return columns of Parquet or Arrow files, in the order of their paths."""
    from forebay.shards.location import find_shards

    found = find_shards(location, may_mix=True)
    paths = [os.path.join(found.root, each.name) for each in found.shards]
    suffixes = {_kind_of(path): path for path in reversed(paths)}
    if unknown := suffixes.get(""):
        raise InputError(
            f"from_table: {shown_location(unknown)!r} is no Parquet or Arrow file\n"
            "  Several files have to be .parquet, or .arrow or .feather. Name them by a pattern, "
            "as in 'data/*.parquet'."
        )
    if len(suffixes) > 1:
        raise InputError(
            f"from_table: {shown_location(paths[0])!r} and "
            f"{shown_location(max(suffixes.values()))!r} are files of two formats\n"
            "  Name those of one, by a pattern, as in 'data/*.parquet'."
        )
    if is_url(found.root):
        return _by_blocks(location, columns)
    if ".parquet" in suffixes:
        return _parquet(paths, columns, [*map(seen_identity, paths)])
    return _mapped(paths, columns)


def _kind_of(path: str) -> str:
    """Return the suffix that stands for a file's format; "" for none that is read here."""
    ends = path.lower()
    if ends.endswith(_PARQUET_SUFFIXES):
        return ".parquet"
    return ".arrow" if ends.endswith(_ARROW_SUFFIXES) else ""


def _checked(
    name: str,
    table: pyarrow.Table,
    columns: Sequence[str],
    paths: Sequence[str] = (),
    stamps: Sequence[str] = (),
) -> Columns:
    _check_chosen(name, table.column_names, columns, table.num_rows)
    origins = _origins(paths, stamps, [table.num_rows], columns) if paths else ()
    return open_columns(table.select(columns), name, None, origins)


def _origins(
    paths: Sequence[str], stamps: Sequence[str], rows: Sequence[int], columns: Sequence[str]
) -> list[Origin]:
    """Return files as the origins of rows, by their names in the folder that has all of them."""
    start = len(os.path.commonpath(paths)) + 1 if len(paths) > 1 else paths[0].rfind("/") + 1
    names = [shown_location(path[start:]) for path in paths]
    stamps = [f"{stamp} {list(columns)}" for stamp in stamps]
    return [*map(Origin, names, stamps, rows)]


def _check_chosen(name: str, known: Sequence[str], chosen: Sequence[str], rows: int) -> None:
    counts = Counter(known)
    for each in chosen:
        if counts[each] > 1:
            refuse(name, f"{counts[each]} columns are called {each!r}", "Rename all but one.")
        if not counts[each]:
            close = get_close_matches(each, counts, 1)
            reason = f"no column is called {each!r}" + "".join(f"; one is {one!r}" for one in close)
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
            return arrow_frame(with_labels(table)[[*columns]], mixes=False)
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


def _mapped(
    paths: Sequence[str], columns: Sequence[str], identities: Sequence[str] = ()
) -> Columns:
    """Return columns of Arrow files, of either of the two formats, without reading the rows."""
    found, identities = [], identities or [*map(_identity_of, paths)]
    for path, identity in zip(paths, identities, strict=True):
        _check_identity(f"from_table: {path}", path, identity)
        found.append(_mapped_file(path, columns))
    table = _joined(paths, found)
    name, rows = _name_of(paths), [each.num_rows for each in found]
    _check_chosen(name, columns, columns, table.num_rows)
    origins = _origins(paths, [each.partition(" ")[0] for each in identities], rows, columns)
    return open_columns(table, name, partial(_mapped, paths, columns, identities), origins)


def _mapped_file(path: str, columns: Sequence[str]) -> pyarrow.Table:
    import pyarrow

    name = f"from_table: {path}"
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
        return opened(source, options=options).read_all().select(columns)


def _parquet(
    paths: Sequence[str], columns: Sequence[str], stamps: Sequence[str], url: str | None = None
) -> Columns | BlockColumns:
    """Return columns of Parquet files, which are read now if they fit into memory.

    Args:
        stamps: What changes with each file.
        url: That of the only file, which is downloaded and will be removed.
    """
    from pyarrow import parquet

    advice = "If it is truncated or has another format, write it again."
    rows, needed, schemas = 0, 0, []
    names = [f"from_table: {url or path}" for path in paths]
    for name, path in zip(names, paths, strict=True):
        with _explained(name, "it cannot be read", advice), parquet.ParquetFile(path) as file:
            _check_chosen(name, file.schema_arrow.names, columns, 1)
            rows, needed = rows + file.metadata.num_rows, needed + _bytes_of(file, columns)
            schemas.append(file.schema_arrow.empty_table().select(columns))
    _joined(paths, schemas)
    free, name = memory_for_files(), names[0] if url else _name_of(paths)
    _check_chosen(name, columns, columns, rows)
    if free is None or needed <= free:
        tables = []
        for each, path in zip(names, paths, strict=True):
            with _explained(each, "it cannot be read", advice):
                with parquet.ParquetFile(path) as file:
                    # A name also stands for columns "name.…", which are left out again.
                    tables.append(file.read(columns).select(columns))
                tables[-1].validate(full=True)  # strings of other writers may not be UTF-8
        counts = [table.num_rows for table in tables]
        origins = _origins([url] if url else paths, stamps, counts, columns)
        return open_columns(_joined(paths, tables), name, None, origins)
    if url is not None:
        size = f"{byte_size(needed)} or more, and {byte_size(free)} of memory are free"
        what = f"the {counted(len(columns), 'column')} of {rows:,} rows take {size}"
        refuse(name, what, "Download it: row groups of a local file are read as needed.")
    return _by_blocks(paths, columns)


def _by_blocks(location: Any, columns: Sequence[str]) -> BlockColumns:
    """Return columns that are read by row groups or record batches, when they are needed."""
    from forebay.shards.columns import BlockColumns
    from forebay.shards.dataset import open_shards

    return BlockColumns(open_shards(location, columns=columns).of_columns(columns))


def _name_of(paths: Sequence[str]) -> str:
    more = f" and {counted(len(paths) - 1, 'other file')}" if len(paths) > 1 else ""
    return f"from_table: {paths[0]}{more}"


def _joined(paths: Sequence[str], tables: Sequence[pyarrow.Table]) -> pyarrow.Table:
    """Return the rows of several files with the same types; InputError names two that differ."""
    import pyarrow

    first = tables[0]
    if len(tables) == 1:
        return first
    for path, table in zip(paths, tables, strict=True):
        for own, other in zip(first.schema, table.schema, strict=True):
            if own.type != other.type:
                from forebay.shards.columns import different_types

                raise different_types(own.name, (own.type, paths[0]), (other.type, path))
    chunks = [
        [chunk for each in tables for chunk in each[at].chunks] for at in range(len(first.schema))
    ]
    arrays = [pyarrow.chunked_array(*each) for each in zip(chunks, first.schema.types, strict=True)]
    return pyarrow.table(arrays, names=first.column_names)


def _identity_of(path: str) -> str:
    """Return what changes with a file, or when it is replaced."""
    status = os.stat(path)
    return f"{status.st_size}:{status.st_mtime_ns} {status.st_dev}:{status.st_ino}"


def _check_identity(where: str, path: str, identity: str) -> None:
    """Raise InputError if a file has another identity than when it was opened."""
    if _identity_of(path) != identity:
        advice = "Make the dataset again, and leave a file alone while it is in use."
        refuse(where, "the file was changed while it was in use", advice)


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
