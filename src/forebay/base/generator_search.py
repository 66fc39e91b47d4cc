"""Find random generators without calling the user's code.

    Search             what objects reach, each with a path: attributes, items, closures, defaults,
                       and the globals that the code of a function names
    others_in_process  what the collector lists besides, in a worker, wherever it is kept
    noted, freeze      list it before a fork: the collector does not list what is frozen

A worker has little else than what the user's function reaches. What it has of the trainer's, it has
a copy of, which may be seeded.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import compress
from types import CellType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from forebay.base.randomness import numpy_and_torch

# Containers with more items are looked through as a whole first, by the collector's own walk.
FEW_ITEMS, MANY_ITEMS = 100, 10_000
_PLAIN = frozenset(
    [str, bytes, bytearray, memoryview, int, float, complex, bool, type(None), range, CodeType]
)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
# Their code keeps no generators but the global ones.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "forebay"}
# Generators that are left alone, by module and attributes: processes would name their temporary
# files and locks alike.
_LEFT_ALONE = (
    ("tempfile", "_name_sequence", "_rng"),
    ("multiprocessing.synchronize", "SemLock", "_rand", "_rng"),
    ("datasets.fingerprint", "fingerprint_rng"),
)


def generator_kinds() -> tuple[type, ...]:
    """Return the classes of generators."""
    kinds: list[type] = [random.Random]
    numpy_random, torch = numpy_and_torch()
    if numpy_random is not None:
        kinds += [numpy_random.Generator, numpy_random.RandomState, numpy_random.BitGenerator]
    if torch is not None:
        kinds.append(torch.Generator)
    return tuple(kinds)


def owner_of_state(generator: Any) -> Any:
    """Return what has the state: a Generator and its bit generator have one."""
    bits = getattr(generator, "bit_generator", None)
    return bits or getattr(generator, "_bit_generator", None) or generator


def _other_states() -> set[int]:
    """Return the IDs of generators that do not count: the global ones, and those left alone."""
    numpy_random, torch = numpy_and_torch()
    found: list[Any] = [random._inst]
    if numpy_random is not None:
        found += [owner_of_state(numpy_random.mtrand._rand), numpy_random.get_bit_generator()]
    if torch is not None:
        found.append(torch.default_generator)
    for name, *attributes in _LEFT_ALONE:
        value: Any = sys.modules.get(name)
        for each in attributes:
            value = getattr(value, "__dict__", {}).get(each)
        found.append(value)
    return set(map(id, found))


def _counts(generator: Any) -> bool:
    """Return whether a generator has a state that a seed sets, on this device."""
    if isinstance(generator, random.SystemRandom):
        return False
    return not hasattr(generator, "manual_seed") or generator.device.type == "cpu"


# ---- those that an object reaches ----------------------------------------------------------------


class Search:
    """A search for the generators that objects reach, those nearest to the roots first.

    Args:
        empty: Long containers that are known to have none; what is found to have none is added.
    """

    def __init__(self, empty: dict[int, tuple[Any, int]]) -> None:
        self._empty, self._kinds = empty, generator_kinds()

    def found(self, roots: Mapping[str, Any]) -> dict[str, Any]:
        """Return the generators by path."""
        others, found = _other_states(), dict[str, Any]()
        known: dict[int, Any] = {}  # with the objects, so that no ID is used again
        waiting = deque(roots.items())
        while waiting:
            path, value = waiting.popleft()
            kind = type(value)
            if kind in _PLAIN or id(value) in known:
                continue
            known[id(value)] = value
            if issubclass(kind, self._kinds):
                state = owner_of_state(value)
                if id(state) not in others and _counts(value):
                    others.add(id(state))
                    found[path] = value
            else:
                waiting.extend((path + step, each) for step, each in self._parts(value, kind))
        return found

    def _parts(self, value: Any, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield what an object refers to, and how its path continues."""
        if kind is FunctionType:
            yield from _parts_of_function(value)
        elif kind is functools.partial:
            # Reading its `__dict__` would create one, and change what it is pickled as.
            yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
        elif issubclass(kind, type):
            yield from _parts_of_class(value)
        elif not issubclass(kind, ModuleType):
            yield from self._parts_of_object(value, kind)

    def _parts_of_object(self, value: Any, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield items and attributes, and those of its classes, without calling a property."""
        named = {id(kind)}
        for base in _CONTAINERS:
            if issubclass(kind, base):
                length = base.__len__(value)
                if length <= FEW_ITEMS or self._holds_any(value, length, _values(value, base)):
                    yield from _items(value, base)
                if kind is base:
                    return
                named.update(map(id, _values(value, base)))
        attributes = attributes_of(value, kind) | _classes_of(kind)
        yield from ((f".{name}", each) for name, each in attributes.items())
        # What only its own C code knows: the object of a method, what a cached function returned.
        named.update(map(id, attributes.values()))
        rest = [each for each in gc.get_referents(value) if id(each) not in named]
        rest = [each for each in rest if type(each) is not dict or each is not _dict_of(value)]
        if len(rest) <= FEW_ITEMS or self._holds_any(value, len(rest), rest):
            yield from ((f"<{at}>", each) for at, each in enumerate(rest))

    def _holds_any(self, value: Any, length: int, values: Iterable[Any]) -> bool:
        known = self._empty.get(id(value))
        if known is not None and known[0] is value and known[1] == length:
            return False
        if _hold_any(values):
            return True
        self._empty[id(value)] = value, length
        return False


def _dict_of(value: Any) -> Any:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def attributes_of(value: Any, kind: type) -> dict[str, Any]:
    """Return the attributes that an object of a class has itself, without calling a property."""
    own = _dict_of(value)
    attributes = dict(own) if type(own) is dict else {}
    for each in kind.__mro__:
        for name, slot in vars(each).items() if _is_users(each) else ():
            if isinstance(slot, MemberDescriptorType):
                try:
                    attributes.setdefault(name, slot.__get__(value))
                except AttributeError:  # not assigned yet
                    continue
    return attributes


def _is_users(kind: type) -> bool:
    return _package(kind) not in _LIBRARIES and bool(kind.__flags__ & _HEAP_TYPE)


def _classes_of(kind: type) -> dict[str, Any]:
    return {f"__class__.{each.__name__}": each for each in kind.__mro__ if _is_users(each)}


# Py_TPFLAGS_HEAPTYPE: the class was made by a class statement, or by an extension.
_HEAP_TYPE = 1 << 9


def _values(value: Any, base: Any) -> Iterable[Any]:
    return dict.values(value) if base is dict else base.__iter__(value)


def _items(value: Any, base: Any) -> Iterator[tuple[str, Any]]:
    pairs = list(dict.items(value)) if base is dict else enumerate(base.__iter__(value))
    for at, (name, each) in enumerate(pairs):
        if type(each) not in _PLAIN:
            # Sets have no order, so their generators share a path.
            name = "" if base in (set, frozenset) else name if type(name) in (str, int) else at
            yield f"[{name}]", each


def variables_around(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables around a function that have a value, with their names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables around a function, its defaults, and the globals that its code names."""
    yield from ((f".{name}", each) for name, each in variables_around(function))
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    yield ".__dict__", vars(function)
    known, package = function.__globals__, _package(function)
    if package in _LIBRARIES:
        return
    names, kinds = (
        names_in(function.__code__),
        generator_kinds() if _is_installed(package) else object,
    )
    for name in names:
        # What a function imports is not among its globals.
        value = known[name] if name in known else sys.modules.get(name)
        for step, each in _named_there(f".{name}", value, names, 4):
            if issubclass(type(each), kinds):
                yield step, each


def _parts_of_class(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the methods and attributes of a class; of an installed one, methods and generators."""
    package = _package(value)
    if package in _LIBRARIES:
        return
    kinds = (FunctionType, *generator_kinds()) if _is_installed(package) else object
    for name, each in list(vars(value).items()):
        is_of_python = name.startswith("__") and type(each) is not FunctionType
        if issubclass(type(each), kinds) and not is_of_python:
            yield f".{name}", each


def _named_there(
    path: str, value: Any, names: Sequence[str], depth: int
) -> Iterator[tuple[str, Any]]:
    """Yield a global; of a module, the attributes that the same code names."""
    if type(value) is not ModuleType:
        yield path, value
    elif depth and _package(value) not in _LIBRARIES:
        for name in filter(vars(value).__contains__, names):
            yield from _named_there(f"{path}.{name}", vars(value)[name], names, depth - 1)


def _package(value: Any) -> str:
    """Return the name of the package that a function, a class or a module is of; "" for others."""
    kind, name = type(value), None
    if kind is FunctionType:
        name = value.__globals__.get("__name__")
    elif kind is ModuleType:
        name = vars(value).get("__name__")
    elif issubclass(kind, type):
        name = type.__getattribute__(value, "__module__")
    return name.partition(".")[0] if type(name) is str else ""


@functools.cache
def _is_installed(package: str) -> bool:
    """Return whether a package was installed, and is not the program's own.

    What its code calls is not followed: that would be most of a library.
    """
    origin = getattr(getattr(sys.modules.get(package), "__spec__", None), "origin", None)
    return (
        isinstance(origin, str)
        and {"site-packages", "dist-packages"}.intersection(origin.split("/")) != set()
    )


@functools.cache
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names that some code, and the code within it, looks up."""
    inner = [name for each in code.co_consts if type(each) is CodeType for name in names_in(each)]
    return (*dict.fromkeys((*code.co_names, *inner)),)


def _hold_any(values: Iterable[Any]) -> bool:
    """Return whether values refer to a generator, however many there are.

    Level by level, at the speed of the collector: a million tuples of strings take 0.1 s.
    """
    kinds, level, known = generator_kinds(), list(values), set[int]()
    is_first = True  # there are most, and whether one comes again costs more than to look at it
    while types := set(map(type, level)) - _PLAIN:
        if any(issubclass(each, kinds) for each in types):
            return True
        # Classes and modules refer to everything else; of a function, what is around it counts.
        of_code = {each for each in types if issubclass(each, type | ModuleType | FunctionType)}
        inner: list[Any] = []
        if FunctionType in of_code:
            functions = [each for each in level if type(each) is FunctionType]
            inner = [part for each in functions for part in (each.__closure__, each.__defaults__)]
        left: Iterable[Any] = filter(gc.is_tracked, level)
        if of_code:
            left = (each for each in left if type(each) not in of_code)
        if is_first:
            level, is_first = [*left, *inner], False
        else:
            level = [each for each in (*left, *inner) if id(each) not in known]
            known.update(map(id, level))
        level = gc.get_referents(*level)
    return False


# ---- those of a process --------------------------------------------------------------------------

# What was there before the process was forked; its objects are not listed any more.
_earlier: list[Any] = []


@contextmanager
def noted() -> Iterator[None]:
    """Have a process that is forked in the block know the generators of this one.

    To list them there would copy the memory of all objects. What the program has frozen is not
    listed; what of it a dataset reaches is found all the same.
    """
    process = os.getpid()
    _earlier[:] = _listed(gc.get_objects())
    try:
        yield
    finally:
        if os.getpid() == process:
            _earlier.clear()


def freeze(*, finds: bool) -> None:
    """Exempt the objects of this process from collection, which would copy what workers share.

    Args:
        finds: Whether its generators are found before, for `others_in_process`: those that it has
            besides what it was forked with, which are `noted`.
    """
    if finds:
        _earlier.extend(_listed(gc.get_objects()))
    gc.freeze()


def _listed(objects: list[Any]) -> list[Any]:
    """Return the generators among objects; those of torch, of what these refer to."""
    types = set(map(type, objects))
    kinds = {each for each in types if issubclass(each, generator_kinds())}
    _, torch = numpy_and_torch()
    if torch is None:
        return [*_of_types(objects, kinds)]
    others = {each for each in types.difference(_CONTAINERS) if _is_users(each)} | {CellType}
    objects = [*_of_types(objects, kinds | others | {*_CONTAINERS})]
    sized = [*_of_types(objects, {*_CONTAINERS})]
    # Of a long container, the collector's own walk is told by what reaches it.
    short = compress(sized, map(MANY_ITEMS.__ge__, map(len, sized)))
    held = gc.get_referents(*short, *_of_types(objects, others))
    return [*_of_types(objects, kinds), *_of_types(held, {torch.Generator})]


def _of_types(objects: list[Any], types: AbstractSet[type]) -> Iterator[Any]:
    return compress(objects, map(types.__contains__, map(type, objects)))


def others_in_process(found: Iterable[Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return the generators of this process that are not found yet, by what holds them.

    Args:
        names: What some are called already, by ID.
    """
    known, left = {id(owner_of_state(each)) for each in found} | _other_states(), dict[int, Any]()
    # A Generator rather than its bit generator, which is listed, too.
    every = sorted(
        (*_earlier, *_listed(gc.get_objects())), key=lambda each: each is owner_of_state(each)
    )
    for each in every:
        if id(owner_of_state(each)) not in known and _counts(each):
            known.add(id(owner_of_state(each)))
            left[id(each)] = each
    others, counts = dict[str, Any](), Counter[str]()
    holders = gc.get_referrers(*left.values()) if left else []
    for each in left.values():
        name = names.get(id(each), "")
        if not name:
            called = (_called_by(holder, each) for holder in holders)
            name = f"{type(each).__name__} {min(filter(None, called), default='')}"
            counts[name] += 1
            name += f" {counts[name]}"
        others[name] = each
    return others


def _called_by(holder: Any, generator: Any) -> str:
    """Return what an object calls a generator that it has; "" if it does not have it."""
    own = holder if type(holder) is dict else _dict_of(holder)
    for name, each in list(own.items()) if type(own) is dict else ():
        if each is generator and type(name) is str:
            where = (
                holder.get("__name__", "") if type(holder) is dict else type(holder).__qualname__
            )
            return f"{where}.{name}"
    return ""
