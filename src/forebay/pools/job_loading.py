"""Load the user's code in the process that forks the workers, or in workers that are spawned.

    driver: cloudpickle ── functions of __main__ by value ──> zygote: load_job ──> __main__.square

A function that arrived by value is a copy, and no module has it under its name. What the user's
function starts itself, such as a multiprocessing.Pool, pickles functions by their names; so copies
get the names that they had in the driver.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from contextlib import suppress
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from forebay.base.process import importing_work
from forebay.errors import OptionError

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

# What makes functions and classes that were pickled by value.
_MAKERS = frozenset(
    {
        ("cloudpickle.cloudpickle", "_make_function"),
        ("cloudpickle.cloudpickle", "_make_skeleton_class"),
        ("forebay.pools.pickling", "cached"),
    }
)


def load_job(data: bytes) -> Any:
    """Return what cloudpickle pickled; functions and classes in it get their names."""
    with importing_work():
        loader = _Loader(io.BytesIO(data))
        found = loader.load()
    for each in loader.made:
        _name(each)
    return found


class _Loader(pickle.Unpickler):
    """Remembers the functions and classes that it makes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        """Return an object by its name."""
        found = super().find_class(module, name)
        if (module, name) not in _MAKERS:
            return found

        def make(*arguments: Any, **options: Any) -> Any:
            one = found(*arguments, **options)
            self.made.append(one)
            return one

        return make


def _name(made: Any) -> None:
    """Make a function or class that was pickled by value importable, as it is in the driver."""
    name, home = str(made.__qualname__), str(made.__module__)
    if "." in name or not name.isidentifier():  # of a class or a function, or a lambda
        return
    module = sys.modules.get(home)
    if module is None:
        if "." in home or find_spec(home) is not None:
            return  # it can be imported, with all that is in it
        module = sys.modules[home] = ModuleType(home)
    setattr(module, name, made)


# ---- main module ---------------------------------------------------------------------------------
# What another interpreter needs of it, where workers are spawned.

# Why no worker can begin in another interpreter.
NOT_BEGUN = (
    "workers cannot begin: the first process ended before it had loaded what they run, with the "
    "error printed above\n"
    "  Workers that are spawned, or come from a forkserver, import the main module again, and find "
    "classes and functions by their names. Put what the program starts under\n"
    '      if __name__ == "__main__":\n'
    "  and the dataset's class, collate_fn and worker_init_fn at the top of a module that can be "
    "imported. Or pass multiprocessing_context='fork', whose workers need neither."
)


class _Names(pickle.Pickler):
    """Records the classes and functions of the main module that are pickled by name."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: list[str] = []

    def reducer_override(self, obj: Any) -> Any:
        """Record one; pickle it as usual."""
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            self.found.append(obj.__qualname__)
        return NotImplemented


def check_main(context: BaseContext, *things: Any) -> None:
    """Refuse classes and functions of a main module that another interpreter cannot import."""
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None or os.path.exists(
        getattr(main, "__file__", None) or ""
    ):
        return
    names = _Names()
    with suppress(Exception):  # what cannot be pickled is refused later, with its own error
        names.dump(things)
    if names.found:
        raise OptionError(
            f"the start method {context.get_start_method()!r} cannot find "
            f"{', '.join(dict.fromkeys(names.found))}: workers import it by name, and this program "
            "has no file (a notebook, python -c, or standard input)\n"
            "  Nothing was started. Move it into a module, or pass multiprocessing_context='fork', "
            "whose workers get it as it is."
        )
