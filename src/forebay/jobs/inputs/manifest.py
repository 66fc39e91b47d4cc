"""Manifests: tables whose rows are inputs, read as a stream from .csv, .jsonl or .parquet.

A manifest is opened once to learn its columns and that it has rows, and read again by every
iteration, a row at a time: ten million rows need no more memory than ten. Every problem with
it is an `InputError` that names the file and, if possible, the line.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from forebay.errors import InputError, shortened
from forebay.jobs.ledger.records import Input

SUFFIXES = (".csv", ".jsonl", ".parquet")
# The column of `preprocess`'s tables that names an output, relative to the table's folder.
DESTINATION = "destination"
# The columns that may hold an input's path, best first. `destination` comes first because the table
# that one step writes is the manifest of the next, which reads the files that it names.
PATH_COLUMNS = (DESTINATION, "source", "path", "file", "filename", "input")

# Characters. It also limits the damage of an unclosed quote; csv's own limit is 131072.
_LARGEST_CELL = 1 << 28
_PARQUET_BATCH_ROWS = 1024

_Row = dict[str, Any]
# A row and its position, such as "line 7".
_Placed = tuple[str, _Row]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One table of inputs; iterating reads it from its beginning.

    Attributes:
        name: The name that the user gave, for messages.
        columns: Names in the manifest's order; for .jsonl in order of first appearance.
        folder: Where relative paths may start besides the current folder; None if it is remote.
    """

    name: str
    columns: tuple[str, ...]
    folder: str | None
    _rows: Callable[[], Iterator[_Placed]]

    def __iter__(self) -> Iterator[Input]:
        """Yield one input for each row, in the manifest's order."""
        encode = json.JSONEncoder(
            ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_as_text
        ).encode
        path_columns = [name for name in PATH_COLUMNS if name in self.columns]
        for place, row in self._rows():
            try:
                text = encode({name: row[name] for name in self.columns if name in row})
                text.encode()  # a lone surrogate ("\ud800" in JSON) fits into no ledger
            except ValueError as error:
                reason = f"a value that JSON in UTF-8 cannot hold: {error}"
                _refuse(f"{self.name}, {place}", reason, "Fix or remove that value.", error)
            column = next((c for c in path_columns if row.get(c) not in (None, "")), "")
            source = str(row[column]) if column else ""
            yield Input(source, text, self._identity(source, column))

    def _identity(self, source: str, column: str) -> str:
        """Return "size:mtime_ns" of the file that a row names, or "" if there is no such file.

        Neither "missing" nor "directory": only the user's function knows what the column means.
        URLs are not checked; a request for each row could take longer than the work.
        """
        if not source or "://" in source:
            return ""
        folders = [] if column == DESTINATION and self.folder is not None else [""]
        for folder in folders if self.folder is None else [*folders, self.folder]:
            path = os.path.join(folder, source)
            try:
                status = os.stat(path)
            except (OSError, ValueError):  # ValueError: a NUL in the name
                continue
            is_folder = stat.S_ISDIR(status.st_mode)
            return "" if is_folder else f"{status.st_size}:{status.st_mtime_ns}"
        return ""


def open_manifest(name: str, open_file: Callable[[], BinaryIO], folder: str | None) -> Manifest:
    """Open the manifest called `name` and learn its columns.

    A .jsonl manifest is read through twice, here and by the iteration: its columns are known only
    when all its keys have been seen. So its errors are raised here, early.

    Args:
        name: The name that the user gave; its suffix, one of `SUFFIXES`, determines the format.
        open_file: Opens it for reading, in binary; called again for every iteration.
        folder: Where relative paths may start besides the current folder; None if it is remote.

    Raises:
        InputError: It cannot be read, or it has no columns or no rows.
    """
    shown = name if name.isprintable() else ascii(name)
    read_columns, read_rows = {
        ".csv": (_csv_columns, _csv_rows),
        ".jsonl": (_json_columns, _json_rows),
        ".parquet": (_parquet_columns, _parquet_rows),
    }[os.path.splitext(name)[1].lower()]

    def rows() -> Iterator[_Placed]:
        with _refusing(shown, open_file), open_file() as file:
            yield from read_rows(shown, file)

    with _refusing(shown, open_file), open_file() as file:
        columns = read_columns(shown, file)
    _check_columns(shown, columns)
    if next(rows(), None) is None:
        _refuse(shown, "no rows", "A manifest needs one row for each input.")
    return Manifest(shown, tuple(columns), folder, rows)


