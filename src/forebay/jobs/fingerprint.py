"""What the user's work is, in text: kept with a run, so that the next one can tell a difference.

    work ──> code: source of the function and, recursively, of what it refers to
         └─> parameters: defaults, partial's arguments, closures, a Dataset's attributes

Longer than 350 lines: code and parameters are one walk, since each leads to the other. A parameter
may be a function, and a function brings parameters in its closure.

Guarantees: two processes describe equal work equally (no addresses, no order of sets, no line
numbers), nothing of the user's is called but its pickling protocol, and nothing raises.
"""

from __future__ import annotations

import ast
import copyreg
import dis
import functools
import hashlib
import inspect
import json
import linecache
import operator
import os
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from difflib import unified_diff
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from forebay.errors import LedgerError

_LONGEST_VALUE = 200  # characters; a longer one is shown as its hash
_LONGEST_DIFFERENCE = 60  # lines
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, range)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A description of the user's work; compare two of them with `difference`.

    Attributes:
        name: For messages, such as "split.py:split_audio".
        reference: Where to find it again, "/there/split.py:split_audio" or
            "package.module:split_audio"; None for what has no place of its own: a lambda, a local
            function, a partial, a Dataset or other object, a notebook's function.
        code: Pairs of a label ("split.py:windows") and a text: source, or a hash without it.
        parameters: Pairs of a name and a JSON value, or "sha256:..." of a large or opaque one.
    """

    name: str
    reference: str | None
    code: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]

    def to_json(self) -> str:
        """Return it as ASCII text for the ledger."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """Return what `to_json` wrote.

        Raises:
            LedgerError: The text is damaged.
        """
        try:
            found = json.loads(text)
            code, parameters = (
                tuple((str(key), str(value)) for key, value in found[part])
                for part in ("code", "parameters")
            )
            return cls(found["name"], found["reference"], code, parameters)
        except (ValueError, KeyError, TypeError) as error:
            what = "the ledger's description of the work is damaged"
            raise LedgerError(f"{what}: {error!r}\n  Start over with resume=False.") from error


def describe(work: object) -> Fingerprint:
    """Describe a function, a callable object, or a map-style Dataset.

    Code of the user's own is followed: from globals, within the same module, folder or top-level
    package; from closures and attributes, anywhere outside the standard library and site-packages.
    Comments count, indentation of the whole and trailing blanks do not. An import within a
    function is not followed. What `__getstate__` leaves out is no parameter: leave a cache out
    there, or it makes a used object differ from a new one. Arrays are hashed, at about 1 GB/s.
    """
    survey = _Survey()
    try:
        name = survey.work(work)
    except Exception:  # noqa: BLE001 - odd objects raise anything; what was found until then counts
        name = _type_name(work)
        survey.add_code(name, "(it cannot be looked into)")
    try:
        reference = _reference(work)
    except Exception:  # noqa: BLE001
        reference = None
    parameters = tuple(sorted(survey.parameters.items()))
    return Fingerprint(name, reference, tuple(survey.code.items()), parameters)


def difference(old: Fingerprint, new: Fingerprint) -> str:
    """Return what changed as text for a message, "" if nothing did.

    Changed code comes as a unified diff, in which comments count, then one line for each changed
    parameter. `name` and `reference` are not compared: a folder that was moved is the same work.
    """
    was, now = dict(old.code), dict(new.code)
    lines: list[str] = []
    for label in dict.fromkeys((*now, *was)):
        before, after = was.get(label, ""), now.get(label, "")
        if before != after:
            pair = before.splitlines(), after.splitlines()
            lines += unified_diff(*pair, f"{label} (before)", f"{label} (now)", "", "", 2, "")
    changes = []
    was, now = dict(old.parameters), dict(new.parameters)
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            before, after = was.get(name, "(none)"), now.get(name, "(none)")
            changes.append(f"parameter {name}: {before} -> {after}")
    return "\n".join(_capped(lines) + _capped(changes))


def _capped(lines: list[str]) -> list[str]:
    left = len(lines) - _LONGEST_DIFFERENCE
    return lines if left <= 0 else [*lines[:_LONGEST_DIFFERENCE], f"... {left} more lines"]


class _Survey:
    """One walk over the user's work, collecting its code and its parameters."""

    def __init__(self) -> None:
        self.code: dict[str, str] = {}
        self.parameters: dict[str, str] = {}
        self._seen: dict[int, object] = {}  # with the objects, so that no id is used twice

    def work(self, work: Any) -> str:
        """Take in the work itself and return its name."""
        if isinstance(work, functools.partial):
            name = self.work(work.func)
            names = list(_signature(work.func))
            for place, value in enumerate(work.args):
                key = names[place] if place < len(names) else f"argument {place + 1}"
                self.parameters[key] = self.value(value)
            self.parameters.update({key: self.value(v) for key, v in work.keywords.items()})
            return name
        if isinstance(work, BuiltinFunctionType):
            name = f"{getattr(work, '__module__', None) or 'builtins'}:{work.__qualname__}"
            self.add_code(name, "(built in)")
            return name
        if isinstance(work, type | FunctionType | MethodType) or _wrapped(work) is not None:
            self._take(work, _is_anything)
            for key, parameter in _signature(work).items():
                if parameter.default is not parameter.empty:
                    self.parameters.setdefault(key, self.value(parameter.default))
            owner = getattr(work, "__self__", None)
            if isinstance(work, MethodType) and not isinstance(owner, type):
                self._attributes(owner)
            return _label(inspect.unwrap(getattr(work, "__func__", work)))
        self._take(type(work), _is_anything)
        self._attributes(work)
        return _label(type(work))

    def value(self, value: object) -> str:
        """Return a value as short JSON, or as a hash."""
        try:
            text = self._json(value)
        except Exception:  # noqa: BLE001 - a circle, or an object that raises when looked at
            return json.dumps(_type_name(value))
        if text.startswith('"sha256:'):
            return text[1:-1]
        if len(text) > _LONGEST_VALUE:
            return _hash(text.encode("utf-8", "backslashreplace"))
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
        self.parameters[name] = self.value(value)

    def _take(self, value: Any, wanted: Callable[[object], bool]) -> bool:
        """Take in `value` if it is code that is `wanted`; return whether it was."""
        if isinstance(value, functools.partial):
            self._take(value.func, wanted)
            return False  # its arguments are still to be looked at
        if isinstance(value, MethodType):
            owner = value.__self__
            self._take(owner if isinstance(owner, type) else type(owner), wanted)
            value = value.__func__
        wrapped = _wrapped(value)
        took = wrapped is not None and self._take(wrapped, wanted)
        if not isinstance(value, type | FunctionType) or not wanted(value):
            return took
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            if isinstance(value, type):
                self._take_class(value)
            else:
                self.add_code(_code_label(value), _source(value.__code__))
                self._take_closure(value)
                self._take_globals(value)
        return True

    def _take_class(self, kind: type) -> None:
        self.add_code(_label(kind), _class_source(kind))
        is_near = functools.partial(_is_near, kind)
        for base in kind.__bases__:
            self._take(base, is_near)
        for member in vars(kind).values():
            for function in _functions(member):
                if function.__code__.co_filename == "<string>":
                    continue  # written by dataclass or namedtuple, from what the class says
                if function.__qualname__.startswith(f"{kind.__qualname__}."):
                    self._take_globals(function)  # its own text is part of the class's
                else:
                    self._take(function, is_near)

    def _take_closure(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if not self._take(value, _is_users):
                self._add_parameter(name, value)

    def _take_globals(self, function: FunctionType) -> None:
        if _is_library(_file(function)):
            return
        stored = {i.argval for i in _instructions(function.__code__) if i.opname == "STORE_GLOBAL"}
        for name, *rest in _names(function.__code__):
            holder: Any = function
            value = function.__globals__.get(name, _MISSING)
            while isinstance(value, ModuleType) and rest and _is_near(function, value):
                holder, name = value, rest.pop(0)
                value = getattr(holder, name, _MISSING)
            if value is _MISSING or isinstance(value, ModuleType):
                continue
            if self._take(value, functools.partial(_is_near, function)):
                continue
            # The content of a container or a model changes while it is used; its definition does
            # not. Neither does the definition of a name that the function itself sets.
            if name not in stored and _is_plain(value):
                text: str | None = f"{name} = {self.value(value)}"
            else:
                text = _assignment(_file(holder), name)
            if text is not None:
                self.add_code(f"{_place(holder)}:{name}", text)

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
            return _hash(bytes(value))
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            self._take(value, _is_users)
            return _label(value)
        if hasattr(value, "isoformat"):
            return value.isoformat()
        if (array := _array(value)) is not None:
            return array
        self._take(type(value), _is_users)
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            return _reduced(reduce(value) if reduce else value.__reduce_ex__(4))
        except Exception:  # noqa: BLE001 - a lock, a file, a generator: it cannot be pickled
            return _type_name(value)


_MISSING = object()


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
    return {_label(make): [part for part in parts if part]}


def _array(value: Any) -> Any:
    """Return the hash of a tensor's or an array's type, shape and bytes; None for all else."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            return None
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _hash(f"{value.dtype} {tuple(value.shape)}".encode(), flat)
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    head = f"{value.dtype.descr} {value.shape}".encode()
    if value.dtype.hasobject:
        return [head.decode(), value.tolist()]
    if isinstance(value, numpy.memmap) and value.filename is not None:
        # Reading it might take hours; a file that is the same has the same content.
        status = os.stat(value.filename)
        where = f"{value.filename} {value.offset} {status.st_size} {status.st_mtime_ns}"
        return _hash(head, where.encode("utf-8", "surrogateescape"))
    return _hash(head, numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _hash(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# ---- places ------------------------------------------------------------------------------------


def _module_name(value: Any) -> str:
    """Return the name of the module that `value` is or lives in, as an import would find it."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    if name == "__main__":
        spec = getattr(sys.modules.get(name), "__spec__", None)
        name = spec.name if spec is not None else name
    return str(name or "")


def _file(value: Any) -> str:
    """Return the file of a module, class or function; it need not exist, as in a notebook."""
    if isinstance(value, FunctionType):
        return value.__code__.co_filename
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__ or "")
    return getattr(module, "__file__", None) or ""


