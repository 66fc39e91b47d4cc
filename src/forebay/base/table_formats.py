"""Table formats: how manifests and metadata tables are read, and metadata tables are written.

Another format is a class in `FORMATS`, and its name in `TABLE_FORMATS`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from forebay.base.arrow_arrays import array_of, check_memory
from forebay.base.output_names import SUFFIXES
from forebay.base.row_values import python_rows
from forebay.base.table_files import TableFile, opening, refuse, text_lines, without_nul

if TYPE_CHECKING:
    import pyarrow

# ---- column kinds --------------------------------------------------------------------------------
# PURE: which type a column has, from the JSON values in it.
#
#     null ─┬─ bool ───────────────┬─ mixed
#           ├─ int ── float ───────┤
#           ├─ str ────────────────┤
#           ├─ list of a kind ─────┤
#           └─ struct of kinds ────┘
#
# Kinds join upwards; the result does not depend on the order of the values, except that the
# fields of a struct stand in the order in which they first appear. What has no common type is
# `mixed`: a string that holds each value as JSON (a string in its quotes), so nothing is lost and
# nothing is guessed. Mixed too are: integers beyond 64 bits, which no table format keeps; structs
# without any field, with two fields that are the same once they are escaped (see
# `_clean`), or with more than 256 different ones, which are dictionaries of data rather
# than records. A column of nothing but nulls is a string column. NaN and the infinities are
# floats; an integer among floats becomes one, exact up to 2**53.

Row = dict[str, Any]

_MOST_FIELDS = 256
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of the lattice."""

    name: str
    item: Kind | None = None
    fields: Mapping[str, Kind] = field(default_factory=dict)


NULL, BOOL, INT, FLOAT, STR, MIXED = map(Kind, ("null", "bool", "int", "float", "str", "mixed"))
AS_THEY_ARE = frozenset({"bool", "int", "str"})
# All values of these types have the same kind.
_BY_TYPE: dict[type, Kind] = {type(None): NULL, bool: BOOL, float: FLOAT, str: STR}


def kind_of(value: Any) -> Kind:
    """Return the least kind that holds a JSON value."""
    if (kind := _BY_TYPE.get(type(value))) is not None:
        return kind
    if isinstance(value, int):
        return INT if -_INT64 <= value < _INT64 else MIXED
    if isinstance(value, list):
        item = NULL
        for one in value:
            item = widen(item, one)
        return Kind("list", item)
    if len(value) > _MOST_FIELDS:
        return MIXED
    return Kind("struct", fields={name: kind_of(one) for name, one in value.items()})


def widen(kind: Kind, value: Any) -> Kind:
    """Return the least kind that holds both what `kind` holds and `value`."""
    if value is None or kind is MIXED or kind is _BY_TYPE.get(type(value)):
        return kind  # the usual case, without making a kind for every value
    if kind is INT and type(value) is int and -_INT64 <= value < _INT64:
        return kind
    return join(kind, kind_of(value))


def widen_rows(kinds: dict[str, Kind], rows: Sequence[Row]) -> None:
    """Widen each column's kind by its values in the rows; new columns come at the end."""
    first = rows[0] if rows else {}
    if any(row.keys() != first.keys() for row in rows):
        for row in rows:
            for name, value in row.items():
                kinds[name] = widen(kinds.get(name, NULL), value)
        return
    for name in first:  # the usual case: the kinds of a column are those of its types
        values = [row[name] for row in rows]
        kind = kinds.get(name, NULL)
        types = {*map(type, values)}
        if types <= _BY_TYPE.keys():
            for each in types:
                kind = join(kind, _BY_TYPE[each])
        elif types <= {int, type(None)} and _fit_int64(values):
            kind = join(kind, INT)
        else:
            for value in values:
                kind = widen(kind, value)
        kinds[name] = kind


def _fit_int64(values: Sequence[int | None]) -> bool:
    numbers = [each for each in values if each is not None]
    return min(numbers) >= -_INT64 and max(numbers) < _INT64


def join(one: Kind, other: Kind) -> Kind:
    """Return the least kind that holds what either of two holds."""
    if one is other or one == other or other.name == "null":
        return one
    if one.name == "null":
        return other
    if {one.name, other.name} == {"int", "float"}:
        return FLOAT
    if one.item is not None and other.item is not None:
        return Kind("list", join(one.item, other.item))
    if one.name == other.name == "struct":
        fields = dict(one.fields)
        for name, kind in other.fields.items():
            fields[name] = join(fields.get(name, NULL), kind)
        return Kind("struct", fields=fields) if len(fields) <= _MOST_FIELDS else MIXED
    return MIXED


