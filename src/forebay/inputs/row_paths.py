"""Which path a row names, in which column, and where it starts if it is relative.

One rule holds for every table, whoever reads it: a relative `destination` starts in the folder
of the table. A table in memory has none, so the user names one; without it, that is the working
folder of the call, as for a relative path in a list.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from forebay.base.files import is_url, location_in
from forebay.errors import InputError, shortened
from forebay.ledger.identity import NOT_SEEN, joined_identity

# The column of `preprocess`'s tables that names an output, relative to the table's folder.
DESTINATION = "destination"
# The column of these tables that names the input of an earlier step.
ORIGIN = "origin"
# The columns that may hold an input's path, best first. `destination` comes first because the table
# that one step writes is the manifest of the next, which reads the files that it names.
PATH_COLUMNS = (DESTINATION, "source", "path", "file", "filename", "input")


class RowFiles(NamedTuple):
    """Where the files are that rows name.

    Attributes:
        folder: Where relative paths may start besides the current folder: the folder of the table,
            or its URL; None if there is none.
        watched: The `file_columns` of the table.
    """

    folder: str | None = None
    watched: tuple[str, ...] = ()


NO_FILES = RowFiles()


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
# A column with a usual name, such as `path`, is one of paths whatever it holds; see `path_in`. So
# is each other one whose first values are files that exist, or lists of these. If there is none,
# for example because a disk is not mounted now, the first is whose first values all end alike, as
# in `.jpg`. So a table that names no files costs nothing for each row.

# Rows and columns that are looked at. More than half of the values are files in a column of paths.
_FIRST_ROWS, _FIRST_COLUMNS = 8, 256


def file_columns(
    columns: Sequence[str],
    rows: Iterable[Mapping[str, Any]],
    folder: str | None,
    known: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the columns that name files, besides one with a usual name.

    Args:
        rows: All of them, or the first ones.
        folder: Where relative paths may start besides the current folder; None if it is remote.
        known: Those of an earlier run, which count while all their files are away.
    """
    has_usual = not set(PATH_COLUMNS).isdisjoint(columns)
    first, found, alike = [*islice(rows, _FIRST_ROWS)], list[str](), ""
    for column in columns[:_FIRST_COLUMNS]:
        # What an earlier step made its files of is no file of this one.
        if column in PATH_COLUMNS or column == ORIGIN:
            continue
        cells = [_paths_at(row, column) for row in first]
        values = [*chain.from_iterable(cells)]
        endings = {_ending(each) for each in values}
        are_alike = all(cells) and len(endings) == 1 and endings != {""}
        is_known = column in known and are_alike
        if is_known or 2 * sum(_is_file(each, folder) for each in values) > len(values):
            found.append(column)
        if not alike and are_alike and len(first) > 1:
            alike = column
    return tuple(found or ([alike] if alike and not has_usual else []))


def _paths_at(row: Mapping[str, Any], column: str) -> list[str]:
    """Return what may be paths in a column of a row: a string, or those of a list."""
    value = row.get(column)
    values = value if isinstance(value, list | tuple) else [value]
    return [str(each) for each in values if isinstance(each, str | os.PathLike) and each]


def files_of_row(row: Mapping[str, Any], watched: Sequence[str]) -> list[tuple[str, str]]:
    """Return the paths that a row names, each with its column, the first of its name first.

    Args:
        watched: The `file_columns` of the table.
    """
    usual = path_in(row)
    found = [(path, column) for column in watched for path in _paths_at(row, column)]
    return [usual, *found] if usual[0] else found


def identity_of_files(
    named: Iterable[tuple[str, str]], folder: str | None, seen: Callable[[str], str]
) -> str:
    """Return what changes with files that a row names.

    Args:
        named: Their paths and columns.
        folder: That of the table.
        seen: Returns what changes with the file or folder at a path; NOT_SEEN for none.
    """
    found = []
    for path, column in named:
        one = ""
        if not is_url(path):  # a request for each row's URL could take longer than the work
            for each in files_named(path, column, folder):
                if (one := seen(each)) != NOT_SEEN:
                    break
        found.append(one)
    return found[0] if len(found) == 1 else joined_identity(found)


def seen_identity(path: str) -> str:
    """Return a value that changes with the file at a path, or the files of a folder there."""
    try:
        status = os.stat(path)
        if not stat.S_ISDIR(status.st_mode):
            return f"{status.st_size}:{status.st_mtime_ns}"
        from forebay.inputs.search import folder_identity

        return folder_identity(path)
    except (OSError, ValueError):  # what is worked on raises a better message
        return NOT_SEEN


def _ending(value: str) -> str:
    """Return the ending of what may be the name of a file, such as ".jpg"; "" for other texts."""
    found = re.search(r"\.[A-Za-z][A-Za-z0-9]{1,4}$", value)
    return found[0].lower() if found and not re.search(r"\s|@|://", value) else ""


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


def with_open_paths(
    row: dict[str, Any], watched: Sequence[str], folder: str | None
) -> dict[str, Any]:
    """Return a row whose paths can be opened, although they are relative to the table.

    Beside a column with a usual name all others stay as they are.
    """
    usual, _ = path_in(row)
    for path in [usual] if usual else [path for path, _ in files_of_row(row, watched)]:
        row = _with_open_path(row, path, folder)
    return row


def _with_open_path(row: dict[str, Any], path: str, folder: str | None) -> dict[str, Any]:
    """Return a row of which one path can be opened.

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
