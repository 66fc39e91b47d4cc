"""The types of Python values, and of the Arrow columns that hold them.

    value                                      Arrow
    tensor, array, all of one shape            fixed_shape_tensor<T, shape>; T if it is one number
    tensor, array, of several shapes           struct<data: large_list<T>, shape: list<int64>>
    int, float, bool, NumPy's numbers          int64, double, bool, T
    str; bytes                                 large_string, or large_binary if one is not UTF-8
    date, time, datetime, timedelta            date32, time64, timestamp, duration
    Decimal of up to 38 digits                 decimal128
    larger int, complex, Decimal, Path, UUID   large_string
    image of PIL                               struct<mode, width, height, data, palette>
    list, tuple of several lengths             large_list<T>
    dict, NamedTuple, dataclass, tuple         struct, with a field for each key
    dict with too many keys, or no strings     large_list<struct<key, value>>
    values of JSON without a type in common    large_string, each as JSON
    None                                       null, in any of these

A `Spec` is one such type. Numbers that Arrow has no type for are stored as their bytes: bool
tensors as uint8, bfloat16 as uint16, complex numbers as pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, timedelta, timezone
from decimal import Decimal
from functools import lru_cache
from pathlib import PosixPath, PurePosixPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import torch

from forebay.base.typed_columns import arrow_type_of
from forebay.base.value_classes import CLASSES, MAPPINGS, SEQUENCES, Identity, MisfitError
from forebay.errors import shortened

# The dtype that an Arrow column has instead of a torch dtype, and how many numbers of it one takes.
TORCH_DTYPES: dict[str, tuple[str, int]] = {
    **{
        f"{sign}int{bits}": (f"{sign}int{bits}", 1)
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": (f"float{bits}", 1) for bits in (16, 32, 64)},
    **{f"float8_{kind}": ("uint8", 1) for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")},
    "float8_e8m0fnu": ("uint8", 1),
    "bool": ("uint8", 1),
    "bfloat16": ("uint16", 1),
    "complex32": ("float16", 2),
    "complex64": ("float32", 2),
    "complex128": ("float64", 2),
}
TORCH_NAMES = {getattr(torch, name): name for name in TORCH_DTYPES if hasattr(torch, name)}
ARRAYS = frozenset("biufcmMSU")  # kinds of dtypes whose values are plain bytes

# Kinds whose values are written as strings, and what makes a value of one.
PARSED: dict[str, tuple[type, Callable[[str], Any]]] = {
    "large int": (int, int),
    "complex": (complex, complex),
    "decimal": (Decimal, Decimal),
    "path": (PosixPath, PosixPath),
    "pure path": (PurePosixPath, PurePosixPath),
    "uuid": (UUID, UUID),
}
# The time zone of a `datetime` that has none is "".
TIMES: dict[str, pa.DataType] = {
    "date": pa.date32(),
    "time": pa.time64("us"),
    "datetime": pa.timestamp("us"),
    "timedelta": pa.duration("us"),
    "Timestamp": pa.timestamp("ns"),
    "Timedelta": pa.duration("ns"),
}
IMAGE = pa.struct(
    [
        ("mode", pa.large_string()),
        *((name, pa.int64()) for name in ("width", "height")),
        *((name, pa.large_binary()) for name in ("data", "palette")),
    ]
)
_FLAT = frozenset(
    [
        *("tensor", "array", "number", "int", "float", "bool", "str", "bytes", "none", "image"),
        "json",
        *PARSED,
        *TIMES,
    ]
)

RECORDS = frozenset([*MAPPINGS, "tuple", "namedtuple", "fields"])
_NESTED = frozenset([*RECORDS, *SEQUENCES, "pairs"])
# More different keys are data, rather than the fields of a record.
MOST_KEYS = 64
# What a key of a `dict`, or a field of a dataclass, has been in some values.
WAS_NONE, WAS_MISSING = 1, 2


@dataclass(frozen=True, slots=True)
class Spec:
    """The type of values.

    Attributes:
        kind: "tensor", "array", "number" (NumPy's), "int", "float", "bool", "str", "bytes", "none"
            (only None so far), "image", "json" (values of JSON of several types); of `PARSED`,
            `TIMES`; or, of a `Nested`, a container's.
        dtype: Of tensors, arrays and numbers; the time zone of a "datetime"; "utf8" or "binary" of
            a string; how many digits a "decimal" has before and behind its point, "" for a string.
        shape: Of a tensor or array; None if it varies.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] | None = ()

    @property
    def stored(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The dtype that Arrow stores, and the shape of one number in it."""
        if self.kind == "int":
            return np.dtype(np.int64), ()
        if self.kind == "float":
            return np.dtype(np.float64), ()
        if self.kind == "tensor":
            name, count = TORCH_DTYPES[self.dtype]
            return np.dtype(name), (count,) * (count > 1)
        dtype = np.dtype(self.dtype)
        if dtype.kind in "iuf" and dtype.isnative and dtype.itemsize <= 8:
            return dtype, ()
        if dtype.kind == "c" and dtype.isnative and dtype.itemsize <= 16:
            return np.dtype(f"float{dtype.itemsize * 4}"), (2,)
        if dtype.kind in "mM" and dtype.isnative:
            return np.dtype(np.int64), ()
        return np.dtype(np.uint8), (dtype.itemsize,) * (dtype.itemsize != 1)


@dataclass(frozen=True, slots=True)
class Nested(Spec):
    """The type of values that contain values.

    Attributes:
        kind: One of `RECORDS`, `SEQUENCES`; "pairs" (a mapping).
        dtype: "dict" or "OrderedDict" of "pairs".
        shape: Of a "tuple": () if all have one length, so that it is a record; None otherwise.
        parts: Of a record its fields; of a sequence its items; of pairs keys and values.
        keys: Of a record.
        home: The module and the qualified name of a class.
        states: For each key, whether its value was None, and whether it was missing.
    """

    parts: tuple[Spec, ...] = ()
    keys: tuple[str, ...] = ()
    home: tuple[str, str] = ("", "")
    states: tuple[int, ...] = ()

    @property
    def identity(self) -> Identity:
        """The identity of the class."""
        return (*self.home, self.keys)

    @property
    def is_record(self) -> bool:
        """Whether a value has a part for each key."""
        return self.kind in RECORDS and self.shape is not None


def zone_name(zone: Any) -> str:
    """Return the name of a time zone, from which `zone_of` makes an equal one; "" for None."""
    if zone is None:
        return ""
    name = "UTC" if zone is UTC else ""
    if type(zone) is ZoneInfo:
        name = "zone:" + (zone.key or "")
    elif type(zone) is timezone and zone is not UTC:
        name = "offset:" + str(zone.utcoffset(None) // timedelta(microseconds=1))
    if not name or name == "zone:":
        raise MisfitError(
            f"has a time zone of type {type(zone).__module__}.{type(zone).__qualname__}; use "
            "datetime.timezone or zoneinfo.ZoneInfo"
        )
    return name


@lru_cache
def zone_of(name: str) -> Any:
    """Return the time zone that has a name; ValueError or LookupError if there is none."""
    form, _, text = name.partition(":")
    if form == "offset":
        return timezone(timedelta(microseconds=int(text)))
    return ZoneInfo(text) if form == "zone" else UTC if name else None


def unique_names(names: Iterable[str]) -> list[str]:
    """Return names of which none is there twice."""
    found: dict[str, None] = {}
    for plain in names:
        name, count = plain, 1
        while name in found:  # the key "a.b" beside the key "b" of "a"
            count += 1
            name = f"{plain}~{count}"
        found[name] = None
    return list(found)


def described_type(spec: Spec) -> str:
    """Return a description of a type for messages."""
    if spec.kind in ("tensor", "array", "number"):
        library = "torch" if spec.kind == "tensor" else "NumPy"
        return f"a {library} {spec.kind} of {spec.dtype}"
    zone = f" of the time zone {spec.dtype.partition(':')[2] or spec.dtype}" if spec.dtype else ""
    plain = " without a time zone" if spec.kind == "datetime" and not zone else ""
    return f"of type {spec.kind}{zone if spec.kind in TIMES else ''}{plain}"


# ---- Arrow types ---------------------------------------------------------------------------------


def arrow_type(spec: Spec) -> pa.DataType:
    """Return the type of a column."""
    if isinstance(spec, Nested):
        return _nested_type(spec)
    if spec.kind in ("str", "bytes"):
        return pa.large_string() if spec == Spec("str", "utf8") else pa.large_binary()
    if spec.kind in ("bool", "none"):
        return pa.bool_() if spec.kind == "bool" else pa.null()
    if spec.kind == "decimal" and spec.dtype:
        return decimal_type(spec.dtype)
    if spec.kind in PARSED or spec.kind == "json":
        return pa.large_string()
    if spec.kind in TIMES:
        plain = TIMES[spec.kind]
        return pa.timestamp(plain.unit, "UTC") if spec.dtype else plain
    if spec.kind == "image":
        return IMAGE
    dtype, each = spec.stored
    value = pa.from_numpy_dtype(dtype)
    if spec.shape is None:
        return pa.struct([("data", pa.large_list(value)), ("shape", pa.list_(pa.int64()))])
    shape = (*spec.shape, *each)
    return pa.fixed_shape_tensor(value, shape) if shape else value


def decimal_type(digits: str) -> pa.DataType:
    """Return the type of Decimals; ValueError if there is none."""
    if not all(map(str.isdecimal, digits.split(" "))):
        raise ValueError(f"a decimal of {shortened(digits)} digits")
    return arrow_type_of("decimal", digits)


def _nested_type(spec: Nested) -> pa.DataType:
    if spec.kind == "pairs":
        return pa.large_list(
            pa.struct([*zip(("key", "value"), map(arrow_type, spec.parts), strict=True)])
        )
    if not spec.is_record:
        return pa.large_list(arrow_type(spec.parts[0]))
    if not spec.parts:
        return pa.bool_()  # other programs cannot read a struct without fields
    return pa.struct([*zip(spec.keys, map(field_type, record_parts(spec)), strict=True)])


def record_parts(spec: Nested) -> list[tuple[Spec, bool]]:
    """Return the parts of a record, and which have a struct around them.

    A null is a key that is missing. If its value has also been None, that is a null in the struct.
    """
    states = spec.states or (0,) * len(spec.parts)
    both = WAS_NONE | WAS_MISSING
    return [(part, state == both) for part, state in zip(spec.parts, states, strict=True)]


def field_type(field: tuple[Spec, bool]) -> pa.DataType:
    """Return the type of a record's field."""
    kind = arrow_type(field[0])
    return pa.struct([("value", kind)]) if field[1] else kind


def may_be_missing(spec: Nested) -> list[bool]:
    """Return which keys of a record some values do not have."""
    return [bool(state & WAS_MISSING) for state in spec.states or (0,) * len(spec.parts)]


def schema_of(names: list[str], specs: list[Spec]) -> pa.Schema:
    """Return the schema of columns, without metadata."""
    pairs = zip(names, specs, strict=True)
    return pa.schema([pa.field(name, arrow_type(spec)) for name, spec in pairs])


def nulls(count: int, kind: Any) -> pa.Array:
    """Return nulls of any type."""
    if not isinstance(kind, pa.BaseExtensionType):
        return pa.nulls(count, kind)
    return pa.ExtensionArray.from_storage(kind, pa.nulls(count, kind.storage_type))


# ---- JSON ----------------------------------------------------------------------------------------


def type_to_json(spec: Spec) -> Any:
    """Return a type as JSON values."""
    shape = None if spec.shape is None else list(spec.shape)
    found: dict[str, Any] = {"kind": spec.kind, "dtype": spec.dtype, "shape": shape}
    if isinstance(spec, Nested):
        found["parts"] = [*map(type_to_json, spec.parts)]
        for name in ("keys", "home", "states"):
            if (value := getattr(spec, name)) not in ((), ("", "")):
                found[name] = list(value)
    return found


def type_from_json(found: Any) -> Spec:
    """Return the type that `type_to_json` returned; ValueError and others if it is none."""
    kind, dtype, shape = found["kind"], str(found["dtype"]), found["shape"]
    sizes = None if shape is None else tuple(map(int, shape))
    if sizes and not all(0 <= size <= sys.maxsize for size in sizes):
        raise ValueError(f"a shape of {shortened(sizes)}")
    if "parts" in found:
        return _nested_from_json(found, kind, dtype, sizes)
    known = kind in _FLAT
    if kind == "tensor":
        known = dtype in TORCH_NAMES.values()
    elif kind in ("array", "number"):
        known = np.dtype(dtype).kind in ARRAYS
    elif kind in TIMES:
        zone_of(dtype)
    elif kind == "decimal" and dtype:
        decimal_type(dtype)
    if not known:
        raise ValueError(f"{kind} of {dtype}")
    return Spec(kind, dtype, sizes)


def _nested_from_json(found: Any, kind: str, dtype: str, shape: tuple[int, ...] | None) -> Nested:
    parts, keys = tuple(map(type_from_json, found["parts"])), tuple(map(str, found.get("keys", ())))
    home = tuple(map(str, found.get("home", ("", ""))))
    states = tuple(map(int, found.get("states", (0,) * len(keys))))
    if kind not in (*MAPPINGS, "fields"):
        states = ()
    spec = Nested(kind, dtype, shape, parts, keys, (home[0], home[1]), states)
    count = 2 if kind == "pairs" else len(keys) if spec.is_record else 1
    dtypes = [*MAPPINGS] if kind == "pairs" else [""]
    if (
        kind not in _NESTED
        or len(home) != 2
        or len(parts) != count
        or dtype not in dtypes
        or (states and len(states) != len(parts))
        or shape not in ((), None)
    ):
        raise ValueError(f"{shortened(kind)} of {len(parts)} parts")
    return spec


def identities_of(spec: Spec) -> Iterator[tuple[Identity, bool]]:
    """Yield the classes of a type, each with whether it is that of a NamedTuple."""
    if isinstance(spec, Nested):
        if spec.kind in CLASSES:
            yield spec.identity, spec.kind == "namedtuple"
        for part in spec.parts:
            yield from identities_of(part)
