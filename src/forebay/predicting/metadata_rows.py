"""A metadata table: its columns, and fingerprints of its rows for change detection."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from forebay.errors import OptionError
from forebay.jobs.inputs.listing import Listing, list_inputs
from forebay.jobs.table.table_reader import find_table, read_memory_table, read_table
from forebay.predicting.prediction_columns import INDEX


class Table(NamedTuple):
    """A metadata table.

    Attributes:
        rows: All columns, in memory.
        listing: The rows as inputs; it also has the folder where relative paths start.
    """

    rows: pa.Table
    listing: Listing


def open_table(data: Any, folder: str | os.PathLike[str] | None) -> Table:
    """Return a table whose columns can be stored beside the predictions.

    Args:
        data: A table in memory; or the path or URL of a table, or of its folder.
        folder: Where the relative `destination` of a table in memory starts.

    Raises:
        OptionError: A column has a name that predict reserves, or there is a folder with a path.
        InputError: It cannot be read, or has no rows.
    """
    is_named = isinstance(data, str | os.PathLike)
    source = find_table(data) if is_named else data
    listing = list_inputs(source, folder)  # raises if there are no rows, or columns of one name
    rows = read_table(source) if is_named else read_memory_table(data, listing.folder)[0]
    if INDEX in rows.column_names:
        shown = repr(os.fspath(source)) if is_named else f"the {type(data).__name__}"
        raise OptionError(
            f"{'the table ' if is_named else ''}{shown} has a column {INDEX!r}, the name that "
            "predict gives to the number of the row\n  Nothing was started. Rename the column."
        )
    return Table(rows.replace_schema_metadata(None).combine_chunks(), listing)


def identities(listing: Listing, size: int) -> Iterator[str]:
    """Yield a fingerprint of each group of `size` rows and of the files that they name."""
    rows = iter(listing)
    while some := list(islice(rows, size)):
        digest = hashlib.sha256()
        for row in some:
            digest.update(f"{row.row}\n{row.identity}\n".encode())
        yield digest.hexdigest()[:32]
