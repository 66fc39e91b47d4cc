"""Reports as HTML files: one template, `page.html`, filled from one JSON, which the file holds.

    loader, run ── JSON ── write_report ──> file, which holds the JSON as well

The JSON has a title, a verdict, figures, and sections of parts: text, tables and bars, each with
the arguments of the function that draws it. A page loads nothing and runs no script: its security
policy forbids both. Every string is escaped here.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from forebay.base.files import atomic_file, open_regular
from forebay.errors import OptionError

# How every report begins: by this a file is known to be one.
MARKER = "<!doctype html><!-- forebay report -->"
REPORT_FORMAT = 1

# A part of a section: the name of what draws it, and its arguments.
Part = tuple[str, dict[str, Any]]
Section = tuple[str, list[Part]]

# ---- page ----------------------------------------------------------------------------------------


class Html(str):
    """Markup. Any other string is escaped where it becomes a part of it."""

    __slots__ = ()


def element(name: str, *inside: str, **attributes: object) -> Html:
    """Return an element; `class_` and `aria_label` are the attributes "class" and "aria-label"."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
    )
    body = "".join(each if isinstance(each, Html) else escape(each) for each in inside)
    return Html(f"<{name}{named}>{body}</{name}>")


def page_of(report: Mapping[str, Any]) -> str:
    """Return a report as HTML."""
    head, rest = first_sentence(report.get("verdict", ""))
    verdict = [element("h2", head), _text(rest)] if head else []
    tiles = [
        element("div", element("strong", value), element("span", name))
        for value, name in report.get("figures", ())
    ]
    sections = [
        element("section", *verdict, class_="verdict") if head else "",
        element("section", *tiles, class_="tiles") if tiles else "",
        *(
            _section(title, *(_PARTS[kind](**known) for kind, known in parts))
            for title, parts in report["sections"]
        ),
        *(_facts(name, report.get(name, {})) for name in ("settings", "environment")),
    ]
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=escape(report["title"]),
        subtitle=escape(report["subtitle"]),
        sections="\n".join(filter(None, sections)),
        data=embedded(report),
    )


def embedded(data: Mapping[str, Any]) -> str:
    """Return data as JSON that cannot end the element around it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII only
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def first_sentence(text: str) -> tuple[str, str]:
    """Split a text behind its first sentence, which ends with ". ", or with its first line."""
    line, _, below = text.strip().partition("\n")
    head, full_stop, rest = line.partition(". ")
    return head + full_stop.strip(), f"{rest}\n{below}".strip()


def _section(title: str, *parts: str) -> str:
    return element("section", element("h2", title), *parts) if any(parts) else ""


def _facts(title: str, named: Mapping[str, str]) -> str:
    """Return a section of names and values."""
    pairs = ((element("dt", name), element("dd", value)) for name, value in named.items())
    facts = element("dl", *(element("div", *each) for each in pairs))
    return _section(title.capitalize(), facts if named else "")


def _text(text: str) -> Html:
    return element("p", text) if text else Html()


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], code: Sequence[int] = ()) -> Html:
    """Return a table; the cells of some columns are shown as code."""

    def shown(column: int, cell: str) -> Html:
        return element("td", element("code", cell) if cell and column in code else cell)

    head = element("tr", *(element("th", name) for name in names))
    body = (element("tr", *(shown(*each) for each in enumerate(row))) for row in rows)
    table = element("table", element("thead", head), element("tbody", *body))
    return element("div", table, class_="scroll")


def _bars(title: str, bars: Sequence[tuple[str, int, str]], note: str = "") -> Html:
    """Return horizontal bars, each with a label, a number and a style."""
    most, rows = max(count for _, count, _ in bars) or 1, []
    for label, count, style in bars:
        width = max(100 * count / most, 0.4 if count else 0)
        bar, name = (
            element("i", class_=style, style=f"width:{width:.1f}%"),
            element("th", label, scope="row"),
        )
        rows.append(element("tr", name, element("td", bar), element("td", f"{count:,}")))
    return _figure([title], filter(None, [note]), element("table", *rows, class_="bars"))


# What draws each kind of part.
_PARTS: dict[str, Callable[..., Html]] = {
    "text": _text,
    "table": _table,
    "bars": _bars,
}


def _figure(title: Sequence[str], legend: Iterable[str], *body: Html) -> Html:
    below = [element("div", *keys, class_="legend")] if (keys := [*legend]) else []
    return element("figure", element("figcaption", *title), *below, *body)


# ---- files ---------------------------------------------------------------------------------------


def write_report(report: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a report, replacing an earlier one."""
    html, target = page_of(report), Path(os.path.realpath(path))
    if target.exists() and not _is_report_or_empty(target):
        raise OptionError(
            f"{os.fspath(path)!r} exists and is not a report made by forebay\n"
            "  Nothing was written, and it was left as it is. Name another file, or remove it."
        )
    if not target.parent.is_dir():
        reason = "the folder of the report does not exist"
        raise FileNotFoundError(errno.ENOENT, reason, str(target.parent))
    with atomic_file(target, is_ours=False) as file:
        # A name or a message may hold bytes that are not UTF-8, as lone surrogates.
        file.write(html.encode(errors="backslashreplace"))
    return target


def _is_report_or_empty(target: Path) -> bool:
    try:
        with open_regular(target) as file:
            return file.read(len(MARKER)) in (b"", MARKER.encode())
    except OSError:
        return False
