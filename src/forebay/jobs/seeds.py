"""Random numbers that depend on the input alone, not on which worker met it, or when."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def seed_everything(key: str) -> None:
    """Seed `random`, and numpy and torch if they are loaded, from an input's key."""
    seed = zlib.crc32(key.encode("utf-8", "surrogatepass"))
    _on_import.seed = seed
    random.seed(seed)
    for name in _LIBRARIES:
        if name in sys.modules:
            _seed_library(sys.modules[name], seed)


def seed_what_is_imported() -> None:
    """From now on, also seed a library that the function itself imports, once it is loaded."""
    if _on_import not in sys.meta_path:
        sys.meta_path.insert(0, _on_import)


def seed_no_more() -> None:
    """Undo `seed_what_is_imported`."""
    if _on_import in sys.meta_path:
        sys.meta_path.remove(_on_import)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the generators as they are found, whatever `seed_everything` does in the block."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch_state = None if torch is None else torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.default_generator.set_state(torch_state)


_LIBRARIES = ("numpy", "torch")


def _seed_library(module: Any, seed: int) -> None:
    if module.__name__ == "numpy":
        module.random.seed(seed)
    else:
        # torch.manual_seed also reaches for devices, at a hundred times the cost.
        module.default_generator.manual_seed(seed)


class _SeedOnImport(MetaPathFinder):
    """Seeds a library for the input at work, the moment the import is complete.

    A worker's first input may be the one that imports it, and which input that is depends on the
    number of workers.
    """

    def __init__(self) -> None:
        self.seed = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _LIBRARIES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_seed(module: ModuleType) -> None:
            execute(module)
            _seed_library(module, self.seed)

        spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]
        return spec


_on_import = _SeedOnImport()
