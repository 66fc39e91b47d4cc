"""A metadata table: where it is, its columns, and what tells its rows from what they were."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa

from forebay.errors import InputError, OptionError
from forebay.jobs.listing import list_inputs
from forebay.jobs.manifest import SUFFIXES
from forebay.jobs.table import read_table
from forebay.options import TABLE_FORMATS
from forebay.predicting.columns import INDEX


def find_table(data: str | os.PathLike[str]) -> Path:
    """Return the path of a metadata table, given itself or the folder that it lies in.

    Raises:
        InputError: There is none.
    """
    path = Path(os.path.expanduser(data))
    if path.is_dir():
        names = [f"metadata.{form}" for form in TABLE_FORMATS]
        found = [path / name for name in names if (path / name).is_file()]
        if len(found) != 1:
            what = "several tables" if found else "no table"
            raise InputError(
                f"the folder {str(path)!r} holds {what}: looked for {', '.join(names)}\n"
                "  Name the table itself."
            )
        path = found[0]
    if not path.is_file() or path.suffix.lower() not in SUFFIXES:
        what = "is no table" if path.exists() else "does not exist"
        raise InputError(
            f"{str(path)!r} {what}\n"
            f"  data takes a Dataset, a DataLoader, a table ({', '.join(SUFFIXES)}), or the "
            "folder that preprocess wrote one to."
        )
    return path


def open_table(path: Path) -> pa.Table:
    """Return a table whose columns can stand beside the predictions.

    Raises:
        OptionError: A column has a name that predict needs.
        InputError: It cannot be read, or has no rows.
    """
    list_inputs(path)  # says what is wrong with it, if anything is
    table = read_table(path).replace_schema_metadata(None).combine_chunks()
    if INDEX in table.column_names:
        raise OptionError(
            f"the table {str(path)!r} has a column {INDEX!r}, which is what predict calls the "
            "number of the row\n  Nothing was started. Rename it."
        )
    return table


def identities(path: Path, size: int) -> Iterator[str]:
    """Yield, for every `size` rows, what changes with them, and with the files that they name."""
    rows = iter(list_inputs(path))
    while some := list(islice(rows, size)):
        digest = hashlib.sha256()
        for row in some:
            digest.update(f"{row.row}\n{row.identity}\n".encode())
        yield digest.hexdigest()[:32]
