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
    from forebay.jobs.report import Failure, Report
    from forebay.loader import DataLoader
    from forebay.loading.buffer import Buffer
    from forebay.options import Ray
    from forebay.packed import PackedSequence
    from forebay.preprocess import preprocess

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "BusyError",
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
    "preprocess",
]

# Where public names live; all others are errors.
_HOMES = {
    "Buffer": "forebay.loading.buffer",
    "DataLoader": "forebay.loader",
    "Failure": "forebay.jobs.report",
    "PackedSequence": "forebay.packed",
    "Ray": "forebay.options",
    "Report": "forebay.jobs.report",
    "preprocess": "forebay.preprocess",
}


def __getattr__(name: str) -> Any:
    """Fetch a public name from its home, once."""
    if name not in __all__:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "forebay.errors")), name)
    globals()[name] = value
    return value


class _Door(ModuleType):
    """Keeps a verb's name for the verb: importing its module would bind the module to it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door
