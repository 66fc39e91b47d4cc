"""Values of Python in Arrow columns: any of them comes back, and no column reads past its end."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from forebay.base.value_classes import MisfitError, StandIn, class_of, loaded_class, stand_in
from forebay.base.value_columns import column_of
from forebay.base.value_inference import joined_all, spec_of, widened, widened_alike
from forebay.base.value_readers import getter_of, widened_array
from forebay.base.value_types import Nested, Spec, arrow_type, type_from_json, type_to_json
from forebay.errors import InputError

YEARS = timedelta(100_000)
KEYS = st.text("abc", max_size=2) | st.integers(0, 3) | st.none()
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    *(st.binary(), st.dates(), st.datetimes(), st.timedeltas(YEARS * -1, YEARS), st.times()),
    st.decimals(allow_nan=False),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    ),
    max_leaves=8,
)


def alike(values):
    """Return those of some values that have a type in common, and the type."""
    wide, kept = Spec("none"), []
    for value in values:
        with suppress(MisfitError):
            wide = widened(wide, spec_of(value))
            kept.append(value)
    return wide, kept


def kinds(value):
    """Return a value in which each part is beside its type."""
    if isinstance(value, list | tuple):
        return type(value), [*map(kinds, value)]
    if isinstance(value, dict):
        return dict, sorted(([kinds(key), kinds(each)] for key, each in value.items()), key=repr)
    return type(value), value


def read(spec, array):
    """Return the values of a column."""
    get = getter_of(spec, array, None, {})
    return [get(row) for row in range(len(array))]


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_any_values_come_back(values):
    """Whatever they are, in one column, with their types, also from the type's JSON."""
    spec, values = alike(values)
    assert type_from_json(json.loads(json.dumps(type_to_json(spec)))) == spec
    column = column_of(spec)
    column.extend(values)
    array = column.taken()
    array.validate(full=True)
    assert array.type == arrow_type(spec)
    assert [kinds(each) for each in read(spec, array)] == [kinds(each) for each in values]


