"""The metadata table of a run, from its ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from forebay.jobs.ledger.database import reading
from forebay.jobs.ledger.ledger import Ledger
from forebay.jobs.table.metadata_table import write_metadata


def write_ledger_table(path: Path, fmt: str, ledger: Ledger, kind: str) -> None:
    """Write the results in a ledger as a table.

    Args:
        path: The file.
        fmt: "parquet", "csv" or "jsonl".
        ledger: The ledger.
        kind: What the inputs are: "paths", "rows" or "indices".

    Raises:
        OutputError: The file cannot be written.
        LedgerError: The ledger is damaged.
    """
    with reading("columns"):
        columns = tuple(map(str, json.loads(ledger.get_meta("columns") or "[]")))

    def records() -> Iterator[tuple[str | int, str | None, str]]:
        for _, source, row, _, metadata in ledger.results():
            if kind != "indices":
                yield source, row, metadata
            else:  # the row of a sample that has a name is its index
                yield int(source) if row is None else source, None, metadata

    write_metadata(path, fmt, columns, records())
