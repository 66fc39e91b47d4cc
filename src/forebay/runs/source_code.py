"""The user's code: found by its name, its file and source; values, as their parts or a hash."""

from __future__ import annotations

import ast
import copyreg
import dis
import functools
import hashlib
import importlib.util
import inspect
import json
import linecache
import operator
import os
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

from forebay.base.process import add_folder
from forebay.errors import OptionError

# ---- values --------------------------------------------------------------------------------------
# Reduce values to their parts, or to a hash, for a fingerprint.

PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, range)
HASH = "sha256:"
dumps = functools.partial(json.dumps, ensure_ascii=False, sort_keys=True)


def is_plain(value: object) -> bool:
    """Return whether a value cannot change while used: a number, a string, a tuple of these."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


def is_sequence(value: object) -> bool:
    """Return whether a value has one element after the other: a list, an array, packed items."""
    if isinstance(value, list | tuple):
        return True
    kinds = (("numpy", "ndarray"), ("torch", "Tensor"), ("forebay.packed", "PackedSequence"))
    found = tuple(getattr(sys.modules[name], each) for name, each in kinds if name in sys.modules)
    return isinstance(value, found) and getattr(value, "ndim", 1) > 0


def type_name(value: object) -> str:
    """Return the full name of a value's type, such as "builtins.list"."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def state_of(value: Any) -> dict[str, Any]:
    """Return an object's state as pickle sees it: attributes, and other parts in parentheses."""
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - a lock, a file, a generator: it cannot be pickled
        return {}
    if isinstance(reduced, str):
        return {"(name)": reduced}
    make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    is_usual = make.__name__ in ("__newobj__", "__newobj_ex__")
    arguments = arguments[1:] if is_usual else (make, *arguments)
    parts = {"(arguments)": arguments, "(items)": items, "(pairs)": pairs}
    named = {name: list(part) for name, part in parts.items() if part}
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = {**(state[0] or {}), **state[1]}  # what __slots__ hold comes second
    if not isinstance(state, dict):
        state = {} if state is None else {"(state)": state}
    copied = functools.WRAPPER_ASSIGNMENTS  # by update_wrapper, and not the same in __main__
    return named | {str(name): part for name, part in state.items() if name not in copied}


def weights_of(value: Any) -> list[tuple[str, Any]]:
    """Return the named parameters and buffers of an nn.Module; [] for any other value."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return []
    return [*value.named_parameters(), *value.named_buffers()]


def hash_of_array(value: Any) -> Any:
    """Return the hash of a tensor's or an array's type, shape and bytes; None for all else."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            return None
        from forebay.base.batches import tensor_bytes  # few functions hold a tensor

        return sha256_of(f"{value.dtype} {tuple(value.shape)}".encode(), tensor_bytes(value))
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


def sha256_of(*parts: Any) -> str:
    """Return "sha256:..." of the concatenated parts, which hold bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"{HASH}{digest.hexdigest()}"


# ---- source code ---------------------------------------------------------------------------------
# The file and the source of code, and whether it is the user's.
#
# Source is read through linecache, as for a traceback; code without source is described by
# its bytecode.

_STDLIB = (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")), "<frozen ")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
Holder: TypeAlias = FunctionType | ModuleType  # whose globals a name is looked up in


def module_name(value: Any) -> str:
    """Return the name of the module that `value` is or lives in, as an import would find it."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    spec = getattr(sys.modules.get(name), "__spec__", None) if name == "__main__" else None
    return str((name if spec is None else spec.name) or "")


def file_of(value: Any) -> str:
    """Return the file of a module, class or function; it need not exist, as in a notebook."""
    if isinstance(value, FunctionType):
        return value.__code__.co_filename
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__ or "")
    return getattr(module, "__file__", None) or ""


