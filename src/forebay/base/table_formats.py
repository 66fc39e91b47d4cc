"""Table formats: how manifests and metadata tables are read, and metadata tables are written.

Another format is a class in `FORMATS`, and its name in `TABLE_FORMATS`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from forebay.base.arrow_arrays import (
    GROUP_ROWS,
    Group,
    Kind,
    Row,
    array_of,
    as_json,
    batches,
    check_memory,
    encoded,
    fit,
    schema_of_kinds,
    table_of_rows,
    values_in,
)
from forebay.base.output_names import PACKINGS, SUFFIXES
from forebay.base.row_values import python_rows, unmarked
from forebay.base.table_files import TableFile, opening, refuse, text_lines, without_nul
from forebay.errors import InputError

if TYPE_CHECKING:
    import pyarrow

# Characters. It also limits the damage of an unclosed quote; csv's own limit is 131072.
_LARGEST_CELL = 1 << 29
_PARQUET_BATCH_ROWS = 1024
# Records that are read at once.
_CSV_PAGE = 64

# A row and its position, such as "line 7".
LocatedRow = tuple[str, Mapping[str, Any]]


# Each format says whether all values are strings, and has four methods:
#
#     columns   the columns of a manifest, and the number of its rows if that is known already
#     rows      the rows of a manifest, without as many as are skipped
#     arrow     all rows as pyarrow has them
#     write     writes groups of rows, given the final kinds of the columns


class _Csv:
    """Strings alone; in `arrow` a column has the type that all its cells are written like."""

    is_text = True

    def __init__(self, separator: str) -> None:
        self._separator = separator

    def columns(self, file: TableFile) -> tuple[Sequence[str], int | None]:
        _, columns = next(self._records(file))
        return columns, None

    def rows(self, file: TableFile, skipped: int = 0) -> Iterator[LocatedRow]:
        records = self._records(file)
        _, columns = next(records)
        for line, fields in islice(records, skipped, None) if skipped else records:
            yield f"line {line}", dict(zip(columns, fields, strict=True))

    def arrow(self, file: TableFile) -> pyarrow.Table:
        import pyarrow

        # Arrow's own reader wants each row within a block, and keeps threads and a pipe for ever.
        rows = (fields for _, fields in self._records(file, takes_nul=True))
        names = next(rows)
        chunks: list[list[pyarrow.Array]] = [[] for _ in names]
        while group := list(islice(rows, GROUP_ROWS)):
            for chunk, column in zip(chunks, zip(*group, strict=True), strict=True):
                chunk.append(array_of([cell or None for cell in column], pyarrow.string()))
        columns = [_typed(pyarrow.chunked_array(chunk, pyarrow.string())) for chunk in chunks]
        return pyarrow.table(columns, names=names)

    def write(self, file: BinaryIO, kinds: dict[str, Kind], groups: Iterator[Group]) -> None:
        # With "\r\n" as its line end the module quotes cells with either character; with "\n" some
        # versions of Python do not quote a single "\r".
        writer = csv.writer(_Lines(file), lineterminator="\r\n")
        writer.writerow(kinds)
        for group in groups:
            cells = (
                [_cell(each, kinds[name]) for each in values_in(group, name)] for name in kinds
            )
            writer.writerows(zip(*cells, strict=True))

    def _records(self, file: TableFile, takes_nul: bool = False) -> Iterator[tuple[int, list[str]]]:
        """Yield each record, the header included, with the number of the line it starts on."""
        # Closed here: an error that is raised holds the generator, and it the file.
        with closing(text_lines(file, newline="")) as text:
            lines = text if takes_nul else without_nul(file, text)
            reader = csv.reader(lines, strict=True, delimiter=self._separator)
            yield from self._checked_records(file, reader)

    def _checked_records(self, file: TableFile, reader: Any) -> Iterator[tuple[int, list[str]]]:
        from forebay.base.table_files import header_guess, separator_guess

        header: list[str] = []
        rows = 0
        for line, fields in chain.from_iterable(_csv_pages(file.name, reader)):
            if not fields:
                continue
            if not header:
                header = fields
                if guess := separator_guess(self._separator, header):
                    refuse(file.name, *guess)
            elif len(fields) != len(header):
                self._refuse_record(file.name, line, header, fields)
            else:
                rows += 1
                if rows == 1 and (guess := header_guess(header, fields)):
                    refuse(file.name, *guess)
            yield line, fields
        if not header:
            refuse(file.name, "no header", "Its first line must name the columns.")

    def _refuse_record(
        self, name: str, line: int, header: list[str], fields: list[str]
    ) -> NoReturn:
        from forebay.base.table_files import separator_guess

        if guess := separator_guess(self._separator, header, fields):
            refuse(name, *guess)
        count = len(fields)
        reason = f"{count} field{'s' * (count != 1)} where the header has {len(header)}"
        advice = "Quote a field that holds a separator or a newline, and leave out no field."
        refuse(f"{name}, line {line}", reason, advice)


def _object(pairs: list[tuple[str, Any]]) -> Row:
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


def _csv_pages(name: str, reader: Any) -> Iterator[list[tuple[int, list[str]]]]:
    """Yield the records of a `csv.reader`, each with the number of the line that it starts on."""
    line, is_over = 1, False
    while not is_over:
        page: list[tuple[int, list[str]]] = []
        failed: Exception | None = None
        # The limit is global: the user's is restored before user code runs again.
        limit = csv.field_size_limit(_LARGEST_CELL)
        try:
            for fields in islice(reader, _CSV_PAGE):
                page.append((line, fields))
                line = reader.line_num + 1
        except (csv.Error, InputError) as error:
            failed = error
        finally:
            csv.field_size_limit(limit)
        yield page
        if isinstance(failed, csv.Error):
            advice = "Quotes inside a quoted field are doubled, and every quote is closed."
            refuse(f"{name}, line {line}", f"not CSV: {failed}", advice, failed)
        if failed is not None:
            raise failed
        is_over = len(page) < _CSV_PAGE


class _Jsonl:
    """An object a line; `arrow` gives the table that the Parquet file would give."""

    is_text = False
    _strict = json.JSONDecoder(
        object_pairs_hook=_object, parse_float=_float, parse_constant=_constant
    )

    def columns(self, file: TableFile) -> tuple[Sequence[str], int | None]:
        columns: dict[str, None] = {}
        for _, row in self.rows(file):
            columns.update(dict.fromkeys(row))
        if not columns:
            advice = "A manifest needs one JSON object for each input."
            refuse(file.name, "no rows with a key", advice)
        return list(columns), None

    def rows(self, file: TableFile, skipped: int = 0) -> Iterator[LocatedRow]:
        for number, row in islice(self._objects(file, self._strict), skipped, None):
            yield f"line {number}", row

    def arrow(self, file: TableFile) -> pyarrow.Table:
        lenient = json.JSONDecoder()
        return table_of_rows(lambda: (row for _, row in self._objects(file, lenient)))

    def write(self, file: BinaryIO, kinds: dict[str, Kind], groups: Iterator[Group]) -> None:
        for group in groups:
            columns = (values_in(group, name) for name in kinds)
            for values in zip(*columns, strict=True):
                file.write(encoded(as_json(dict(zip(kinds, values, strict=True))) + "\n"))

    def _objects(self, file: TableFile, decoder: json.JSONDecoder) -> Iterator[tuple[int, Row]]:
        with closing(text_lines(file, newline="\n")) as lines:  # as of CSV
            yield from self._checked_objects(file, decoder, lines)

    def _checked_objects(
        self, file: TableFile, decoder: json.JSONDecoder, lines: Iterator[str]
    ) -> Iterator[tuple[int, Row]]:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except (ValueError, RecursionError) as error:
                reason = f"not JSON: {getattr(error, 'msg', error)}"
                advice = "Each line must hold one JSON object."
                refuse(f"{file.name}, line {number}", reason, advice, error)
            if not isinstance(row, dict):
                reason = f"a JSON {type(row).__name__} instead of an object"
                advice = 'Each line must hold one object such as {"path": "a.wav"}. '
                advice += "If the file is one list of objects, pass what json.load returns."
                refuse(f"{file.name}, line {number}", reason, advice)
            yield number, row


class _Parquet:
    """Columns with types; the calling thread alone reads.

    A thread of Arrow that releases a Python file once the interpreter has begun to end aborts the
    process (apache/arrow issues 34314 and 50482). So `use_threads` and `pre_buffer` are off.
    """

    is_text = False

    def columns(self, file: TableFile) -> tuple[Sequence[str], int | None]:
        with self._opened(file) as table:
            schema, total = table.schema_arrow, int(table.metadata.num_rows)
        check_types(file.name, schema)
        return list(schema.names), total

    def rows(self, file: TableFile, skipped: int = 0) -> Iterator[LocatedRow]:
        number = 0
        with self._opened(file) as table:
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if number + rows <= skipped:
                    number += rows
                    continue
                # One reader for many groups keeps something of each: 9 MB for a million rows.
                batches = table.iter_batches(
                    _PARQUET_BATCH_ROWS, row_groups=[group], use_threads=False
                )
                for batch in batches:
                    before = min(max(skipped - number, 0), batch.num_rows)
                    number += before
                    for row in python_rows(batch.slice(before)):
                        number += 1
                        yield f"row {number}", row

    def arrow(self, file: TableFile) -> pyarrow.Table:
        import pyarrow.parquet

        with file.open() as opened:
            found = pyarrow.parquet.ParquetFile(opened, pre_buffer=False)
            groups = map(found.metadata.row_group, range(found.num_row_groups))
            check_memory(sum(each.total_byte_size for each in groups))
            table = found.read(use_threads=False)
        table.validate(full=True)  # strings of other writers may not be UTF-8
        return table

    def write(self, file: BinaryIO, kinds: dict[str, Kind], groups: Iterator[Group]) -> None:
        import pyarrow.parquet

        schema = schema_of_kinds(kinds)
        writer = pyarrow.parquet.ParquetWriter(
            file,
            schema,
            version="2.6",
            compression="zstd",
            # Parquet has no such types: the schema of Arrow tells them from numbers and lists.
            store_schema=any(part in str(schema) for part in ("duration", "tz=", "fixed_size")),
        )
        with writer:
            for batch in batches(kinds, groups):
                writer.write_batch(batch, row_group_size=GROUP_ROWS)

    @contextmanager
    def _opened(self, file: TableFile) -> Iterator[Any]:
        """Open a manifest; pyarrow's errors, which have no common base class, are InputErrors."""
        with opening(file) as opened:
            try:
                from pyarrow import parquet

                # buffer_size: otherwise all columns of a row group are in memory at once.
                yield parquet.ParquetFile(opened, buffer_size=1 << 20, pre_buffer=False)
            except ImportError as error:
                advice = "Run: pip install pyarrow"
                refuse(file.name, "reading parquet needs pyarrow", advice, error)
            except Exception as error:  # noqa: BLE001 - ArrowException, OSError, ValueError...
                advice = "If it is truncated or not a parquet file, write it again."
                refuse(file.name, f"pyarrow cannot read it: {error}", advice, error)


