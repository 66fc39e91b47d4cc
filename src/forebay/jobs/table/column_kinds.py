"""PURE: which type a column has, from the JSON values in it.

    null ─┬─ bool ───────────────┬─ mixed
          ├─ int ── float ───────┤
          ├─ str ────────────────┤
          ├─ list of a kind ─────┤
          └─ struct of kinds ────┘

Kinds join upwards; the result does not depend on the order of the values, except that the fields of
a struct stand in the order in which they first appear. What has no common type is `mixed`: a string
that holds each value as JSON (a string in its quotes), so nothing is lost and nothing is guessed.
Mixed too are: integers beyond 64 bits, which no table format keeps; structs without any field, with
two fields that are the same once they are escaped (see `table_reader.py`), or with more than 256
different ones, which are dictionaries of data rather than records. A column of nothing but nulls is
a string column. NaN and the infinities are floats; an integer among floats becomes one, exact up to
2**53.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

_MOST_FIELDS = 256
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_INT64 = 1 << 63
_SCALARS = {bool: "bool", float: "float", str: "str"}


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of the lattice.

    Attributes:
        name: "null", "bool", "int", "float", "str", "list", "struct" or "mixed".
        item: The kind of a list's items.
        fields: The kinds of a struct's fields.
    """

    name: str
    item: Kind | None = None
    fields: Mapping[str, Kind] = field(default_factory=dict)


NULL, BOOL, INT, FLOAT, STR, MIXED = map(Kind, ("null", "bool", "int", "float", "str", "mixed"))
AS_THEY_ARE = frozenset({"bool", "int", "str"})
_BY_NAME = {kind.name: kind for kind in (BOOL, FLOAT, STR)}
# All values of these types have the same kind.
_BY_TYPE: dict[type, Kind] = {type(None): NULL, bool: BOOL, float: FLOAT, str: STR}
_INTEGERS = {int, type(None)}


def kind_of(value: Any) -> Kind:
    """Return the least kind that holds a JSON value."""
    if value is None:
        return NULL
    if (name := _SCALARS.get(type(value))) is not None:
        return _BY_NAME[name]
    if isinstance(value, int):
        return INT if -_INT64 <= value < _INT64 else MIXED
    if isinstance(value, list):
        item = NULL
        for one in value:
            item = widen(item, one)
        return Kind("list", item)
    if len(value) > _MOST_FIELDS:
        return MIXED
    return Kind("struct", fields={name: kind_of(one) for name, one in value.items()})


def widen(kind: Kind, value: Any) -> Kind:
    """Return the least kind that holds both what `kind` holds and `value`."""
    if value is None or kind.name == "mixed" or kind.name == _SCALARS.get(type(value)):
        return kind  # the usual case, without making a kind for every value
    if kind is INT and type(value) is int and -_INT64 <= value < _INT64:
        return kind
    return join(kind, kind_of(value))


def widen_row(kinds: dict[str, Kind], row: Row) -> None:
    """Widen each column's kind by its value in `row`; new columns come at the end."""
    for name, value in row.items():
        kind = kinds.get(name, NULL)
        if type(value) is not str or kind is not STR:  # most columns hold strings
            kinds[name] = widen(kind, value)


def widen_rows(kinds: dict[str, Kind], rows: Sequence[Row]) -> None:
    """Widen each column's kind by its values in all of the rows, as `widen_row` does."""
    if not rows:
        return
    first = rows[0]
    if any(row.keys() != first.keys() for row in rows):
        for row in rows:
            widen_row(kinds, row)
        return
    for name in first:  # the usual case: the kinds of a column are those of its types
        values = [row[name] for row in rows]
        kind = kinds.get(name, NULL)
        types = {*map(type, values)}
        if types <= _BY_TYPE.keys():
            for each in types:
                kind = join(kind, _BY_TYPE[each])
        elif types <= _INTEGERS and _fit_int64(values):
            kind = join(kind, INT)
        else:
            for value in values:
                kind = widen(kind, value)
        kinds[name] = kind


def _fit_int64(values: Sequence[int | None]) -> bool:
    numbers = [each for each in values if each is not None]
    return min(numbers) >= -_INT64 and max(numbers) < _INT64


def join(one: Kind, other: Kind) -> Kind:
    """Return the least kind that holds what either of two holds."""
    if one is other or one == other or other.name == "null":
        return one
    if one.name == "null":
        return other
    if {one.name, other.name} == {"int", "float"}:
        return FLOAT
    if one.item is not None and other.item is not None:
        return Kind("list", join(one.item, other.item))
    if one.name == other.name == "struct":
        fields = dict(one.fields)
        for name, kind in other.fields.items():
            fields[name] = join(fields.get(name, NULL), kind)
        return Kind("struct", fields=fields) if len(fields) <= _MOST_FIELDS else MIXED
    return MIXED


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
        return _ENCODER.encode(value)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False)


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
        return [fit(one, kind.item) for one in value]
    return {name: fit(value.get(name), one) for name, one in kind.fields.items()}
