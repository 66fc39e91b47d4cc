"""The metadata table in Arrow's terms: finding it, and reading it back from each of its formats."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.base.arrow_arrays import array_of
from forebay.base.output_names import TABLES
from forebay.base.remote import fetched, names_among
from forebay.errors import InputError
from forebay.inputs.tables import SUFFIXES, arrow_table, memory_manifest, open_manifest, start_of
from forebay.ledger.records import DESTINATION

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
# `table_reader.py`), or with more than 256 different ones, which are dictionaries of data rather
# than records. A column of nothing but nulls is a string column. NaN and the infinities are
# floats; an integer among floats becomes one, exact up to 2**53.

Row = dict[str, Any]

_MOST_FIELDS = 256
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_INT64 = 1 << 63
_SCALARS = {bool: "bool", float: "float", str: "str"}


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of the lattice."""

    name: str
    item: Kind | None = None
    fields: Mapping[str, Kind] = field(default_factory=dict)


NULL, BOOL, INT, FLOAT, STR, MIXED = map(Kind, ("null", "bool", "int", "float", "str", "mixed"))
AS_THEY_ARE = frozenset({"bool", "int", "str"})
_BY_NAME = {kind.name: kind for kind in (BOOL, FLOAT, STR)}
# All values of these types have the same kind.
_BY_TYPE: dict[type, Kind] = {type(None): NULL, bool: BOOL, float: FLOAT, str: STR}
_INTEGERS = {int, type(None)}


def kind_of(value: Any) -> Kind:
    """Return the least kind that holds a JSON value."""
    if value is None:
        return NULL
    if (name := _SCALARS.get(type(value))) is not None:
        return _BY_NAME[name]
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
    if value is None or kind.name == "mixed" or kind.name == _SCALARS.get(type(value)):
        return kind  # the usual case, without making a kind for every value
    if kind is INT and type(value) is int and -_INT64 <= value < _INT64:
        return kind
    return join(kind, kind_of(value))


def widen_row(kinds: dict[str, Kind], row: Row) -> None:
    """Widen each column's kind by its value in `row`; new columns come at the end."""
    for name, value in row.items():
        kind = kinds.get(name, NULL)
        if type(value) is not str or kind is not STR:  # most columns hold strings
            kinds[name] = widen(kind, value)


def widen_rows(kinds: dict[str, Kind], rows: Sequence[Row]) -> None:
    """Widen each column's kind by its values in all of the rows, as `widen_row` does."""
    if not rows:
        return
    first = rows[0]
    if any(row.keys() != first.keys() for row in rows):
        for row in rows:
            widen_row(kinds, row)
        return
    for name in first:  # the usual case: the kinds of a column are those of its types
        values = [row[name] for row in rows]
        kind = kinds.get(name, NULL)
        types = {*map(type, values)}
        if types <= _BY_TYPE.keys():
            for each in types:
                kind = join(kind, _BY_TYPE[each])
        elif types <= _INTEGERS and _fit_int64(values):
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


# ---- table reader --------------------------------------------------------------------------------

GROUP_ROWS = 65_536


def find_table(table: str | os.PathLike[str]) -> str:
    """Return the path or URL of a metadata table, given that or its folder's."""
    name = os.path.expanduser(os.fspath(table))
    if is_url := "://" in name:
        tables = names_among(name, TABLES)
    else:
        is_folder = os.path.isdir(name)
        tables = [each for each in TABLES if Path(name, each).is_file()] if is_folder else None
    if tables is not None:
        if len(tables) != 1:
            raise InputError(
                f"the folder {name!r} holds {' and '.join(tables) or 'no metadata table'}\n"
                f"  An output folder of preprocess holds one of {', '.join(TABLES)}. Name the "
                "table itself. If metadata= was changed, only the last run's is up to date: remove "
                "the others."
            )
        return f"{name.rstrip('/')}/{tables[0]}" if is_url else os.path.join(name, tables[0])
    if not name.partition("::")[0].lower().endswith(SUFFIXES) or not (
        is_url or os.path.isfile(name)
    ):
        what = "is not a table" if is_url or os.path.exists(name) else "does not exist"
        raise InputError(
            f"{name!r} {what}\n"
            f"  A table is a file ending in {', '.join(SUFFIXES)}, or the folder that preprocess "
            "wrote one to."
        )
    return name


def read_table(table: str | os.PathLike[str]) -> pyarrow.Table:
    """Return a metadata table, given its path or URL, as pyarrow has it.

    A Parquet file has types. A JSONL file gives the same table as the Parquet file would have
    given. A CSV file holds strings alone: a column is bool, int64 or double if all its cells are
    written like that, and an empty cell is null. Blank lines of CSV and JSONL are skipped.
    """
    name = os.fspath(table)
    if "://" not in name:
        return _read(Path(name), name)
    with fetched(name) as path:
        return _read(path, name)