def _is_library(file: str) -> bool:
    parts = PurePath(file).parts
    return "site-packages" in parts or "dist-packages" in parts or file.startswith(_LIBRARIES)


def _is_anything(_: object) -> bool:
    return True


def _is_users(value: Any) -> bool:
    """Tell whether code is the user's own, and neither a library's nor built in."""
    if _module_name(value).partition(".")[0] in sys.stdlib_module_names:
        return False
    return _module_name(value) == "__main__" or not _is_library(_file(value) or _LIBRARIES[0])


def _is_near(home: Any, value: Any) -> bool:
    """Tell whether code lives in the same module, folder or top-level package as `home`."""
    if not _is_users(value):
        return False
    if _module_name(home) == _module_name(value):
        return True
    if _module_name(home).partition(".")[0] == _module_name(value).partition(".")[0]:
        return True
    folders = os.path.dirname(_file(home)), os.path.dirname(_file(value))
    return folders[0] == folders[1] != ""


def _place(value: Any) -> str:
    """Return a file as its package sees it, such as "package/module.py" or "split.py".

    It is the same whether the file was run as a script, imported, or loaded by its path.
    """
    file = _file(value)
    if not os.path.isfile(file):
        return _module_name(value)
    above, name = os.path.split(os.path.abspath(file))
    while os.path.isfile(os.path.join(above, "__init__.py")):
        above, package = os.path.split(above)
        name = f"{package}/{name}"
    return name


