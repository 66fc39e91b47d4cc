"""Batches compared: trees of digests, small enough to keep and to send.

    {"image": tensor, "graph": Graph(edges)}  ── digested ──>  dict ['image'] "float32 [3] 5f0c…"
                                                                    ['graph'] Graph .edges "…"

An object of any other class has the state that pickle would save. What has none that Python can
read, such as a generator or a lock, is `NotCompared`, which nobody may take as equal.
"""

from __future__ import annotations

import copyreg
import dataclasses
import hashlib
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import BuiltinFunctionType, EllipsisType, FunctionType, NoneType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from resume_check.words import shortened

_PLAIN = (bool, int, float, complex, str, NoneType, EllipsisType)


class Digest(NamedTuple):
    """A container or an object, as the digests of its parts.

    Attributes:
        kind: Its class.
        steps: How the path to each part continues; None for [0], [1], …
        parts: A digest of each, or a string.
    """

    kind: str
    steps: tuple[str, ...] | None
    parts: tuple[Digested, ...]


class NotCompared(NamedTuple):
    """An object whose state cannot be read."""

    kind: str


Digested: TypeAlias = Digest | NotCompared | str


def digested(batch: Any) -> Digested:
    """Return the digests of a batch.

    Those of two are equal if these are equal in classes, shapes, bits, and in the states of their
    objects; a tensor on another kind of device differs.
    """
    try:
        return _digested(batch, {})
    except RecursionError:
        return NotCompared(f"{_name(type(batch))} that contains itself, or is nested too deeply")


def differing(one: Digested, two: Digested) -> Iterator[str]:
    """Yield the paths at which the digests of two batches differ, each once."""
    yield from dict.fromkeys(_differing(one, two, ""))


def _differing(one: Digested, two: Digested, path: str) -> Iterator[str]:
    if one == two:
        return
    if isinstance(one, Digest) and isinstance(two, Digest) and _is_alike(one, two):
        for step, left, right in zip(_steps(one), one.parts, two.parts, strict=True):
            yield from _differing(left, right, path + step)
    else:
        yield path


def _is_alike(one: Digest, two: Digest) -> bool:
    return (one.kind, one.steps, len(one.parts)) == (two.kind, two.steps, len(two.parts))