def located(row: _Row, folder: str | None) -> _Row:
    """Return a row whose `destination` can be opened from any working folder.

    Args:
        row: A row of a table. A destination that is absolute, or a URL, stays as it is.
        folder: The folder of the table, or its URL; None for a table in memory.

    Raises:
        InputError: The destination would leave the folder.
    """
    path = row.get(DESTINATION)
    if not folder or not isinstance(path, str) or not path or "://" in path:
        return row
    if not os.path.isabs(path) and ".." in path.split("/"):
        raise InputError(
            f"the table in {folder} names the output {shortened(path)}, which would leave that "
            "folder\n  preprocess never writes such a name. Correct it, or give an absolute path."
        )
    if "://" in folder and not os.path.isabs(path):
        return {**row, DESTINATION: f"{folder}/{path}"}
    return {**row, DESTINATION: os.path.join(folder, path)}


def _csv_columns(name: str, file: BinaryIO) -> Sequence[str]:
    columns = next((fields for _, fields in _csv_records(name, file)), None)
    if columns is None:
        _refuse(name, "no header", "Its first line must name the columns.")
    return columns


def _csv_rows(name: str, file: BinaryIO) -> Iterator[_Placed]:
    records = _csv_records(name, file)
    _, columns = next(records)
    for line, fields in records:
        if (count := len(fields)) != len(columns):
            _refuse(
                f"{name}, line {line}",
                f"{count} field{'s' * (count != 1)} where the header has {len(columns)}",
                "Quote a field that holds a comma or a newline.",
            )
        yield f"line {line}", dict(zip(columns, fields, strict=True))


