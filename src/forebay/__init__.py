"""forebay: one PyTorch Dataset for preprocessing, training and prediction.

The public door. Each name is fetched from its home when it is first used, so importing forebay
loads neither torch, pyarrow nor ray, and a worker loads only what it needs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay import collate
    from forebay.cache import cache, open_cache
    from forebay.caching.dataset import CachedDataset
    from forebay.errors import (
        BusyError,
        ChangedError,
        FailuresError,
        ForebayError,
        InputError,
        LedgerError,
        OptionError,
        OutputError,
        SampleTimeoutError,
        WorkerDiedError,
    )
    from forebay.items import from_folder, from_ids, from_table
    from forebay.jobs.report import Failure, Report
    from forebay.loader import DataLoader
    from forebay.loading.buffer import Buffer
    from forebay.options import Ray
    from forebay.packed import PackedSequence
    from forebay.predict import predict
    from forebay.preprocess import preprocess

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "BusyError",
    "CachedDataset",
    "ChangedError",
    "DataLoader",
    "Failure",
    "FailuresError",
    "ForebayError",
    "InputError",
    "LedgerError",
    "OptionError",
    "OutputError",
    "PackedSequence",
    "Ray",
    "Report",
    "SampleTimeoutError",
    "WorkerDiedError",
    "cache",
    "collate",
    "from_folder",
    "from_ids",
    "from_table",
    "open_cache",
    "predict",
    "preprocess",
]

# Where public names live; all others are errors.
_HOMES = {
    "Buffer": "forebay.loading.buffer",
    "CachedDataset": "forebay.caching.dataset",
    "DataLoader": "forebay.loader",
    "Failure": "forebay.jobs.report",
    "PackedSequence": "forebay.packed",
    "Ray": "forebay.options",
    "Report": "forebay.jobs.report",
    "cache": "forebay.cache",
    "from_folder": "forebay.items",
    "from_ids": "forebay.items",
    "from_table": "forebay.items",
    "open_cache": "forebay.cache",
    "predict": "forebay.predict",
    "preprocess": "forebay.preprocess",
}
# Public names that are modules.
_MODULES = {"collate"}


def __getattr__(name: str) -> Any:
    """Fetch a public name from its home, once."""
    if name not in __all__:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    if name in _MODULES:
        return import_module(f"forebay.{name}")
    value = getattr(import_module(_HOMES.get(name, "forebay.errors")), name)
    globals()[name] = value
    return value


class _Door(ModuleType):
    """Keeps a verb's name for the verb: importing its module would bind the module to it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not isinstance(value, ModuleType) or name in _MODULES or name not in __all__:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door