def final_kind(kind: Kind) -> Kind:
    """Return the kind of a column once all values are seen: nulls alone are strings."""
    if kind.name == "null":
        return STR
    if kind.item is not None:
        return Kind("list", final_kind(kind.item))
    if kind.name == "struct":
        written = {name.encode(errors="backslashreplace") for name in kind.fields}
        if not kind.fields or len(written) < len(kind.fields):
            return MIXED
        return Kind("struct", fields={name: final_kind(one) for name, one in kind.fields.items()})
    return kind


def as_json(value: Any) -> str:
    """Return a value as JSON that every reader takes: NaN and the infinities are null."""
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return value


def fit(value: Any, kind: Kind) -> Any:
    """Return `value` in the final `kind` of its column; None stays None."""
    if value is None or kind.name in AS_THEY_ARE:
        return value
    if kind.name == "mixed":
        return as_json(value)
    if kind.name == "float":
        return float(value)
    if kind.item is not None:
        return [fit(one, kind.item) for one in value]
    return {name: fit(value.get(name), one) for name, one in kind.fields.items()}


# ---- arrow ---------------------------------------------------------------------------------------
# Rows and kinds as pyarrow has them.


def schema_of(kinds: dict[str, Kind]) -> pyarrow.Schema:
    """Return the Arrow schema of final kinds."""
    import pyarrow

    return pyarrow.schema([(_clean(name), _arrow_type(kind)) for name, kind in kinds.items()])


def _arrow_type(kind: Kind) -> pyarrow.DataType:
    import pyarrow

    if kind.item is not None:
        return pyarrow.list_(_arrow_type(kind.item))
    if kind.name == "struct":
        fields = [(_clean(name), _arrow_type(one)) for name, one in kind.fields.items()]
        return pyarrow.struct(fields)
    scalars = {"bool": pyarrow.bool_(), "int": pyarrow.int64(), "float": pyarrow.float64()}
    return scalars.get(kind.name, pyarrow.string())


