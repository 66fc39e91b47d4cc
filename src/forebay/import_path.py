"""`sys.path`: the standard library comes before every folder that forebay adds.

The working folder often holds data. A file `json.py` in it must not replace Python's own module.
"""

from __future__ import annotations

import os
import sys

_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def add_folder(folder: str) -> None:
    """Have modules of a folder found: before installed packages, after the standard library."""
    if folder not in sys.path:
        last = max((at for at, each in enumerate(sys.path) if _is_standard(each)), default=-1)
        sys.path.insert(last + 1, folder)


def standard_library_first() -> list[str]:
    """Return `sys.path` with the standard library's own folders moved to its front."""
    return sorted(sys.path, key=lambda folder: not _is_standard(folder))


def _is_standard(folder: str) -> bool:
    return folder == _STANDARD_LIBRARY or os.path.basename(folder) == "lib-dynload"
