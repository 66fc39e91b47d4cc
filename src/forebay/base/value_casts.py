"""Arrow columns of one type as columns of a wider type that holds all its values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.base.arrow_arrays import array_of, array_of_numpy
from forebay.base.value_columns import column_of
from forebay.base.value_readers import getter_of
from forebay.base.value_types import Nested, Spec, arrow_type, nulls


def widened_array(array: pa.Array, own: Spec, wanted: Spec) -> pa.Array:
    """Return an array of the type `own` as one of a type that holds its values.

    Numbers of tensors and arrays, and strings, are not copied; other values are made anew.
    """
    if own == wanted:
        return array
    if array.offset:
        array = array.take(array_of_numpy(np.arange(len(array))))
    kind = arrow_type(wanted)
    if own.kind == "none":
        return nulls(len(array), kind)
    if own.kind == wanted.kind == "str":
        return array.cast(kind)
    if not isinstance(own, Nested) and (own.kind, own.dtype) == (wanted.kind, wanted.dtype):
        return _in_any_shape(array, own, kind)
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    get, column = getter_of(own, storage, None, {}), column_of(wanted)
    column.extend([get(row) for row in range(len(array))])
    return column.taken()


def _in_any_shape(array: pa.Array, own: Spec, kind: Any) -> pa.Array:
    """Return tensors or arrays of one shape as a column of any shapes."""
    shape = own.shape or ()
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    values = storage.values if isinstance(storage, pa.FixedSizeListArray) else storage
    each = math.prod((*shape, *own.stored[1]))
    ends = array_of_numpy(np.arange(len(array) + 1) * each)
    shapes = array_of([shape] * len(array), pa.list_(pa.int64()))
    lists = pa.LargeListArray.from_arrays(ends, values)
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays([lists, shapes], fields=list(kind), mask=mask)
