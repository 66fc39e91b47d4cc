"""Manifests: tables whose rows are inputs, read as a stream from .csv, .jsonl or .parquet.

A manifest is opened once to learn its columns and that it has rows, and read again by every
iteration, a row at a time: ten million rows need no more memory than ten. Every problem with
it is an `InputError` that names the file and, if possible, the line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice, starmap
from typing import Any, BinaryIO

from forebay.base.arrow_arrays import Row
from forebay.base.files import file_name, open_regular, shown_values
from forebay.base.row_values import json_value
from forebay.base.table_files import refuse, table_file
from forebay.base.table_formats import NO_BYTES, LocatedRow, format_of
from forebay.errors import InputError
from forebay.inputs.row_paths import (
    PATH_COLUMNS,
    file_columns,
    files_of_row,
    identity_of_files,
    path_in,
    seen_identity,
)
from forebay.ledger.records import Input, shown_input

# Rows that become JSON at once: few, since each may be large.
_PAGE_ROWS = 64
# The separator between these rows.
_MARK = "forebay: the next row"
# What values raise that JSON in UTF-8 cannot hold, or that are nested too deep to be looked at.
_UNFIT = (ValueError, TypeError, RecursionError)
# A Parquet manifest with as many rows has a fingerprint; fewer are always compared, in a second.
MANY_ROWS = 1 << 16
# It writes the infinities as Python's `json` reads them. NaN is None here; see `json_value`.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

# Whether a URL in the JSON of a row may have a user or a query.
_may_hide = re.compile(r'://[^"]*[@?#]').search


@dataclass(frozen=True, slots=True)
class Manifest:
    """One table of inputs; iterating reads it from its beginning.

    Attributes:
        folder: Where relative paths may start besides the current folder; None if it is remote.
        total: The number of rows; None if it is not known before the last one is read.
        fingerprint: Changes with a large file that is read from any row on; "" for others.
        watched: The columns that name files, besides one with a usual name for that.
        is_text: Whether each row has a string in each column, in their order.
    """

    name: str
    columns: tuple[str, ...]
    folder: str | None
    _rows: Callable[[int], Iterator[LocatedRow]]
    total: int | None = None
    fingerprint: str = ""
    watched: tuple[str, ...] = ()
    is_text: bool = False

    def watching(self, known: Sequence[str]) -> Manifest:
        """Return this table with the columns of files of an earlier run; see `file_columns`."""
        rows = (row for row, _ in self.rows())
        return replace(self, watched=file_columns(self.columns, rows, self.folder, known))

    def inputs(self, first: int = 1) -> Iterator[Input]:
        """Yield one input for each row from the `first` on, in the manifest's order."""
        seen = lru_cache(4096)(seen_identity)  # many rows may name one folder
        names_paths, watched = not set(PATH_COLUMNS).isdisjoint(self.columns), self.watched
        for row, text in self.rows(first - 1):
            named = files_of_row(row, watched) if names_paths or watched else []
            source = path_in(row)[0] if names_paths else named[0][0] if named else ""
            identity = identity_of_files(named, self.folder, seen) if named else ""
            if "://" not in text or not _may_hide(text):
                yield tuple.__new__(Input, (source, text, identity))  # calls no Python code
                continue
            shown = shown_values(row)
            shown_text = text if shown == row else _ENCODER.encode(shown)
            yield shown_input(shown_values(source), shown_text, identity, text)

    def rows(self, skipped: int = 0) -> Iterator[tuple[Row, str]]:
        """Yield each row with values that JSON has, and its JSON; as `inputs` otherwise."""
        columns = self.columns
        for page in _pages(self._rows(skipped)):
            try:
                rows = [
                    values
                    if self.is_text
                    else {
                        column: value if type(value := values[column]) is str else json_value(value)
                        for column in columns
                        if column in values
                    }
                    for _, values in page
                ]
                texts = _encoded(rows)
            except _UNFIT:
                texts = []
            if len(texts) == len(page):
                yield from zip(rows, texts, strict=True)
            else:
                yield from starmap(self._row, page)

    def _row(self, place: str, values: Mapping[str, Any]) -> tuple[Row, str]:
        """Return a single row as `rows` does; if it cannot be held, say where it is."""
        column = ""
        try:
            row = {}
            for column in self.columns:
                if column in values:
                    row[column] = json_value(values[column])
            column = ""
            text = _ENCODER.encode(row)
            text.encode()
        except _UNFIT as error:
            reason = f"a value that JSON in UTF-8 cannot hold: {error}"
            where = f"{self.name}, {place}" + (f", column {column!r}" if column else "")
            is_binary = column and isinstance(values[column], bytes | bytearray)
            advice = NO_BYTES if is_binary else "Fix or remove that value."
            refuse(where, reason, advice, error)
        return row, text


