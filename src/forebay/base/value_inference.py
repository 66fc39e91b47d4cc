"""The type of a value, and the least type that holds several.

    1 ── int ─┬─ float: JSON, or, where types need not come back, float
    0.5 ──────┘
    1, "x" ── JSON: what has no other type in common, if it is of JSON
    {"a": 1}, {"b": "x"} ── a record in which either key may be missing
    (1, 2), (1, 2, 3) ── a list

The result does not depend on the order of the values, except that keys stand in the order in which
they first appear.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from forebay.base.typed_columns import common_detail, detail_of
from forebay.base.value_classes import (
    CLASSES,
    MAPPINGS,
    MOST_DEPTH,
    SEQUENCES,
    MisfitError,
    class_identity,
    container_kind,
    is_unicode,
    items_of,
)
from forebay.base.value_types import (
    ARRAYS,
    MOST_KEYS,
    PARSED,
    TORCH_NAMES,
    WAS_MISSING,
    WAS_NONE,
    Nested,
    Spec,
    described_type,
    zone_name,
)

_SCALARS = {int: "int", float: "float", bool: "bool", bytes: "bytes", type(None): "none"}
# NumPy's scalar strings have a length in their dtype, which differs from sample to sample.
_BUILTIN: dict[type, type] = {np.str_: str, np.bytes_: bytes}
_WRITTEN = {kind: name for name, (kind, _) in PARSED.items() if name != "large int"}
# More than that, an integer has more digits than Python reads again.
MOST_BITS = 14_000
_TIMES = {date: "date", time: "time", datetime: "datetime", timedelta: "timedelta"}


def spec_of(value: Any, depth: int = 0) -> Spec:
    """Return the type of a value."""
    kind = _BUILTIN.get(type(value), type(value))
    if kind is torch.Tensor:
        return _tensor_spec(value)
    if kind in _SCALARS:
        if kind is int and not -(1 << 63) <= value < 1 << 63:
            if value.bit_length() > MOST_BITS:
                raise MisfitError(f"is an integer of {value.bit_length():,} bits; make it bytes")
            return Spec("large int")
        return Spec(_SCALARS[kind])
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:  # a lone surrogate, as in a file name that is not UTF-8
            return Spec("str", "binary")
        return Spec("str", "utf8")
    if issubclass(kind, np.ndarray | np.generic):
        return _array_spec(value, kind)
    if container_kind(value) is not None:
        return _nested_spec(value, depth)
    if kind in _WRITTEN:
        if not is_unicode(value):
            raise MisfitError(f"is {value!r}, which is not Unicode; make it bytes or a string")
        return Spec(_WRITTEN[kind], _digits(value) if kind is Decimal else "")
    if issubclass(kind, date | time | timedelta) or kind.__name__ == "NaTType":
        return _time_spec(value, kind)
    if is_image(value):
        try:
            value.load()
        except (OSError, SyntaxError, ValueError) as error:
            raise MisfitError(f"is an image that cannot be read: {error}") from error
        return Spec("image")
    if issubclass(kind, Set):
        raise MisfitError(f"is a {kind.__name__}, whose order differs; make it a sorted list")
    raise MisfitError(
        f"is of type {kind.__module__}.{kind.__qualname__}, which has no form as data; make it "
        "a plain tensor, an array, a number, a string, or a dict of these"
    )


def _digits(value: Decimal) -> str:
    """Return how many digits a Decimal has before and behind its point; "" if a string keeps more.

    A column of numbers has neither 1E+3 beside 1000, nor -0, NaN and infinity.
    """
    sign, _, exponent = value.as_tuple()
    if not isinstance(exponent, int) or exponent > 0 or (sign and not value):
        return ""
    return detail_of("decimal", [str(value)]) or ""


def _decimals(old: Spec, new: Spec, *, alike: bool) -> Spec:
    """Return the type of the Decimals of both: where they come back as they were, of one scale."""
    scales = {each.dtype.partition(" ")[2] for each in (old, new)}
    if "" in scales or (len(scales) > 1 and not alike):
        return Spec("decimal")
    return Spec("decimal", common_detail("decimal", old.dtype, new.dtype) or "")


def _tensor_spec(value: torch.Tensor) -> Spec:
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        raise MisfitError("is a sparse, nested or quantized tensor; make it a dense one")
    if value.device.type != "cpu":
        raise MisfitError(f"is on the device {value.device}; move it to the CPU with .cpu()")
    if value.requires_grad:
        raise MisfitError("requires a gradient, which cannot be stored; return tensor.detach()")
    name = TORCH_NAMES.get(value.dtype)
    if name is None:
        raise MisfitError(f"is a tensor of {value.dtype}, which no column can hold")
    return Spec("tensor", name, _shape(value))


def _array_spec(value: Any, kind: type) -> Spec:
    what = "number" if issubclass(kind, np.generic) else "array"
    is_plain = kind is np.ndarray or kind is np.memmap or what == "number"
    if is_plain and value.dtype.kind in "OT":
        raise MisfitError(f"is a NumPy array of dtype {value.dtype}; make it a list: .tolist()")
    if not is_plain or value.dtype.kind not in ARRAYS or value.dtype.itemsize == 0:
        name = "" if is_plain else f" ({kind.__module__}.{kind.__qualname__})"
        raise MisfitError(f"is a NumPy {what}{name} of dtype {value.dtype}; use a numeric dtype")
    return Spec(what, value.dtype.str, _shape(value))


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an array; None if it is empty: other programs read no lists of size 0."""
    return None if 0 in value.shape else tuple(value.shape)