@given(st.lists(VALUES, min_size=2, max_size=4))
def test_a_column_made_wider_has_the_same_values(values):
    """As if it had been wide from the first value on."""
    wide, values = alike([*values, None])
    own = spec_of(values[0])
    column = column_of(own)
    column.add(values[0])
    array = widened_array(column.taken(), own, wide)
    assert array.type == arrow_type(wide)
    assert kinds(read(wide, array)[0]) == kinds(values[0])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("a\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(JSON, min_size=1, max_size=4))
def test_values_of_json_always_have_a_type(values):
    """Where it is no other one, they are strings that hold each as JSON."""
    for wide in (joined_all(map(spec_of, values)), joined_all(map(spec_of, values[::-1]))):
        column = column_of(wide)
        column.extend(values)
        assert [kinds(each) for each in read(wide, column.taken())] == [*map(kinds, values)]


@given(st.lists(VALUES, min_size=2, max_size=4))
def test_what_holds_a_value_holds_it_however_often_it_comes(values):
    """A type that is wide enough stays as it is, so that no file is written for nothing."""
    wide, values = alike(values)
    assert all(widened(wide, spec_of(value)) == wide for value in values)


@pytest.mark.parametrize("middle", [1 << 60, -1, 3])
@pytest.mark.parametrize("kind", ["none", "int", "str"])
def test_the_items_of_a_list_lie_within_its_column(middle, kind):
    """Or reading is an error at once, however many a damaged file says there are."""
    spec = Nested("list", parts=(Spec(kind, "utf8" * (kind == "str")),))
    items = column_of(spec.parts[0])
    items.extend([None, None])
    buffers = [None, pa.py_buffer(np.array([0, middle, 2], np.int64))]
    array = pa.Array.from_buffers(arrow_type(spec), 2, buffers, children=[items.taken()])
    with pytest.raises(ValueError, match="lie outside"):
        read(spec, array)


def test_an_image_has_as_many_bytes_as_its_size_says():
    """So that a few bytes of a file cannot take gigabytes of memory."""
    spec, image = Spec("image"), Image.new("RGB", (3, 2), (1, 2, 3))
    column = column_of(spec)
    column.add(image)
    array = column.taken()
    assert read(spec, array)[0].tobytes() == image.tobytes()
    fields = [array.field(at) for at in range(5)]
    fields[1] = pa.array([1 << 40])
    forged = pa.StructArray.from_arrays(fields, fields=[*arrow_type(spec)])
    with pytest.raises(ValueError, match="an image of 1099511627776 x 2 with 18 bytes"):
        read(spec, forged)


@dataclass
class Released:
    """A class that does something at its end."""

    path: str

    def __del__(self):
        pass


@dataclass
class Plain:
    """A class as any other."""

    path: str

    def __post_init__(self):
        raise AssertionError("it is not called")


def test_a_class_is_only_used_if_it_is_there_and_does_nothing_at_its_end():
    """The name comes from a file, which may be anybody's."""
    home = (__name__, "Plain", ("path",))
    assert class_of(home, False, {}) is Plain and loaded_class(home) is None
    assert issubclass(class_of((__name__, "Plain", ("other",)), False, {}), StandIn)
    assert issubclass(class_of((__name__, "Released", ("path",)), False, {}), StandIn)
    assert loaded_class(("os", "path.join", ()), False) is None
    before = {*sys.modules}
    assert issubclass(class_of(("this", "Zen", ("path",)), False, {}), StandIn)
    assert {*sys.modules} == before
    spec = Nested(
        "fields", parts=(Spec("str", "utf8"),), keys=("path",), home=home[:2], states=(0,)
    )
    column = column_of(spec)
    value = object.__new__(Plain)
    value.path = "x"
    column.add(value)
    assert read(spec, column.taken()) == [value]


@pytest.mark.parametrize("is_tuple", [True, False])
@pytest.mark.parametrize(
    ("name", "fields"),
    [("x", ("a b",)), ("x", ("a", "a")), ("class", ("a",)), ("x", ("__class__",)), ("x()", ("a",))],
)
def test_no_string_of_a_file_is_executed(name, fields, is_tuple):
    """What is no name of a class or a field is damage."""
    with pytest.raises(InputError, match="damaged"):
        stand_in(("m", name, fields), is_tuple)


ALIKE = {
    "int and float": (1, 0.5, "float"),
    "small and large": (np.float32(1), np.float64(2), "float"),
    "None": (None, "x", "str"),
}


@pytest.mark.parametrize(("one", "other", "kind"), ALIKE.values(), ids=ALIKE)
def test_types_of_a_table_become_wider(one, other, kind):
    """In either order."""
    for pair in ((one, other), (other, one)):
        assert widened_alike(*map(spec_of, pair)).kind == kind


@pytest.mark.parametrize(
    ("values", "exact", "alike"),
    [
        (["1.50", "-12.25"], "decimal128(4, 2)", "decimal128(4, 2)"),
        (["1.5", "100"], "large_string", "decimal128(4, 1)"),
        (["1E+3", "1"], "large_string", "large_string"),
        (["-0", "1"], "large_string", "large_string"),
        (["1e30", "1e-30"], "large_string", "large_string"),
        (["0", "9" * 38], "decimal128(38, 0)", "decimal128(38, 0)"),
    ],
)
def test_decimals_are_numbers_if_they_come_back_as_they_were(values, exact, alike):
    """Their digits too: 1.5 is not 1.50 for whoever prints it."""
    numbers = [*map(Decimal, values)]
    for join, name in ((widened, exact), (widened_alike, alike)):
        spec = Spec("none")
        for each in numbers:
            spec = join(spec, spec_of(each))
        assert str(arrow_type(spec)) == name
        assert type_from_json(type_to_json(spec)) == spec
        column = column_of(spec)
        column.extend([*numbers, None])
        array = column.taken()
        get = getter_of(spec, array, None, {})
        found = [get(row) for row in range(len(numbers) + 1)]
        assert found == [*numbers, None]
        if join is widened:
            assert [*map(str, found[:-1])] == [*map(str, numbers)]
