"""Take rows from the columns of an Arrow table by number, without copying the columns.

    numbers, booleans           ──> array [rows]
    lists of numbers            ──> array [rows, length], if those of the rows are equally long
    struct<data, shape>         ──> arrays of these shapes, as `base/value_types.py` has them
    strings, bytes, categories  ──> list
    other lists and structs     ──> list of Python values

A column of any other type is an error that names it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from forebay.base.row_values import python_values
from forebay.errors import InputError, shortened

if TYPE_CHECKING:
    import numpy as np
    import pyarrow
from forebay.base.arrow_arrays import array_of_numpy
from forebay.columns.arrow_chunks import (
    BufferParts,
    ColumnChunks,
    ColumnRows,
    array_buffer,
    holds_null,
    nulls_of,
    numbers_of,
    offsets_of,
)


class Column(ABC):
    """One column."""

    @abstractmethod
    def take(self, rows: ColumnRows) -> Any:
        """Return the values of the rows: an array, or a list of strings or bytes."""

    def each(self, rows: ColumnRows) -> Sequence[Any]:
        """Return the value of each row; arrays may differ in length."""
        found: Sequence[Any] = self.take(rows)
        return found

    def counts(self, rows: ColumnRows) -> Any:
        """Return the number in each row, or the length of its list without reading that."""
        return self.take(rows)


class Columns:
    """The columns of a table with at least one row, over its memory where its layout allows.

    Booleans and categories are converted, and of columns with nulls there are copies.

    Args:
        where: What errors begin with.
        reopen: Returns these columns in another process, where they are not to be pickled.

    Attributes:
        types: The type of each, by name.
        nbytes: Bytes of the table, in memory or in a mapped file.

    Raises:
        InputError: A column has a type that no batch can have, or a null where NaN is not possible.
    """

    def __init__(
        self, table: pyarrow.Table, where: str, reopen: Callable[[], Columns] | None = None
    ) -> None:
        try:
            table.validate()
        except Exception as error:  # pyarrow's errors have no common root
            raise InputError(f"{where}: it is damaged: {error}\n  Write it again.") from error
        self._reopen = reopen or partial(Columns, table, where)
        self._length, self.nbytes = int(table.num_rows), int(table.nbytes)
        self.types = {field.name: str(field.type) for field in table.schema}
        known: dict[Any, Any] = {}
        self._columns = {
            name: _column(table.column(at), name, f"{where}: column {shortened(name)}", known)
            for at, name in enumerate(table.column_names)
        }

    def __reduce__(self) -> Any:
        """Pickle what opens them again."""
        return self._reopen, ()

    def __len__(self) -> int:
        return self._length

    def take(self, index: Any) -> dict[str, Any]:
        """Return the values of some rows by column: an array, or a list of strings or bytes.

        Raises:
            InputError: Lists of these rows have different lengths.
            IndexError: There is no such row.
        """
        rows = ColumnRows(row_numbers(index, self._length))
        return {name: column.take(rows) for name, column in self._columns.items()}

    def each(self, index: Any) -> dict[str, Sequence[Any]]:
        """Return the value of each of some rows by column; arrays may differ in length."""
        rows = ColumnRows(row_numbers(index, self._length))
        return {name: column.each(rows) for name, column in self._columns.items()}

    def counts(self, name: str) -> Any:
        """Return the number in each row of a column, or the length of its list."""
        import numpy as np

        return self._columns[name].counts(ColumnRows(np.arange(self._length)))


def ragged(name: str, lengths: object) -> InputError:
    """Return the error for lists of a column, given two of their lengths."""
    return InputError(
        f"column {shortened(name)} has {lengths} in these rows, which cannot be one tensor\n"
        f"  Pad them: collate_fn=forebay.collate.by_field({{{name!r}: forebay.collate.pad()}})."
    )


def row_numbers(index: Any, length: int) -> np.ndarray[Any, Any]:
    """Return the numbers of rows, counted from 0; negative ones count from the end."""
    import numpy as np

    numbers = np.asarray(index)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise TypeError(f"rows are chosen by integers; got an array of {numbers.dtype}")
    numbers = numbers.astype(np.int64, copy=False)
    if numbers.size and numbers.min() < 0:
        numbers = np.where(numbers < 0, numbers + length, numbers)
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < length):
        raise IndexError(f"a row is out of range: there are {length:,}")
    return numbers


class _Numbers(Column):
    """Numbers, or lists of numbers of one length."""

    def __init__(self, parts: BufferParts, shape: tuple[int, ...]) -> None:
        self._parts, self._shape, self._width = parts, shape, math.prod(shape)

    def take(self, rows: ColumnRows) -> Any:
        parts, width = self._parts, self._width
        if not self._shape:
            return parts.whole.take(parts.at(rows))
        if width and not parts.is_shifted:  # a single chunk: half the time
            whole = parts.whole
            found = whole[: len(whole) // width * width].reshape(-1, width).take(rows.numbers, 0)
        else:
            found = parts.take(parts.at(rows), width)
        return found.reshape(len(rows.numbers), *self._shape)

    def counts(self, rows: ColumnRows) -> Any:
        return 0 * rows.numbers + self._shape[0] if self._shape else self.take(rows)


class _Lists(Column):
    """Lists of numbers, or of arrays of one shape, whose lengths may differ from row to row."""

    def __init__(
        self,
        name: str,
        chunks: ColumnChunks,
        values: list[np.ndarray[Any, Any]],
        shape: tuple[int, ...] = (),
    ) -> None:
        import numpy as np

        self._name = name
        self._shape, self._each, self._ends = shape, math.prod(shape), chunks.ends
        self._offsets, self._values = (
            BufferParts(chunks, offsets_of(chunks)),
            BufferParts(chunks, values),
        )
        self._counts = np.array([len(part) // max(self._each, 1) for part in values])

    def spans(self, rows: ColumnRows) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return where the values of each row start, and the length of its list."""
        at = self._offsets.at(rows)
        starts, ends = self._offsets.whole.take(at), self._offsets.whole.take(at + 1)
        most = rows.of_chunk(self._ends, self._counts)
        if not ((starts >= 0).all() and (starts <= ends).all() and (ends <= most).all()):
            raise InputError("a column is damaged: the values of a row lie outside of its chunk")
        first = rows.of_chunk(self._ends, self._values.starts)
        return starts.astype("i8") * self._each + first, (ends - starts).astype("i8")

    def take(self, rows: ColumnRows) -> Any:
        starts, lengths = self.spans(rows)
        length = int(lengths[0]) if len(lengths) else 0
        if (lengths != length).any():
            other = int(lengths[lengths != length][0])
            raise ragged(self._name, f"a list of {length} and one of {other}")
        return self._found(starts, length)

    def each(self, rows: ColumnRows) -> Sequence[Any]:
        starts, lengths = self.spans(rows)
        return [
            self._found(starts[row : row + 1], length)[0]
            for row, length in enumerate(lengths.tolist())
        ]

    def counts(self, rows: ColumnRows) -> Any:
        return self.spans(rows)[1]

    def _found(self, starts: np.ndarray[Any, Any], length: int) -> Any:
        found = self._values.take(starts, length * self._each)
        return found.reshape(len(starts), length, *self._shape)