def not_compared(one: Digested, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths and classes of what cannot be compared."""
    if isinstance(one, NotCompared):
        yield path, one.kind
    elif isinstance(one, Digest):
        for step, part in zip(_steps(one), one.parts, strict=True):
            yield from not_compared(part, path + step)


def unread(parts: Iterable[str]) -> str:
    """Say that parts of batches cannot be compared.

    Args:
        parts: Their paths and classes.
    """
    return (
        f"{', '.join(parts)}: cannot be compared, since Python cannot read its state, or not to "
        "its end. Leave it out, or give its class a __getstate__()"
    )


def _steps(one: Digest) -> Iterable[str]:
    return one.steps if one.steps is not None else (f"[{at}]" for at in range(len(one.parts)))


# ---- one value -----------------------------------------------------------------------------------

# The objects that a walk has met, by their ids: each is kept, so that no other gets its id.
_Known: TypeAlias = dict[int, tuple[int, Any]]


def _digested(value: Any, known: _Known) -> Digested:
    if type(value) in _PLAIN:
        return repr(value)
    ways: tuple[Callable[[Any, _Known], Digested | None], ...] = (_of_container, _of_object)
    if isinstance(value, torch.Tensor | np.ndarray | np.generic | bytes | bytearray | memoryview):
        ways = (_of_data,)
    for way in ways:
        try:
            found = way(value, known)
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001, S112 - the user's class may raise anything
            continue
        if found is not None:
            return found
    return NotCompared(_name(type(value)))


def _of_data(value: Any, known: _Known) -> Digested:
    kind = _name(type(value))
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return _in_order(value, value.unbind(), known)
        whole = value.detach()
        whole = whole if whole.layout is torch.strided else whole.to_dense()
        said = f"{kind} {value.dtype} {[*value.shape]} {value.device.type}"
        if value.device.type == "meta":  # it has no data
            return said
        # Also of what has gaps, is on a device, or is the view of a conjugate.
        flat = whole.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        # torch takes a tensor of one element as contiguous, whatever its stride.
        numbers = flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()
        return f"{said} {digest_of(numbers)}"
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            return Digest(f"{kind} {[*value.shape]}", ("",), (_digested(value.tolist(), known),))
        return f"{kind} {value.dtype} {[*value.shape]} {digest_of(value.tobytes())}"
    return f"{kind} {digest_of(bytes(value))}"


def _of_container(value: Any, known: _Known) -> Digested | None:
    kind = _name(type(value))
    if isinstance(value, Set):
        parts = sorted((_digested(each, known) for each in value), key=repr)
        return Digest(kind, ("",) * len(parts), tuple(parts))
    if isinstance(value, deque):
        return _in_order(value, value, known)
    if type(value) in (list, tuple):
        return _in_order(value, value, known)
    items = _items(value)
    if items is None:
        return None
    others = {} if type(value) is dict else _attributes_beside(value, items.values())
    steps = (*items, *(f".{name}" for name in others))
    within = (_digested(each, known) for each in (*items.values(), *others.values()))
    return Digest(kind, steps, tuple(within))


def _items(value: Any) -> dict[str, Any] | None:
    """Return the items or fields of a container, by how their paths continue; None for others."""
    if isinstance(value, Mapping):
        return {_step(key): each for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {f".{name}": each for name, each in zip(value._fields, value, strict=True)}
    if isinstance(value, tuple | list | UserList):
        return {f"[{at}]": each for at, each in enumerate(value)}
    if dataclasses.is_dataclass(type(value)):
        names = [each.name for each in dataclasses.fields(type(value))]
    elif (attributes := getattr(type(value), "__attrs_attrs__", None)) is not None:
        names = [each.name for each in attributes]
    else:
        return None
    # Fields with `init=False` may be unset.
    return {f".{name}": getattr(value, name) for name in names if hasattr(value, name)}


def _attributes_beside(value: Any, values: Iterable[Any]) -> dict[str, Any]:
    """Return the attributes of a container that do not hold its values, by names."""
    if not getattr(value, "__dict__", None):
        return {}
    try:
        _, attributes = _saved(value)
    except Exception:  # noqa: BLE001 - the user's class may raise anything
        attributes = {**vars(value)}
    inside = {id(each) for each in values}

    def is_beside(attribute: Any) -> bool:
        within = (_items(attribute) or {}).values()
        return all(id(each) not in inside for each in (attribute, *within))

    return {name: attributes[name] for name in sorted(attributes) if is_beside(attributes[name])}


def _in_order(value: Any, items: Iterable[Any], known: _Known) -> Digest:
    return Digest(_name(type(value)), None, tuple(_digested(each, known) for each in items))


def _of_object(value: Any, known: _Known) -> Digested:
    kind = _name(type(value))
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return f"{kind} {_name(value)}"
    if id(value) in known:  # an object that refers to itself, or is in two places
        return f"{kind}, object {known[id(value)][0]}"
    known[id(value)] = len(known), value
    unnamed, attributes = _saved(value)
    names = sorted(attributes)
    steps = [""] * len(unnamed) + [f".{name}" for name in names]
    parts = [_digested(each, known) for each in (*unnamed, *(attributes[name] for name in names))]
    return Digest(kind, tuple(steps), tuple(parts))


def _saved(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return what pickle saves of an object: without names, and attributes."""
    reducer = copyreg.dispatch_table.get(type(value))
    reduced: Any = reducer(value) if reducer is not None else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return [reduced], {}
    parts: list[Any] = [*reduced, None, None, None]
    function, args, state, items, pairs = parts[:5]
    unnamed = [function, *args, *(items or ()), *(pairs or ())]
    slots = None
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state, slots = state
    if isinstance(state, dict):
        slots = {**state, **(slots or {})}
    elif state is not None:
        unnamed += state if isinstance(state, list | tuple) else [state]
    return unnamed, {str(name): part for name, part in (slots or {}).items()}


def _step(key: Any) -> str:
    if type(key) in _PLAIN and len(shown := shortened(key)) < 200:
        return f"[{shown}]"
    return f"[{shortened(key)}, {digest_of(repr(digested(key)).encode())}]"


def _name(kind: Any) -> str:
    named = getattr(kind, "__qualname__", type(kind).__qualname__)
    module = getattr(kind, "__module__", None)
    return named if module in ("builtins", None) else f"{module}.{named}"


def digest_of(data: Any) -> str:
    """Return the digest of bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
