"""Runs of preprocess on a cluster, and the table and ledger that a run leaves."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import forebay


def run(work: Any, inputs: Any, output: Path, **options: Any) -> forebay.Report:
    """Run preprocess on the cluster, unless the options say otherwise."""
    return forebay.preprocess(work, inputs, output, progress=False, **{"backend": "ray"} | options)


def table(output: Path) -> bytes:
    """Return the table of a run, as it is on the disk."""
    return (output / "metadata.parquet").read_bytes()


def attempts(output: Path) -> dict[str, int]:
    """Return how many tries each input took, by its name, as the ledger has it."""
    with closing(sqlite3.connect(output / ".forebay" / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT source, attempts FROM inputs").fetchall()
    return {Path(source).name: tries for source, tries in rows}
