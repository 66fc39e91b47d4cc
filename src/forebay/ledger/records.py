"""The plain records of inputs, outputs and runs that other parts pass to each other.

Annotations are evaluated at once: workers import this module, and a named tuple would compile each
of them from a string.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from forebay.base.files import is_url, joined
from forebay.errors import InputError, shortened
from forebay.failures import Failure


class Input(NamedTuple):
    """One input as it was listed, known by its row or else its path. A tuple: there may be many.

    Attributes:
        source: The path or URL, without credentials: they may change, and the ledger keeps it.
        row: The table's row as a JSON object, columns in the table's order; for a sample that has
            a name, that and what tells it from others of the name, or its source again if only
            others have names; None otherwise.
    """

    source: str
    row: str | None = None
    identity: str = ""


def key_of(source: str, row: str | None) -> str:
    """Return what an input is known by: its row, or its path if it is none of a table."""
    return source if row is None else row


class LinkInput(Input):
    """An input whose path is a symbolic link."""


class SecretInput(Input):
    """An input without the credentials of its URL or row; `opens` is that with them."""

    opens: str


def shown_input(source: str, row: str | None, identity: str, opens: str) -> Input:
    """Return an input, given its source and row as they are shown, and what opens it."""
    if opens == key_of(source, row):
        return Input(source, row, identity)
    found = SecretInput(source, row, identity)
    found.opens = opens
    return found


class Todo(NamedTuple):
    """One input that still has to be worked on, as the ledger lists it.

    Attributes:
        opens: Its source or row with credentials; None if it has none. For a sample its index in
            the Dataset, or None for that by its ordinal.
    """

    ordinal: int
    source: str
    row: str | None
    opens: str | None = None


class OutputFile(NamedTuple):
    """One output of an input."""

    name: str
    size: int
    staged: str = ""


# The fields of an `OutputFile`, as a worker sends them: pickle calls Python code for a named tuple.
FileFields = tuple[str, int, str]


class Done(NamedTuple):
    """An input that was processed successfully.

    Attributes:
        content: The identity of the file that was read, with a hash of its content; see
            `identity.py`. "" if there is none.
    """

    ordinal: int
    attempts: int
    seconds: float
    outputs: tuple[OutputFile, ...]
    metadata: str
    content: str = ""


class FailedInput(NamedTuple):
    """An input that failed and is not tried again in this run; `metadata` may say more."""

    ordinal: int
    failure: Failure
    metadata: str | None = None


class FileChange(NamedTuple):
    """A rename or a removal in the output folder that a commit requires; safe to do twice.

    With a `staged` path, that file is renamed to `name`, which must be free; without, `name` is
    removed. A removal and a rename of the same name replace the file. A tuple, since there is one
    for every file.
    """

    name: str
    staged: str | None = None


class Leftover(NamedTuple):
    """An output of an earlier result that no row of the table has."""

    name: str
    size: int
    reason: str


class Unpublished(NamedTuple):
    """A staged file that could not be given its name."""

    name: str
    staged: str
    reason: str


class Counts(NamedTuple):
    """How many inputs are in which state; `total = done + failed + todo`."""

    total: int
    done: int
    failed: int

    @property
    def todo(self) -> int:
        """Inputs neither done nor failed."""
        return self.total - self.done - self.failed


# ---- row paths -----------------------------------------------------------------------------------
# Which path a row names, and where it starts if it is relative. PURE.
#
# One rule holds for every table, whoever reads it: a relative `destination` starts in the folder
# of the table. A table in memory has none, so the user names one; without it, that is the working
# folder of the call, as for a relative path in a list.

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
    return {**row, DESTINATION: joined(folder, path)}
