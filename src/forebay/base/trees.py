"""Walk the containers that samples and batches are made of.

    {"image": tensor, "boxes": [a, b]}  ── leaves ──>  tensor, a, b
                                        ── mapped ──>  {"image": f(tensor), "boxes": [f(a), f(b)]}

Containers are mappings, lists, tuples, NamedTuples, and instances of dataclasses and attrs classes.
Everything else is a leaf. This module does not depend on a tensor library; `batches.py` does.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserList
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple


class Branch(NamedTuple):
    """The contents of one container."""

    kind: str
    keys: tuple[Any, ...]
    values: tuple[Any, ...]


def opened(value: Any) -> Branch | None:
    """Return the contents of a container; None for a leaf."""
    kind = type(value)
    if kind is dict or isinstance(value, Mapping):
        return Branch("mapping", tuple(value), tuple(value.values()))
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        if names is not None:
            return Branch("namedtuple", tuple(names), tuple(value))
        return Branch("sequence", tuple(range(len(value))), tuple(value))
    if isinstance(value, list | UserList):
        return Branch("sequence", tuple(range(len(value))), tuple(value))
    names = field_names(kind)
    if names is None:
        return None
    # Fields with `init=False` may be unset.
    names = tuple(name for name in names if hasattr(value, name))
    return Branch("fields", names, tuple(getattr(value, name) for name in names))


def field_names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a dataclass or an attrs class; None for any other class."""
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind))
    attributes = getattr(kind, "__attrs_attrs__", None)
    return None if attributes is None else tuple(each.name for each in attributes)


def rebuilt(value: Any, branch: Branch, values: Sequence[Any]) -> Any:
    """Return a container like `value` with other values for the same keys.

    It has the same type, and attributes that are not fields are the same objects
    (the `default_factory` of a defaultdict). The `__init__` of a dataclass is not called. A
    sequence whose class cannot be called with a list of its items becomes a plain tuple or list.
    """
    if branch.kind == "mapping":
        if type(value) is dict:
            return dict(zip(branch.keys, values, strict=True))
        if isinstance(value, MutableMapping):
            whole = copy.copy(value)
            for key, each in zip(
                branch.keys, values, strict=True
            ):  # some classes override `update`
                whole[key] = each
            return whole
        kind: Any = type(value)
        return kind(dict(zip(branch.keys, values, strict=True)))
    if branch.kind == "namedtuple":
        return type(value)._make(values)
    if branch.kind == "fields":
        whole = copy.copy(value)
        for name, each in zip(branch.keys, values, strict=True):
            object.__setattr__(whole, name, each)  # it may be frozen
        return whole
    try:
        return type(value)(values)
    except TypeError:
        return tuple(values) if isinstance(value, tuple) else list(values)


def leaves(tree: Any, *, lists: bool = True) -> Iterator[Any]:
    """Yield the leaves of a tree, in order; a list is a leaf without `lists`."""
    branch = opened(tree) if lists or not isinstance(tree, list) else None
    if branch is None:
        yield tree
        return
    for value in branch.values:
        yield from leaves(value, lists=lists)


def mapped(function: Callable[[Any], Any], tree: Any, *, lists: bool = True) -> Any:
    """Return the same tree with each leaf replaced by what `function` returns for it."""
    branch = opened(tree) if lists or not isinstance(tree, list) else None
    if branch is None:
        return function(tree)
    return rebuilt(tree, branch, [mapped(function, each, lists=lists) for each in branch.values])
