"""The tables that `preprocess` writes, or any other, as a whole: found and read."""

from __future__ import annotations

import glob
import os
from contextlib import nullcontext
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from forebay.base.arrow_arrays import table_of_rows
from forebay.base.files import (
    absolute,
    fetched,
    file_name,
    folder_of,
    is_url,
    location_in,
    names_among,
    open_regular,
)
from forebay.base.output_names import ENDINGS, PRIVATE, SUFFIXES, TABLES
from forebay.base.table_files import refuse, table_file
from forebay.base.table_formats import format_of
from forebay.errors import InputError, shortened
from forebay.inputs.memory_tables import arrow_table, memory_manifest, start_of
from forebay.inputs.row_paths import DESTINATION
from forebay.ledger.database import LEDGER_FILE

if TYPE_CHECKING:
    import pyarrow


def read_table(table: str | os.PathLike[str]) -> pyarrow.Table:
    """Return a metadata table, given its path or URL, as pyarrow has it.

    A Parquet file has types. A JSONL file gives the same table as the Parquet file would have
    given. A CSV file holds strings alone: a column is bool, int64 or double if all its cells are
    written like that, and an empty cell is null. Blank lines of CSV and JSONL are skipped.
    """
    name = os.fspath(table)
    with fetched(name) if is_url(name) else nullcontext(Path(name)) as path:
        form = format_of(path.name)
        if form is None or not path.is_file():
            what = "is not a metadata table" if path.exists() else "does not exist"
            raise InputError(f"{name} {what}: looked for a file ending in {ENDINGS}")
        try:
            opens = partial(_opened, path)
            return form.arrow(table_file(path.name, name, opens))
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - pyarrow's errors have no common root
            advice = "If it is truncated or has another format, write it again."
            refuse(f"{name} cannot be read", str(error), advice, error)


def are_paths(table: object) -> bool:
    """Return whether a value is a list of paths."""
    return (
        isinstance(table, list | tuple)
        and bool(table)
        and all(isinstance(each, str | os.PathLike) for each in table)
    )


def names_files(name: str | os.PathLike[str]) -> bool:
    """Return whether the name of a file, a folder or a glob stands for files which are no table."""
    name = os.path.expanduser(os.fspath(name))
    is_glob = glob.has_magic(name) and not os.path.lexists(name)
    if file_name(name).lower().endswith(SUFFIXES) and not (is_glob and not is_url(name)):
        return False
    if is_glob:  # a URL may have a query
        return True
    return not names_among(name, TABLES)


def read_tables(named: Any) -> tuple[str, pyarrow.Table, str | None]:
    """Return the rows of a table, or of a list or a glob of tables, one after another.

    Returns:
        What errors call it, the table, and the folder in which relative paths start; None if the
        tables are in several folders.
    """
    import pyarrow

    from forebay.inputs.search import glob_files

    several = [*named] if isinstance(named, list | tuple) else [named]
    first = os.path.expanduser(os.fspath(several[0]))
    if not is_url(first) and glob.has_magic(first) and not os.path.lexists(first):
        several = [*glob_files(first)] or several
    paths = [absolute(find_table(each)) for each in several]
    folders = {folder_of(path) for path in paths}
    tables = [read_table(path) for path in paths]
    table = tables[0]
    if len(tables) > 1:
        try:
            table = pyarrow.concat_tables(tables, promote_options="permissive")
        except pyarrow.ArrowException as error:
            advice = "A column needs the same type in all of them."
            refuse(f"from_table: {shortened(named)}", str(error), advice, error)
    name = f"from_table: {paths[0] if len(paths) == 1 else shortened(named)}"
    return name, table, folders.pop() if len(folders) == 1 else None


def _opened(path: Path) -> BinaryIO:
    return BufferedReader(open_regular(path))


def read_memory_table(
    table: Any, folder: str | os.PathLike[str] | None
) -> tuple[pyarrow.Table, str]:
    """Return a table in memory as pyarrow has it, and where its relative `destination` starts."""
    if isinstance(table, list | tuple):
        manifest, start = memory_manifest(table, folder)
        return table_of_rows(lambda: (row for row, _ in manifest.rows())), start
    arrow = arrow_table(table)
    names = arrow.column_names
    column = arrow.column(names.index(DESTINATION)) if DESTINATION in names else ()
    return arrow, start_of(folder, (each.as_py() for each in column), f"the {type(table).__name__}")


def find_table(table: str | os.PathLike[str]) -> str:
    """Return the path or URL of a metadata table, given that or its folder's."""
    name = os.path.expanduser(os.fspath(table))
    if (tables := names_among(name, TABLES)) is not None:
        if len(tables) != 1:
            if not tables:
                from forebay.inputs.unfinished import refuse_unfinished

                refuse_unfinished(name)
                raise InputError(
                    f"the folder {name!r} holds no metadata table\n"
                    f"  An output folder of preprocess holds one of {', '.join(TABLES)}. Of other "
                    "folders with Parquet or Arrow files, from_table needs columns=; and "
                    "open_shards reads them as they are."
                )
            raise InputError(
                f"the folder {name!r} holds {' and '.join(tables)}\n"
                f"  An output folder of preprocess holds one of {', '.join(TABLES)}. Name the "
                "table itself. If metadata= was changed, only the last run's is up to date: remove "
                "the others."
            )
        _warn_if_stale(name, tables[0])
        return location_in(name, tables[0])
    is_remote = is_url(name)
    if not file_name(name).lower().endswith(SUFFIXES) or not (is_remote or os.path.isfile(name)):
        what = "is not a table" if is_remote or os.path.exists(name) else "does not exist"
        raise InputError(
            f"{name!r} {what}\n"
            f"  A table is a file ending in {ENDINGS}, or the folder that preprocess "
            "wrote one to."
        )
    if not is_remote:
        _warn_if_stale(*os.path.split(name))
    return name


def _warn_if_stale(folder: str, table: str) -> None:
    if is_url(folder) or os.path.isdir(os.path.join(folder, PRIVATE)):
        from forebay.inputs.unfinished import warn_if_stale

        warn_if_stale(folder, table)


def tables_in(folder: str) -> list[str]:
    """Return the file names of the metadata tables in an output folder; [] for another folder."""
    if not os.path.isfile(os.path.join(folder, LEDGER_FILE)):
        return []
    return [table for table in TABLES if os.path.isfile(os.path.join(folder, table))]


def only_table(tables: list[str], shown: str) -> str:
    """Return the one table of an output folder of `preprocess`."""
    if len(tables) == 1:
        return tables[0]
    if tables:
        what, advice = f"holds {' and '.join(tables)}", "Name the table that you mean."
    else:
        from forebay.inputs.unfinished import refuse_other_outputs

        refuse_other_outputs(shown)
        what = "holds no metadata table"
        advice = "preprocess writes it when it ends: make the call that made this folder again."
    raise InputError(
        f"{shown}: this output folder of forebay's {what}\n"
        f"  An output folder stands for its table. {advice} To process the files themselves, name "
        f"them by a glob, such as '{os.path.join(shown, '**', '*')}'."
    )
