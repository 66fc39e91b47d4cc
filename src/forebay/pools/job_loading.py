"""Unpickle the user's code in the process that forks the workers.

    driver: cloudpickle ── functions of __main__ by value ──> zygote: load_job ──> __main__.square

A function that arrived by value is a copy, and no module has it under its name. What the user's
function starts itself, such as a multiprocessing.Pool, pickles functions by their names; so copies
get the names that they had in the driver.
"""

from __future__ import annotations

import io
import pickle
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

# What cloudpickle makes functions and classes with.
_CLOUDPICKLE, _MAKERS = "cloudpickle.cloudpickle", ("_make_function", "_make_skeleton_class")

_is_loading, _is_worker = False, False


def load_job(data: bytes) -> Any:
    """Return what cloudpickle pickled; functions and classes in it get their names."""
    with _loading():
        loader = _Loader(io.BytesIO(data))
        found = loader.load()
    for each in loader.made:
        _name(each)
    return found


def check_not_loading(call: str) -> None:
    """Raise OptionError if a module that a worker imports makes this call when it is imported."""
    if not _is_loading:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    where = "a module" if frame is None else f"{frame.f_code.co_filename}, line {frame.f_lineno},"
    raise OptionError(
        f"{where} calls forebay.{call} when it is imported, and workers import it for a function "
        "in it: each would make the call again\n"
        "  No input was processed. Put the call into a function, or under "
        "`if __name__ == '__main__':`."
    )


def is_worker() -> bool:
    """Return whether this process is one of forebay's workers, or forks them."""
    return _is_worker


def become_worker() -> None:
    """Note that this process is a worker, or forks them."""
    global _is_worker  # noqa: PLW0603 - of this process
    _is_worker = True


@contextmanager
def _loading() -> Iterator[None]:
    global _is_loading  # noqa: PLW0603 - of this process
    _is_loading = True
    try:
        yield
    finally:
        _is_loading = False


class _Loader(pickle.Unpickler):
    """Remembers the functions and classes that it makes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        """Return an object by its name."""
        found = super().find_class(module, name)
        if module != _CLOUDPICKLE or name not in _MAKERS:
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
