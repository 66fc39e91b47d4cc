"""Take rows from the columns of an Arrow table by number, without copying the columns.

A column has many chunks, in a mapped file thousands. Their buffers are parts of one array, over the
memory from the first to the last of them, so that one take suffices for any rows. What lies between
the parts is never read: numbers of rows are checked against the length of the table, and offsets,
which may come from a damaged file, against that of their chunk.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from forebay.base.origins import Origin
from forebay.base.row_values import python_values
from forebay.errors import InputError, shortened

if TYPE_CHECKING:
    import numpy as np
    import pyarrow


class ColumnRows:
    """Numbers of rows, and in which chunk of a column each of them is.

    Args:
        numbers: As int64.
    """

    def __init__(self, numbers: np.ndarray[Any, Any]) -> None:
        self.numbers = numbers
        self._chunks: dict[int, Any] = {}

    @cached_property
    def in_arrow(self) -> pyarrow.Array:
        """The numbers as an Arrow array."""
        import numpy as np
        import pyarrow

        # Of a buffer: `pyarrow.array` would import pandas.
        data = pyarrow.py_buffer(np.ascontiguousarray(self.numbers))
        return pyarrow.Array.from_buffers(pyarrow.int64(), len(self.numbers), [None, data])

    def of_chunk(self, ends: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> Any:
        """Return the value of each row's chunk; only one if there is one chunk.

        Args:
            ends: The rows up to the end of each chunk; columns with equal chunks share this object.
        """
        if len(ends) == 1:
            return values[0]
        if (found := self._chunks.get(id(ends))) is None:
            found = self._chunks[id(ends)] = ends.searchsorted(self.numbers, "right")
        return values[found]


class ColumnChunks:
    """The chunks of a column.

    Attributes:
        firsts: The number of the first row of each.
        ends: See `ColumnRows.of_chunk`.
    """

    def __init__(self, column: pyarrow.ChunkedArray, known: dict[Any, Any]) -> None:
        import numpy as np

        self.arrays = [chunk for chunk in column.chunks if len(chunk)]
        sizes = tuple(map(len, self.arrays))
        self.ends = known.setdefault(sizes, np.cumsum(sizes))
        self.firsts = self.ends - sizes


class BufferParts:
    """A buffer of each chunk, as parts of one array.

    Args:
        each: How many elements of it belong to a row.

    Attributes:
        whole: The memory from the first to the last of them; only the parts may be read.
        starts: Where each of them starts in it.
        is_shifted: Whether the elements of row n do not start at n times as many as a row has.
    """

    def __init__(
        self, chunks: ColumnChunks, parts: Iterable[np.ndarray[Any, Any]], each: int = 1
    ) -> None:
        import numpy as np

        # The addresses of nearly all are multiples of the size of an element.
        owners = [part if part.flags.aligned else part.copy() for part in parts]
        self._owners, self._ends, self._each = owners, chunks.ends, each
        self.whole, self.starts = max(owners, key=len), np.zeros(len(owners), np.int64)
        used = np.array([part.size > 0 for part in owners])
        if used.sum() > 1:
            addresses = np.array([part.__array_interface__["data"][0] for part in owners])
            first = addresses[used].min()
            ends = addresses + [part.nbytes for part in owners]
            memory: Any = (ctypes.c_char * int(ends[used].max() - first)).from_address(int(first))
            self.whole = np.frombuffer(memory, owners[0].dtype)
            self.starts = np.where(used, (addresses - first) // self.whole.itemsize, 0)
        self._shifts = self.starts - chunks.firsts * each
        self.is_shifted = bool(self._shifts.any())

    def at(self, rows: ColumnRows) -> np.ndarray[Any, Any]:
        """Return where the elements of each row start."""
        numbers = rows.numbers if self._each == 1 else rows.numbers * self._each
        return numbers + rows.of_chunk(self._ends, self._shifts) if self.is_shifted else numbers

    def take(self, positions: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
        """Return so many elements from each position on, as an array [positions, width]."""
        import numpy as np

        if not width:
            return np.empty((len(positions), 0), self.whole.dtype)
        shape, strides = (max(len(self.whole) - width + 1, 0), width), self.whole.strides * 2
        windows = np.lib.stride_tricks.as_strided(self.whole, shape, strides, writeable=False)
        found: np.ndarray[Any, Any] = windows[positions]
        return found


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


class NumberColumn(Column):
    """Numbers, or lists of numbers of one length."""

    def __init__(self, parts: BufferParts, shape: tuple[int, ...]) -> None:
        self._parts, self._shape, self._width = parts, shape, math.prod(shape)

    def take(self, rows: ColumnRows) -> Any:
        """See `Column.take`."""
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
        """See `Column.counts`."""
        return 0 * rows.numbers + self._shape[0] if self._shape else self.take(rows)


class ListColumn(Column):
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
        """See `Column.take`."""
        starts, lengths = self.spans(rows)
        length = int(lengths[0]) if len(lengths) else 0
        if (lengths != length).any():
            other = int(lengths[lengths != length][0])
            raise ragged(self._name, f"a list of {length} and one of {other}")
        return self._found(starts, length)

    def each(self, rows: ColumnRows) -> Sequence[Any]:
        """See `Column.each`."""
        starts, lengths = self.spans(rows)
        return [
            self._found(starts[row : row + 1], length)[0]
            for row, length in enumerate(lengths.tolist())
        ]

    def counts(self, rows: ColumnRows) -> Any:
        """See `Column.counts`."""
        return self.spans(rows)[1]

    def _found(self, starts: np.ndarray[Any, Any], length: int) -> Any:
        found = self._values.take(starts, length * self._each)
        return found.reshape(len(starts), length, *self._shape)


class StringColumn(ListColumn):
    """Strings or bytes."""

    def __init__(self, name: str, chunks: ColumnChunks, values: Any, is_text: bool) -> None:
        super().__init__(name, chunks, values)
        self._array = chunks.arrays[0] if len(chunks.arrays) == 1 else None
        self._is_text, self._view = is_text, self._values.whole.data

    def take(self, rows: ColumnRows) -> Any:
        """See `Column.take`."""
        starts, lengths = self.spans(rows)
        if self._array is not None:  # Arrow takes a quarter of the time, but not from many chunks
            return self._array.take(rows.in_arrow).to_pylist()
        view, ends = self._view, (starts + lengths).tolist()
        spans = zip(starts.tolist(), ends, strict=True)
        if self._is_text:
            return [str(view[start:end], "utf-8") for start, end in spans]
        return [bytes(view[start:end]) for start, end in spans]

    each = counts = take


class ShapedColumn(Column):
    """Arrays whose shapes may differ from row to row."""

    def __init__(self, name: str, data: Column, shapes: Column) -> None:
        self._name, self._data, self._shapes = name, data, shapes

    def take(self, rows: ColumnRows) -> Any:
        """See `Column.take`."""
        import numpy as np

        found = self.each(rows)
        shapes = dict.fromkeys(each.shape for each in found)
        if len(shapes) > 1:
            one, two, *_ = shapes
            raise ragged(self._name, f"an array of shape {one} and one of {two}")
        return np.stack(found) if found else np.empty(0)

    def each(self, rows: ColumnRows) -> Sequence[Any]:
        """See `Column.each`."""
        pairs = zip(self._data.each(rows), self._shapes.each(rows), strict=True)
        try:
            return [flat.reshape(shape) for flat, shape in pairs]
        except ValueError as error:
            raise InputError(f"column {shortened(self._name)} is damaged: {error}") from error

    def counts(self, rows: ColumnRows) -> Any:
        """See `Column.counts`."""
        import numpy as np

        return np.array([shape[0] if len(shape) else 1 for shape in self._shapes.each(rows)])


class ObjectColumn(Column):
    """Lists and structs that no array holds, as Python values."""

    def __init__(self, column: pyarrow.ChunkedArray) -> None:
        self._column = column

    def take(self, rows: ColumnRows) -> Any:
        """See `Column.take`."""
        return python_values(self._column.take(rows.in_arrow))

    def counts(self, rows: ColumnRows) -> Any:
        """See `Column.counts`."""
        import numpy as np

        found = self.take(rows)
        return np.array([len(each) if isinstance(each, list) else 1 for each in found])


class CategoryColumn(Column):
    """Values out of a few: numbers, or a list of strings or bytes."""

    def __init__(self, codes: Column, values: Any) -> None:
        self._codes, self._values = codes, values

    def take(self, rows: ColumnRows) -> Any:
        """See `Column.take`."""
        codes, values = self._codes.take(rows), self._values
        if not isinstance(values, list):
            return values.take(codes)
        return [values[code] for code in codes.tolist()]


class Columns:
    """Columns of a table with at least one row; made by `open_columns`.

    Args:
        columns: By name.
        types: The type of each, by name.
        reopen: Returns these columns in another process, where they are not to be pickled.
        origins: The files of the rows; none for rows in memory.
        hashed: Returns the origin of rows in memory, a hash of them.

    Attributes:
        types: The type of each, by name.
        nbytes: Bytes of the table, in memory or in a mapped file.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        types: Mapping[str, str],
        length: int,
        nbytes: int,
        reopen: Callable[[], Columns],
        origins: Sequence[Origin],
        hashed: Callable[[], Origin],
    ) -> None:
        self._columns, self.types = columns, types
        self._length, self.nbytes = length, nbytes
        self._reopen, self._origins, self._hashed = reopen, origins, cache(hashed)

    def __reduce__(self) -> Any:
        """Pickle what opens them again."""
        return self._reopen, ()

    def __len__(self) -> int:
        return self._length

    def origins(self, reads: bool) -> Sequence[Origin]:
        """Return where the rows come from; none of rows in memory unless they may be read."""
        return self._origins or ((self._hashed(),) if reads else ())

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


def array_buffer(array: pyarrow.Array, number: int, dtype: str) -> np.ndarray[Any, Any]:
    """Return one of an array's buffers, whole; Arrow may leave out an empty one."""
    import numpy as np

    buffer = array.buffers()[number]
    return np.empty(0, dtype) if buffer is None else np.frombuffer(buffer, dtype)


def offsets_of(chunks: ColumnChunks) -> list[np.ndarray[Any, Any]]:
    """Return where the values of each row start, and where those of the last end, by chunk."""
    return [
        array_buffer(each, 1, "i8" if "large" in str(each.type) else "i4")[each.offset :][
            : len(each) + 1
        ]
        for each in chunks.arrays
    ]
