"""Call functions when user code imports a library, which may be long after a worker began."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Call = Callable[[Any], object]


class _Finder:
    """Finds the libraries that are waited for, and calls the functions after the import."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.calls:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            for call in self.calls.get(name, ()):
                call(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def after_import(name: str, call: Call) -> None:
    """Call a function with a module each time that it is imported for the first time.

    Args:
        name: The module, of the top level.
        call: The function; it is kept once, and not called for a module that is imported already.
    """
    calls = _finder.calls.setdefault(name, [])
    if call not in calls:
        calls.append(call)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def not_after_import(name: str, call: Call) -> None:
    """Undo `after_import`."""
    calls = _finder.calls.get(name, [])
    if call in calls:
        calls.remove(call)
    if not calls:
        _finder.calls.pop(name, None)
    if not _finder.calls and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
