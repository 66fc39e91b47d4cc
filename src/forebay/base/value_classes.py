"""Containers that values are made of, and their classes, which a file may name.

A name from a file never causes an import: a value gets a user's class only if this process has
loaded it, and otherwise a substitute.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import make_dataclass
from functools import lru_cache
from keyword import iskeyword
from typing import Any

import numpy as np
import torch

from forebay.base.batches import field_names, opened
from forebay.errors import InputError, shortened

MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict}
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}
CLASSES = ("namedtuple", "fields")
_CONTAINERS = MAPPINGS | SEQUENCES
# What has no items, with those that `opened` would ask for attributes.
_LEAVES = frozenset(
    [torch.Tensor, np.ndarray, str, bytes, int, float, bool, type(None), np.str_, np.float32]
)
# Values nested deeper than this may contain themselves.
MOST_DEPTH = 64

# Identifies the class of a NamedTuple or a dataclass: its module, qualified name and fields.
Identity = tuple[str, str, tuple[str, ...]]
Classes = Mapping[Identity, type]


class MisfitError(ValueError):
    """A value has no type, or differs in structure from the others; names the part."""


def container_kind(value: Any) -> str | None:
    """Return the kind of a container; None for any other value.

    A mapping that is no OrderedDict counts as a dict; subclasses of lists and tuples as these.
    """
    kind = type(value)
    if _CONTAINERS.get(kind.__name__) is kind:
        return kind.__name__
    if kind in _LEAVES or isinstance(value, torch.Tensor):
        return None
    branch = opened(value)
    if branch is None:
        return None
    if branch.kind == "sequence":
        return "tuple" if isinstance(value, tuple) else "list"
    return "dict" if branch.kind == "mapping" else branch.kind


def class_identity(value: Any) -> Identity:
    """Return the identity of the class of a NamedTuple or a dataclass."""
    return _identity_of_class(type(value))


def _identity_of_class(cls: type) -> Identity:
    return cls.__module__, cls.__qualname__, _fields_of(cls)


def _fields_of(cls: type) -> tuple[str, ...]:
    known = getattr(cls, "_fields", None) if issubclass(cls, tuple) else field_names(cls)
    return tuple(known or ())


def items_of(value: Any, kind: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the keys and the values of a container; a field that is not set is left out."""
    if kind in MAPPINGS:
        return tuple(value), tuple(value.values())
    if kind == "fields":
        names = [name for name in _fields_of(type(value)) if hasattr(value, name)]
        return names, [getattr(value, name) for name in names]
    if kind == "namedtuple":
        return value._fields, value
    return range(len(value)), value


def classes_in(value: Any, depth: int = 0) -> dict[Identity, type]:
    """Return the classes of NamedTuples and dataclasses in a value."""
    kind = container_kind(value)
    if kind is None or depth > MOST_DEPTH:
        return {}
    found: dict[Identity, type] = {}
    if kind in CLASSES and not isinstance(value, StandIn):
        found[class_identity(value)] = type(value)
    for part in items_of(value, kind)[1]:
        found |= classes_in(part, depth + 1)
    return found


class StandIn:
    """A substitute for a value whose class this process does not have."""

    __slots__ = ()
    identity: Identity

    def __reduce__(self) -> Any:
        return _remade, (self.identity, isinstance(self, tuple), [*items_of_stand_in(self)])


def items_of_stand_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields that are set, and their values."""
    return ((name, getattr(value, name)) for name in value.identity[2] if hasattr(value, name))


def _remade(identity: Identity, is_tuple: bool, items: list[tuple[str, Any]]) -> Any:
    cls = stand_in(identity, is_tuple)
    return cls(*(value for _, value in items)) if is_tuple else with_fields(cls, items)


def loaded_class(identity: Identity, is_tuple: bool = True) -> type | None:
    """Return the class that has an identity, if this process has loaded it, with equal fields.

    Args:
        is_tuple: Whether it is the class of a NamedTuple, rather than of a dataclass.
    """
    module, qualname, _ = identity
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    if not isinstance(found, type) or issubclass(found, tuple) != is_tuple:
        return None
    if not is_tuple and hasattr(found, "__del__"):  # which whoever wrote the file could call
        return None
    return found if _identity_of_class(found) == identity else None


@lru_cache
def stand_in(identity: Identity, is_tuple: bool = True) -> type:
    """Return a substitute for a class that this process does not have."""
    module, qualname, fields = identity
    name = qualname.rpartition(".")[2]
    try:
        # Both check that fields are identifiers, so that no string of a file is ever executed.
        if is_tuple:
            bases: tuple[Any, ...] = (StandIn, namedtuple(name, fields))
        else:
            if not name.isidentifier() or iskeyword(name) or any("__" in each for each in fields):
                raise ValueError(f"{shortened(name)} with the fields {shortened(fields)}")
            bases = StandIn, make_dataclass(name, fields)
    except (ValueError, TypeError) as error:
        raise InputError(f"the type of a column is damaged: {error}") from error
    slots = {"__slots__": ()} if is_tuple else {}
    # The same identity, so that what is written again has the user's.
    members = {**slots, "identity": identity, "__module__": module, "__qualname__": qualname}
    return type(name, bases, members)


def class_of(identity: Identity, is_tuple: bool, classes: Classes) -> type:
    """Return the class that has an identity, or a substitute."""
    known = classes.get(identity) or loaded_class(identity, is_tuple)
    return known or stand_in(identity, is_tuple)


def with_fields(cls: type, items: Iterable[tuple[str, Any]]) -> Any:
    """Return an instance of a dataclass with these fields; its `__init__` is not called."""
    value: Any = object.__new__(cls)
    for name, each in items:
        object.__setattr__(value, name, each)  # it may be frozen
    return value


def is_unicode(key: Any) -> bool:
    """Return whether a key can be part of a column's name; a lone surrogate cannot."""
    return str(key).encode(errors="replace").decode() == str(key)
