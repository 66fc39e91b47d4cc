"""forebay: one PyTorch Dataset for preprocessing, training and prediction.

Each public name is fetched from its module when it is first used, so importing forebay
loads neither torch, pyarrow nor ray, and a worker loads only what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"

# The public names of each module, with their types in `__init__.pyi`.
_NAMES = {
    "buffer": ("Buffer",),
    "caching.dataset": ("CachedDataset", "open_cache"),
    "errors": (
        "BusyError",
        "ChangedError",
        "FailuresError",
        "ForebayError",
        "InputError",
        "LedgerError",
        "OptionError",
        "OutputError",
        "SampleTimeoutError",
        "WorkerDiedError",
    ),
    "failures": ("Failure",),
    "items": ("from_folder", "from_ids", "from_table"),
    "lengths": ("batch_by_length", "pack_sequences"),
    "loader": ("DataLoader",),
    "loading.sample_check": ("SampleCheck",),
    "mixing": ("MixedDataset", "mix"),
    "observe.diagnosis": ("Diagnosis",),
    "observe.figures": ("Statistics",),
    "options": ("AutoWorkers", "Ray"),
    "outputs.tars": ("open_output",),
    "outputs.output": ("get_output",),
    "packed": ("PackedSequence",),
    "predicting.predict": ("predict",),
    "runs.cache": ("cache",),
    "runs.index_shards": ("index_shards",),
    "runs.preprocess": ("preprocess",),
    "runs.report": ("PredictionReport", "Report"),
    "shards.dataset": ("ShardDataset", "open_shards"),
    "shards.format": ("register_format",),
    "trainer": ("use",),
}
_MODULES = ("collate",)
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted([*_MODULE_OF, *_MODULES])  # noqa: PLE0605 - a list of strings


def __getattr__(name: str) -> Any:
    """Fetch a public name from its module, once."""
    if name in _MODULES:
        return import_module(f"forebay.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    value = getattr(import_module(f"forebay.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, fetched yet or not: what completion shows."""
    return sorted({*globals(), *__all__})
