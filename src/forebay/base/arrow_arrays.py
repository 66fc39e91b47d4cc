"""Arrow arrays from values and NumPy arrays, and Arrow tables from rows of JSON values.

All of them use buffers: `pyarrow.array` imports pandas where that is installed, half a second and
50 MB in every process that writes a table.

A column of a table has a kind, which depends on the values in it:

    null ─┬─ bool ───────────────┬─ mixed
          ├─ int ── float ───────┤
          ├─ date, time, … ──────┤   see `typed_columns`
          ├─ vector ── list ─────┤
          ├─ str ────────────────┤
          ├─ list of a kind ─────┤
          └─ struct of kinds ────┘

Kinds join upwards; the result does not depend on the order of the values, except that the fields of
a struct stand in the order in which they first appear. What has no common type is `mixed`: a string
that holds each value as JSON (a string in its quotes), so nothing is lost and nothing is guessed.
Mixed too are: integers beyond 64 bits, which no table format keeps; structs without any field, with
two fields that are the same once they are escaped (see `_clean`), or with more than 256 different
ones, which are dictionaries of data rather than records. A column of nothing but nulls is a string
column. NaN and the infinities are floats; an integer among floats becomes one, exact up to 2**53.
"""

from __future__ import annotations

import json
import math
import mmap
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any

from forebay.base.formatting import byte_size
from forebay.base.row_values import unmarked
from forebay.base.typed_columns import (
    arrow_type_of,
    common_detail,
    detail_of,
    mark_of,
    typed_array,
)

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


@cache
def _typed_of() -> tuple[tuple[Callable[[Any], bool], str], ...]:
    """Return what tells whether an Arrow type is one of a kind of marked values."""
    from pyarrow import types

    return (
        (types.is_date32, "date"),
        (types.is_time64, "time"),
        (types.is_timestamp, "datetime"),
        (types.is_duration, "duration"),
        (types.is_decimal128, "decimal"),
        (types.is_binary, "bytes"),
        (types.is_fixed_size_list, "vector"),
    )


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
    if (typed := next((name for is_one, name in _typed_of() if is_one(kind)), None)) is not None:
        return typed_array(values, typed, kind, valid)
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
        numbers = values if valid is None else [0 if value is None else value for value in values]
        buffers.append(pyarrow.py_buffer(array(_TYPECODES[str(kind)], numbers)))
    return pyarrow.Array.from_buffers(kind, len(values), buffers, children=children)


def array_of_numpy(values: np.ndarray[Any, Any]) -> pyarrow.Array:
    """Return a NumPy array as an Arrow array, with its memory where its layout allows."""
    import numpy as np
    import pyarrow

    if values.dtype.kind == "U":
        return array_of(values.tolist(), pyarrow.string())
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
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


Row = dict[str, Any]


