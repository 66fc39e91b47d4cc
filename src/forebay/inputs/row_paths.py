"""Which path a row names, in which column, and where it starts if it is relative.

One rule holds for every table, whoever reads it: a relative `destination` starts in the folder
of the table. A table in memory has none, so the user names one; without it, that is the working
folder of the call, as for a relative path in a list.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from forebay.base.files import is_url, location_in
from forebay.errors import InputError, shortened

# The column of `preprocess`'s tables that names an output, relative to the table's folder.
DESTINATION = "destination"
# The columns that may hold an input's path, best first. `destination` comes first because the table
# that one step writes is the manifest of the next, which reads the files that it names.
PATH_COLUMNS = (DESTINATION, "source", "path", "file", "filename", "input")


def path_in(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the path that a row names, and its column; two empty strings if it names none.

    A column of lists or dicts is not taken for one of paths, whatever its name.
    """
    for column in PATH_COLUMNS:
        value = row.get(column)
        if value not in (None, "") and not isinstance(value, list | dict):
            return str(value), column
    return "", ""


def files_named(source: str, column: str, folder: str | None) -> list[str]:
    """Return the local paths that may be meant by the path of an input, the likelier one first.

    Args:
        column: That of a row which has the path; "" for an input that is a path itself.
        folder: That of the table; None if there is none, or it is remote.
    """
    if not column or folder is None or is_url(folder):
        return [source]
    beside = os.path.join(folder, source)
    return [beside] if column == DESTINATION else [source, beside]


def located(row: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """Return a row whose `destination` can be opened from any working folder.

    Args:
        folder: The folder of the table, or its URL; None for a table in memory.
    """
    path = row.get(DESTINATION)
    if not folder or not isinstance(path, str) or not path or is_url(path):
        return row
    if not os.path.isabs(path) and ".." in path.split("/"):
        raise InputError(
            f"the table in {folder} names the output {shortened(path)}, which would leave that "
            "folder\n  preprocess never writes such a name. Correct it, or give an absolute path."
        )
    return {**row, DESTINATION: location_in(folder, path)}


# ---- columns of files ----------------------------------------------------------------------------
# A column with a usual name, such as `path`, is one of paths whatever it holds; see `path_in`. In a
# table without one it is the first whose first values are files that exist; if there is none, for
# example because a disk is not mounted now, the first whose first values all end alike, as in
# `.jpg`. So a table that names no files costs nothing for each row.

# Rows and columns that are looked at. More than half of the values are files in a column of paths.
_FIRST_ROWS, _FIRST_COLUMNS = 8, 256


def file_column(
    columns: Sequence[str], rows: Iterable[Mapping[str, Any]], folder: str | None
) -> str:
    """Return the column that names files; "" if there is none, or one has a usual name.

    Args:
        rows: All of them, or the first ones.
        folder: Where relative paths may start besides the current folder; None if it is remote.
    """
    if not set(PATH_COLUMNS).isdisjoint(columns):
        return ""
    first, alike = [*islice(rows, _FIRST_ROWS)], ""
    for column in columns[:_FIRST_COLUMNS]:
        cells = [row.get(column) for row in first]
        values = [str(each) for each in cells if isinstance(each, str | os.PathLike) and each]
        if 2 * sum(_is_file(each, folder) for each in values) > len(values):
            return column
        endings = {_ending(each) for each in values}
        if not alike and len(values) == len(first) > 1 and len(endings) == 1 and endings != {""}:
            alike = column
    return alike


def _ending(value: str) -> str:
    """Return the ending of what may be the name of a file, such as ".jpg"; "" for other texts."""
    found = re.search(r"\.[A-Za-z][A-Za-z0-9]{1,4}$", value)
    return found[0].lower() if found and not re.search(r"\s|@|://", value) else ""


def path_among(row: Mapping[str, Any], column: str) -> tuple[str, str]:
    """Return the path that a row names in a `file_column`, and that; two empty strings for none."""
    value = row.get(column)
    return (value, column) if value and isinstance(value, str) else ("", "")


def _is_file(value: Any, folder: str | None) -> bool:
    if not isinstance(value, str) or is_url(value):
        return False
    for start in ("", *([] if folder is None else [folder])):
        try:
            if stat.S_ISREG(os.stat(os.path.join(start, value)).st_mode):
                return True
        except (OSError, ValueError):  # ValueError: a NUL in the name
            continue
    return False


def with_open_path(row: dict[str, Any], path: str, folder: str | None) -> dict[str, Any]:
    """Return a row whose path can be opened, although it is relative to the table.

    Args:
        path: What the row names; "" for nothing.
        folder: That of the table.
    """
    if not path or not folder or is_url(path) or is_url(folder) or os.path.isabs(path):
        return row
    beside = os.path.join(folder, path)
    if "\0" in path or os.path.lexists(path) or not os.path.lexists(beside):
        return row
    return {
        name: beside if value == path and name != DESTINATION else value
        for name, value in row.items()
    }