def _label(value: Any) -> str:
    if isinstance(value, type | FunctionType) and _is_users(value):
        return f"{_place(value)}:{value.__qualname__}"
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', _type_name(value))}"


def _code_label(function: FunctionType) -> str:
    """Name the code itself: functools.wraps gives a wrapper the name of what it wraps."""
    return f"{_place(function)}:{function.__code__.co_qualname}"


def _reference(work: Any) -> str | None:
    module = sys.modules.get(getattr(work, "__module__", None) or "")
    path = getattr(work, "__qualname__", "<")
    if module is None or "<" in path or operator.attrgetter(path)(module) != work:
        return None
    name, file = _module_name(module), _file(module)
    if _is_library(file) or not file or "." in name:
        top = name.partition(".")[0]
        finders = (finder.find_spec(top, None) for finder in sys.meta_path)
        if name != "__main__" and any(spec is not None for spec in finders):
            return f"{name}:{path}"
    # A module outside any package is found by its file wherever the next command starts.
    return f"{os.path.abspath(file)}:{path}" if os.path.isfile(file) else None


# ---- code --------------------------------------------------------------------------------------


def _wrapped(value: Any) -> Any:
    return getattr(value, "__wrapped__", None) if callable(value) else None


def _signature(work: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(work).parameters)
    except (ValueError, TypeError):  # built in
        return {}


