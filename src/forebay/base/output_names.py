"""Which names outputs may have in an output folder: relative, inside of it, not forebay's. PURE.

    out.file("a/../../x")            asked_name ─────> OutputError, in the worker
    ledger: "../../x", "/etc/x"      recorded_name ──> LedgerError, before a path is made of it

No name in a ledger, even a malicious one, reaches a file outside of the output folder.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from forebay.errors import LedgerError, OutputError, shortened

# ---- formats -------------------------------------------------------------------------------------
# Constants of the outputs' formats, for the options and for workers, which import no options.

# The formats of the metadata table.
TABLE_FORMATS = ("parquet", "csv", "jsonl")

# ---- output names --------------------------------------------------------------------------------

# forebay's own folder inside every output folder, and the staging folder in it.
PRIVATE = ".forebay"
STAGING = f"{PRIVATE}/staging"
# Where files of an earlier run stay that others are made from.
EARLIER = f"{PRIVATE}/earlier"
_IN_STAGING = f"{STAGING}/"


def table_name(form: str) -> str:
    """Return the file name of a metadata table of a format."""
    return f"metadata.{form}"


# How the names of tables end that are read.
_TEXT = ("csv", "jsonl", "ndjson", "tsv")
PACKINGS = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = (
    *(f".{form}" for form in (*_TEXT, "parquet")),
    *(f".{form}{packing}" for form in (*_TEXT, "json") for packing in PACKINGS),
)
ENDINGS = f"{', '.join(SUFFIXES[: len(_TEXT) + 1])}, text also with {', '.join(PACKINGS)}"
TABLES = tuple(map(table_name, sorted(TABLE_FORMATS)))
# What the names of outputs outside of the output folder begin with. No other name holds "//".
_ELSEWHERE = "file://"
# First parts of names that outputs cannot have. Some file systems treat "A" and "a" as equal.
_OWN = frozenset([PRIVATE, *TABLES])


def normalized(name: object) -> str:
    """Return a relative name in normal form: "a/b" for "a//./b"."""
    if not isinstance(name, str) or not name:
        raise ValueError("is not the name of a file")
    if "\0" in name:
        raise ValueError("holds a NUL character")
    if name[0] not in "./" and name[-1] != "/" and "/." not in name and "//" not in name:
        return name  # a fast path for the usual case
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name:
        raise ValueError("would leave the output folder")
    return str(path)


def asked_name(name: object) -> str:
    """Return the name that a function gives a file."""
    final = inside_name(name, "out.file")
    if final.partition("/")[0].casefold() in _OWN:
        raise OutputError(f"the output {name!r} has a name reserved for forebay; choose another")
    return final


def inside_name(name: object, function: str) -> str:
    """Return a name in normal form; `function` is what it was given to."""
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    try:
        return normalized(name)
    except ValueError as error:
        raise bad_name(f"{function}({shortened(name)})", str(error)) from None


def bad_name(call: str, reason: str = "would leave the output folder") -> OutputError:
    """Return the error for a call with a name that no output can have."""
    return OutputError(
        f"{call} {reason}\n"
        "  Nothing was written. Give a name relative to the output folder, such as "
        "'speaker1/a.flac': an input's path may be absolute, so take its last parts, as in "
        "f'{source.parent.name}/{source.stem}.flac'."
    )


def elsewhere(path: str) -> str:
    """Return the name of an output that a function wrote by itself outside of the output folder."""
    return f"{_ELSEWHERE}{path}"


def path_elsewhere(name: object) -> str | None:
    """Return the path of such an output, to look at; None for all other names.

    Nothing else is done to it: forebay does not know what else it is.
    """
    is_elsewhere = isinstance(name, str) and name.startswith(f"{_ELSEWHERE}/")
    return str(name)[len(_ELSEWHERE) :] if is_elsewhere else None


def recorded_name(name: object) -> str:
    """Return the name of an output that a ledger holds."""
    if path_elsewhere(name) is not None:
        return str(name)
    try:
        final = _as_written(name)
        if final.partition("/")[0] == PRIVATE:
            raise ValueError("is reserved for forebay")
    except ValueError as error:
        raise _foreign(name, error) from None
    return final


def staged_name(name: object) -> str:
    """Return the path of a staged file that a ledger holds."""
    try:
        if isinstance(name, str) and name.startswith(_IN_STAGING):
            return _IN_STAGING + _as_written(name[len(_IN_STAGING) :])
        _as_written(name)
        raise ValueError(f"is not in {STAGING}")
    except ValueError as error:
        raise _foreign(name, error) from None


def removable_name(name: object) -> str:
    """Return a name that a ledger says is to be removed: an output's, or that of a staged file."""
    is_staged = isinstance(name, str) and name.startswith(_IN_STAGING)
    return staged_name(name) if is_staged else recorded_name(name)


def worker_folder(run: str, worker: int, number: str) -> str:
    """Return a folder where a worker stages files of several inputs."""
    return f"{_IN_STAGING}{run}-{worker}{number}"


def own_folder(run: str, worker: int, number: int) -> str:
    """Return a folder where a worker stages the files of one input alone."""
    return f"{_IN_STAGING}{run}-{worker}-{number}"


def own_folder_of(staged: str) -> str:
    """Return the folder of one input alone that a staged file is in; "" if it is in none."""
    folder = staged[: staged.find("/", len(_IN_STAGING))]
    return folder if folder.count("-", len(_IN_STAGING)) == 2 else ""


def folders_of(name: str) -> list[str]:
    """Return every folder that contains a name: "a" and "a/b" for "a/b/c"."""
    return [name[:at] for at, character in enumerate(name) if character == "/"]


def _as_written(name: object) -> str:
    final = normalized(name)
    if final != name:
        raise ValueError("is not in normal form")
    return final


def _foreign(name: object, reason: ValueError) -> LedgerError:
    return LedgerError(
        f"the ledger names an output {shortened(name)}, which {reason}\n"
        "  It is damaged or malicious. Nothing was changed. Use another output folder, "
        "or restore a copy of this one that you trust."
    )