def _pages(rows: Iterator[LocatedRow]) -> Iterator[list[LocatedRow]]:
    """Yield rows in lists; those before a damaged row come before its error is raised."""
    page: list[LocatedRow] = []
    try:
        while not page or len(page) == _PAGE_ROWS:
            page = []
            page.extend(islice(rows, _PAGE_ROWS))  # it keeps those before an error
            if not page:
                return
            yield page
    except InputError:
        if page:
            yield page
        raise


def _encoded(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the JSON of each row; there are too many strings if a row holds the mark.

    One call for a page takes a third of the time, since each prepares an encoder.
    """
    marked: list[Any] = [_MARK] * (2 * len(rows) - 1)
    marked[::2] = rows
    text = _ENCODER.encode(marked)[1:-1]
    text.encode()  # a lone surrogate ("\ud800" in JSON) fits into no ledger
    return text.split(f',"{_MARK}",')


def open_manifest(name: str, open_file: Callable[[], BinaryIO], folder: str | None) -> Manifest:
    """Open the manifest called `name` and learn its columns.

    A .jsonl manifest is read through twice, here and by the iteration: its columns are known only
    when all its keys have been seen. So its errors are raised here, early.

    Args:
        folder: Where relative paths may start besides the current folder; None if it is remote.
    """
    shown = name if name.isprintable() else ascii(name)
    form = format_of(file_name(name))
    assert form is not None, "the caller looked at the ending"
    file = table_file(file_name(name), shown, open_file)
    columns, total = form.columns(file)
    check_columns(shown, columns)
    rows = partial(form.rows, file)
    if next(rows(), None) is None:
        refuse(shown, "no rows", "A manifest needs one row for each input.")
    watched = file_columns(columns, (row for _, row in rows()), folder)
    is_large = folder is not None and total is not None and total >= MANY_ROWS
    fingerprint = _fingerprint(name) if is_large else ""
    is_text = form.is_text
    return Manifest(shown, tuple(columns), folder, rows, total, fingerprint, watched, is_text)


def _fingerprint(path: str) -> str:
    """Return a string that changes with a Parquet file: its size and time, a hash of its footer."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            file.seek(-8, os.SEEK_END)
            length = int.from_bytes(file.read(4), "little")
            file.seek(-min(8 + length, status.st_size), os.SEEK_END)
            footer = hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    except OSError as error:
        refuse(path, f"it cannot be read: {error}", "Check its path and permissions.", error)
    return f"{status.st_size}:{status.st_mtime_ns}:{footer}"


def check_columns(name: str, columns: Sequence[str]) -> None:
    """Raise InputError if there are no columns, or one has no name or the name of another."""
    known: set[str] = set()
    for number, column in enumerate(columns, 1):
        if not column.strip():
            advice = "Give every column a name."
            if number == 1:
                advice += " pandas writes row labels there: use df.to_csv(..., index=False)."
            refuse(name, f"column {number} has no name", advice)
        if column in known:
            refuse(name, f"two columns are called {column!r}", "Rename one of them.")
        known.add(column)
    if not columns:
        refuse(name, "no columns", "A manifest needs a column for the inputs' paths.")
