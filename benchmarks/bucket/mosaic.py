"""Mosaic Streaming as it can be installed here.

Its import needs torchvision, for decoding that is not used here, and PyPI has none for a torch
without CUDA. Its pins exclude other libraries here, so it is installed without its dependencies.
"""

from __future__ import annotations

import sys
from types import ModuleType


def prepare() -> None:
    """Make its import possible: nothing of torchvision is called."""
    import transformers  # noqa: F401 - it looks for the real one, which the rest of Mosaic imports

    names = {"datasets": "VisionDataset", "transforms.functional": "to_tensor"}
    for each in ("", ".transforms", *(f".{name}" for name in names)):
        sys.modules.setdefault(f"torchvision{each}", ModuleType(f"torchvision{each}"))
    for name, inside in names.items():
        setattr(sys.modules[f"torchvision.{name}"], inside, type(inside, (), {}))