class _Strings(_Lists):
    """Strings or bytes."""

    def __init__(self, name: str, chunks: ColumnChunks, values: Any, is_text: bool) -> None:
        super().__init__(name, chunks, values)
        self._array = chunks.arrays[0] if len(chunks.arrays) == 1 else None
        self._is_text, self._view = is_text, self._values.whole.data

    def take(self, rows: ColumnRows) -> Any:
        starts, lengths = self.spans(rows)
        if self._array is not None:  # Arrow takes a quarter of the time, but not from many chunks
            return self._array.take(array_of_numpy(rows.numbers)).to_pylist()
        view, ends = self._view, (starts + lengths).tolist()
        spans = zip(starts.tolist(), ends, strict=True)
        if self._is_text:
            return [str(view[start:end], "utf-8") for start, end in spans]
        return [bytes(view[start:end]) for start, end in spans]

    each = counts = take


class _Shaped(Column):
    """Arrays whose shapes may differ from row to row."""

    def __init__(self, name: str, data: Column, shapes: Column) -> None:
        self._name, self._data, self._shapes = name, data, shapes

    def take(self, rows: ColumnRows) -> Any:
        import numpy as np

        found = self.each(rows)
        shapes = dict.fromkeys(each.shape for each in found)
        if len(shapes) > 1:
            one, two, *_ = shapes
            raise ragged(self._name, f"an array of shape {one} and one of {two}")
        return np.stack(found) if found else np.empty(0)

    def each(self, rows: ColumnRows) -> Sequence[Any]:
        pairs = zip(self._data.each(rows), self._shapes.each(rows), strict=True)
        try:
            return [flat.reshape(shape) for flat, shape in pairs]
        except ValueError as error:
            raise InputError(f"column {shortened(self._name)} is damaged: {error}") from error

    def counts(self, rows: ColumnRows) -> Any:
        import numpy as np

        return np.array([shape[0] if len(shape) else 1 for shape in self._shapes.each(rows)])


class _Objects(Column):
    """Lists and structs that no array holds, as Python values."""

    def __init__(self, column: pyarrow.ChunkedArray) -> None:
        self._column = column

    def take(self, rows: ColumnRows) -> Any:
        return python_values(self._column.take(array_of_numpy(rows.numbers)))

    def counts(self, rows: ColumnRows) -> Any:
        import numpy as np

        found = self.take(rows)
        return np.array([len(each) if isinstance(each, list) else 1 for each in found])


class _Categories(Column):
    """Values out of a few: numbers, or a list of strings or bytes."""

    def __init__(self, codes: Column, values: Any) -> None:
        self._codes, self._values = codes, values

    def take(self, rows: ColumnRows) -> Any:
        codes, values = self._codes.take(rows), self._values
        if not isinstance(values, list):
            return values.take(codes)
        return [values[code] for code in codes.tolist()]


