"""What another interpreter needs of the main module, where workers are spawned."""

from __future__ import annotations

import io
import os
import pickle
import sys
from contextlib import suppress
from multiprocessing.context import BaseContext
from types import FunctionType
from typing import Any

from forebay.errors import OptionError

# Why no worker can begin in another interpreter.
NOT_BEGUN = (
    "workers cannot begin: the first process ended before it had loaded what they run, with the "
    "error printed above\n"
    "  Workers that are spawned, or come from a forkserver, import the main module again, and find "
    "classes and functions by their names. Put what the program starts under\n"
    '      if __name__ == "__main__":\n'
    "  and the dataset's class, collate_fn and worker_init_fn at the top of a module that can be "
    "imported. Or leave multiprocessing_context out: forebay's own workers need neither."
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
            f"multiprocessing_context={context.get_start_method()!r} cannot find "
            f"{', '.join(dict.fromkeys(names.found))}: workers import it by name, and this program "
            "has no file (a notebook, python -c, or standard input)\n"
            "  Nothing was started. Move it into a module, or leave multiprocessing_context out: "
            "forebay's own workers get it as it is."
        )