_MOST_FIELDS = 256


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of the lattice."""

    name: str
    item: Kind | None = None
    fields: Mapping[str, Kind] = field(default_factory=dict)
    detail: str = ""  # see `typed_columns`

    @property
    def is_typed(self) -> bool:
        """Whether the values are marked ones."""
        return self.name in TYPED


NULL, BOOL, INT, FLOAT, STR, MIXED = map(Kind, ("null", "bool", "int", "float", "str", "mixed"))


TYPED = frozenset({"date", "time", "datetime", "duration", "decimal", "bytes", "vector"})
AS_THEY_ARE = frozenset({"bool", "int", "str"}) | TYPED


# All values of these types have the same kind.
_BY_TYPE: dict[type, Kind] = {type(None): NULL, bool: BOOL, float: FLOAT, str: STR}


def kind_of(value: Any) -> Kind:
    """Return the least kind that holds a JSON value."""
    if (kind := _BY_TYPE.get(type(value))) is not None:
        return kind
    if isinstance(value, int):
        return INT if -_INT64 <= value < _INT64 else MIXED
    if isinstance(value, list):
        item = NULL
        for one in value:
            item = widen(item, one)
        return Kind("list", item)
    if (mark := mark_of(value)) is not None:
        detail = detail_of(*mark)
        return MIXED if detail is None else Kind(mark[0], detail=detail)
    if len(value) > _MOST_FIELDS:
        return MIXED
    return Kind("struct", fields={name: kind_of(one) for name, one in value.items()})


def widen(kind: Kind, value: Any) -> Kind:
    """Return the least kind that holds both what `kind` holds and `value`."""
    if value is None or kind is MIXED or kind is _BY_TYPE.get(type(value)):
        return kind  # the usual case, without making a kind for every value
    if kind is INT and type(value) is int and -_INT64 <= value < _INT64:
        return kind
    return common_kind(kind, kind_of(value))


# Some rows as columns: their number, and by name a list of as many values.
Group = tuple[int, dict[str, list[Any]]]


def groups_of(rows: Iterator[Row]) -> Iterator[Group]:
    """Yield rows as columns, `GROUP_ROWS` at a time; what a row does not have is None."""
    while group := list(islice(rows, GROUP_ROWS)):
        first = group[0].keys()
        if all(row.keys() == first for row in group):
            yield len(group), {name: [row[name] for row in group] for name in first}
        else:
            names = dict.fromkeys(chain.from_iterable(group))
            yield len(group), {name: [row.get(name) for row in group] for name in names}


def widen_columns(kinds: dict[str, Kind], columns: Mapping[str, Sequence[Any]]) -> None:
    """Widen each column's kind by its values; new columns come at the end."""
    for name, values in columns.items():
        kind = kinds.get(name, NULL)
        types = {*map(type, values)}  # usually the kinds of a column are those of its types
        if types <= _BY_TYPE.keys():
            for each in types:
                kind = common_kind(kind, _BY_TYPE[each])
        elif types <= {int, type(None)} and _fit_int64(values):
            kind = common_kind(kind, INT)
        else:
            for value in values:
                kind = widen(kind, value)
        kinds[name] = kind


def _fit_int64(values: Sequence[int | None]) -> bool:
    numbers = [each for each in values if each is not None]
    return min(numbers) >= -_INT64 and max(numbers) < _INT64


def common_kind(one: Kind, other: Kind) -> Kind:
    """Return the least kind that holds what either of two holds."""
    if one is other or one == other or other.name == "null":
        return one
    if one.name == "null":
        return other
    if {one.name, other.name} == {"int", "float"}:
        return FLOAT
    if one.item is not None and other.item is not None:
        return Kind("list", common_kind(one.item, other.item))
    if one.is_typed and one.name == other.name:
        detail = common_detail(one.name, one.detail, other.detail)
        if detail is not None:
            return Kind(one.name, detail=detail)
    if {one.name, other.name} <= {"vector", "list"}:  # of several lengths or dtypes
        return common_kind(_as_list(one), _as_list(other))
    if one.name == other.name == "struct":
        fields = dict(one.fields)
        for name, kind in other.fields.items():
            fields[name] = common_kind(fields.get(name, NULL), kind)
        return Kind("struct", fields=fields) if len(fields) <= _MOST_FIELDS else MIXED
    return MIXED


def _as_list(kind: Kind) -> Kind:
    """Return a kind of vectors as one of lists."""
    if kind.name != "vector":
        return kind
    return Kind("list", FLOAT if kind.detail.startswith("float") else INT)


def final_kind(kind: Kind) -> Kind:
    """Return the kind of a column once all values are seen: nulls alone are strings."""
    if kind.name == "null":
        return STR
    if kind.item is not None:
        return Kind("list", final_kind(kind.item))
    if kind.name == "struct":
        written = {name.encode(errors="backslashreplace") for name in kind.fields}
        if not kind.fields or len(written) < len(kind.fields):
            return MIXED
        return Kind("struct", fields={name: final_kind(one) for name, one in kind.fields.items()})
    return kind


