"""Runs of preprocess on a cluster, and the table that a run leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forebay


def run(work: Any, inputs: Any, output: Path, **options: Any) -> forebay.Report:
    """Run preprocess on the cluster, unless the options say otherwise."""
    return forebay.preprocess(work, inputs, output, progress=False, **{"backend": "ray"} | options)


def table(output: Path) -> bytes:
    """Return the table of a run, as it is on the disk."""
    return (output / "metadata.parquet").read_bytes()
