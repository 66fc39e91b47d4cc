"""Tables whose rows are inputs: manifests in files, and tables in memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import BufferedReader
from itertools import chain, islice, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from forebay.base.arrow_arrays import Columns, ragged, row_numbers, without_view
from forebay.base.files import (
    absolute,
    fetched,
    file_name,
    is_url,
    open_regular,
    shown_values,
)
from forebay.base.output_names import SUFFIXES
from forebay.base.row_values import json_value, python_rows
from forebay.base.table_files import refuse, table_file
from forebay.base.table_formats import (
    NO_BYTES,
    LocatedRow,
    Row,
    check_types,
    format_of,
    table_of,
)
from forebay.errors import InputError, shortened
from forebay.ledger.identity import NOT_SEEN
from forebay.ledger.records import (
    DESTINATION,
    PATH_COLUMNS,
    Input,
    files_named,
    path_in,
    shown_input,
)

if TYPE_CHECKING:
    import numpy as np
    import pyarrow

# ---- manifest ------------------------------------------------------------------------------------
# Manifests: tables whose rows are inputs, read as a stream from .csv, .jsonl or .parquet.
#
# A manifest is opened once to learn its columns and that it has rows, and read again by every
# iteration, a row at a time: ten million rows need no more memory than ten. Every problem with
# it is an `InputError` that names the file and, if possible, the line.

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
        file_column: The column that names files, if none has a usual name for that; "" for none.
    """

    name: str
    columns: tuple[str, ...]
    folder: str | None
    _rows: Callable[[int], Iterator[LocatedRow]]
    total: int | None = None
    fingerprint: str = ""
    file_column: str = ""

    def inputs(self, first: int = 1) -> Iterator[Input]:
        """Yield one input for each row from the `first` on, in the manifest's order."""
        folder_seen = lru_cache(4096)(_folder_identity)  # many rows may name one folder
        names_paths, other = not set(PATH_COLUMNS).isdisjoint(self.columns), self.file_column
        for row, text in self.rows(first - 1):
            source, column = path_in(row) if names_paths else (_path_at(row, other), other)
            identity = self._identity(source, column, folder_seen) if source else ""
            if "://" not in text or not _may_hide(text):
                yield Input(source, text, identity)
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
                    {column: json_value(values[column]) for column in columns if column in values}
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

    def _identity(self, source: str, column: str, folder_seen: Callable[[str], str]) -> str:
        """Return what changes with the file or folder that a row names; NOT_SEEN for none."""
        if is_url(source):  # a request for each row could take longer than the work
            return ""
        for path in files_named(source, column, self.folder):
            try:
                status = os.stat(path)
                if stat.S_ISDIR(status.st_mode):
                    return folder_seen(path)
            except (OSError, ValueError):  # ValueError: a NUL in the name
                continue
            return f"{status.st_size}:{status.st_mtime_ns}"
        return NOT_SEEN


def _folder_identity(path: str) -> str:
    from forebay.inputs.search import folder_identity

    return folder_identity(path)


def _path_at(row: Row, column: str) -> str:
    """Return the path that a row names in a `file_column`; "" for none."""
    value = row.get(column)
    return value if isinstance(value, str) else ""


def _file_column(columns: Sequence[str], rows: Iterator[LocatedRow], folder: str | None) -> str:
    from forebay.inputs.file_columns import file_column

    return file_column(columns, (row for _, row in rows), folder)


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


def _encoded(rows: Sequence[Row]) -> list[str]:
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
    watched = _file_column(columns, rows(), folder)
    is_large = folder is not None and total is not None and total >= MANY_ROWS
    fingerprint = _fingerprint(name) if is_large else ""
    return Manifest(shown, tuple(columns), folder, rows, total, fingerprint, watched)


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


# ---- metadata tables -----------------------------------------------------------------------------
# The tables that preprocess writes, or any other, as a whole: found and read.


