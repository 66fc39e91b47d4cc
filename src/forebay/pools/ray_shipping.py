"""Pickle code for machines that may not have it.

    __main__, a notebook      by value, as cloudpickle does anyway
    a module of the project   by value: it need not be on the nodes
    an installed package      by name: every node must have it

A module of the project is one that was loaded from a file outside of Python's own folders and
outside of forebay. What a function imports when it runs is not known here, and not included: name
its folder in `forebay.Ray(runtime_env={"py_modules": [...]})`.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from forebay.pools.pickling import pickled

_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


def shipped(thing: Any) -> bytes:
    """Pickle something, with the project's own code in it."""
    import cloudpickle

    already = cloudpickle.list_registry_pickle_by_value()
    # By name: `sys.modules` may have a module twice, or under another name than its own only.
    mine = {module.__name__: module for module in _project_modules()}
    mine = {name: each for name, each in mine.items() if name in sys.modules.keys() - already}
    for module in mine.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        return pickled(thing)
    finally:
        for module in mine.values():
            cloudpickle.unregister_pickle_by_value(module)


def find_in(path: Sequence[str]) -> None:
    """Add the driver's module folders to the path of a process on a node, after its own."""
    sys.path.extend(each for each in path if each not in sys.path)


def leave_out(folder: str, path: Sequence[str]) -> None:
    """Remove the driver's working folder from `sys.path`, unless the driver has it there too.

    Ray puts it first in each of its processes, before the standard library.
    """
    if folder not in path and "" not in path:
        sys.path[:] = [each for each in sys.path if each != folder]


def _project_modules() -> list[ModuleType]:
    paths = sysconfig.get_paths()
    ours = Path(__file__).resolve().parents[1]
    installed = [ours, *(Path(paths[name]).resolve() for name in ("stdlib", "platstdlib"))]
    found = []
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in modules:
        file = getattr(module, "__file__", None)
        if name in ("__main__", "__mp_main__") or not isinstance(file, str):
            continue
        if not isinstance(module, ModuleType):  # some packages put an object in their place
            continue
        path = Path(file).resolve()
        is_installed = any(path.is_relative_to(folder) for folder in installed)
        if not is_installed and _PACKAGE_FOLDERS.isdisjoint(path.parts):
            found.append(module)
    return found
