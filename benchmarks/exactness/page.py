"""The page of the exactness benchmark: `python -m benchmarks.exactness.page` writes it.

It is made of what docs/benchmarks/exactness.json has, which `python -m benchmarks exactness --page`
measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.exactness.histories import HISTORIES, MEANINGS, SAMPLES, History
from benchmarks.exactness.measured import FILE, Measured, stored

PAGE = FILE.with_suffix(".md")
Rows = list[tuple[str, ...]]
WORDS = {
    "exact": "each sample once in each epoch, in the order of an uninterrupted run; on another "
    "number of ranks, the same samples in each step; of an augmentation, the same random draws",
    "once each": "each sample once in each epoch, in another order than without the interruption",
    "refused": "an error with a sentence for a person; its words are below",
    "crashed": "an error without one",
    "hangs": "nothing more came while its processes did nothing, twice",
    "wrong": "samples lost, or given twice, or with other draws, and no error",
    "-": "the library has no such thing or does not claim it; the reason is below",
}


def groups(histories: Sequence[History]) -> dict[str, list[History]]:
    """Return the histories of each table."""
    found: dict[str, list[History]] = {}
    for each in histories:
        found.setdefault(each.group, []).append(each)
    return found


def cell_rows(measured: Iterable[Measured], histories: Sequence[History]) -> Rows:
    """Return a row of cells for each loader that was measured."""
    return [
        (each.title, *(str(each.cells[history.name]) for history in histories))
        for each in measured
        if not each.missing
    ]


def seen_rows(measured: Iterable[Measured], histories: Sequence[History]) -> Rows:
    """Return what is behind the cells that are not exact: histories with the same are one row."""
    rows = []
    for each in measured:
        same: dict[tuple[str, str], list[str]] = {}
        for history in histories if not each.missing else ():
            cell = each.cells[history.name]
            if cell.word != "exact":
                key = str(cell), cell.detail.replace("|", "/").replace("\n", " ")
                same.setdefault(key, []).append(history.title)
        rows += [(each.title, "; ".join(titles), *key) for key, titles in same.items()]
    return rows


def compared_rows(measured: Iterable[Measured]) -> Rows:
    """Return versions, days and documentation of each loader, or why it was not measured."""
    return [
        (each.title, each.missing or each.versions, each.date, _link(each.docs))
        for each in measured
    ]


def page(measured: Sequence[Measured]) -> str:
    """Return the text of the page."""
    return "\n".join(_lines(sorted(measured, key=_place)))


def _place(each: Measured) -> tuple[bool, bool, str]:
    """Loaders first, then what is around one; forebay's after the others."""
    around = "," in each.title and "Hugging Face" not in each.title
    return (around or "Trainer" in each.title, "forebay" in each.title, each.title.lower())


def _lines(measured: Sequence[Measured]) -> Iterator[str]:
    ours = [each for each in measured if "forebay" in each.title and not each.missing]
    yield from (
        "# Exactness: loaders after cuts, kills and changes",
        "",
        "`python -m benchmarks exactness --page` measures what is in `exactness.json` beside this",
        "page, and writes the page. No cell is written by hand.",
        "",
        f"Each loader reads {SAMPLES} samples, and notes the ids and the random draws of every",
        "batch that the training program gets. Every run of that program is a process of its own,",
        "or one for each rank. A checker that knows nothing of loaders compares what was noted.",
        "Libraries are used as their documentation recommends, one file each in",
        "`benchmarks/exactness/drivers/`. What a library does not claim is measured, but not",
        "counted as wrong. For each loader of another library with cells that are wrong or hang,",
        "`benchmarks/exactness/wrong/` has a script without forebay that shows it. To check a",
        "loader of your own, see [`check_resume`](../tutorial/train.md).",
        "",
        *(f"- **{word}**: {meaning}." for word, meaning in WORDS.items()),
        "",
    )
    wrong = sum(cell.word == "wrong" for each in measured for cell in each.cells.values())
    hangs = sum(cell.word == "hangs" for each in measured for cell in each.cells.values())
    run = [each for each in measured if not each.missing]
    good = all(cell.word in ("exact", "-") for each in ours for cell in each.cells.values())
    yield from (
        f"{len(run)} loaders, {len(HISTORIES)} histories: {wrong} cells wrong, {hangs} hanging."
        + (f" forebay's {len(ours)} rows are exact or have no such thing." if good else ""),
        "",
    )
    for group, histories in groups(HISTORIES).items():
        yield from (f"## {group}", "")
        yield from _table(("", *(each.title for each in histories)), cell_rows(measured, histories))
        yield from (f"- **{each.title}**: {MEANINGS[each.name]}." for each in histories)
        yield ""
    yield from ("## What was seen", "", "Behind each cell that is not exact:", "")
    columns = ("", "history", "cell", "what was seen, or why there is no such thing")
    yield from _table(columns, seen_rows(measured, HISTORIES))
    yield from ("## What was compared", "")
    yield from _table(("", "versions", "measured on", "what it promises"), compared_rows(measured))
    for machine in dict.fromkeys(each.machine for each in run):
        yield from (f"Machine: {machine}.", "")
    yield from (
        "## Measure it again",
        "",
        "Install what is to be compared beside forebay; what is missing is named in the table.",
        "",
        "```bash",
        "python -m benchmarks exactness                    # all loaders: up to an hour",
        "python -m benchmarks exactness --quick            # fewer cuts",
        "python -m benchmarks exactness --loaders stateful # one driver, by the name of its file",
        "python -m benchmarks exactness --page             # and write this page",
        "```",
        "",
    )


def _table(columns: tuple[str, ...], rows: Rows) -> Iterator[str]:
    yield from ("| " + " | ".join(row) + " |" for row in [columns, ("---",) * len(columns), *rows])
    yield ""


def _link(docs: str) -> str:
    """Return a link, from the page's folder if it is to a file of this repository."""
    if not docs:
        return ""
    if docs.startswith("docs/"):
        return f"[its page](../{docs.removeprefix('docs/')})"
    return f"[its documentation]({docs})"


def write() -> None:
    """Write the page from the stored results."""
    PAGE.write_text(page(stored()), encoding="utf-8")


if __name__ == "__main__":
    print(f"written: {Path(PAGE)}")
    write()