def _read(path: Path, name: str) -> pyarrow.Table:
    """Return the table in a file; `name` is the user's name for it."""
    readers = {".parquet": _read_parquet, ".csv": _read_csv, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None or not path.is_file():
        what = "is not a metadata table" if path.exists() else "does not exist"
        raise InputError(f"{name} {what}: looked for a file ending in {sorted(readers)}")
    try:
        return reader(path)
    except Exception as error:  # pyarrow's errors have no common root
        if path.suffix.lower() != ".parquet":
            # Reading it as a manifest names the damaged line.
            for _ in open_manifest(name, lambda: path.open("rb"), None).inputs():
                pass
        raise InputError(
            f"{name} cannot be read: {error}\n  If it is truncated or has another format, write "
            "it again."
        ) from error


def read_memory_table(
    table: Any, folder: str | os.PathLike[str] | None
) -> tuple[pyarrow.Table, str]:
    """Return a table in memory as pyarrow has it, and where its relative `destination` starts.

    Args:
        folder: A folder or URL; None for the working folder.
    """
    if isinstance(table, list | tuple):
        manifest, start = memory_manifest(table, folder)
        return _table_of(lambda: (row for row, _ in manifest.rows())), start
    arrow = arrow_table(table)
    chunks: list[Any] = []
    if DESTINATION in arrow.column_names:
        chunks = arrow.column(arrow.column_names.index(DESTINATION)).chunks
    destinations = (value.as_py() for chunk in chunks for value in chunk)
    return arrow, start_of(folder, destinations, f"the {type(table).__name__}")


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


def encoded(text: str) -> bytes:
    """Return a string as UTF-8, with backslash escapes for what is not Unicode."""
    return text.encode(errors="backslashreplace")


def _clean(value: Any) -> Any:
    """Return a value in which all strings are Unicode, with escapes where they were not."""
    if isinstance(value, str):
        return encoded(value).decode()
    if isinstance(value, list):
        return [_clean(one) for one in value]
    if isinstance(value, dict):
        return {_clean(name): _clean(one) for name, one in value.items()}
    return value


def _has_unicode_names(kind: Kind) -> bool:
    """Tell whether the fields of a kind, at any depth, have names that are Unicode."""
    inner = [*kind.fields.values()] if kind.item is None else [kind.item]
    return _clean([*kind.fields]) == [*kind.fields] and all(map(_has_unicode_names, inner))


def _read_parquet(path: Path) -> pyarrow.Table:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        table = file.read()
    table.validate(full=True)  # strings of other writers may not be UTF-8
    return table


def _read_jsonl(path: Path) -> pyarrow.Table:
    def rows() -> Iterator[Row]:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            yield from (json.loads(line) for line in file if line.strip())

    return _table_of(rows)


def _table_of(rows: Callable[[], Iterator[Row]]) -> pyarrow.Table:
    """Return the table of rows that JSON can hold; `rows` is called twice."""
    import pyarrow

    kinds: dict[str, Kind] = {}
    for row in rows():
        widen_row(kinds, row)
    final = {name: final_kind(kind) for name, kind in kinds.items()}
    return pyarrow.Table.from_batches(batches(final, rows()), schema_of(final))


def _read_csv(path: Path) -> pyarrow.Table:
    import pyarrow

    # Arrow's own reader wants each row within a block, and keeps threads and a pipe for ever.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = filter(None, csv.reader(file, strict=True))  # or an open quote would take rows
            names = next(rows)
            chunks: list[list[pyarrow.Array]] = [[] for _ in names]
            while group := list(islice(rows, GROUP_ROWS)):
                for chunk, column in zip(chunks, zip(*group, strict=True), strict=True):
                    chunk.append(array_of([cell or None for cell in column], pyarrow.string()))
    finally:
        csv.field_size_limit(limit)
    columns = [_typed(pyarrow.chunked_array(chunk, pyarrow.string())) for chunk in chunks]
    return pyarrow.table(columns, names=names)


def _typed(cells: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    import pyarrow
    import pyarrow.compute

    whole = "0|-?[1-9][0-9]*"
    other = "-?[0-9]+[.][0-9]+(e[-+]?[0-9]+)?|-?[0-9]+e[-+]?[0-9]+|nan|-?inf"
    shapes = (
        ("^(true|false|True|False|TRUE|FALSE)$", pyarrow.bool_()),
        (f"^({whole})$", pyarrow.int64()),
        (f"^({whole}|{other})$", pyarrow.float64()),
    )
    for pattern, kind in shapes:
        # A column without a value would match every type; it stays a string column.
        if (
            cells.null_count < len(cells)
            and pyarrow.compute.all(pyarrow.compute.match_substring_regex(cells, pattern)).as_py()
        ):
            with suppress(pyarrow.ArrowInvalid):
                return cells.cast(kind)
            return cells  # integers beyond 64 bits
    return cells