def _column(column: pyarrow.ChunkedArray, name: str, where: str, known: dict[Any, Any]) -> Column:
    import pyarrow
    from pyarrow import types

    kind, sizes = column.type, []
    if isinstance(kind, pyarrow.FixedShapeTensorType):
        sizes, kind = list(kind.shape), kind.storage_type
        column = pyarrow.chunked_array([each.storage for each in column.chunks], kind)
    if types.is_dictionary(kind):
        return _categories(column, name, where, known)
    if (plain := without_view(kind)) is not kind:
        kind, column = plain, column.cast(plain)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_list = types.is_list(kind) or types.is_large_list(kind)
    chunks = ColumnChunks(column, known)
    if is_text or types.is_binary(kind) or types.is_large_binary(kind):
        _refuse_nulls(chunks, where)
        return _Strings(
            name, chunks, [array_buffer(each, 2, "u1") for each in chunks.arrays], is_text
        )
    if types.is_struct(kind) and [each.name for each in kind] == ["data", "shape"]:
        _refuse_nulls(chunks, where)
        parts = [[chunk.field(at) for chunk in chunks.arrays] for at in (0, 1)]
        fields = [pyarrow.chunked_array(*each) for each in zip(parts, _types_of(kind), strict=True)]
        return _Shaped(name, *(_column(each, name, where, known) for each in fields))
    leaf, found = kind.value_type if is_list else kind, []
    while types.is_fixed_size_list(leaf):
        found.append(leaf.list_size)
        leaf = leaf.value_type
    if types.is_nested(kind) and not is_number(leaf):
        return _Objects(column)
    if not is_number(leaf):
        raise InputError(
            f"{where} has the type {kind}\n  Columns of a batch are numbers, booleans, strings, "
            "bytes, lists or structs. Convert it first, times to integers and decimals to "
            "floats for example; or leave columns= out: load= is called with a row's values."
        )
    shape, has_nan = tuple(sizes or found), types.is_floating(leaf)
    if is_list or shape or not has_nan:
        _refuse_nulls(chunks, where)
    values = []
    for chunk, first in zip(chunks.arrays, chunks.firsts.tolist(), strict=True):
        inner, depth = chunk.values if is_list else chunk, len(found)
        while depth and not inner.null_count:
            inner, depth = inner.flatten(), depth - 1
        if (depth or not has_nan) and inner.null_count:
            row = next(row for row, each in enumerate(chunk) if holds_null(each.as_py()))
            raise _null(f"{where} has a null in the list of row {first + row:,}", "")
        values.append(numbers_of(inner, str(leaf)))
    if is_list:
        return _Lists(name, chunks, values, shape)
    return _Numbers(BufferParts(chunks, values, math.prod(shape)), shape)


def _types_of(kind: pyarrow.DataType) -> list[pyarrow.DataType]:
    return [each.type for each in kind]


def is_number(kind: pyarrow.DataType) -> bool:
    """Return whether values of a type are numbers or booleans."""
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _categories(
    column: pyarrow.ChunkedArray, name: str, where: str, known: dict[Any, Any]
) -> Column:
    import numpy as np
    import pyarrow

    if "_view" in str(column.type.value_type):  # of which Arrow cannot make one dictionary
        kind = without_view(column.type.value_type)
        pairs = [(each.indices, each.dictionary.cast(kind)) for each in column.chunks]
        parts = [pyarrow.DictionaryArray.from_arrays(*pair) for pair in pairs]
        column = pyarrow.chunked_array(parts)
    chunks = ColumnChunks(column.unify_dictionaries(), known)
    _refuse_nulls(chunks, where)
    codes = pyarrow.chunked_array([each.indices for each in chunks.arrays])
    values = pyarrow.chunked_array([chunks.arrays[0].dictionary])
    words = _column(values, name, f"{where}, its categories", {})
    return _Categories(
        _column(codes, name, where, known), words.take(ColumnRows(np.arange(len(values))))
    )


def without_view(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return the type of strings or bytes that Arrow computes with, for one that it does not."""
    import pyarrow

    views = {"string_view": pyarrow.large_string(), "binary_view": pyarrow.large_binary()}
    return views.get(str(kind), kind)


def _refuse_nulls(chunks: ColumnChunks, where: str) -> None:
    for chunk, first in zip(chunks.arrays, chunks.firsts.tolist(), strict=True):
        if chunk.null_count:
            row = first + int(nulls_of(chunk).argmax())
            count = sum(each.null_count for each in chunks.arrays)
            raise _null(f"{where} is null in row {row:,}", f"{count:,} of its rows are null. ")


def _null(what: str, count: str) -> InputError:
    return InputError(
        f"{what}, counted from 0: a batch has no value for it\n  {count}Fill or drop them first; "
        "only nulls among floats become NaN."
    )
