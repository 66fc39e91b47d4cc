"""forebay: one PyTorch Dataset for preprocessing, training and prediction.

The public door. Importing it loads neither torch, pyarrow nor ray; what needs them fetches them.
"""

from __future__ import annotations

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
from forebay.preprocess import preprocess

__version__ = "0.1.0"

__all__ = [
    "BusyError",
    "ChangedError",
    "Failure",
    "FailuresError",
    "ForebayError",
    "InputError",
    "LedgerError",
    "OptionError",
    "OutputError",
    "Report",
    "SampleTimeoutError",
    "WorkerDiedError",
    "preprocess",
]
