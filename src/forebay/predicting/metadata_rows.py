"""A metadata table: its columns, and fingerprints of its rows for change detection."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa

from forebay.errors import OptionError
from forebay.jobs.inputs.listing import list_inputs
from forebay.jobs.table.table_reader import read_table
from forebay.predicting.prediction_columns import INDEX


def open_table(path: Path) -> pa.Table:
    """Return a table whose columns can be stored beside the predictions.

    Raises:
        OptionError: A column has a name that predict reserves.
        InputError: It cannot be read, or has no rows.
    """
    list_inputs(path)  # raises if there are no rows, or two columns of one name
    table = read_table(path).replace_schema_metadata(None).combine_chunks()
    if INDEX in table.column_names:
        raise OptionError(
            f"the table {str(path)!r} has a column {INDEX!r}, the name that predict gives to the "
            "number of the row\n  Nothing was started. Rename the column."
        )
    return table


def identities(path: Path, size: int) -> Iterator[str]:
    """Yield a fingerprint of each group of `size` rows and of the files that they name."""
    rows = iter(list_inputs(path))
    while some := list(islice(rows, size)):
        digest = hashlib.sha256()
        for row in some:
            digest.update(f"{row.row}\n{row.identity}\n".encode())
        yield digest.hexdigest()[:32]
