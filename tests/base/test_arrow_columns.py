"""ColumnRows of Arrow columns: what pyarrow itself would take, whatever the layout of the table."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.columns.column_types import open_columns
from forebay.errors import InputError

FLOATS = [0.5, math.nan, None, -1e300, math.inf]
WORDS = ["", "a", "längst", "\0", "x" * 40]
# Per type: values to choose from. A null among floats is NaN in a batch.
KINDS = {
    pa.int8(): [-128, 0, 127],
    pa.uint64(): [0, 2**64 - 1],
    pa.float16(): [0.5, -2.0],
    pa.float32(): [0.5, math.nan, None],
    pa.float64(): FLOATS,
    pa.bool_(): [True, False],
    pa.string(): WORDS,
    pa.large_string(): WORDS,
    pa.string_view(): WORDS,
    pa.binary(): [b"", b"\0", b"ab"],
    pa.binary_view(): [b"", b"\0", b"ab" * 20],
    pa.dictionary(pa.int8(), pa.string()): WORDS,
    pa.dictionary(pa.int32(), pa.int64()): [7, 2**60],
    pa.list_(pa.int32()): [[], [1], [1, 2], [3, 4, 5]],
    pa.large_list(pa.float32()): [[], [0.5, None]],
    pa.list_(pa.bool_()): [[True], [False, True]],
    pa.list_(pa.float64(), 2): [[0.5, None], [1.0, 2.0]],
    pa.list_(pa.int64(), 0): [[]],
    pa.list_(pa.list_(pa.int16(), 2), 3): [[[1, 2], [3, 4], [5, 6]], [[0, 0], [0, 1], [9, 9]]],
    pa.list_(pa.list_(pa.int16(), 2)): [[], [[1, 2]], [[3, 4], [5, 6]]],
}


@st.composite
def tables(draw):
    """Tables of many layouts: chunks that are parts of others, empty ones, of several types."""
    kinds = draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3))
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    batches = []
    for size in sizes:
        before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        arrays = []
        for kind in kinds:
            count = before + size + after
            values = draw(st.lists(st.sampled_from(KINDS[kind]), min_size=count, max_size=count))
            arrays.append(array(values, kind).slice(before, size))
        batches.append(arrays)
    columns = [pa.chunked_array(list(chunks)) for chunks in zip(*batches, strict=True)]
    return pa.table(columns, names=[f"c{at}" for at in range(len(kinds))])


def array(values, kind):
    if kind == pa.float16():
        return pa.array(np.array(values, np.float16))
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)


def plain(value):
    """Return a value of a batch as Python has it, and floats as strings: NaN is equal to NaN."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return [plain(each) for each in value]
    return str(math.nan if value is None else value) if isinstance(value, float | None) else value


@given(tables(), st.data())
def test_rows_are_those_that_pyarrow_has(table, data):
    """In any order, repeated, counted from either end, from tables of any layout."""
    columns, count = open_columns(table, "the table"), table.num_rows
    rows = data.draw(st.lists(st.integers(-count, count - 1), max_size=6))
    expected = {
        name: [plain(table.column(name)[row % count].as_py()) for row in rows]
        for name in table.column_names
    }
    assert {name: plain(list(each)) for name, each in columns.each(rows).items()} == expected
    try:
        taken = columns.take(np.array(rows, np.int64))
    except InputError:
        assert any(
            len({len(row) for row in rows if isinstance(row, list)}) > 1
            for rows in expected.values()
        )
        return
    assert {name: plain(each) for name, each in taken.items()} == expected


def test_numbers_keep_their_types_and_fixed_lists_their_shapes():
    """A batch of lists of one length is an array with two dimensions."""
    table = pa.table(
        {
            "f": pa.array([1, 2], pa.float32()),
            "l": pa.array([[1, 2], [3, 4]], pa.list_(pa.int16())),
            "t": pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.uint8(), 2), 1)),
        }
    )
    found = open_columns(table, "the table").take([1, 0, 1])
    assert {name: (each.dtype.name, each.shape) for name, each in found.items()} == {
        "f": ("float32", (3,)),
        "l": ("int16", (3, 2)),
        "t": ("uint8", (3, 1, 2)),
    }


def test_the_memory_of_a_table_is_used_as_it_is():
    """Also where it lies in several chunks: a column takes no memory a second time."""
    arrays = [np.arange(4.0), np.arange(4.0, 8)]
    table = pa.table({"a": pa.chunked_array([pa.array(each) for each in arrays])})
    columns = open_columns(table, "the table")
    arrays[1][2] = 99.0
    assert columns.take([0, 6, 4])["a"].tolist() == [0.0, 99.0, 4.0]


def test_a_row_that_does_not_exist_is_an_error():
    """On both sides, and whatever is not a number of a row."""
    columns = open_columns(pa.table({"a": [1, 2]}), "the table")
    for row in (2, -3):
        with pytest.raises(IndexError, match="there are 2"):
            columns.take([0, row])
    for rows in ([0.5], 1, [[1]]):
        with pytest.raises(TypeError, match="integers"):
            columns.take(rows)


def test_values_outside_of_their_chunk_are_an_error():
    """As a damaged file may have them: nothing else of the memory is read."""
    offsets = pa.py_buffer(np.array([0, 5000, 2, 3], np.int32))
    numbers = pa.py_buffer(np.arange(3, dtype=np.int64))
    values = pa.Array.from_buffers(pa.int64(), 3, [None, numbers])
    lists = pa.Array.from_buffers(pa.list_(pa.int64()), 3, [None, offsets], children=[values])
    columns = open_columns(pa.table({"a": lists}), "the table")
    assert columns.take([2])["a"].tolist() == [[2]]
    for row in (0, 1):
        with pytest.raises(InputError, match="damaged"):
            columns.take([row])