def as_json(value: Any) -> str:
    """Return a value as JSON that every reader takes: NaN and the infinities are null."""
    try:
        text = _ENCODER.encode(value)
        return text if "\\u0000" not in text else _ENCODER.encode(_plain(value))
    except ValueError:
        return json.dumps(_finite(_plain(value)), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a value without marks."""
    value = unmarked(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return {name: _plain(one) for name, one in value.items()} if type(value) is dict else value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return value


def fit(value: Any, kind: Kind) -> Any:
    """Return `value` in the final `kind` of its column; None stays None."""
    if value is None or kind.name in AS_THEY_ARE:
        return value
    if kind.name == "mixed":
        return as_json(value)
    if kind.name == "float":
        return float(value)
    if kind.item is not None:
        return [fit(one, kind.item) for one in unmarked(value)]
    return {name: fit(value.get(name), one) for name, one in kind.fields.items()}


def schema_of_kinds(kinds: dict[str, Kind]) -> pyarrow.Schema:
    """Return the Arrow schema of final kinds."""
    import pyarrow

    return pyarrow.schema([(_clean(name), _arrow_type(kind)) for name, kind in kinds.items()])


def _arrow_type(kind: Kind) -> pyarrow.DataType:
    import pyarrow

    if kind.item is not None:
        return pyarrow.list_(_arrow_type(kind.item))
    if kind.name == "struct":
        fields = [(_clean(name), _arrow_type(one)) for name, one in kind.fields.items()]
        return pyarrow.struct(fields)
    if kind.is_typed:
        return arrow_type_of(kind.name, kind.detail)
    scalars = {"bool": pyarrow.bool_(), "int": pyarrow.int64(), "float": pyarrow.float64()}
    return scalars.get(kind.name, pyarrow.string())


def batches(kinds: dict[str, Kind], groups: Iterator[Group]) -> Iterator[pyarrow.RecordBatch]:
    """Yield groups of rows as batches, with the types of their final kinds."""
    import pyarrow

    schema = schema_of_kinds(kinds)
    for group in groups:
        check_memory(_CELL_BYTES * group[0] * len(kinds))
        arrays = []
        for (name, kind), column in zip(kinds.items(), schema, strict=True):
            values = values_in(group, name)
            if kind.name not in AS_THEY_ARE:
                values = [fit(value, kind) for value in values]
            if not _has_unicode_names(kind):  # or no value would be found under the clean name
                values = _clean(values)
            try:
                arrays.append(array_of(values, column.type))
            except UnicodeEncodeError:
                arrays.append(array_of(_clean(values), column.type))
        yield pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def values_in(group: Group, name: str) -> Sequence[Any]:
    """Return the values of a column; of one that a group does not have, they are None."""
    count, columns = group
    return columns.get(name) or [None] * count


def encoded(text: str) -> bytes:
    """Return a string as UTF-8, with backslash escapes for what is not Unicode."""
    return text.encode(errors="backslashreplace")


def _clean(value: Any) -> Any:
    """Return a value in which all strings are Unicode, with escapes where they were not."""
    if isinstance(value, str):
        return encoded(value).decode()
    if isinstance(value, list):
        return [_clean(one) for one in value]
    if isinstance(value, dict):
        return {_clean(name): _clean(one) for name, one in value.items()}
    return value


def _has_unicode_names(kind: Kind) -> bool:
    """Return whether the fields of a kind, at any depth, have names that are Unicode."""
    inner = [*kind.fields.values()] if kind.item is None else [kind.item]
    return _clean([*kind.fields]) == [*kind.fields] and all(map(_has_unicode_names, inner))


def table_of_rows(rows: Callable[[], Iterator[Row]]) -> pyarrow.Table:
    """Return the table of rows that JSON can hold; `rows` is called twice."""
    import pyarrow

    kinds: dict[str, Kind] = {}
    for _, columns in groups_of(rows()):
        widen_columns(kinds, columns)
    final = {name: final_kind(kind) for name, kind in kinds.items()}
    return pyarrow.Table.from_batches(batches(final, groups_of(rows())), schema_of_kinds(final))


GROUP_ROWS = 65_536


_CELL_BYTES = 16
