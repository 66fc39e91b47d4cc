"""Open the columns of an Arrow table, each as its type allows.

    numbers, booleans           ──> array [rows]
    lists of numbers            ──> array [rows, length], if those of the rows are equally long
    struct<data, shape>         ──> arrays of these shapes, as `base/value_types.py` has them
    strings, bytes, categories  ──> list
    other lists and structs     ──> list of Python values

A column of any other type is an error that names it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from forebay.base.origins import Origin
from forebay.columns.arrow_columns import (
    BufferParts,
    CategoryColumn,
    Column,
    ColumnChunks,
    ColumnRows,
    Columns,
    ListColumn,
    NumberColumn,
    ObjectColumn,
    ShapedColumn,
    StringColumn,
    array_buffer,
)
from forebay.errors import InputError, shortened

if TYPE_CHECKING:
    import numpy as np
    import pyarrow

# NumPy's names of Arrow's types, for those with another name.
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def open_columns(
    table: pyarrow.Table,
    where: str,
    reopen: Callable[[], Columns] | None = None,
    origins: Sequence[Origin] = (),
) -> Columns:
    """Return the columns of a table with at least one row, over its memory where that is possible.

    Booleans and categories are converted, and of columns with nulls there are copies.

    Args:
        where: What errors begin with.
        reopen: See `Columns`; None to pickle the table.
        origins: The files of the rows; none for rows in memory, of which a hash is made.

    Raises:
        InputError: A column has a type that no batch can have, or a null where NaN is not possible.
    """
    try:
        table.validate()
    except Exception as error:  # pyarrow's errors have no common root
        raise InputError(f"{where}: it is damaged: {error}\n  Write it again.") from error
    known: dict[Any, Any] = {}
    columns = {
        name: _column(table.column(at), name, f"{where}: column {shortened(name)}", known)
        for at, name in enumerate(table.column_names)
    }
    types = {field.name: str(field.type) for field in table.schema}
    again = reopen or partial(open_columns, table, where, None, origins)
    sizes = int(table.num_rows), int(table.nbytes)
    return Columns(columns, types, *sizes, again, origins, partial(_hashed, table))


def _hashed(table: pyarrow.Table) -> Origin:
    """Return the rows of a table in memory as an origin, known by a hash of all values."""
    import pyarrow

    written = _Hashed()
    with pyarrow.ipc.new_stream(pyarrow.PythonFile(written, "w"), table.schema) as stream:
        stream.write_table(table)
    return Origin("", written.hash.hexdigest(), int(table.num_rows))


class _Hashed(io.RawIOBase):
    """A file that is only hashed."""

    def __init__(self) -> None:
        self.hash = blake2b(digest_size=16)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return memoryview(data).nbytes


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
        return StringColumn(
            name, chunks, [array_buffer(each, 2, "u1") for each in chunks.arrays], is_text
        )
    if types.is_struct(kind) and [each.name for each in kind] == ["data", "shape"]:
        _refuse_nulls(chunks, where)
        parts = [[chunk.field(at) for chunk in chunks.arrays] for at in (0, 1)]
        fields = [pyarrow.chunked_array(*each) for each in zip(parts, _types_of(kind), strict=True)]
        return ShapedColumn(name, *(_column(each, name, where, known) for each in fields))
    leaf, found = kind.value_type if is_list else kind, []
    while types.is_fixed_size_list(leaf):
        found.append(leaf.list_size)
        leaf = leaf.value_type
    if types.is_nested(kind) and not is_number(leaf):
        return ObjectColumn(column)
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
        return ListColumn(name, chunks, values, shape)
    return NumberColumn(BufferParts(chunks, values, math.prod(shape)), shape)


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
    return CategoryColumn(
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


def holds_null(value: Any) -> bool:
    """Return whether a value is None, or a list that has None at any depth."""
    return value is None or (isinstance(value, list) and any(map(holds_null, value)))


def nulls_of(array: pyarrow.Array) -> np.ndarray[Any, Any]:
    """Return which values are null, of an array that has nulls."""
    return ~flags_of(array, 0)


def flags_of(array: pyarrow.Array, number: int) -> np.ndarray[Any, Any]:
    """Return one of an array's buffers of bits as booleans."""
    import numpy as np

    bits = np.frombuffer(array.buffers()[number], "u1")
    found = np.unpackbits(bits, count=array.offset + len(array), bitorder="little")
    return found[array.offset :].view(bool)


def numbers_of(array: pyarrow.Array, kind: str) -> np.ndarray[Any, Any]:
    """Return numbers of an Arrow type as they are in memory; of floats with nulls, a copy."""
    count, first = len(array), array.offset
    if kind == "bool":
        return flags_of(array, 1) if count else array_buffer(array, 1, "?")[:0]
    found = array_buffer(array, 1, _DTYPES.get(kind, kind))[first : first + count]
    if array.null_count:
        found = found.copy()
        found[nulls_of(array)] = math.nan
    return found
