"""Convert the output of `python -m benchmarks` to JSON: machine, versions, date and tables.

`python -m benchmarks --json FILE` writes it. `python -m benchmarks.results PRINTED FILE` converts
the output of an earlier run. The format is described in docs/benchmarks/index.md.
"""

from __future__ import annotations

import argparse
import json
import re
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

TOTAL = re.compile(r"\d+ s in all")


def parse(printed: str, date: str) -> dict[str, Any]:
    """Return the results in the output of the benchmarks.

    Args:
        printed: The machine in lines of a word and its value, a blank line, and then tables: each
            of them a title, a table in Markdown, and notes.
        date: The day on which they were measured, such as "2026-11-22".
    """
    lines = printed.splitlines()
    paragraphs = [list(group) for filled, group in groupby(lines, key=bool) if filled]
    machine = dict(line.split(maxsplit=1) for line in paragraphs[0])
    tables: list[dict[str, Any]] = []
    for paragraph in paragraphs[1:]:
        inside = [number for number, line in enumerate(paragraph) if line.startswith("|")]
        if inside:
            columns, _, *rows = (_cells(paragraph[number]) for number in inside)
            tables.append(
                {
                    "title": " ".join(paragraph[: inside[0]]),
                    "columns": columns,
                    "rows": rows,
                    "note": " ".join(paragraph[inside[-1] + 1 :]),
                }
            )
        elif tables and not TOTAL.fullmatch(paragraph[0]):
            # A paragraph without a table is a note on the table before it.
            tables[-1]["note"] = " ".join([tables[-1]["note"], *paragraph]).strip()
    return {"date": date, "machine": machine, "tables": tables}


def write(path: Path, printed: str) -> None:
    """Write output that was printed today as JSON."""
    results = parse(printed, datetime.now(UTC).date().isoformat())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("printed", type=Path, help="what `python -m benchmarks` printed")
    parser.add_argument("file", type=Path, help="the JSON file to write")
    arguments = parser.parse_args()
    write(arguments.file, arguments.printed.read_text(encoding="utf-8"))
