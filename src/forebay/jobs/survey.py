"""The walk over the user's work that a fingerprint is made of: its code and its parameters.

The two are one walk, since each leads to the other: a parameter may be a function, and a function
brings parameters in its closure. Values become short JSON, or the hash of what they hold.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from forebay.jobs.sources import (
    assignment_of,
    class_source,
    code_label,
    dotted_names,
    file_of,
    functions_of,
    instructions_of,
    is_library,
    is_near,
    is_users,
    label_of,
    parameters_of,
    place_of,
    sha256_of,
    source_of,
    type_name,
    wrapped_by,
)

_LONGEST_VALUE = 200  # characters; a longer one is shown as its hash
_PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, range)
_MISSING = object()


class Survey:
    """One walk over the user's work, collecting its code and its parameters.

    Attributes:
        code: Text by label, in the order of the walk.
        parameters: A short text for each value, by name.
    """

    def __init__(self) -> None:
        self.code: dict[str, str] = {}
        self.parameters: dict[str, str] = {}
        self._seen: dict[int, object] = {}  # with the objects, so that no id is used twice

    def add_work(self, work: Any) -> str:
        """Take in the work itself and return its name."""
        if isinstance(work, functools.partial):
            name = self.add_work(work.func)
            names = list(parameters_of(work.func))
            for place, value in enumerate(work.args):
                key = names[place] if place < len(names) else f"argument {place + 1}"
                self.parameters[key] = self._value(value)
            self.parameters.update({key: self._value(v) for key, v in work.keywords.items()})
            return name
        if isinstance(work, BuiltinFunctionType):
            name = f"{getattr(work, '__module__', None) or 'builtins'}:{work.__qualname__}"
            self.add_code(name, "(built in)")
            return name
        if isinstance(work, type | FunctionType | MethodType) or wrapped_by(work) is not None:
            self._take(work, _is_anything)
            for key, parameter in parameters_of(work).items():
                if parameter.default is not parameter.empty:
                    self.parameters.setdefault(key, self._value(parameter.default))
            owner = getattr(work, "__self__", None)
            if isinstance(work, MethodType) and not isinstance(owner, type):
                self._attributes(owner)
            return label_of(inspect.unwrap(getattr(work, "__func__", work)))
        self._take(type(work), _is_anything)
        self._attributes(work)
        return label_of(type(work))

    def _value(self, value: object) -> str:
        """Return a value as short JSON, or as a hash."""
        try:
            text = self._json(value)
        except Exception:  # noqa: BLE001 - a circle, or an object that raises when looked at
            return json.dumps(type_name(value))
        if text.startswith('"sha256:'):
            return text[1:-1]
        if len(text) > _LONGEST_VALUE:
            return sha256_of(text.encode("utf-8", "backslashreplace"))
        return text.encode("utf-8", "backslashreplace").decode()

    def add_code(self, label: str, text: str) -> None:
        """Keep a piece of code; two that share a label are told apart by a number."""
        lines = (line.rstrip() for line in textwrap.dedent(text).strip("\n").splitlines())
        text, name, count = "\n".join(lines).rstrip(), label, 1
        while self.code.get(name, text) != text:
            count += 1
            name = f"{label} ({count})"
        self.code[name] = text

    def _attributes(self, work: Any) -> None:
        reduced = work.__reduce_ex__(4)
        state = reduced[2] if len(reduced) > 2 else {}
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}  # what __slots__ hold comes second
        if reduced[0] is not copyreg.__newobj__ or not isinstance(state, dict):  # type: ignore[attr-defined]
            state = {"state": _reduced(reduced)}
        for key, value in state.items():
            self._add_parameter(str(key), value)

    def _add_parameter(self, key: str, value: object) -> None:
        name, count = key, 1
        while name in self.parameters:
            count += 1
            name = f"{key} ({count})"
        self.parameters[name] = self._value(value)

    def _take(self, value: Any, wanted: Callable[[object], bool]) -> bool:
        """Take in `value` if it is code that is `wanted`; return whether it was."""
        if isinstance(value, functools.partial):
            self._take(value.func, wanted)
            return False  # its arguments are still to be looked at
        if isinstance(value, MethodType):
            owner = value.__self__
            self._take(owner if isinstance(owner, type) else type(owner), wanted)
            value = value.__func__
        wrapped = wrapped_by(value)
        took = wrapped is not None and self._take(wrapped, wanted)
        if not isinstance(value, type | FunctionType) or not wanted(value):
            return took
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            if isinstance(value, type):
                self._take_class(value)
            else:
                self.add_code(code_label(value), source_of(value.__code__))
                self._take_closure(value)
                self._take_globals(value)
        return True

    def _take_class(self, kind: type) -> None:
        self.add_code(label_of(kind), class_source(kind))
        wanted = functools.partial(is_near, kind)
        for base in kind.__bases__:
            self._take(base, wanted)
        for member in vars(kind).values():
            for function in functions_of(member):
                if function.__code__.co_filename == "<string>":
                    continue  # written by dataclass or namedtuple, from what the class says
                if function.__qualname__.startswith(f"{kind.__qualname__}."):
                    self._take_globals(function)  # its own text is part of the class's
                else:
                    self._take(function, wanted)

    def _take_closure(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if not self._take(value, is_users):
                self._add_parameter(name, value)

    def _take_globals(self, function: FunctionType) -> None:
        if is_library(file_of(function)):
            return
        stored = {
            i.argval for i in instructions_of(function.__code__) if i.opname == "STORE_GLOBAL"
        }
        for name, *rest in dotted_names(function.__code__):
            holder: Any = function
            value = function.__globals__.get(name, _MISSING)
            while isinstance(value, ModuleType) and rest and is_near(function, value):
                holder, name = value, rest.pop(0)
                value = getattr(holder, name, _MISSING)
            if value is _MISSING or isinstance(value, ModuleType):
                continue
            if self._take(value, functools.partial(is_near, function)):
                continue
            # The content of a container or a model changes while it is used; its definition does
            # not. Neither does the definition of a name that the function itself sets.
            if name not in stored and _is_plain(value):
                text: str | None = f"{name} = {self._value(value)}"
            else:
                text = assignment_of(file_of(holder), name)
            if text is not None:
                self.add_code(f"{place_of(holder)}:{name}", text)

    def _json(self, value: object) -> str:
        dumps = functools.partial(json.dumps, ensure_ascii=False, sort_keys=True)
        try:  # the C encoder walks a list of a million paths in a fraction of a second
            return dumps(value, default=self._stand_in)
        except TypeError:  # keys that are no text, or that cannot be sorted
            stand_in = self._stand_in
            return dumps(self._paired(value), default=lambda one: self._paired(stand_in(one)))

    def _paired(self, value: Any) -> Any:
        """Turn dicts into sorted pairs: JSON keys can only be text."""
        if isinstance(value, dict):
            pairs = sorted((self._json(key), self._paired(item)) for key, item in value.items())
            return {"pairs": pairs}
        if isinstance(value, list | tuple):
            return [self._paired(item) for item in value]
        return value

    def _stand_in(self, value: Any) -> Any:
        """Return something for JSON that is equal, in every process, for equal values."""
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, set | frozenset):
            is_text = all(type(item) is str for item in value)
            return {"set": sorted(value) if is_text else sorted(value, key=self._json)}
        if isinstance(value, bytes | bytearray):
            return sha256_of(bytes(value))
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            self._take(value, is_users)
            return label_of(value)
        if hasattr(value, "isoformat"):
            return value.isoformat()
        if (array := _array(value)) is not None:
            return array
        self._take(type(value), is_users)
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            return _reduced(reduce(value) if reduce else value.__reduce_ex__(4))
        except Exception:  # noqa: BLE001 - a lock, a file, a generator: it cannot be pickled
            return type_name(value)


def _is_anything(_: object) -> bool:
    return True


# ---- values ------------------------------------------------------------------------------------


def _reduced(reduced: Any) -> Any:
    """Return what pickle would write of an object, without the order and identity of its parts."""
    if not isinstance(reduced, tuple):
        return reduced
    make, arguments, *rest = reduced
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        make, *arguments = arguments
    state, items, pairs = (*rest[:3], None, None, None)[:3]
    parts = [list(arguments), state, items and list(items), pairs and list(pairs)]
    return {label_of(make): [part for part in parts if part]}


def _array(value: Any) -> Any:
    """Return the hash of a tensor's or an array's type, shape and bytes; None for all else."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            return None
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return sha256_of(f"{value.dtype} {tuple(value.shape)}".encode(), flat)
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    head = f"{value.dtype.descr} {value.shape}".encode()
    if value.dtype.hasobject:
        return [head.decode(), value.tolist()]
    if isinstance(value, numpy.memmap) and value.filename is not None:
        # Reading it might take hours; a file that is the same has the same content.
        status = os.stat(value.filename)
        where = f"{value.filename} {value.offset} {status.st_size} {status.st_mtime_ns}"
        return sha256_of(head, where.encode("utf-8", "surrogateescape"))
    return sha256_of(head, numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)