def is_library(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package."""
    if file.startswith(_STDLIB) or not _INSTALLED.isdisjoint(PurePath(file).parts):
        return True
    above, name = _in_package(file)
    return name.partition("/")[0] in _installed_in(above)


def _in_package(file: str) -> tuple[str, str]:
    """Return the folder from which a file is imported, and the rest of its path."""
    above, name = os.path.split(os.path.abspath(file))
    while os.path.isfile(os.path.join(above, "__init__.py")):
        above, package = os.path.split(above)
        name = f"{package}/{name}"
    return above, name


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """Return the files and packages that `pip install --target` put into a folder of any name."""
    try:
        if not any(name.endswith(".dist-info") for name in os.listdir(folder)):
            return frozenset()
        from importlib.metadata import distributions  # only here: it takes 10 ms

        found = distributions(path=[folder])
        return frozenset(file.parts[0] for each in found for file in each.files or ())
    except (OSError, ValueError):
        return frozenset()


def is_own(value: Any) -> bool:
    """Return whether a module, class or function is user code: not Python, forebay or installed."""
    name, file = module_name(value), file_of(value)
    own = not is_library(file) if file else name == "__main__"
    return own and name.partition(".")[0] != "forebay"


def place_of(value: Any) -> str:
    """Return a file as its package sees it, such as "package/module.py" or "split.py".

    It is the same whether the file was run as a script, imported, or loaded by its path.
    """
    file = file_of(value)
    if not os.path.isfile(file):
        return module_name(value) or "builtins"
    return _in_package(file)[1]


def code_label(value: Any) -> str:
    """Name a class or function by its place and its own name, such as "split.py:windows".

    A wrapper keeps the name it was defined with: functools.wraps gives it that of the wrapped one.
    """
    is_function = isinstance(value, FunctionType)
    return f"{place_of(value)}:{value.__code__.co_qualname if is_function else value.__qualname__}"


def name_of(value: Any) -> str:
    """Return the label of a class or function; for a class of a library only its own name."""
    if isinstance(value, type) and is_library(file_of(value)):
        return value.__qualname__
    return code_label(value)


def reference_of(work: Any) -> str | None:
    """Return where to find `work` again; None if it has no importable name."""
    module = sys.modules.get(getattr(work, "__module__", None) or "")
    path = getattr(work, "__qualname__", "<")
    if module is None or "<" in path or operator.attrgetter(path)(module) != work:
        return None
    name, file = module_name(module), file_of(module)
    if is_library(file) or not file or "." in name:
        top = name.partition(".")[0]
        finders = (finder.find_spec(top, None) for finder in sys.meta_path)
        if name != "__main__" and any(spec is not None for spec in finders):
            return f"{name}:{path}"
    # A module outside any package is found by its file wherever the next command starts.
    return f"{os.path.abspath(file)}:{path}" if os.path.isfile(file) else None


def source_of(function: FunctionType) -> str:
    """Return a function's source, or its bytecode where there is none."""
    code = function.__code__
    try:
        lines = _lines_of(function)
        if code.co_name == "<lambda>":
            return _lambda_source("".join(lines), code)
        return "".join(inspect.getblock(lines[code.co_firstlineno - 1 :])) or _bytecode_of(code)
    except Exception:  # noqa: BLE001 - no file, or it changed meanwhile or is not Python
        return _bytecode_of(code)


def _lambda_source(text: str, code: CodeType) -> str:
    """Cut a lambda out of its line, which may hold the whole call of preprocess."""
    spans: list[Any] = [at for at in code.co_positions() if at[0] and at[3]]
    start, end = min(at[::2] for at in spans), max(at[1::2] for at in spans)
    found = [
        node
        for node in ast.walk(_parsed(text))
        if isinstance(node, ast.Lambda)
        and node.lineno == code.co_firstlineno
        and (node.body.lineno, node.body.col_offset) <= start
        and (node.body.end_lineno, node.body.end_col_offset) >= end
    ]
    # The innermost one that holds all of its instructions.
    return ast.get_source_segment(text, max(found, key=lambda node: node.col_offset)) or ""


@functools.lru_cache(maxsize=64)  # a ConcatDataset may have very many Datasets of one class
def class_source(kind: type) -> tuple[str, CodeType | None]:
    """Return a class's source, as text and compiled; "" and None without source, as in a shell."""
    try:
        text = textwrap.dedent(inspect.getsource(kind))
        return text, compile(text, "", "exec")
    except Exception:  # noqa: BLE001 - as above
        return "", None


def namespace_of(holder: Holder) -> dict[str, Any]:
    """Return the globals of a function or module."""
    return holder.__globals__ if isinstance(holder, FunctionType) else vars(holder)


def definition_of(holder: Holder, name: str) -> tuple[str, CodeType]:
    """Return the statements that assign to a global, as text and compiled."""
    return _definition_in("".join(_lines_of(holder)), name)


@functools.lru_cache(maxsize=512)  # hundreds of modules may import what a function uses
def _definition_in(text: str, name: str) -> tuple[str, CodeType]:
    found: list[ast.stmt] = []
    nodes: list[ast.AST] = list(_parsed(text).body)
    for node in nodes:  # statements within `if` and `try` are added on the way
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        inner = ast.iter_child_nodes(node)
        nodes += (one for one in inner if isinstance(one, ast.stmt | ast.ExceptHandler))
        targets = getattr(node, "targets", None) or [getattr(node, "target", ast.Pass())]
        parts = (part for target in targets for part in ast.walk(target))
        if isinstance(node, ast.stmt) and name in (getattr(part, "id", None) for part in parts):
            found.append(node)
    shown = "\n".join(ast.get_source_segment(text, node) or "" for node in found)
    return shown, compile(ast.Module(found, []), "", "exec")


def is_declared_global(holder: Holder, name: str) -> bool:
    """Return whether a function beside `holder` declares a name `global`, to assign to it."""
    return name in _declared_in("".join(_lines_of(holder)))


def _lines_of(holder: Holder) -> list[str]:
    file = file_of(holder)
    linecache.checkcache(file)
    return linecache.getlines(file, namespace_of(holder))


@functools.lru_cache(maxsize=512)
def _declared_in(text: str) -> frozenset[str]:
    """Return the names that a file's functions declare `global`."""
    # A walk takes six times as long as the parser, and hundreds of modules may be asked.
    nodes = ast.walk(_parsed(text)) if "global" in text else ()
    declared = (node.names for node in nodes if isinstance(node, ast.Global))
    return frozenset(name for names in declared for name in names)


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:  # a notebook's %magic
        return ast.parse("")


@functools.lru_cache(maxsize=1024)
def dotted_names(code: CodeType) -> list[list[str]]:
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


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code and of the functions defined in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _bytecode_of(code: CodeType) -> str:
    """Return the instructions of code without source; file, lines and addresses do not count."""
    shown = f"{code.co_argcount}"
    for instruction in _instructions(code):
        value = instruction.argval
        if isinstance(value, CodeType):
            value = value.co_name
        elif isinstance(value, frozenset):
            value = sorted(map(repr, value))
        shown += f"\n{instruction.opname} {value!r}"
    return shown


# ---- references ----------------------------------------------------------------------------------
# A function is found by its name as a string: `split.py:split_audio` or `package.module:name`.


def load_work(reference: str) -> Any:
    """Return what a reference names."""
    place, name = parse_reference(reference)
    is_file = place.endswith(".py") or os.sep in place
    try:
        if not is_file:
            add_folder(os.getcwd())
        module = _from_file(Path(place)) if is_file else importlib.import_module(place)
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(
            f"{place!r} cannot be imported: {type(error).__name__}: {error}\n"
            "  Nothing was started. Try the import alone: "
            + (f"python {place}" if is_file else f"python -c 'import {place}'")
        ) from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionError(f"{place!r} has no {name!r}; it has {_functions(module)}")
        found = getattr(found, part)
    return found


def parse_reference(reference: str) -> tuple[str, str]:
    """Return the file or module of a reference, and the name in it, without loading anything."""
    place, _, name = reference.rpartition(":")
    if place and name:
        return place, name
    if os.path.isdir(reference):
        what = f"{reference!r} is a folder; a file or module and a name in it are expected"
    elif os.path.isfile(reference):
        what = f"{reference!r} is a file; the name of a function in it is missing"
    else:
        what = f"{reference!r} names no function"
    raise OptionError(f"{what}\n  Write FILE.py:NAME, as in split.py:split_audio, or MODULE:NAME.")


def _from_file(path: Path) -> ModuleType:
    """Import a script, but not as main; modules beside it are found after the standard library."""
    import cloudpickle

    if not path.is_file():
        raise OptionError(f"{str(path)!r} is not a file; looked from {os.getcwd()!r}")
    if path.stem in sys.stdlib_module_names:
        raise OptionError(
            f"{str(path)!r} has the same name as a module of Python's standard library, "
            f"{path.stem!r}\n"
            "  Nothing was started. Rename the file."
        )
    add_folder(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    known = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if known is not None:
            sys.modules[path.stem] = known
        raise
    cloudpickle.register_pickle_by_value(module)  # workers need not find the file again
    return module


def _functions(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return ", ".join(map(repr, names)) or "no functions"
