"""Where a run took place: versions, system, cores, memory. No names of machines or users."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from forebay.options import usable_memory, whole_cores
from forebay.units import byte_size

PACKAGES = ("forebay", "torch", "numpy", "pyarrow")


def environment() -> dict[str, str]:
    """Return what a report says about the machine and the software."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            # What is loaded says its build as well, such as 2.13.0+cu130.
            found[name] = str(getattr(sys.modules.get(name), "__version__", "") or version(name))
        except PackageNotFoundError:  # not installed
            continue
    found["system"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    cores, usable = os.cpu_count() or 1, whole_cores()
    found["cores"] = f"{usable}" if cores == usable else f"{usable} usable of {cores}"
    memory = usable_memory()
    if memory is not None:
        found["memory"] = byte_size(memory)
    return found
