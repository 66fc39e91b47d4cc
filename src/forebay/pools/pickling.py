"""Pickle what workers run, for a process that does not have it: a new interpreter, or a node.

functions and classes of a script     by value, as cloudpickle does it
their functools.cache helpers         by value: the function, with an empty cache
a lock, a connection, a generator     cannot be pickled: the error names who holds it
"""

from __future__ import annotations

import functools
import io
import operator
import pickle
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import cloudpickle

from forebay.base.generator_search import names_in, variables_around
from forebay.errors import OptionError, shortened

_CACHED = type(functools.cache(len))
# The main module, and what multiprocessing calls it in a process that it spawned.
_MAIN = "__main__", "__mp_main__"


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, with cached functions, which it would look for in the other process."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to make an object again."""
        if type(obj) is _CACHED and not _is_importable(obj):
            return cached, (obj.__wrapped__, obj.cache_parameters(), vars(obj))
        return super().reducer_override(obj)


def cached(function: Any, parameters: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """Return a function with a cache that is empty."""
    made = functools.lru_cache(**parameters)(function)
    vars(made).update(attributes)
    return made


def _is_importable(function: Any) -> bool:
    """Return whether another process finds a function by its name."""
    name = function.__module__
    if name in _MAIN or name in cloudpickle.list_registry_pickle_by_value():
        return False
    try:
        return operator.attrgetter(function.__qualname__)(sys.modules[name]) is function
    except (AttributeError, KeyError):
        return False


def dumps(thing: Any) -> bytes:
    """Pickle something; raise whatever that raises."""
    file, main = io.BytesIO(), sys.modules.get(_MAIN[1])
    if main is not None and main.__name__ not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(main)
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(thing)
    return file.getvalue()


def pickled(thing: Any) -> bytes:
    """Pickle something; raise OptionError with the object that cannot be, and who holds it."""
    try:
        return dumps(thing)
    except Exception as error:
        raise OptionError(
            f"the function cannot be sent to other processes: {culprit(thing, error)}\n"
            "  Pickling it failed, so nothing was started. Open files, locks, connections and "
            "generators cannot be sent to another machine:\n"
            "  create them in the function, or in a helper with @functools.cache; or use "
            "backend='process', whose workers are forked with them."
        ) from error


# ---- what cannot be pickled ----------------------------------------------------------------------


def culprit(thing: Any, error: BaseException, pickler: Any = _Pickler) -> str:
    """Describe the innermost object that cannot be pickled, and the variable that holds it."""
    where, seen = "", set[int]()
    while id(thing) not in seen:
        seen.add(id(thing))
        for name, part in _parts(thing):
            if (reason := _why_not(part, pickler)) is not None:
                thing, where, error = part, name, reason
                break
    shown = f"{type(error).__name__}: {shortened(error)}"
    return f"{where} is a {type(thing).__qualname__} ({shown})" if where else shown


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


def _why_not(thing: Any, pickler: Any) -> Exception | None:
    """Return the exception that pickling something raises; None if it can be pickled."""
    if isinstance(thing, str | bytes | int | float | None):
        return None
    try:
        pickler(_Nowhere(), pickle.HIGHEST_PROTOCOL).dump(thing)
    except Exception as error:  # noqa: BLE001 - whatever the user's objects raise
        return error
    return None


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, each with what messages call it."""
    if isinstance(thing, functools.partial):
        yield from _items("the partial", (thing.func, *thing.args))
        yield from _items("the partial", thing.keywords)
        return
    if isinstance(thing, MethodType):
        yield f"the object of the method {thing.__qualname__!r}", thing.__self__
    function = getattr(thing, "__wrapped__", None) if type(thing) is _CACHED else thing
    if isinstance(function, FunctionType):
        name = function.__qualname__
        for variable, value in variables_around(function):
            yield f"the variable {variable!r} of {name}", value
        for variable in names_in(function.__code__):
            if variable in function.__globals__:
                yield f"the global variable {variable!r} of {name}", function.__globals__[variable]
        for each in function.__defaults__ or (), function.__kwdefaults__ or {}:
            yield from _items(f"the defaults of {name}", each)
    elif isinstance(thing, list | tuple | set | frozenset | dict):
        yield from _items(f"the {type(thing).__name__}", thing)
    owner = thing.__qualname__ if isinstance(thing, type) else type(thing).__qualname__
    for attribute, value in dict(getattr(thing, "__dict__", {})).items():
        yield f"the attribute {attribute!r} of {owner}", value


def _items(of: str, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    return ((f"{of}, at {shortened(repr(key))},", value) for key, value in pairs)
