"""Which column of a table names files, and where a file is that a row names.

A column with a usual name, such as `path`, is one of paths whatever it holds; see `path_in`. In a
table without one it is the first whose first values are files that exist; if there is none, for
example because a disk is not mounted now, the first whose first values all end alike, as in `.jpg`.
So a table that names no files costs nothing for each row.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from forebay.base.files import is_url
from forebay.inputs.row_paths import DESTINATION, PATH_COLUMNS

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