def _time_spec(value: Any, kind: type) -> Spec:
    try:
        fits_int64 = -(1 << 63) <= number_of(value) < 1 << 63
    except (OverflowError, ValueError, AttributeError):
        fits_int64 = False
    if not fits_int64:
        raise MisfitError(f"is {value!r}, which no column of times can hold; make it a string")
    if kind in _TIMES:
        if kind is date or kind is timedelta:
            return Spec(_TIMES[kind])
        zone = zone_name(value.tzinfo)
        if kind is time and zone:
            raise MisfitError("is a time of day with a time zone; make it a string")
        return Spec(_TIMES[kind], zone)
    if kind.__module__.partition(".")[0] == "pandas":
        name = "Timedelta" if isinstance(value, timedelta) and kind.__name__ != "NaTType" else ""
        zone = "" if name or kind.__name__ == "NaTType" else zone_name(value.tzinfo)
        return Spec(name or "Timestamp", zone)
    raise MisfitError(f"is of type {kind.__module__}.{kind.__qualname__}; make it a datetime")


def is_image(value: Any) -> bool:
    """Return whether a value is an image of PIL."""
    library = sys.modules.get("PIL.Image")  # there is no image before it is imported
    return library is not None and isinstance(value, library.Image)


def _nested_spec(value: Any, depth: int) -> Spec:
    kind = container_kind(value)
    assert kind is not None
    _deeper((), depth)
    if kind in SEQUENCES and kind != "tuple":
        with _Part("[…]"):
            item = _plain_item(value) or joined_all(spec_of(each, depth + 1) for each in value)
        return Nested(kind, parts=(item,))
    keys, values = items_of(value, kind)
    if kind in MAPPINGS and (len(keys) > MOST_KEYS or not all(map(_is_name, keys))):
        with _Part("a key"):
            key = joined_all(spec_of(each, depth + 1) for each in keys)
        with _Part("[…]"):
            item = joined_all(spec_of(each, depth + 1) for each in values)
        return Nested("pairs", kind, parts=(key, item))
    parts = []
    for name, each in zip(keys, values, strict=True):
        with _Part(str(name)):
            parts.append(spec_of(each, depth + 1))
    names, home = tuple(map(str, keys)), ("", "")
    states = tuple(WAS_NONE * (part.kind == "none") for part in parts)
    if kind in CLASSES:
        module, qualname, fields = class_identity(value)
        home = module, qualname
        if names != fields:  # some fields are not set
            known = dict(zip(names, zip(parts, states, strict=True), strict=True))
            some = [known.get(name, (Spec("none"), WAS_MISSING)) for name in fields]
            names, parts, states = fields, [each[0] for each in some], tuple(x[1] for x in some)
    if kind not in (*MAPPINGS, "fields"):
        states = ()
    return Nested(kind, parts=tuple(parts), keys=names, home=home, states=states)


