"""Charts of stored results: one for each table of `docs/benchmarks/results.json`.

`python -m benchmarks.charts` draws them beside that file and lists them on the page beside it.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.svg import CHARACTER, picture, rectangle, words

FOLDER = Path("docs", "benchmarks")
BEGIN, END = "<!-- charts: begin -->", "<!-- charts: end -->"
NUMBER = re.compile(r"([\d,]+(?:\.\d+)?) ?(k|%|s|ms|MiB)?")
WIDTH, MARGIN, ROW, BAR, VALUE = 760, 20, 26, 16, 90
Table = dict[str, Any]


class Bar(NamedTuple):
    """A row of a chart: its label, its length, and the words after the bar."""

    label: str
    value: float
    shown: str


def charts(results: dict[str, Any]) -> dict[str, str]:
    """Return the charts of results by the names of their files."""
    return {
        _file(at, table): draw(table)
        for at, table in enumerate(results["tables"], 1)
        if _column(table)
    }


def page(text: str, results: dict[str, Any]) -> str:
    """Return the page's text with the results between its marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return "\n".join([before + BEGIN, "", *_section(results), END + after])


def draw(table: Table) -> str:
    """Return the chart of a table's first rate, time, share or size."""
    column = _column(table)
    assert column is not None
    bars = [_bar(row, column) for row in table["rows"]]
    unit = table["columns"][column]
    better = "more" if unit.endswith("/s") else "less"
    left = MARGIN + min(330, max(len(bar.label) for bar in bars) * 13 * CHARACTER) + 10
    scale = (WIDTH - left - VALUE - MARGIN) / max(bar.value for bar in bars)
    title = textwrap.wrap(table["title"], 98)
    top = 24 + 18 * len(title)
    parts = [words(MARGIN, 26 + 18 * at, line) for at, line in enumerate(title)]
    parts.append(words(MARGIN, top + 4, f"{unit}: {better} is better", "note"))
    for at, bar in enumerate(bars):
        y, length = top + 18 + at * ROW, bar.value * scale
        kind = "main" if "forebay" in bar.label else "other"
        parts += [
            words(left - 10, y + 13, bar.label, anchor="end"),
            rectangle(left, y, length, BAR, kind),
            words(left + length + 6, y + 13, bar.shown),
        ]
    return picture(table["title"], WIDTH, top + 18 + len(bars) * ROW + 8, parts)


def number(cell: str) -> float | None:
    """Return the number of a cell such as "17.1 k", "21 %" or "0.24 s"; None for words."""
    found = NUMBER.fullmatch(cell)
    if found is None:
        return None
    return float(found[1].replace(",", "")) * (1000 if found[2] == "k" else 1)


def _column(table: Table) -> int | None:
    """Return the first column after the labels that is a rate, or whose numbers have a unit.

    A column "before" holds the start of a measurement, not a result.
    """
    for at, title in list(enumerate(table["columns"]))[1:]:
        if title == "before":
            continue
        found = [found for row in table["rows"] if (found := NUMBER.fullmatch(_cell(row, at)))]
        if found and (title.endswith("/s") or all(each[2] for each in found)):
            return at
    return None


def _bar(row: list[str], column: int) -> Bar:
    shown = _cell(row, column) or row[-1]  # a row that ends early ends with the reason
    return Bar(", ".join(row[:column]), number(shown) or 0.0, shown)


def _cell(row: list[str], column: int) -> str:
    return row[column] if column < len(row) else ""


def _file(at: int, table: Table) -> str:
    """Return the name of a chart's file: its number and the beginning of its title."""
    beginning = re.findall(r"[a-z0-9]+", table["title"].lower())[:6]
    return f"{at:02}-{'-'.join(beginning)}.svg"


def _section(results: dict[str, Any]) -> Iterator[str]:
    machine = "; ".join(f"{key} {value}" for key, value in results["machine"].items())
    yield from (f"Measured on {results['date']}: {machine}.", "")
    for at, table in enumerate(results["tables"], 1):
        yield from (f"## {table['title']}", "")
        if _column(table):
            yield from (f"![Chart of the table below]({_file(at, table)})", "")
        width = len(table["columns"])
        rows = [table["columns"], ["---"] * width, *table["rows"]]
        yield from ("| " + " | ".join([*row, *[""] * (width - len(row))]) + " |" for row in rows)
        yield ""
        if table["note"]:
            yield from (table["note"], "")


def main() -> None:
    """Draw the charts and write the page."""
    results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    for old in FOLDER.glob("*.svg"):
        old.unlink()
    for file, chart in charts(results).items():
        (FOLDER / file).write_text(chart, encoding="utf-8")
    index = FOLDER / "index.md"
    index.write_text(page(index.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
