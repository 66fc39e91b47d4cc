"""All exceptions that forebay defines.

    ForebayError
    ├── OptionError(ValueError)            a setting is impossible; nothing was started
    ├── InputError(ValueError)             the inputs cannot be used as they are
    ├── OutputError                        an output cannot be written
    ├── LedgerError                        the ledger is damaged, unsupported or not writable
    │   ├── BusyError                      another run holds this output folder
    │   └── ChangedError                   the function changed since the earlier run
    ├── FailuresError                      the run stopped early: too many inputs failed
    ├── SampleTimeoutError(TimeoutError)   one input or sample ran past `timeout`
    └── WorkerDiedError(RuntimeError)      a worker died: its signal or exit code

A message says, in this order: what happened, to what, the numbers, what forebay did, what to do.
Its first line must make sense alone.
"""

from __future__ import annotations

from typing import Any


class ForebayError(Exception):
    """The base class of all exceptions that forebay defines."""


class OptionError(ForebayError, ValueError):
    """A setting is impossible; raised before anything starts."""


class InputError(ForebayError, ValueError):
    """The inputs cannot be used as they are: a missing folder, a damaged manifest, a duplicate."""


class OutputError(ForebayError):
    """An output cannot be written: a full or read-only folder, an invalid or duplicate name."""


class LedgerError(ForebayError):
    """The ledger is damaged, of an unsupported format, or cannot be written."""


class BusyError(LedgerError):
    """Another run holds this output folder."""


class ChangedError(LedgerError):
    """The function or its parameters differ from those the ledger was written with."""


class FailuresError(ForebayError):
    """A run stopped early: more inputs failed than allowed, or many in a row alike.

    Or, with ranks, all samples of a rank's batch failed.
    """

    # Of a range of samples: the failed ones, as the ledger records them.
    record: dict[str, Any] | None = None


class SampleTimeoutError(ForebayError, TimeoutError):
    """One input or sample ran past `timeout`; the message holds the stack of the hang."""


class WorkerDiedError(ForebayError, RuntimeError):
    """A worker died; the message names its signal or exit code and what it was doing."""


def shortened(value: object) -> str:
    """Return the repr of a value, shortened to fit into a message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def printable(text: str) -> str:
    """Return a string with all characters escaped that cannot be printed, line breaks included."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def one_line(text: str, most: int) -> str:
    """Return a string on one line of at most `most` characters, safe to print on a terminal."""
    return printable(" ".join(text[:most].split()))[:most]
