"""forebay.preprocess, as it comes: ledger, staging, flushes to disk and the table of metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Only the table at the end needs it, so `import forebay` leaves it out; "libraries imported
# beforehand" holds for all peers, so it is here.
import pyarrow.parquet

from benchmarks import work
from benchmarks.peers import WORKERS
from forebay import preprocess

# Where pandas is installed, as datasets has it here, pyarrow imports it at its first array.
pyarrow.array([])


def copy(source: Path, out: Any) -> dict[str, int]:
    return work.copy(source, out.file(source.name))


def burn(source: Path, out: Any) -> dict[str, int]:
    return work.burn(source, out.file(source.name))


def traced(source: Path, out: Any) -> dict[str, int]:
    return work.traced(source, out.file(source.name))


TASKS = {"copy": copy, "burn": burn, "traced": traced}


def run(task: str, sources: list[str], folder: str) -> int:
    report = preprocess(TASKS[task], sources, output=folder, num_workers=WORKERS, progress=False)
    return report.done