def _functions(member: Any) -> Iterator[FunctionType]:
    """Yield the functions behind a class's member: a method, a property, a wrapped one."""
    if isinstance(member, FunctionType):
        yield member
    names = ("__func__", "fget", "fset", "fdel", "func", "__wrapped__")
    for name in names if not isinstance(member, type) else ():
        inner = getattr(member, name, None)
        if isinstance(inner, FunctionType):
            yield inner


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _names(code: CodeType) -> list[list[str]]:
    """Return the dotted names that start at a global, such as ["numpy", "mean"]."""
    chains: list[list[str]] = []
    is_open = False
    for instruction in _instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chains.append([instruction.argval])
            is_open = True
        elif is_open and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chains[-1].append(instruction.argval)
        else:
            is_open = False
    return chains


def _source(code: CodeType) -> str:
    try:
        text = _lambda_source(code) if code.co_name == "<lambda>" else inspect.getsource(code)
    except Exception:  # noqa: BLE001 - no file, a file that changed meanwhile, no Python in it
        text = None
    return _bytecode(code) if text is None else text


def _lambda_source(code: CodeType) -> str | None:
    """Cut a lambda out of its line, which may hold the whole call of preprocess."""
    text = "".join(linecache.getlines(code.co_filename))
    inner = [
        ((line, column), (end, end_column))
        for line, end, column, end_column in code.co_positions()
        if line and end and column is not None and end_column
    ]
    found = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Lambda)
        and node.lineno == code.co_firstlineno
        and all(_covers(node.body, *span) for span in inner)
    ]
    if not found or not (inner or len(found) == 1):
        return None
    # The innermost that holds all of its instructions.
    best = max(found, key=lambda node: (node.body.lineno, node.body.col_offset))
    return ast.get_source_segment(text, best)


def _covers(node: ast.expr, start: tuple[int, int], end: tuple[int, int]) -> bool:
    last = (node.end_lineno or 0, node.end_col_offset or 0)
    return (node.lineno, node.col_offset) <= start and end <= last


def _class_source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except Exception:  # noqa: BLE001 - as above
        members = vars(kind).items()
        functions = [(name, one) for name, member in members for one in _functions(member)]
        return "\n".join(f"{name}: {_bytecode(one.__code__)}" for name, one in functions)


def _bytecode(code: CodeType) -> str:
    """Describe code without source; neither its file, nor its lines, nor addresses count."""

    def plain(value: Any) -> Any:
        if isinstance(value, CodeType):
            names = (value.co_names, value.co_varnames, value.co_freevars, value.co_argcount)
            return [value.co_code.hex(), names, [plain(item) for item in value.co_consts]]
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        if isinstance(value, frozenset):
            return sorted(repr(plain(item)) for item in value)
        return [type(value).__name__, repr(value)]

    return f"bytecode {_hash(json.dumps(plain(code)).encode())}"


def _assignment(file: str, name: str) -> str | None:
    """Return the statements at the top of a file that set a name; None if there are none."""
    text = "".join(linecache.getlines(file))
    found = []
    for node in _parsed(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        inner = (one for target in targets if target for one in ast.walk(target))
        if any(isinstance(one, ast.Name) and one.id == name for one in inner):
            found.append(ast.get_source_segment(text, node) or "")
    return "\n".join(found) or None


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:  # a notebook's %magic
        return ast.parse("")
