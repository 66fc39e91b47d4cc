"""Reports as HTML files: one template, `page.html`, filled from one JSON, which the file holds.

    loader, run, comparison ── JSON ── write_report ──> file ── read_report ──> JSON

The JSON has a title, a verdict, figures, and sections of parts: text, tables and charts, each with
the arguments of the function that draws it. A page loads nothing and runs no script: its security
policy forbids both. Every string is escaped here, and what is read is untrusted data.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from string import Template
from typing import Any

from forebay.base.files import atomic_file, open_regular, read_regular
from forebay.base.formatting import duration, short_number
from forebay.errors import InputError, OptionError

# How every report begins: by this a file is known to be one.
MARKER = "<!doctype html><!-- forebay report -->"
# What encloses the JSON.
DATA_BEGIN = '<script type="application/json" id="forebay-data">'
DATA_END = "</script>"
REPORT_FORMAT = 1
# forebay's own reports stay below 300 KB.
MAX_REPORT_BYTES = 4_000_000

# A part of a section: the name of what draws it, and its arguments.
Part = tuple[str, dict[str, Any]]
Section = tuple[str, list[Part]]
# Name, style, kind and values: "line", "area" is filled from 0, and "band" from further values.
Series = tuple[Any, ...]

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


# ---- charts --------------------------------------------------------------------------------------
# Inline SVG without text, stretched to the width of the page: labels are HTML beside it, and keep
# their size on a phone. Colours come from the template, by class. Values are columns of equal
# width; None leaves a gap.

# Units of the drawing, before it is stretched.
_WIDTH, _HEIGHT = 1000, 100


def _columns(
    title: str,
    unit: str,
    seconds: float,
    limit: float,
    series: Sequence[Series],
    marks: Sequence[tuple[float, str]] = (),
    events: Sequence[float] = (),
) -> Html:
    """Return columns over time.

    Args:
        marks: Horizontal lines with a label, such as a limit.
        events: Vertical lines, at positions from 0 to 1.
    """
    top = ceiling(limit)
    levels, shown = (0.0, top / 2, top), [each for each in marks if each[0] <= top]
    drawn = [_stroke("grid", f"M0 {_y(value, top)}h{_WIDTH}") for value in levels]
    drawn += [_path(top, *each) for _, *each in series]
    drawn += [_stroke("mark", f"M0 {_y(value, top)}h{_WIDTH}") for value, _ in shown]
    drawn += [_stroke("event", f"M{_number(_WIDTH * min(at, 1.0))} 0v{_HEIGHT}") for at in events]
    left = (_label("bottom", value / top, short_number(value)) for value in levels)
    inside = (_label("bottom", value / top, label, class_="note") for value, label in shown)
    keys = [
        element("span", element("i", class_=f"{style} {kind}"), name, class_="key")
        for name, style, kind, *_ in series
    ]
    plot = element(
        "div", element("div", *left, class_="y"), _svg(title, *drawn), *inside, class_="plot"
    )
    return _figure([f"{title} ", element("small", unit)], keys, plot, _time_axis(seconds))


def _lanes(title: str, seconds: float, lanes: Mapping[str, Sequence[float]]) -> Html:
    """Return a chart of lanes, with columns from 0 to 1, and the mean of each at its end."""
    rows = []
    for label, values in lanes.items():
        mean = element("em", f"{sum(values) / len(values):.0%}")
        drawn = _svg(label, _path(1.0, "made", "area", values))
        rows.append(element("div", element("b", label), drawn, mean, class_="lane"))
    return _figure([title], [], element("div", *rows, class_="lanes"), _time_axis(seconds))


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
    "columns": _columns,
    "lanes": _lanes,
    "bars": _bars,
}


def ceiling(value: float) -> float:
    """Return the end of an axis that shows a value: 1, 2, 4, 5 or 8 times a power of ten."""
    if not value > 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 2, 4, 5, 8) if value <= step * power), 10 * power)


def time_ticks(seconds: float) -> list[tuple[float, str]]:
    """Return about five labels for a time axis from 0 to so many seconds."""
    if seconds <= 0:
        return [(0.0, "0 s")]
    sizes = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400)
    wanted = seconds / 5
    days = 86400.0 * math.ceil(wanted / 86400)
    step = seconds / 2 if seconds < 3 else next((each for each in sizes if each >= wanted), days)
    count = int(seconds / step + 1e-9)
    return [(number * step / seconds, duration(number * step)) for number in range(count + 1)]


def _figure(title: Sequence[str], legend: Iterable[str], *body: Html) -> Html:
    below = [element("div", *keys, class_="legend")] if (keys := [*legend]) else []
    return element("figure", element("figcaption", *title), *below, *body)


def _svg(name: str, *drawn: Html) -> Html:
    box = {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "preserveAspectRatio": "none"}
    return element("svg", *drawn, **box, role="img", aria_label=name)


def _stroke(style: str, path: str) -> Html:
    return element("path", class_=style, d=path)


def _path(
    top: float,
    style: str,
    kind: str,
    values: Sequence[float | None],
    low: Sequence[float | None] = (),
) -> Html:
    """Return what a chart shows of a series, with an axis that ends at `top`."""
    heights, width = [_y(value, top) for value in values], _WIDTH / max(len(values), 1)
    floor = [_y(value or 0.0, top) for value in low or [0.0] * len(values)]
    is_gap = [True, *(value is None for value in values), True]
    edges = [index for index, pair in enumerate(pairwise(is_gap)) if pair[0] != pair[1]]
    path, form = "", "line" if kind == "line" else "area"
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        path += f"M{_number(begin * width)} {_strokes(heights[begin:end], width)}"
        if form == "area":
            path += f"V{_strokes(reversed(floor[begin:end]), -width)}Z"
    return _stroke(f"{style} {form}", path)


def _y(value: float | None, top: float) -> float | None:
    return None if value is None else round(_HEIGHT * (1 - min(max(value / top, 0.0), 1.0)), 1)


def _strokes(values: Iterable[float | None], width: float) -> str:
    """Return a path along columns; equal neighbours are one stroke."""
    strokes = [(value, width * len(list(same))) for value, same in groupby(values)]
    return "V".join(f"{_number(value)}h{_number(length)}" for value, length in strokes)


def _number(value: float | None) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _label(side: str, at: float, text: str, **more: str) -> Html:
    return element("span", text, **more, style=f"{side}:{100 * at:.1f}%")


def _time_axis(seconds: float) -> Html:
    labels = (_label("left", *each) for each in time_ticks(seconds))
    return element("div", element("div", *labels), class_="x")


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


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON in a report. Nothing in the file is executed."""
    try:
        content = read_regular(path, MAX_REPORT_BYTES)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EFBIG):
            raise
        raise _unusable(path, str(error.strerror)) from None
    text = content.decode("utf-8", "replace")
    begin = text.rfind(DATA_BEGIN)
    end = text.find(DATA_END, begin)
    if not text.startswith(MARKER) or begin < 0 or end < 0:
        raise _unusable(path, "it has no data of a report")
    try:
        report = json.loads(text[begin + len(DATA_BEGIN) : end])
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"its data is damaged ({type(error).__name__})") from None
    if not isinstance(report, dict) or report.get("format") != REPORT_FORMAT:
        raise _unusable(path, "its data has another format; it may be from a later forebay")
    return report


def _is_report_or_empty(target: Path) -> bool:
    try:
        with open_regular(target) as file:
            return file.read(len(MARKER)) in (b"", MARKER.encode())
    except OSError:
        return False


def _unusable(path: str | os.PathLike[str], reason: str) -> InputError:
    return InputError(
        f"{os.fspath(path)!r} cannot be used as a report: {reason}\n"
        "  Name a file written by loader.report() or by the report.save() of a run."
    )