def read_table(table: str | os.PathLike[str]) -> pyarrow.Table:
    """Return a metadata table, given its path or URL, as pyarrow has it.

    A Parquet file has types. A JSONL file gives the same table as the Parquet file would have
    given. A CSV file holds strings alone: a column is bool, int64 or double if all its cells are
    written like that, and an empty cell is null. Blank lines of CSV and JSONL are skipped.
    """
    name = os.fspath(table)
    with fetched(name) if is_url(name) else nullcontext(Path(name)) as path:
        form = format_of(path.name)
        if form is None or not path.is_file():
            what = "is not a metadata table" if path.exists() else "does not exist"
            raise InputError(f"{name} {what}: looked for a file ending in {[*SUFFIXES]}")
        try:
            opens = partial(_opened, path)
            return form.arrow(table_file(path.name, name, opens))
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - pyarrow's errors have no common root
            advice = "If it is truncated or has another format, write it again."
            refuse(f"{name} cannot be read", str(error), advice, error)


def _opened(path: Path) -> BinaryIO:
    return BufferedReader(open_regular(path))


def read_memory_table(
    table: Any, folder: str | os.PathLike[str] | None
) -> tuple[pyarrow.Table, str]:
    """Return a table in memory as pyarrow has it, and where its relative `destination` starts."""
    if isinstance(table, list | tuple):
        manifest, start = memory_manifest(table, folder)
        return table_of(lambda: (row for row, _ in manifest.rows())), start
    arrow = arrow_table(table)
    names = arrow.column_names
    column = arrow.column(names.index(DESTINATION)) if DESTINATION in names else ()
    return arrow, start_of(folder, (each.as_py() for each in column), f"the {type(table).__name__}")


# ---- memory tables -------------------------------------------------------------------------------
# Tables in memory as manifests: of pandas, polars or pyarrow, or a list of dicts.
#
# forebay imports neither pandas nor polars. A table is recognised by the columns that it has and by
# Arrow's PyCapsule interface, which all of them offer.

_BATCH_ROWS = 1024


def is_table(value: object) -> bool:
    """Return whether a value is a table in memory; a list is one if its first element is a dict."""
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping)
    kind = type(value)  # a property of an instance might compute something
    return hasattr(kind, "columns") and (
        hasattr(kind, "__arrow_c_stream__") or hasattr(kind, "__dataframe__")
    )


def memory_manifest(table: Any, folder: str | os.PathLike[str] | None) -> tuple[Manifest, str]:
    """Return the manifest of a table in memory, and where its relative `destination` starts."""
    values: Callable[[], Iterable[Row]]
    pandas = sys.modules.get("pandas")
    if isinstance(table, list | tuple):
        name, total = "the list of dicts", len(table)
        columns, values = _list_columns(name, table), partial(iter, table)
    elif pandas is not None and isinstance(table, pandas.DataFrame):
        # Not by way of Arrow: so a value is the one that `to_dict("records")` would give.
        name, total = "the DataFrame", len(table)
        columns = tuple(map(str, table.columns))
        values = partial(_frame_rows, table, columns)
    else:
        arrow = arrow_table(table)
        name, total = f"the {type(table).__name__}", arrow.num_rows
        columns, values = tuple(arrow.column_names), partial(_arrow_rows, arrow)
        check_types(name, arrow.schema)

    def rows() -> Iterator[LocatedRow]:
        return ((f"row {number}", row) for number, row in enumerate(values(), 1))

    check_columns(name, columns)
    if next(rows(), None) is None:
        refuse(name, "no rows", "A manifest needs one row for each input.")
    start = start_of(folder, (row.get(DESTINATION) for _, row in rows()), name)
    local = None if is_url(start) else start
    watched = _file_column(columns, rows(), local)
    manifest = Manifest(name, columns, local, lambda skipped: islice(rows(), skipped, None), total)
    return replace(manifest, file_column=watched), start


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
            arrow = arrow_frame(table)
        else:
            arrow = pyarrow.table(table)
        arrow.validate(full=True)  # or a string that is not UTF-8 would be found in a worker
    except Exception as error:  # noqa: BLE001 - ArrowException, ValueError, TypeError, UnicodeError
        advice = "Each column needs one type and a name, and strings are UTF-8. Convert it first."
        refuse(f"the {type(table).__name__}", f"pyarrow cannot read it: {error}", advice, error)
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
        text = absolute(os.path.expanduser(os.fspath(folder)))
        return text.rstrip("/") if is_url(text) else text
    here = os.getcwd()
    texts = (each for each in destinations if isinstance(each, str) and each)
    first = next((each for each in texts if not is_url(each) and not os.path.isabs(each)), None)
    path = os.path.join(here, first or "")
    if first is None or "\0" in first or os.path.lexists(path):
        return here
    raise InputError(
        f"{name}: its destination {shortened(first)} is not in the working folder {here}\n"
        "  A table in memory does not say in which folder its outputs are. Name it, as in "
        "folder=report.output, or pass the output folder instead of the table."
    )


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


