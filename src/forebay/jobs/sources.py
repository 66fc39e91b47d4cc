"""Where the user's code lives, whose it is, and what its source says.

Source is read through linecache, as a traceback's is; code without a file is told apart by its
bytecode.
"""

from __future__ import annotations

import ast
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
from collections.abc import Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


# ---- places ------------------------------------------------------------------------------------


def _module_name(value: Any) -> str:
    """Return the name of the module that `value` is or lives in, as an import would find it."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    if name == "__main__":
        spec = getattr(sys.modules.get(name), "__spec__", None)
        name = spec.name if spec is not None else name
    return str(name or "")


def file_of(value: Any) -> str:
    """Return the file of a module, class or function; it need not exist, as in a notebook."""
    if isinstance(value, FunctionType):
        return value.__code__.co_filename
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__ or "")
    return getattr(module, "__file__", None) or ""


def is_library(file: str) -> bool:
    """Tell whether a file belongs to Python or to an installed package."""
    parts = PurePath(file).parts
    return "site-packages" in parts or "dist-packages" in parts or file.startswith(_LIBRARIES)


def is_users(value: Any) -> bool:
    """Tell whether code is the user's own, and neither a library's nor built in."""
    if _module_name(value).partition(".")[0] in sys.stdlib_module_names:
        return False
    return _module_name(value) == "__main__" or not is_library(file_of(value) or _LIBRARIES[0])


def is_near(home: Any, value: Any) -> bool:
    """Tell whether code lives in the same module, folder or top-level package as `home`."""
    if not is_users(value):
        return False
    if _module_name(home) == _module_name(value):
        return True
    if _module_name(home).partition(".")[0] == _module_name(value).partition(".")[0]:
        return True
    folders = os.path.dirname(file_of(home)), os.path.dirname(file_of(value))
    return folders[0] == folders[1] != ""


def place_of(value: Any) -> str:
    """Return a file as its package sees it, such as "package/module.py" or "split.py".

    It is the same whether the file was run as a script, imported, or loaded by its path.
    """
    file = file_of(value)
    if not os.path.isfile(file):
        return _module_name(value)
    above, name = os.path.split(os.path.abspath(file))
    while os.path.isfile(os.path.join(above, "__init__.py")):
        above, package = os.path.split(above)
        name = f"{package}/{name}"
    return name


def label_of(value: Any) -> str:
    """Name code by its place and its own name, such as "split.py:windows"."""
    if isinstance(value, type | FunctionType) and is_users(value):
        return f"{place_of(value)}:{value.__qualname__}"
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', type_name(value))}"


def code_label(function: FunctionType) -> str:
    """Name the code itself: functools.wraps gives a wrapper the name of what it wraps."""
    return f"{place_of(function)}:{function.__code__.co_qualname}"


def reference_of(work: Any) -> str | None:
    """Return where to find `work` again; None for what has no place of its own."""
    module = sys.modules.get(getattr(work, "__module__", None) or "")
    path = getattr(work, "__qualname__", "<")
    if module is None or "<" in path or operator.attrgetter(path)(module) != work:
        return None
    name, file = _module_name(module), file_of(module)
    if is_library(file) or not file or "." in name:
        top = name.partition(".")[0]
        finders = (finder.find_spec(top, None) for finder in sys.meta_path)
        if name != "__main__" and any(spec is not None for spec in finders):
            return f"{name}:{path}"
    # A module outside any package is found by its file wherever the next command starts.
    return f"{os.path.abspath(file)}:{path}" if os.path.isfile(file) else None


def type_name(value: object) -> str:
    """Return the full name of a value's type, such as "builtins.list"."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


# ---- code --------------------------------------------------------------------------------------


def wrapped_by(value: Any) -> Any:
    """Return what a decorated function or a cached one wraps; None if it wraps nothing."""
    return getattr(value, "__wrapped__", None) if callable(value) else None


def parameters_of(work: Any) -> dict[str, inspect.Parameter]:
    """Return a callable's parameters by name; none where its signature is unknown."""
    try:
        return dict(inspect.signature(work).parameters)
    except (ValueError, TypeError):  # built in
        return {}


def functions_of(member: Any) -> Iterator[FunctionType]:
    """Yield the functions behind a class's member: a method, a property, a wrapped one."""
    if isinstance(member, FunctionType):
        yield member
    names = ("__func__", "fget", "fset", "fdel", "func", "__wrapped__")
    for name in names if not isinstance(member, type) else ():
        inner = getattr(member, name, None)
        if isinstance(inner, FunctionType):
            yield inner


def instructions_of(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code and of the functions defined in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from instructions_of(constant)


def dotted_names(code: CodeType) -> list[list[str]]:
    """Return the dotted names that start at a global, such as ["numpy", "mean"]."""
    chains: list[list[str]] = []
    is_open = False
    for instruction in instructions_of(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chains.append([instruction.argval])
            is_open = True
        elif is_open and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chains[-1].append(instruction.argval)
        else:
            is_open = False
    return chains


def source_of(code: CodeType) -> str:
    """Return a function's source, or the hash of its bytecode where there is none."""
    try:
        text = _lambda_source(code) if code.co_name == "<lambda>" else _block_of(code)
    except Exception:  # noqa: BLE001 - no file, a file that changed meanwhile, no Python in it
        text = None
    return _bytecode(code) if text is None else text


def _block_of(code: CodeType) -> str:
    """Cut a function out of its file, as `inspect.getsource` does.

    That one looks first at every module there is, for the one which the code is from.
    """
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    return "".join(inspect.getblock(lines)) if lines else inspect.getsource(code)


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


def class_source(kind: type) -> str:
    """Return a class's source, or the hash of each method's bytecode where there is none."""
    try:
        return inspect.getsource(kind)
    except Exception:  # noqa: BLE001 - as above
        members = vars(kind).items()
        functions = [(name, one) for name, member in members for one in functions_of(member)]
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

    return f"bytecode {sha256_of(json.dumps(plain(code)).encode())}"


def assignment_of(file: str, name: str) -> str | None:
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


def sha256_of(*parts: Any) -> str:
    """Return "sha256:..." of parts that hold bytes, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"
