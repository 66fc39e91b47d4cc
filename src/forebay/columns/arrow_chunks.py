"""The chunks of an Arrow column, whose buffers are parts of one array over the memory of all.

A column has many chunks, in a mapped file thousands. Their buffers are parts of one array, over the
memory from the first to the last of them, so that one take suffices for any rows. What lies between
the parts is never read: numbers of rows are checked against the length of the table, and offsets,
which may come from a damaged file, against that of their chunk.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow


# NumPy's names of Arrow's types, for those with another name.
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}


class ColumnRows:
    """Numbers of rows, and in which chunk of a column each of them is."""

    def __init__(self, numbers: np.ndarray[Any, Any]) -> None:
        self.numbers = numbers
        self._chunks: dict[int, Any] = {}

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
