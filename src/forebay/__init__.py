"""forebay: one PyTorch Dataset for preprocessing, training and prediction.

Each public name is fetched from its module when it is first used, so importing forebay
loads neither torch, pyarrow nor ray, and a worker loads only what it needs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay import collate
    from forebay.cache import cache
    from forebay.caching.reader import CachedDataset, open_cache
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
    from forebay.failures import Failure
    from forebay.items import from_folder, from_ids, from_table
    from forebay.loader import DataLoader
    from forebay.loading.replay import SampleCheck
    from forebay.mixing import MixedDataset, mix
    from forebay.observe.diagnosis import Diagnosis
    from forebay.observe.figures import Statistics
    from forebay.options import AutoWorkers, Buffer, Ray
    from forebay.outputs.packed_reader import open_output
    from forebay.packed import PackedSequence
    from forebay.predict import predict
    from forebay.preprocess import preprocess
    from forebay.runs.report import PredictionReport, Report
    from forebay.show.comparison import Comparison, compare

__version__ = "0.1.0"

__all__ = [
    "AutoWorkers",
    "Buffer",
    "BusyError",
    "CachedDataset",
    "ChangedError",
    "Comparison",
    "DataLoader",
    "Diagnosis",
    "Failure",
    "FailuresError",
    "ForebayError",
    "InputError",
    "LedgerError",
    "MixedDataset",
    "OptionError",
    "OutputError",
    "PackedSequence",
    "PredictionReport",
    "Ray",
    "Report",
    "SampleCheck",
    "SampleTimeoutError",
    "Statistics",
    "WorkerDiedError",
    "cache",
    "collate",
    "compare",
    "from_folder",
    "from_ids",
    "from_table",
    "mix",
    "open_cache",
    "open_output",
    "predict",
    "preprocess",
]

# The module of each public name; that of all others is `errors`.
_MODULE_OF = {
    "AutoWorkers": "forebay.options",
    "Buffer": "forebay.options",
    "CachedDataset": "forebay.caching.reader",
    "Comparison": "forebay.show.comparison",
    "DataLoader": "forebay.loader",
    "Diagnosis": "forebay.observe.diagnosis",
    "Failure": "forebay.failures",
    "MixedDataset": "forebay.mixing",
    "PackedSequence": "forebay.packed",
    "PredictionReport": "forebay.runs.report",
    "Ray": "forebay.options",
    "Report": "forebay.runs.report",
    "SampleCheck": "forebay.loading.replay",
    "Statistics": "forebay.observe.figures",
    "cache": "forebay.cache",
    "compare": "forebay.show.comparison",
    "from_folder": "forebay.items",
    "from_ids": "forebay.items",
    "from_table": "forebay.items",
    "mix": "forebay.mixing",
    "open_cache": "forebay.caching.reader",
    "open_output": "forebay.outputs.packed_reader",
    "predict": "forebay.predict",
    "preprocess": "forebay.preprocess",
}
# Public names that are modules themselves.
_MODULES = {"collate"}


if not TYPE_CHECKING:  # or else a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Fetch a public name from its module, once."""
        if name not in __all__:
            raise AttributeError(f"module 'forebay' has no attribute {name!r}")
        if name in _MODULES:
            return import_module(f"forebay.{name}")
        value = getattr(import_module(_MODULE_OF.get(name, "forebay.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names, fetched yet or not: what completion shows."""
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The package, with `forebay.predict` the function, not the module of the same name.

    Importing a submodule sets an attribute of that name on the package.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the package by its name: cloudpickle knows no subclasses of modules."""
        return import_module, (self.__name__,)

    def __setattr__(self, name: str, value: object) -> None:
        if not isinstance(value, ModuleType) or name in _MODULES or name not in __all__:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