# The names are those of `TABLE_FORMATS`.
FORMATS: dict[str, _Csv | _Jsonl | _Parquet] = {
    "parquet": _Parquet(),
    "csv": _Csv(","),
    "jsonl": _Jsonl(),
}
# By the endings of files: what is written, and what else is read.
_BY_ENDING = {**FORMATS, "tsv": _Csv("\t"), "ndjson": FORMATS["jsonl"], "json": FORMATS["jsonl"]}


def format_of(name: str) -> _Csv | _Jsonl | _Parquet | None:
    """Return the format of a file, by its ending; None if that is of no table."""
    name = name.lower()
    if not name.endswith(SUFFIXES):
        return None
    stem, _, ending = name.rpartition(".")
    return _BY_ENDING[stem.rpartition(".")[2] if f".{ending}" in PACKINGS else ending]


NO_BYTES = (
    "Rows become JSON: leave the column out, write its bytes to files, or process the samples of "
    "forebay.from_table(table), with save=f in place of f."
)


def check_types(name: str, schema: Any) -> None:
    """Raise InputError if a column of an Arrow schema cannot become JSON."""
    for each in schema:
        if _is_binary(each.type):
            refuse(name, f"column {each.name!r} holds bytes ({each.type})", NO_BYTES)


def _is_binary(kind: Any) -> bool:
    if kind.num_fields:
        return any(_is_binary(kind.field(k).type) for k in range(kind.num_fields))
    # One test for binary, large_binary, binary_view, fixed_size_binary[4] and a dictionary of them.
    return "binary" in str(kind)