def _arrow_rows(table: pyarrow.Table) -> Iterator[Row]:
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        yield from python_rows(batch)


def _frame_rows(frame: Any, columns: Sequence[str]) -> Iterator[Row]:
    for first in range(0, len(frame), _BATCH_ROWS):
        part = frame.iloc[first : first + _BATCH_ROWS]
        values = [part.iloc[:, at].tolist() for at in range(len(columns))]
        for each in zip(*values, strict=True):
            yield dict(zip(columns, each, strict=True))


def arrow_frame(frame: Any, *, mixes: bool = True) -> pyarrow.Table:
    """Return a DataFrame of pandas as pyarrow's table, without its row labels.

    Arrow would make numbers of periods and intervals, and refuses some columns of Python objects:
    these have the values that they have in rows.

    Args:
        mixes: Whether a column of Python objects may hold several types.

    Raises:
        Exception: pyarrow cannot read a column; there is no common base class.
    """
    import pyarrow

    arrays = []
    for at, dtype in enumerate(frame.dtypes):
        column = frame.iloc[:, at]
        known = str(getattr(getattr(dtype, "categories", dtype), "dtype", dtype))
        if not known.startswith(("period", "interval")):
            try:
                arrays.append(pyarrow.Array.from_pandas(column))
                continue
            except Exception:
                if not mixes or str(dtype) != "object":
                    raise
        values = [{"": json_value(each)} for each in column.tolist()]
        arrays.append(table_of(partial(iter, values)).column(0))
    return pyarrow.table(arrays, names=[*map(str, frame.columns)])


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
        kind = without_view(kind)
    return field.with_type(kind)


# ---- row groups ----------------------------------------------------------------------------------

# A warning is due if so many row groups were read for less than one row in so many of theirs.
_GROUPS_READ, _ROWS_READ = 16, 16


