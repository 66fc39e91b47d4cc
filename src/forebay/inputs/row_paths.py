"""Which path a row names, and where it starts if it is relative.

One rule holds for every table, whoever reads it: a relative `destination` starts in the folder
of the table. A table in memory has none, so the user names one; without it, that is the working
folder of the call, as for a relative path in a list.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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
