"""Finding a function by its name as a string: `split.py:split_audio` or `package.module:name`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from forebay.base.process import add_folder
from forebay.errors import OptionError


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
