"""forebay.preprocess with default settings: ledger, staging, flushes to disk, metadata table."""

from __future__ import annotations

# Only the table at the end needs it, so `import forebay` leaves it out; "libraries imported
# beforehand" holds for all peers, so it is here.
import pyarrow.parquet

from benchmarks.peers import WORKERS
from benchmarks.work import Staged
from forebay import preprocess

# Where pandas is installed, as datasets has it here, pyarrow imports it at its first array.
pyarrow.array([])


def run(task: str, sources: list[str], folder: str) -> int:
    report = preprocess(Staged(task), sources, output=folder, num_workers=WORKERS, progress=False)
    return report.done
