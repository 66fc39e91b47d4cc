"""A run with small pages and manifests: `small_pages.py MANIFEST OUTPUT [POINT TIMES]`.

With a point, it is killed by SIGKILL when that is reached for the given time.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import forebay
from forebay.inputs import manifests
from forebay.ledger import enrolment, ledger, results
from forebay.ledger.ledger import Ledger
from forebay.runs import processing
from forebay.runs import run as runs_run

POINTS: dict[str, tuple[Any, str]] = {
    "before a page of the listing is read": (Ledger, "_read_on"),
    "while a page is appended": (enrolment, "change_counts"),
    "before results are recorded": (Ledger, "record"),
    "while results are recorded": (results, "add_file_changes"),
}


def work(row: dict[str, Any], out: Any) -> dict[str, int]:
    """Write a file for every third row."""
    if row["label"] % 3 == 0:
        out.file(f"{row['label'] % 7}/{row['name']}").write_text(row["name"])
    return {"square": row["label"] ** 2}


def die_at(point: str, times: int) -> None:
    """Be killed when a point is reached for the given time, in this process."""
    place, name = POINTS[point]
    original, driver, left = getattr(place, name), os.getpid(), [times]

    def killed(*arguments: Any, **options: Any) -> Any:
        if os.getpid() == driver:
            left[0] -= 1
            if not left[0]:
                os.kill(driver, signal.SIGKILL)
        return original(*arguments, **options)

    setattr(place, name, killed)


if __name__ == "__main__":
    manifests.MANY_ROWS, runs_run.AHEAD, ledger.READ_ON = 10, 50, 40
    processing.SLOTS = processing.LOOKAHEAD = 64  # so that results are recorded at least six times
    if len(sys.argv) > 3:
        die_at(sys.argv[3], int(sys.argv[4]))
    report = forebay.preprocess(work, sys.argv[1], Path(sys.argv[2]), num_workers=2, progress=False)
    print(report.done)