def _csv_records(name: str, file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
    """Yield each record, the header included, with the number of the line it starts on."""
    reader = csv.reader(_without_nul(name, _text_lines(file, newline="")), strict=True)
    while True:
        line = reader.line_num + 1
        # The limit is global: the user's is restored before user code runs again.
        limit = csv.field_size_limit(_LARGEST_CELL)
        try:
            fields = next(reader, None)
        except csv.Error as error:
            advice = "Quotes inside a quoted field are doubled, and every quote is closed."
            _refuse(f"{name}, line {line}", f"not CSV: {error}", advice, error)
        finally:
            csv.field_size_limit(limit)
        if fields is None:
            return
        if fields:
            yield line, fields


def _without_nul(name: str, lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            advice = "It is damaged, or UTF-16 without a byte order mark: save it as UTF-8."
            _refuse(f"{name}, line {number}", "a NUL byte", advice)
        yield line


def _json_columns(name: str, file: BinaryIO) -> Sequence[str]:
    columns: dict[str, None] = {}
    for _, row in _json_rows(name, file):
        columns.update(dict.fromkeys(row))
    if not columns:
        _refuse(name, "no rows with a key", "A manifest needs one JSON object for each input.")
    return list(columns)


def _json_rows(name: str, file: BinaryIO) -> Iterator[_Placed]:
    decode = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant).decode
    for number, line in enumerate(_text_lines(file, newline="\n"), 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = decode(line)
        except (ValueError, RecursionError) as error:
            _refuse(
                place,
                f"not JSON: {getattr(error, 'msg', error)}",
                "Each line must hold one JSON object.",
                error,
            )
        if not isinstance(row, dict):
            got = f"a JSON {type(row).__name__} instead of an object"
            _refuse(place, got, 'Each line must hold one object such as {"path": "a.wav"}.')
        yield f"line {number}", row


def _object(pairs: list[tuple[str, Any]]) -> _Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("an object has the same key twice")
    return row


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON; write null")


def _parquet_columns(name: str, file: BinaryIO) -> Sequence[str]:
    with _arrow_refusing(name):
        from pyarrow import parquet

        schema = parquet.ParquetFile(file).schema_arrow
    for field in schema:
        if _is_binary(field.type):
            advice = "Rows become JSON: leave the column out, or write its bytes to files."
            _refuse(name, f"column {field.name!r} holds bytes ({field.type})", advice)
    return list(schema.names)


def _parquet_rows(name: str, file: BinaryIO) -> Iterator[_Placed]:
    number = 0
    with _arrow_refusing(name):
        from pyarrow import parquet

        # buffer_size: otherwise all columns of a row group are in memory at once.
        table = parquet.ParquetFile(file, buffer_size=1 << 20)
        for batch in table.iter_batches(_PARQUET_BATCH_ROWS, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", _without_nan(row)


def _is_binary(kind: Any) -> bool:
    if kind.num_fields:
        return any(_is_binary(kind.field(k).type) for k in range(kind.num_fields))
    # One test for binary, large_binary, binary_view, fixed_size_binary[4] and a dictionary of them.
    return "binary" in str(kind)


def _without_nan(value: Any) -> Any:
    """Turn NaN into null: pandas writes a missing number as NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _as_text(value: Any) -> str:
    """Return a date, time, decimal or UUID of a Parquet file as a string."""
    return str(value.isoformat() if hasattr(value, "isoformat") else value)


def _check_columns(name: str, columns: Sequence[str]) -> None:
    for place, column in enumerate(columns, 1):
        if not column.strip():
            _refuse(name, f"column {place} has no name", "Give every column a name.")
        if column in columns[: place - 1]:
            _refuse(name, f"two columns are called {column!r}", "Rename one of them.")
    if not columns:
        _refuse(name, "no columns", "A manifest needs a column for the inputs' paths.")


def _text_lines(file: BinaryIO, newline: str) -> Iterator[str]:
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text:
        yield from text


@contextmanager
def _refusing(name: str, open_file: Callable[[], BinaryIO]) -> Iterator[None]:
    """Turn errors of the disk and the decoder into an `InputError`."""
    try:
        yield
    except UnicodeDecodeError as error:
        where, reason = _undecodable(open_file)
        _refuse(name + where, reason, "Save it as UTF-8.", error)
    except OSError as error:
        reason = f"it cannot be read: {error}"
        _refuse(name, reason, "Check its path and permissions.", error)


@contextmanager
def _arrow_refusing(name: str) -> Iterator[None]:
    """Turn errors of pyarrow, which have no common base class, into an `InputError`."""
    try:
        yield
    except ImportError as error:
        _refuse(name, "reading parquet needs pyarrow", "Run: pip install pyarrow", error)
    except Exception as error:  # noqa: BLE001 - ArrowException, OSError, ValueError, KeyError...
        reason = f"pyarrow cannot read it: {error}"
        _refuse(name, reason, "If it is truncated or not a parquet file, write it again.", error)


def _undecodable(open_file: Callable[[], BinaryIO]) -> tuple[str, str]:
    """Find the first byte that is not UTF-8; the decoder only knows its position in a chunk."""
    offset = 0
    with open_file() as file:
        for number, line in enumerate(file, 1):
            if not offset and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                return "", "it is UTF-16 (it starts with a UTF-16 byte order mark), not UTF-8"
            try:
                line.decode()
            except UnicodeDecodeError as error:
                byte = line[error.start]
                return (
                    f", line {number}",
                    f"byte {offset + error.start} (0x{byte:02x}) is not UTF-8",
                )
            offset += len(line)
    return "", "it is not UTF-8"


def _refuse(where: str, reason: str, advice: str, cause: BaseException | None = None) -> NoReturn:
    raise InputError(f"{where}: {reason}\n  {advice}") from cause
