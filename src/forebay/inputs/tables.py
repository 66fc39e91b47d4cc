"""Tables whose rows are inputs: manifests in files, and tables in memory."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from functools import partial
from itertools import islice, starmap
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn
from uuid import UUID

from forebay.errors import InputError, shortened
from forebay.ledger.records import DESTINATION, PATH_COLUMNS, Input, path_in
from forebay.outputs.packed_reader import packed_identity

if TYPE_CHECKING:
    import pyarrow

# ---- row values ----------------------------------------------------------------------------------
# PURE: the values of a row as JSON has them, whichever library they come from.

_AS_THEY_ARE = frozenset({str, int, bool, type(None)})
# Types whose values are told apart by their strings.
_AS_STRINGS = (Decimal, UUID, timedelta)


def plain(value: Any) -> Any:
    """Return a value of a row as strings, numbers, booleans, None, lists and dicts.

    NaN, NaT and pandas' NA are None: that is how tables mark a missing value. The infinities stay
    floats: the level of silence in dB is one.
    A date or time is a string in ISO format; a path, Decimal, UUID or timedelta a string; numbers
    and arrays of numpy and torch are numbers and lists.
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, str | int):  # subclasses, such as numpy's strings and enumerations
        return value
    if isinstance(value, float):
        return None if value != value else float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a dict with the key {key!r}, which is not a string")
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return plain(os.fspath(value))
    if type(value).__name__ in ("NaTType", "NAType"):
        return None
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, _AS_STRINGS):
        return None if value != value else str(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return _of_array(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def _of_array(value: Any) -> Any:
    """Return a number or an array of numpy or torch as numbers and lists."""
    if getattr(value.dtype, "kind", "") not in ("m", "M"):
        return plain(value.tolist())
    # numpy turns times into integers, whose unit is lost.
    return [_of_array(item) for item in value] if value.ndim else _of_time(value)


def _of_time(value: Any) -> str | None:
    """Return a datetime64 or timedelta64 of numpy as a string; None for NaT."""
    return None if value != value else str(value)


# ---- manifest ------------------------------------------------------------------------------------
# Manifests: tables whose rows are inputs, read as a stream from .csv, .jsonl or .parquet.
#
# A manifest is opened once to learn its columns and that it has rows, and read again by every
# iteration, a row at a time: ten million rows need no more memory than ten. Every problem with
# it is an `InputError` that names the file and, if possible, the line.

SUFFIXES = (".csv", ".jsonl", ".parquet")

# Characters. It also limits the damage of an unclosed quote; csv's own limit is 131072.
_LARGEST_CELL = 1 << 28
_PARQUET_BATCH_ROWS = 1024
# Rows that become JSON at once: few, since each may be large.
_PAGE_ROWS = 64
# What stands between these rows.
_MARK = "forebay: the next row"
# What values raise that JSON in UTF-8 cannot hold, or that are nested too deep to be looked at.
_UNFIT = (ValueError, TypeError, RecursionError)
# A Parquet manifest with as many rows has a fingerprint; fewer are always compared, in a second.
MANY_ROWS = 1 << 16
# It writes the infinities as Python's `json` reads them. NaN is None here; see `plain`.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

_Row = dict[str, Any]
# A row and its position, such as "line 7".
LocatedRow = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One table of inputs; iterating reads it from its beginning.

    Attributes:
        folder: Where relative paths may start besides the current folder; None if it is remote.
        total: The number of rows; None if it is not known before the last one is read.
        fingerprint: Changes with a large file that is read from any row on; "" for others.
    """

    name: str
    columns: tuple[str, ...]
    folder: str | None
    _rows: Callable[[int], Iterator[LocatedRow]]
    total: int | None = None
    fingerprint: str = ""

    def inputs(self, first: int = 1) -> Iterator[Input]:
        """Yield one input for each row from the `first` on, in the manifest's order."""
        names_paths = not set(PATH_COLUMNS).isdisjoint(self.columns)
        for row, text in self.rows(first - 1):
            source, column = path_in(row) if names_paths else ("", "")
            yield Input(source, text, self._identity(source, column) if source else "")

    def rows(self, skipped: int = 0) -> Iterator[tuple[_Row, str]]:
        """Yield each row with values that JSON has, and its JSON; as `inputs` otherwise."""
        columns = self.columns
        for page in _pages(self._rows(skipped)):
            try:
                rows = [
                    {column: plain(values[column]) for column in columns if column in values}
                    for _, values in page
                ]
                texts = _encoded(rows)
            except _UNFIT:
                texts = []
            if len(texts) == len(page):
                yield from zip(rows, texts, strict=True)
            else:
                yield from starmap(self._row, page)

    def _row(self, place: str, values: Mapping[str, Any]) -> tuple[_Row, str]:
        """Return a single row as `rows` does; if it cannot be held, say where it is."""
        column = ""
        try:
            row = {}
            for column in self.columns:
                if column in values:
                    row[column] = plain(values[column])
            column = ""
            text = _ENCODER.encode(row)
            text.encode()
        except _UNFIT as error:
            reason = f"a value that JSON in UTF-8 cannot hold: {error}"
            where = f"{self.name}, {place}" + (f", column {column!r}" if column else "")
            refuse(where, reason, "Fix or remove that value.", error)
        return row, text

    def _identity(self, source: str, column: str) -> str:
        """Return "size:mtime_ns" of the file that a row names, or "" if there is no such file.

        That of a packed output is "size:CRC-32".

        Neither "missing" nor "directory": only the user's function knows what the column means.
        URLs are not checked; a request for each row could take longer than the work.
        """
        if "://" in source:
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
        return packed_identity(os.path.join(self.folder or "", source))


def _pages(rows: Iterator[LocatedRow]) -> Iterator[list[LocatedRow]]:
    """Yield rows in lists; those before a damaged row come before its error is raised."""
    page: list[LocatedRow] = []
    try:
        for each in rows:
            page.append(each)
            if len(page) == _PAGE_ROWS:
                yield page
                page = []
    except InputError:
        if page:
            yield page
        raise
    if page:
        yield page


def _encoded(rows: Sequence[_Row]) -> list[str]:
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
    suffix = os.path.splitext(name.partition("::")[0])[1].lower()  # zip://a.csv::s3://b/c.zip
    read_columns = {".csv": _csv_columns, ".jsonl": _json_columns, ".parquet": _parquet_columns}
    read_rows = {".csv": _csv_rows, ".jsonl": _json_rows}.get(suffix)

    def rows(skipped: int = 0) -> Iterator[LocatedRow]:
        with _refusing(shown, open_file), open_file() as file:
            if read_rows is None:
                yield from _parquet_rows(shown, file, skipped)
            else:
                yield from islice(read_rows(shown, file), skipped, None)

    with _refusing(shown, open_file), open_file() as file:
        columns = read_columns[suffix](shown, file)
        total = None if read_rows is not None else _parquet_total(shown, file)
    check_columns(shown, columns)
    if next(rows(), None) is None:
        refuse(shown, "no rows", "A manifest needs one row for each input.")
    is_large = folder is not None and total is not None and total >= MANY_ROWS
    fingerprint = _fingerprint(name) if is_large else ""
    return Manifest(shown, tuple(columns), folder, rows, total, fingerprint)


def _csv_columns(name: str, file: BinaryIO) -> Sequence[str]:
    columns = next((fields for _, fields in _csv_records(name, file)), None)
    if columns is None:
        refuse(name, "no header", "Its first line must name the columns.")
    if len(columns) == 1 and (other := next((each for each in ";\t" if each in columns[0]), "")):
        refuse(
            name,
            f"its header is one column, {columns[0]!r}: fields are separated by commas",
            f"Write it with commas, or pass the table that pandas.read_csv(..., sep={other!r}) "
            "returns.",
        )
    return columns


def _csv_rows(name: str, file: BinaryIO) -> Iterator[LocatedRow]:
    records = _csv_records(name, file)
    _, columns = next(records)
    for line, fields in records:
        if (count := len(fields)) != len(columns):
            refuse(
                f"{name}, line {line}",
                f"{count} field{'s' * (count != 1)} where the header has {len(columns)}",
                "Quote a field that holds a comma or a newline, and leave out no field.",
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
            refuse(f"{name}, line {line}", f"not CSV: {error}", advice, error)
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
            refuse(f"{name}, line {number}", "a NUL byte", advice)
        yield line


def _json_columns(name: str, file: BinaryIO) -> Sequence[str]:
    columns: dict[str, None] = {}
    for _, row in _json_rows(name, file):
        columns.update(dict.fromkeys(row))
    if not columns:
        refuse(name, "no rows with a key", "A manifest needs one JSON object for each input.")
    return list(columns)


def _json_rows(name: str, file: BinaryIO) -> Iterator[LocatedRow]:
    decode = json.JSONDecoder(
        object_pairs_hook=_object, parse_float=_float, parse_constant=_constant
    ).decode
    for number, line in enumerate(_text_lines(file, newline="\n"), 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = decode(line)
        except (ValueError, RecursionError) as error:
            refuse(
                place,
                f"not JSON: {getattr(error, 'msg', error)}",
                "Each line must hold one JSON object.",
                error,
            )
        if not isinstance(row, dict):
            got = f"a JSON {type(row).__name__} instead of an object"
            refuse(place, got, 'Each line must hold one object such as {"path": "a.wav"}.')
        yield f"line {number}", row


def _object(pairs: list[tuple[str, Any]]) -> _Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("an object has the same key twice")
    return row


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON; write null")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is more than a float holds")
    return value


def _parquet_columns(name: str, file: BinaryIO) -> Sequence[str]:
    with _arrow_refusing(name):
        from pyarrow import parquet

        schema = parquet.ParquetFile(file).schema_arrow
    check_types(name, schema)
    return list(schema.names)


def _parquet_total(name: str, file: BinaryIO) -> int:
    with _arrow_refusing(name):
        from pyarrow import parquet

        return int(parquet.read_metadata(file).num_rows)


def _parquet_rows(name: str, file: BinaryIO, skipped: int) -> Iterator[LocatedRow]:
    number = 0
    with _arrow_refusing(name):
        from pyarrow import parquet

        # buffer_size: otherwise all columns of a row group are in memory at once.
        table = parquet.ParquetFile(file, buffer_size=1 << 20)
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if number + rows <= skipped:
                number += rows
                continue
            # One reader for many groups keeps something of each: 9 MB for a million rows.
            batches = table.iter_batches(_PARQUET_BATCH_ROWS, row_groups=[group], use_threads=False)
            for batch in batches:
                before = min(max(skipped - number, 0), batch.num_rows)
                number += before
                for row in batch.slice(before).to_pylist():
                    number += 1
                    yield f"row {number}", row


def _fingerprint(path: str) -> str:
    """Return a string that changes with a Parquet file: its size and time, a hash of its footer."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(-8, os.SEEK_END)
            length = int.from_bytes(file.read(4), "little")
            file.seek(-min(8 + length, status.st_size), os.SEEK_END)
            footer = hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    except OSError as error:
        refuse(path, f"it cannot be read: {error}", "Check its path and permissions.", error)
    return f"{status.st_size}:{status.st_mtime_ns}:{footer}"


def check_types(name: str, schema: Any) -> None:
    """Raise InputError if a column of an Arrow schema cannot become JSON."""
    for field in schema:
        if _is_binary(field.type):
            advice = "Rows become JSON: leave the column out, or write its bytes to files."
            refuse(name, f"column {field.name!r} holds bytes ({field.type})", advice)


def _is_binary(kind: Any) -> bool:
    if kind.num_fields:
        return any(_is_binary(kind.field(k).type) for k in range(kind.num_fields))
    # One test for binary, large_binary, binary_view, fixed_size_binary[4] and a dictionary of them.
    return "binary" in str(kind)


def check_columns(name: str, columns: Sequence[str]) -> None:
    """Raise InputError if there are no columns, or one has no name or the name of another."""
    for number, column in enumerate(columns, 1):
        if not column.strip():
            refuse(name, f"column {number} has no name", "Give every column a name.")
        if column in columns[: number - 1]:
            refuse(name, f"two columns are called {column!r}", "Rename one of them.")
    if not columns:
        refuse(name, "no columns", "A manifest needs a column for the inputs' paths.")


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
        refuse(name + where, reason, "Save it as UTF-8.", error)
    except OSError as error:
        reason = f"it cannot be read: {error}"
        refuse(name, reason, "Check its path and permissions.", error)


@contextmanager
def _arrow_refusing(name: str) -> Iterator[None]:
    """Turn errors of pyarrow, which have no common base class, into an `InputError`."""
    try:
        yield
    except ImportError as error:
        refuse(name, "reading parquet needs pyarrow", "Run: pip install pyarrow", error)
    except Exception as error:  # noqa: BLE001 - ArrowException, OSError, ValueError, KeyError...
        reason = f"pyarrow cannot read it: {error}"
        refuse(name, reason, "If it is truncated or not a parquet file, write it again.", error)


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


def refuse(where: str, reason: str, advice: str, cause: BaseException | None = None) -> NoReturn:
    """Raise InputError with a message of two lines."""
    raise InputError(f"{where}: {reason}\n  {advice}") from cause


# ---- memory tables -------------------------------------------------------------------------------
# Tables in memory as manifests: of pandas, polars or pyarrow, or a list of dicts.
#
# forebay imports neither pandas nor polars. A table is recognised by the columns that it has and by
# Arrow's PyCapsule interface, which all of them offer.

_BATCH_ROWS = 1024


def is_table(value: object) -> bool:
    """Tell whether a value is a table in memory; a list is one if its first element is a dict."""
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping)
    kind = type(value)  # a property of an instance might compute something
    return hasattr(kind, "columns") and (
        hasattr(kind, "__arrow_c_stream__") or hasattr(kind, "__dataframe__")
    )


def memory_manifest(table: Any, folder: str | os.PathLike[str] | None) -> tuple[Manifest, str]:
    """Return the manifest of a table in memory, and where its relative `destination` starts.

    Args:
        folder: A folder or URL; None for the working folder.
    """
    name = "the list of dicts" if isinstance(table, list | tuple) else _name_of(table)
    rows: Callable[[], Iterator[LocatedRow]]
    if isinstance(table, list | tuple):
        columns, rows = _list_columns(name, table), partial(_list_rows, table)
    else:
        arrow = arrow_table(table)
        columns, rows = tuple(arrow.column_names), partial(_arrow_rows, arrow)
        check_types(name, arrow.schema)
    check_columns(name, columns)
    if next(rows(), None) is None:
        refuse(name, "no rows", "A manifest needs one row for each input.")
    start = start_of(folder, (row.get(DESTINATION) for _, row in rows()), name)
    local = None if "://" in start else start
    total = len(table) if isinstance(table, list | tuple) else arrow.num_rows
    manifest = Manifest(name, columns, local, lambda skipped: islice(rows(), skipped, None), total)
    return manifest, start


def arrow_table(table: Any) -> pyarrow.Table:
    """Return a table of pandas, polars or pyarrow as pyarrow's, without row labels of pandas."""
    import pyarrow

    # A DataFrame cannot exist before its library is imported.
    pandas, polars = map(sys.modules.get, ("pandas", "polars"))
    try:
        objects = polars is not None and isinstance(table, polars.DataFrame) and polars.Object
        if objects and objects in table.dtypes:  # Arrow would be given their addresses
            raise TypeError("a column holds Python objects")
        if pandas is not None and isinstance(table, pandas.DataFrame):
            # Otherwise row labels would be a column or not, depending on how rows were selected.
            arrow = pyarrow.Table.from_pandas(table, preserve_index=False)
        else:
            arrow = pyarrow.table(table)
        arrow.validate(full=True)  # or a string that is not UTF-8 would be found in a worker
    except Exception as error:  # noqa: BLE001 - ArrowException, ValueError, TypeError, UnicodeError
        advice = "Each column needs one type and a name, and strings are UTF-8. Convert it first."
        refuse(_name_of(table), f"pyarrow cannot read it: {error}", advice, error)
    arrow = arrow.replace_schema_metadata(None)
    if "_view" in str(arrow.schema):  # polars; pyarrow cannot select rows of these types
        arrow = arrow.cast(pyarrow.schema(map(_without_views, arrow.schema)))
    return arrow


def start_of(folder: str | os.PathLike[str] | None, destinations: Iterable[Any], name: str) -> str:
    """Return the folder or URL in which relative destinations of a table in memory start.

    Args:
        folder: What the user named; None for the working folder.
    """
    if folder is not None:
        text = os.path.expanduser(os.fspath(folder))
        return text.rstrip("/") if "://" in text else os.path.abspath(text)
    here = os.getcwd()
    texts = (each for each in destinations if isinstance(each, str) and each)
    first = next((each for each in texts if "://" not in each and not os.path.isabs(each)), None)
    path = os.path.join(here, first or "")
    if first is None or "\0" in first or os.path.lexists(path) or packed_identity(path):
        return here
    raise InputError(
        f"{name}: its destination {shortened(first)} is not in the working folder {here}\n"
        "  A table in memory does not say in which folder its outputs are. Name it, as in "
        "folder=report.output, or pass the output folder instead of the table."
    )


def _name_of(table: object) -> str:
    return f"the {type(table).__name__}"


def _list_columns(name: str, table: Iterable[Any]) -> tuple[str, ...]:
    columns: dict[Any, None] = {}
    for number, row in enumerate(table, 1):
        if not isinstance(row, Mapping):
            got = f"got {type(row).__name__} instead of a dict"
            refuse(f"{name}, row {number}", got, "The first row is a dict, so all must be.")
        columns.update(dict.fromkeys(row))
    for column in columns:
        if not isinstance(column, str):
            got = f"the key {column!r} is not a string"
            refuse(name, got, "The keys are the names of columns.")
    return tuple(columns)


def _list_rows(table: Iterable[Mapping[str, Any]]) -> Iterator[LocatedRow]:
    return ((f"row {number}", row) for number, row in enumerate(table, 1))


def _arrow_rows(table: pyarrow.Table) -> Iterator[LocatedRow]:
    number = 0
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", row


def _without_views(field: Any) -> Any:
    """Return an Arrow field whose strings and bytes are of the types that pyarrow computes with."""
    import pyarrow

    kind, types = field.type, pyarrow.types
    if "_view" not in str(kind):
        return field
    if types.is_dictionary(kind):
        kind = _without_views(field.with_type(kind.value_type)).type
    elif types.is_struct(kind):
        kind = pyarrow.struct([_without_views(kind.field(k)) for k in range(kind.num_fields)])
    elif types.is_fixed_size_list(kind):
        kind = pyarrow.list_(_without_views(kind.value_field), kind.list_size)
    elif types.is_large_list(kind) or types.is_list(kind):
        make = pyarrow.large_list if types.is_large_list(kind) else pyarrow.list_
        kind = make(_without_views(kind.value_field))
    else:
        kind = {"string_view": pyarrow.large_string(), "binary_view": pyarrow.large_binary()}.get(
            str(kind), kind
        )
    return field.with_type(kind)