def _plain_item(values: Any) -> Spec | None:
    """Return the type of items that are all floats, all small integers, or all ASCII strings."""
    types = {*map(type, values)}
    if types == {float} or (types == {int} and -(1 << 63) <= min(values) <= max(values) < 1 << 63):
        return Spec(_SCALARS[types.pop()])
    return Spec("str", "utf8") if types == {str} and all(map(str.isascii, values)) else None


def _deeper(values: Sequence[Any], depth: int) -> Sequence[Any]:
    if depth >= MOST_DEPTH:
        raise MisfitError(f"is nested deeper than {MOST_DEPTH} levels, or contains itself")
    return values


def _is_name(key: Any) -> bool:
    """Return whether a key can be the name of a field: a string without a lone surrogate."""
    return type(key) is str and is_unicode(key)


class _Part:
    """Put the part of a value in front of what is wrong with it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if isinstance(error, MisfitError):
            words = str(error)
            inner, _, rest = words.partition("\0")
            path = f"{self._name}.{inner}" if rest else self._name
            raise MisfitError(f"{path}\0{rest or words}") from None


def named_misfit(name: str, error: MisfitError) -> MisfitError:
    """Return the error for a value with a name; of a part of it, with the path to that."""
    inner, _, rest = str(error).partition("\0")
    if not rest:
        return MisfitError(f"{name!r} {inner}")
    return MisfitError(f"{name + '.' + inner!r} {rest}".replace(".[…]", "[…]"))


_START = datetime(1970, 1, 1, tzinfo=UTC)
# By whether there is a time zone.
EPOCH = {True: _START, False: _START.replace(tzinfo=None)}
_MICROSECOND = timedelta(microseconds=1)


def number_of(value: Any) -> int:
    """Return the number that a column has for a date or a time."""
    if type(value) not in _TIMES:  # of pandas
        return int(value.as_unit("ns").value) if value == value else -(1 << 63)
    if isinstance(value, datetime):
        return (value - EPOCH[value.tzinfo is not None]) // _MICROSECOND
    if isinstance(value, timedelta):
        return value // _MICROSECOND
    if isinstance(value, date):
        return value.toordinal() - date(1970, 1, 1).toordinal()
    assert isinstance(value, time)
    seconds = (value.hour * 60 + value.minute) * 60 + value.second
    return seconds * 1_000_000 + value.microsecond


# ---- joins ---------------------------------------------------------------------------------------


def joined_all(specs: Iterable[Spec]) -> Spec:
    """Return the type that holds the values of all these types."""
    found = Spec("none")
    for spec in specs:
        found = widened(found, spec)
    return found


def widened(old: Spec, new: Spec) -> Spec:
    """Return the least type that holds the values of both; MisfitError if there is none."""
    if old == new or new.kind == "none":
        return old
    if old.kind == "none":
        return new
    return _joined(old, new, widened) or _as_json(old, new)


def widened_alike(old: Spec, new: Spec) -> Spec:
    """Return the type of a column for both, whose values need not come back with their types.

    As in a table of `preprocess`: an integer among floats becomes one.
    """
    if old == new or new.kind == "none":
        return old
    if old.kind == "none":
        return new
    if {old.kind, new.kind} <= {"int", "float", "number"}:
        return _number(old, new)
    if old.kind == new.kind == "array" and old.dtype != new.dtype:
        dtype = np.result_type(old.dtype, new.dtype)
        if dtype.kind in "iuf":
            return Spec("array", dtype.str, old.shape if old.shape == new.shape else None)
    if old.kind == new.kind == "datetime" and old.dtype and new.dtype:
        return Spec("datetime", zone_name(UTC))  # the same times, of several time zones
    joined = _joined(old, new, widened_alike)
    if joined is None and "json" not in (old.kind, new.kind):
        raise _apart(old, new)  # a string among numbers is rather a mistake of the model
    return joined or _as_json(old, new)


def _as_json(old: Spec, new: Spec) -> Spec:
    """Return the type of values that have no other one in common."""
    if not _is_json(old) or not _is_json(new):
        raise _apart(old, new)
    return Spec("json")


def _apart(old: Spec, new: Spec) -> MisfitError:
    return MisfitError(f"is {described_type(new)}, and {described_type(old)} in other samples")


def _is_json(spec: Spec) -> bool:
    """Return whether JSON has all values of a type, such that they come back as they were."""
    if not isinstance(spec, Nested):
        return spec.kind in ("none", "bool", "int", "large int", "float", "str", "json")
    return spec.kind in ("list", "dict") and all(map(_is_json, spec.parts))


def _number(old: Spec, new: Spec) -> Spec:
    kinds = np.result_type(*(np.dtype(each.dtype or each.kind) for each in (old, new)))
    if kinds.kind not in "iuf":
        raise _apart(old, new)
    known = {"int64": Spec("int"), "float64": Spec("float")}
    return known.get(kinds.name) or Spec("number", kinds.str)


_Join = Callable[[Spec, Spec], Spec]


def _joined(old: Spec, new: Spec, join: _Join) -> Spec | None:
    """Return the type of both, if they have one that is not JSON."""
    kinds = {old.kind, new.kind}
    if len(kinds) == 2:
        if kinds == {"int", "large int"}:
            return Spec("large int")
        if kinds == {"dict", "pairs"} or kinds == {"OrderedDict", "pairs"}:
            assert isinstance(old, Nested) and isinstance(new, Nested)
            one, other = _as_pairs(old, join), _as_pairs(new, join)
            return None if one.dtype != other.dtype else _joined(one, other, join)
        return None
    if not isinstance(old, Nested) or not isinstance(new, Nested):
        if old.kind == "str":
            return Spec("str", "binary")
        if old.kind == "decimal":
            return _decimals(old, new, alike=join is widened_alike)
        return replace(old, shape=None) if old.dtype == new.dtype else None
    if (old.dtype, old.home) != (new.dtype, new.home):
        return None
    if old.is_record and new.is_record:
        if (old.states or new.states) and (old.kind in MAPPINGS or old.keys == new.keys):
            return _record(old, new, join)
        if old.keys == new.keys:
            return replace(old, parts=_pairwise(old, new, join))
    if old.kind == "tuple":  # of several lengths
        items = [each for spec in (old, new) for each in spec.parts]
        item = Spec("none")
        for each in items:
            item = join(item, each)
        return Nested("tuple", shape=None, parts=(item,))
    return None if old.kind in CLASSES else replace(old, parts=_pairwise(old, new, join))


def _pairwise(old: Nested, new: Nested, join: _Join) -> tuple[Spec, ...]:
    return tuple(join(*pair) for pair in zip(old.parts, new.parts, strict=True))


def _as_pairs(spec: Nested, join: _Join) -> Nested:
    if spec.kind == "pairs":
        return spec
    item = Spec("none")
    for part in spec.parts:
        item = join(item, part)
    return Nested("pairs", spec.kind, parts=(Spec("str", "utf8"), item))


def _record(old: Nested, new: Nested, join: _Join) -> Nested:
    """Return the type of records, some of which have keys that others have not."""
    counts = WAS_MISSING if join is widened_alike else WAS_MISSING | WAS_NONE
    keys = merged_keys(old.keys, new.keys)
    is_other = old.kind == "OrderedDict" and not are_in_order(old.keys, new.keys)
    if is_other or (len(keys) > MOST_KEYS and old.kind in MAPPINGS):
        one, other = _as_pairs(old, join), _as_pairs(new, join)
        return replace(one, parts=_pairwise(one, other, join))
    found: dict[str, tuple[Spec, int]] = {}
    for spec in (old, new):
        for key, part, state in zip(spec.keys, spec.parts, spec.states, strict=True):
            known = found.get(key)
            state &= counts
            found[key] = (join(known[0], part), known[1] | state) if known else (part, state)
    common = {*old.keys} & {*new.keys}
    parts = tuple(found[key][0] for key in keys)
    states = tuple(found[key][1] | WAS_MISSING * (key not in common) for key in keys)
    return replace(old, parts=parts, keys=keys, states=states)


def merged_keys(old: tuple[Any, ...], new: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the keys of both; new ones stand before the next one that is known, or at the end."""
    keys, waiting = list(old), list[Any]()
    for key in new:
        if key in old:
            at = keys.index(key)
            keys[at:at], waiting = waiting, []
        else:
            waiting.append(key)
    return (*keys, *waiting)


def are_in_order(known: tuple[Any, ...], keys: tuple[Any, ...]) -> bool:
    """Return whether the keys that are known come in the same order."""
    places = [known.index(key) for key in keys if key in known]
    return places == sorted(places)