class _Lines:
    r"""The file of a csv.writer, which writes each row as one string that ends in "\r\n"."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, row: str) -> int:
        return self._file.write(encoded(row[:-2] + "\n"))


def _cell(value: Any, kind: Kind) -> Any:
    value = unmarked(value)
    if isinstance(value, list | dict):
        return as_json(value)
    value = value if kind.is_typed else fit(value, kind)
    return ("false", "true")[value] if isinstance(value, bool) else value


def _typed(cells: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    import pyarrow
    import pyarrow.compute

    # A code such as 007 is no number, and 1_000 is one for Python alone.
    whole = "[-+]?(0|[1-9][0-9]*)"
    decimal = "[-+]?([0-9]+[.][0-9]*|[.][0-9]+)(e[-+]?[0-9]+)?|[-+]?[0-9]+e[-+]?[0-9]+"
    shapes = (
        ("^(true|false|True|False|TRUE|FALSE)$", pyarrow.bool_()),
        (f"^{whole}$", pyarrow.int64()),
        (f"(?i)^({whole}|{decimal}|[-+]?(nan|inf|infinity))$", pyarrow.float64()),
    )
    compute = pyarrow.compute
    if cells.null_count == len(cells):  # it would match every type; it stays a string column
        return cells
    trimmed = compute.utf8_trim_whitespace(cells)
    for pattern, kind in shapes:
        if compute.all(compute.match_substring_regex(trimmed, pattern)).as_py():
            with suppress(pyarrow.ArrowInvalid):
                return compute.utf8_ltrim(trimmed, "+").cast(kind)
            return cells  # integers beyond 64 bits
    return cells
