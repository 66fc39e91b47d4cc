"""Arrow arrays built from buffers are those that pyarrow makes."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.base.arrow_arrays import array_of, array_of_numpy

SCALARS = {
    pa.bool_(): st.booleans(),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(),
    pa.string(): st.text(),
}


def lists_of(kinds):
    """Return lists of such types, and structs of two fields."""
    inner = kinds.map(lambda each: (pa.list_(each[0]), st.lists(st.none() | each[1], max_size=4)))
    pairs = st.tuples(kinds, kinds).map(
        lambda both: (
            pa.struct([(name, kind) for name, (kind, _) in zip("ab", both, strict=True)]),
            st.fixed_dictionaries(
                {name: st.none() | values for name, (_, values) in zip("ab", both, strict=True)}
            ),
        )
    )
    return inner | pairs


KINDS = st.recursive(st.sampled_from(list(SCALARS.items())), lists_of, max_leaves=4)
COLUMNS = KINDS.flatmap(
    lambda each: st.tuples(st.just(each[0]), st.lists(st.none() | each[1], max_size=20))
)


@pytest.mark.slow
@example((pa.float64(), [None, -0.0]))
@given(COLUMNS)
def test_values_of_any_type_are_what_pyarrow_makes_of_them(column):
    """Nulls, lists and structs at any depth, and no value at all."""
    kind, values = column
    found, expected = array_of(values, kind), pa.array(values, kind)
    found.validate(full=True)
    assert found.type == expected.type
    assert found.null_count == expected.null_count
    assert repr(found.to_pylist()) == repr(expected.to_pylist())  # NaN equals nothing


@pytest.mark.parametrize(
    ("values", "kind", "error"),
    [(["\ud800"], pa.string(), UnicodeEncodeError), ([2**63], pa.int64(), OverflowError)],
)
def test_what_does_not_fit_is_an_error(values, kind, error):
    """Strings that are not Unicode, and integers beyond 64 bits."""
    with pytest.raises(error):
        array_of(values, kind)


@pytest.mark.parametrize("shape", [(0,), (5,), (3, 4), (4, 1, 2), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "float64"])
def test_numpy_arrays_are_what_pyarrow_makes_of_them(shape, dtype):
    """One dimension, and tensors; the layout in memory does not matter."""
    values = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    for each in (values, np.asfortranarray(values), values[::-1]):
        plain = np.ascontiguousarray(each)
        make = pa.array if each.ndim == 1 else pa.FixedShapeTensorArray.from_numpy_ndarray
        found, expected = array_of_numpy(each), make(plain)
        found.validate(full=True)
        assert found.type == expected.type
        assert found.equals(expected)


def test_numpy_strings_are_strings():
    """Whatever their width."""
    assert array_of_numpy(np.array(["a", "", "é日"])).equals(pa.array(["a", "", "é日"]))