def batches(kinds: dict[str, Kind], rows: Iterator[Row]) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows in batches of `GROUP_ROWS`, with the types of their final kinds."""
    import pyarrow

    schema = schema_of(kinds)
    while group := list(islice(rows, GROUP_ROWS)):
        check_memory(_CELL_BYTES * len(group) * len(kinds))
        arrays = []
        for (name, kind), column in zip(kinds.items(), schema, strict=True):
            values = [row.get(name) for row in group]
            if kind.name not in AS_THEY_ARE:
                values = [fit(value, kind) for value in values]
            if not _has_unicode_names(kind):  # or no value would be found under the clean name
                values = _clean(values)
            try:
                arrays.append(array_of(values, column.type))
            except UnicodeEncodeError:
                arrays.append(array_of(_clean(values), column.type))
        yield pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _encoded(text: str) -> bytes:
    """Return a string as UTF-8, with backslash escapes for what is not Unicode."""
    return text.encode(errors="backslashreplace")


def _clean(value: Any) -> Any:
    """Return a value in which all strings are Unicode, with escapes where they were not."""
    if isinstance(value, str):
        return _encoded(value).decode()
    if isinstance(value, list):
        return [_clean(one) for one in value]
    if isinstance(value, dict):
        return {_clean(name): _clean(one) for name, one in value.items()}
    return value


def _has_unicode_names(kind: Kind) -> bool:
    """Return whether the fields of a kind, at any depth, have names that are Unicode."""
    inner = [*kind.fields.values()] if kind.item is None else [kind.item]
    return _clean([*kind.fields]) == [*kind.fields] and all(map(_has_unicode_names, inner))


def table_of(rows: Callable[[], Iterator[Row]]) -> pyarrow.Table:
    """Return the table of rows that JSON can hold; `rows` is called twice."""
    import pyarrow

    kinds: dict[str, Kind] = {}
    every = rows()
    while group := list(islice(every, GROUP_ROWS)):
        widen_rows(kinds, group)
    final = {name: final_kind(kind) for name, kind in kinds.items()}
    return pyarrow.Table.from_batches(batches(final, rows()), schema_of(final))


# ---- table formats -------------------------------------------------------------------------------
# What differs between CSV, JSONL and Parquet. An error in a file says in which line or row it is.

GROUP_ROWS = 65_536
_CELL_BYTES = 16
# Characters. It also limits the damage of an unclosed quote; csv's own limit is 131072.
_LARGEST_CELL = 1 << 29
_PARQUET_BATCH_ROWS = 1024

# A row and its position, such as "line 7".
LocatedRow = tuple[str, Mapping[str, Any]]


# Each format has four methods:
#
#     columns   the columns of a manifest, and the number of its rows if that is known already
#     rows      the rows of a manifest, without as many as are skipped
#     arrow     all rows as pyarrow has them
#     write     writes rows, given the final kinds of the columns


class _Csv:
    """Strings alone; in `arrow` a column has the type that all its cells are written like."""

    def __init__(self, separator: str) -> None:
        self._separator = separator

    def columns(self, file: TableFile) -> tuple[Sequence[str], int | None]:
        _, columns = next(self._records(file))
        return columns, None

    def rows(self, file: TableFile, skipped: int = 0) -> Iterator[LocatedRow]:
        records = self._records(file)
        _, columns = next(records)
        for line, fields in islice(records, skipped, None):
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

    def write(self, file: BinaryIO, kinds: dict[str, Kind], rows: Iterator[Row]) -> None:
        # With "\r\n" as its line end the module quotes cells with either character; with "\n" some
        # versions of Python do not quote a single "\r".
        writer = csv.writer(_Lines(file), lineterminator="\r\n")
        writer.writerow(kinds)
        for row in rows:
            writer.writerow([_cell(row.get(name), kind) for name, kind in kinds.items()])

    def _records(self, file: TableFile, takes_nul: bool = False) -> Iterator[tuple[int, list[str]]]:
        """Yield each record, the header included, with the number of the line it starts on."""
        lines = text_lines(file, newline="")
        if not takes_nul:
            lines = without_nul(file, lines)
        from forebay.base.table_guesses import header_guess, separator_guess

        reader = csv.reader(lines, strict=True, delimiter=self._separator)
        header: list[str] = []
        rows = 0
        while True:
            line = reader.line_num + 1
            # The limit is global: the user's is restored before user code runs again.
            limit = csv.field_size_limit(_LARGEST_CELL)
            try:
                fields = next(reader, None)
            except csv.Error as error:
                advice = "Quotes inside a quoted field are doubled, and every quote is closed."
                refuse(f"{file.name}, line {line}", f"not CSV: {error}", advice, error)
            finally:
                csv.field_size_limit(limit)
            if fields is None:
                break
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
        from forebay.base.table_guesses import separator_guess

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


class _Jsonl:
    """An object a line; `arrow` gives the table that the Parquet file would give."""

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
        return table_of(lambda: (row for _, row in self._objects(file, lenient)))

    def write(self, file: BinaryIO, kinds: dict[str, Kind], rows: Iterator[Row]) -> None:
        for row in rows:
            line = as_json({name: row.get(name) for name in kinds})
            file.write(_encoded(line + "\n"))

    def _objects(self, file: TableFile, decoder: json.JSONDecoder) -> Iterator[tuple[int, Row]]:
        for number, line in enumerate(text_lines(file, newline="\n"), 1):
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

    def write(self, file: BinaryIO, kinds: dict[str, Kind], rows: Iterator[Row]) -> None:
        import pyarrow.parquet

        # Without the stored Arrow schema there is nothing in the file but the table itself.
        writer = pyarrow.parquet.ParquetWriter(
            file, schema_of(kinds), version="2.6", compression="zstd", store_schema=False
        )
        with writer:
            for batch in batches(kinds, rows):
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
_BY_ENDING = {**FORMATS, "tsv": _Csv("\t"), "ndjson": FORMATS["jsonl"]}


def format_of(name: str) -> _Csv | _Jsonl | _Parquet | None:
    """Return the format of a file, by its ending; None if that is of no table."""
    name = name.lower()
    if name.endswith(SUFFIXES):
        return _BY_ENDING[name.removesuffix(".gz").rpartition(".")[2]]
    return None


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
        return self._file.write(_encoded(row[:-2] + "\n"))


def _cell(value: Any, kind: Kind) -> Any:
    if isinstance(value, list | dict):
        return as_json(value)
    value = fit(value, kind)
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
