"""Arrow arrays from values of JSON and from NumPy arrays, built from buffers.

`pyarrow.array` imports pandas where that is installed: half a second and 50 MB in every process
that writes a table.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from forebay.base.formatting import byte_size

if TYPE_CHECKING:
    import numpy as np
    import pyarrow

# What Arrow takes beside the rows: for threads, hash tables, pages and compression of a column.
_BESIDE_BYTES = 64 << 20


def check_memory(nbytes: int) -> None:
    """Raise MemoryError if there is none for so many bytes of rows, once they are loaded.

    Arrow would end the process, since some of its destructors allocate memory.
    """
    needed = _BESIDE_BYTES + 2 * nbytes
    try:
        mmap.mmap(-1, needed, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        raise MemoryError(
            f"{byte_size(needed)} of memory are needed, and the system grants less; see `ulimit -v`"
        ) from error


_TYPECODES = {"int64": "q", "double": "d"}


def array_of(values: Sequence[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    """Return values of one type as an Arrow array.

    Args:
        values: Each is of the type, or None, which becomes null.
    """
    import pyarrow
    from pyarrow import types

    valid = None
    if None in values:
        valid = bits_of([value is not None for value in values])
    buffers, children = [valid], None
    if types.is_struct(kind):
        children = [
            array_of([None if value is None else value[one.name] for value in values], one.type)
            for one in kind
        ]
    elif types.is_list(kind):
        lists = [value or () for value in values]
        buffers.append(_ends(map(len, lists)))
        children = [array_of(list(chain.from_iterable(lists)), kind.value_type)]
    elif types.is_string(kind):
        strings = values if valid is None else [value or "" for value in values]
        text = "".join(strings)
        lengths = map(len, strings if text.isascii() else [each.encode() for each in strings])
        buffers += [_ends(lengths), pyarrow.py_buffer(text.encode())]
    elif types.is_boolean(kind):
        buffers.append(bits_of(values))
    else:
        numbers = values if valid is None else [value or 0 for value in values]
        buffers.append(pyarrow.py_buffer(array(_TYPECODES[str(kind)], numbers)))
    return pyarrow.Array.from_buffers(kind, len(values), buffers, children=children)


def array_of_numpy(values: np.ndarray[Any, Any]) -> pyarrow.Array:
    """Return a NumPy array as an Arrow array, with its memory where its layout allows."""
    import numpy as np
    import pyarrow

    if values.dtype.kind == "U":
        return array_of(values.tolist(), pyarrow.string())
    kind = pyarrow.from_numpy_dtype(values.dtype)
    flat = np.ascontiguousarray(values).reshape(-1)
    data = bits_of(flat) if values.dtype.kind == "b" else pyarrow.py_buffer(flat)
    found = pyarrow.Array.from_buffers(kind, len(flat), [None, data])
    if values.ndim == 1:
        return found
    shape = values.shape[1:]
    tensor = pyarrow.fixed_shape_tensor(kind, shape, permutation=range(len(shape)))
    storage = pyarrow.Array.from_buffers(tensor.storage_type, len(values), [None], children=[found])
    return pyarrow.ExtensionArray.from_storage(tensor, storage)


def bits_of(flags: Any) -> pyarrow.Buffer:
    """Return flags as the bits of an Arrow array."""
    import numpy as np
    import pyarrow

    return pyarrow.py_buffer(np.packbits(np.asarray(flags, bool), bitorder="little"))


def _ends(lengths: Any) -> pyarrow.Buffer:
    import pyarrow

    return pyarrow.py_buffer(array("i", accumulate(lengths, initial=0)))