class RowGroups:
    """What `Columns` is, for a Parquet file that does not fit into memory.

    A row group is read when rows of it are taken, and the last two are kept: enough for rows in
    order. Rows in a random order take a row group each.

    Args:
        identity: Changes with the file.

    Raises:
        InputError: The first row group cannot be read, or see `Columns`.
    """

    def __init__(self, path: str, names: Sequence[str], where: str, identity: str) -> None:
        import numpy as np
        from pyarrow import parquet

        self._arguments = path, names, where, identity
        self._footer = parquet.read_metadata(path)
        groups = map(self._footer.row_group, range(self._footer.num_row_groups))
        sizes = np.array([group.num_rows for group in groups])
        self._numbers = np.flatnonzero(sizes).tolist()  # an empty one has no columns
        self._ends = np.cumsum(sizes[self._numbers])
        self._held: dict[int, Columns] = {}
        self._asked = self._read = self._groups_read = 0
        first = self._group(0)
        self.types = first.types
        self.nbytes = first.nbytes * len(self) // len(first)

    def __reduce__(self) -> Any:
        """Pickle the path."""
        return RowGroups, self._arguments

    def __len__(self) -> int:
        return int(self._footer.num_rows)

    def take(self, index: Any) -> dict[str, Any]:
        """See `Columns.take`."""
        return self._gathered(index, Columns.take)

    def each(self, index: Any) -> dict[str, Sequence[Any]]:
        """See `Columns.each`."""
        return self._gathered(index, Columns.each)

    def counts(self, name: str) -> Any:
        """See `Columns.counts`."""
        import numpy as np

        return np.concatenate([self._group(at).counts(name) for at in range(len(self._ends))])

    def _gathered(self, index: Any, take: Callable[[Columns, Any], Any]) -> dict[str, Any]:
        import numpy as np

        numbers = row_numbers(index, len(self))
        parts: list[dict[str, Any]] = []
        groups, places = self._ends.searchsorted(numbers, "right"), []
        for group in np.unique(groups).tolist() or [0]:
            places.append(np.flatnonzero(groups == group))
            columns = self._group(group)
            first = self._ends[group] - len(columns)
            parts.append(take(columns, numbers[places[-1]] - first))
        self._asked += len(numbers)
        self._warn_of_order()
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate(places))
        return {name: _joined(name, [each[name] for each in parts], order) for name in parts[0]}

    def _group(self, at: int) -> Columns:
        """Return the columns of a row group, which are read unless they were used just before.

        Args:
            at: Its number among those with rows.
        """
        if (found := self._held.get(at)) is not None:
            return found
        from pyarrow import parquet

        path, names, where, identity = self._arguments
        number = self._numbers[at]
        where = f"{where}, row group {number}"
        check_identity(where, path, identity)
        try:
            with parquet.ParquetFile(path, metadata=self._footer) as file:
                table = file.read_row_group(number, names).select(names)
            table.validate(full=True)  # strings of other writers may not be UTF-8
        except Exception as error:  # noqa: BLE001 - pyarrow's errors have no common root
            refuse(
                where, f"it cannot be read: {error}", "If it is truncated, write it again.", error
            )
        found = Columns(table, where)
        self._held = {**dict(list(self._held.items())[-1:]), at: found}
        self._read, self._groups_read = self._read + len(found), self._groups_read + 1
        return found

    def _warn_of_order(self) -> None:
        if self._groups_read < _GROUPS_READ or self._read < _ROWS_READ * self._asked:
            return
        warnings.warn(
            f"{self._arguments[2]}: the columns do not fit into memory, so row groups are read as "
            f"needed, {self._groups_read:,} so far with {self._read:,} rows, of which "
            f"{self._asked:,} were used: the order is random\n  Nothing is wrong, but slow. Write "
            "an Arrow file, which is mapped: see docs/how-to/tables.md. Or leave shuffle out.",
            RuntimeWarning,
            stacklevel=2,
        )
        self._groups_read = -1 << 62  # once


def _joined(name: str, parts: list[Any], order: np.ndarray[Any, Any]) -> Any:
    """Return arrays or lists one after the other, in another order of the rows."""
    import numpy as np

    if isinstance(parts[0], list):
        every = list(chain.from_iterable(parts))
        return [every[at] for at in order.tolist()]
    shapes = {part.shape[1:] for part in parts if len(part)}
    if len(shapes) > 1:
        one, two, *_ = sorted(shape[0] for shape in shapes)
        raise ragged(name, f"a list of {one} and one of {two}")
    return np.concatenate(parts)[order]


def file_identity(path: str) -> str:
    """Return what changes with a file, or when it is replaced."""
    status = os.stat(path)
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def check_identity(where: str, path: str, identity: str) -> None:
    """Raise InputError if a file has another identity than when it was opened."""
    if file_identity(path) != identity:
        advice = "Make the dataset again, and leave a file alone while it is in use."
        refuse(where, "the file was changed while it was in use", advice)
