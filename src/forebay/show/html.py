"""HTML: charts, the page around them, files of reports, and what differs between two of these.

Every string is escaped here.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from forebay.base.files import atomic_file, open_regular, read_regular
from forebay.base.formatting import duration, short_number
from forebay.errors import InputError, OptionError, one_line
from forebay.observe.figures import MAX_TEXT, checked_number, checked_text, figures_of, percent

# ---- html page -----------------------------------------------------------------------------------
# The page around the charts: one self-contained HTML file, with its data as JSON inside. It loads
# nothing and runs no script: its security policy forbids both.

# How every report begins: by this a file is known to be one.
MARKER = "<!doctype html><!-- forebay report -->"
# What encloses the data.
DATA_BEGIN = '<script type="application/json" id="forebay-data">'
DATA_END = "</script>"

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(title: str, subtitle: str, sections: Sequence[str], data: Mapping[str, Any]) -> str:
    """Return a report as HTML."""
    return "\n".join(
        [
            f'{MARKER}<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>",
            f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>",
            *filter(None, sections),
            f"</main>{DATA_BEGIN}{embedded(data)}{DATA_END}</body></html>\n",
        ]
    )


def embedded(data: Mapping[str, Any]) -> str:
    """Return data as JSON that cannot end the element around it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII only
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def verdict_box(verdict: str) -> str:
    """Return the verdict, its first sentence as a heading; "" without one."""
    if not verdict:
        return ""
    head, rest = first_sentence(verdict)
    body = f"<p>{escape(rest)}</p>" if rest else ""
    return f'<section class="verdict"><h2>{escape(head)}</h2>{body}</section>'


def first_sentence(text: str) -> tuple[str, str]:
    """Split a text behind its first sentence, which ends with ". ", or with its first line."""
    line, _, below = text.strip().partition("\n")
    head, full_stop, rest = line.partition(". ")
    return head + full_stop.strip(), f"{rest}\n{below}".strip()


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Return the most important numbers, each with what it is."""
    boxes = "".join(
        f"<div><strong>{escape(value)}</strong><span>{escape(name)}</span></div>"
        for name, value in figures
    )
    return f'<section class="tiles">{boxes}</section>'


def section(title: str, *bodies: str) -> str:
    """Return a section; "" if there is nothing in it."""
    inside = "".join(bodies)
    return f"<section><h2>{escape(title)}</h2>{inside}</section>" if inside else ""


def paragraph(text: str) -> str:
    """Return a paragraph."""
    return f"<p>{escape(text)}</p>"


def table(names: Sequence[str], rows: Sequence[Sequence[object]], code: Sequence[int] = ()) -> str:
    """Return a table; "" without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = ""
    for row in rows:
        cells = [escape(str(cell)) for cell in row]
        for column in code:
            cells[column] = f"<code>{cells[column]}</code>" if cells[column] else ""
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    table_html = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table_html}</div>'


def facts(named: Mapping[str, object]) -> str:
    """Return names and values, as a list."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in named.items()
    )
    return f"<dl>{items}</dl>" if items else ""


_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1b1f24;--soft:#5d6672;
--line:#dfe3e8;--made:#2a6fdb;--wanted:#1b1f24;--wait:#d6453d;--ready:#1f9d72;--other:#8a63d2;
--tint:#eaf1fd}
@media(prefers-color-scheme:dark){:root{--page:#14171b;--card:#1d2126;--text:#e8eaed;
--soft:#9aa3ae;--line:#343a42;--made:#6ea8fe;--wanted:#e8eaed;--wait:#ff7b72;--ready:#4cc38a;
--other:#b794f6;--tint:#1d2b42}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:960px;margin:0 auto;padding:24px 16px 48px}
header{margin:0 4px 16px}
h1{font-size:1.45rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
header p{margin:4px 0 0;color:var(--soft);overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:0 0 8px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:16px;margin:0 0 16px}
section p{margin:0 0 8px;max-width:70ch;overflow-wrap:anywhere;white-space:pre-line}
.verdict{border-left:5px solid var(--made);background:var(--tint)}
.verdict h2{font-size:1.25rem;line-height:1.35;margin:0}
.verdict p{margin:8px 0 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:12px 16px}
.tiles div{display:flex;flex-direction:column}
.tiles strong{font-size:1.3rem;line-height:1.3;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:.85rem}
figure{margin:0 0 20px}
figure:last-child{margin:0}
figcaption{font-weight:600}
figcaption small{font-weight:400;color:var(--soft)}
.legend{color:var(--soft);font-size:.85rem;margin:2px 0}
.key{margin-right:14px;white-space:nowrap;display:inline-block}
.key i{display:inline-block;width:16px;height:10px;margin-right:5px;border-radius:2px}
.key i.line{height:0;border-top:2px solid currentColor;border-radius:0;vertical-align:3px;
background:none!important}
svg{display:block;width:100%;overflow:visible}
.plot{position:relative;margin:10px 0 0 52px}
.plot svg{height:140px}
.y span{position:absolute;right:calc(100% + 6px);transform:translateY(50%);
color:var(--soft);font-size:.75rem;white-space:nowrap;font-variant-numeric:tabular-nums}
.note{position:absolute;right:2px;color:var(--soft);font-size:.75rem;
background:var(--card);padding:0 3px;transform:translateY(50%)}
.x{margin:4px 0 0 52px;height:1.2em;color:var(--soft);font-size:.75rem}
.x div{position:relative}
.x span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.x span:first-child{transform:none}
.x span[style="left:100.0%"]{transform:translateX(-100%)}
path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--line);stroke-width:1}
.mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}
.event{stroke:var(--other);stroke-width:1.5;stroke-dasharray:3 3}
path.line{stroke-width:1.75}
path.made.line{stroke:var(--made)}path.wanted.line{stroke:var(--wanted);stroke-dasharray:5 4}
path.ready.line{stroke:var(--ready)}
path.made.area{fill:var(--made);fill-opacity:.75}path.wait.area{fill:var(--wait);fill-opacity:.8}
path.ready.area{fill:var(--ready);fill-opacity:.35}path.taken.area{fill:var(--made);fill-opacity:.18}
path.other.area{fill:var(--other);fill-opacity:.35}
i.made{background:var(--made);color:var(--made)}
i.taken{background:var(--made);opacity:.3}
i.wanted{color:var(--wanted)}.key i.wanted.line{border-top-style:dashed}
i.wait{background:var(--wait)}i.ready{background:var(--ready);color:var(--ready);opacity:.75}
i.other{background:var(--other);color:var(--other)}
.lanes{margin-top:8px}
.lane{display:grid;grid-template-columns:46px 1fr 40px;gap:6px;align-items:center;margin:0 0 3px}
.lane b{font-weight:400;font-size:.75rem;color:var(--soft);text-align:right;white-space:nowrap}
.lane em{font-style:normal;font-size:.75rem;color:var(--soft);text-align:right}
.lane svg{height:18px;background:var(--page);border-radius:3px;overflow:hidden}
.lanes+.x{margin-right:46px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto;margin:0 0 8px}
th{font-weight:600;text-align:left;color:var(--soft);font-size:.85rem}
td,th{padding:4px 12px 4px 0;vertical-align:top}
tbody tr{border-top:1px solid var(--line)}
td{overflow-wrap:anywhere}td:first-child{white-space:nowrap}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
overflow-wrap:anywhere;white-space:pre-line}
.bars th{font-weight:400;white-space:nowrap;width:1%;text-align:right}
.bars td{padding:2px 8px 2px 0;vertical-align:middle}
.bars tr{border:0}
.bars td:last-child{width:1%;text-align:right;padding:0;white-space:nowrap;overflow-wrap:normal}
.bars i{display:block;height:14px;border-radius:2px}
dl{margin:0;display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:8px 16px}
dt{color:var(--soft);font-size:.85rem}
dd{margin:0;overflow-wrap:anywhere}
@media(max-width:520px){main{padding:12px 8px 32px}section{padding:12px}.plot svg{height:110px}
.plot,.x{margin-left:40px}h1{font-size:1.2rem}.lane{grid-template-columns:34px 1fr 36px}}
@media print{body{background:#fff}section{break-inside:avoid}}
""".strip().replace("\n", "")

# ---- report file ---------------------------------------------------------------------------------
# Reports on disk: written through a temporary file, and read as untrusted data.

# forebay's own reports stay below 300 KB.
MAX_BYTES = 4_000_000


def write_report(html: str, path: str | os.PathLike[str]) -> Path:
    """Write a report, replacing an earlier one."""
    target = Path(os.path.realpath(path))
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
    """Return the summary in a report. Nothing in the file is executed."""
    try:
        content = read_regular(path, MAX_BYTES)
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
        summary = json.loads(text[begin + len(DATA_BEGIN) : end])
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"its data is damaged ({type(error).__name__})") from None
    if not isinstance(summary, dict) or summary.get("format") != 1:
        raise _unusable(path, "its data has another format; it may be from a later forebay")
    return summary


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


# ---- charts --------------------------------------------------------------------------------------
# Charts as inline SVG: columns over time, lanes and bars, without text in the SVG.
#
# Each chart is a string of HTML. The SVG is stretched to the width of the page, so labels are HTML
# beside it and keep their size on a phone. Colours come from the style sheet above, by class.
# Values are columns of equal width; None leaves a gap.

# Units of the drawing, before it is stretched.
WIDTH, HEIGHT = 1000, 100

Column = float | None


class Series(NamedTuple):
    """One set of columns in a chart."""

    name: str
    style: str
    values: Sequence[Column]
    kind: str = "line"  # "area" is filled from 0, "band" from `low`
    low: Sequence[Column] = ()


class Mark(NamedTuple):
    """A horizontal line with a label, such as a limit."""

    value: float
    label: str


def columns_chart(
    title: str,
    series: Sequence[Series],
    times: Sequence[tuple[float, str]],
    *,
    unit: str,
    limit: float,
    marks: Sequence[Mark] = (),
    events: Sequence[float] = (),
) -> str:
    """Return a chart of columns over time; `times` and `events` are at positions from 0 to 1."""
    top = ceiling(limit)
    levels, shown = (0.0, top / 2, top), [each for each in marks if each.value <= top]
    drawn = [_level("grid", value, top) for value in levels]
    drawn += [_drawn(each, top) for each in series]
    drawn += [_level("mark", each.value, top) for each in shown]
    drawn += [
        f'<path class="event" d="M{_number(WIDTH * min(at, 1.0))} 0v{HEIGHT}"/>' for at in events
    ]
    left = "".join(_label("bottom", value / top, short_number(value)) for value in levels)
    inside = "".join(_label("bottom", each.value / top, each.label, "note") for each in shown)
    plot = f'<div class="y">{left}</div>{_svg(title, "".join(drawn))}{inside}'
    legend = "".join(
        f'<span class="key"><i class="{each.style} {each.kind}"></i>{escape(each.name)}</span>'
        for each in series
    )
    return _figure(
        f"{escape(title)} <small>{escape(unit)}</small>",
        legend,
        f'<div class="plot">{plot}</div>{_time_labels(times)}',
    )


def lanes_chart(
    title: str,
    lanes: Sequence[tuple[str, Sequence[Column], str]],
    times: Sequence[tuple[float, str]],
) -> str:
    """Return a chart of lanes: each has a label, columns from 0 to 1, and a note at the end."""
    rows = "".join(
        f'<div class="lane"><b>{escape(label)}</b>'
        f"{_svg(label, _drawn(Series('', 'made', values, 'area'), 1.0))}"
        f"<em>{escape(note)}</em></div>"
        for label, values, note in lanes
    )
    return _figure(escape(title), "", f'<div class="lanes">{rows}</div>{_time_labels(times)}')


def bars_chart(title: str, bars: Sequence[tuple[str, int, str]], note: str = "") -> str:
    """Return horizontal bars, one for each label."""
    most = max((count for _, count, _ in bars), default=0) or 1
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        f'<td><i class="{style}" style="width:{max(100 * count / most, 0.4 if count else 0):.1f}%">'
        f"</i></td><td>{count:,}</td></tr>"
        for label, count, style in bars
    )
    return _figure(escape(title), escape(note), f'<table class="bars">{rows}</table>')


def histogram_bars(bins: Sequence[int], style: str) -> list[tuple[str, int, str]]:
    """Return the bars of a histogram of durations, from the first bin in use to the last."""
    used = [index for index, count in enumerate(bins) if count]
    if not used:
        return []
    first, last = used[0], used[-1]
    # Bins of factors of four keep it short where durations differ by orders of magnitude.
    width = 1 if last - first < 12 else 2
    bars = []
    for index in range(first, last + 1, width):
        edges = (2 ** (each - 1) * 1e-6 if each else 0.0 for each in (index, index + width))
        low, high = (duration(each, digits=2) for each in edges)
        bars.append((f"{low} to {high}", sum(bins[index : index + width]), style))
    return bars


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


def _drawn(series: Series, top: float) -> str:
    values, width = [_y(value, top) for value in series.values], WIDTH / max(len(series.values), 1)
    low = [_y(value or 0.0, top) for value in series.low or [0.0] * len(values)]
    is_gap = [True, *(value is None for value in values), True]
    edges = [index for index, pair in enumerate(pairwise(is_gap)) if pair[0] != pair[1]]
    path, kind = "", "line" if series.kind == "line" else "area"
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        path += f"M{_number(begin * width)} {_strokes(values[begin:end], width)}"
        if kind == "area":
            path += f"V{_strokes(reversed(low[begin:end]), -width)}Z"
    return f'<path class="{series.style} {kind}" d="{path}"/>'


def _y(value: Column, top: float) -> float | None:
    return None if value is None else round(HEIGHT * (1 - min(max(value / top, 0.0), 1.0)), 1)


def _strokes(values: Iterable[float | None], width: float) -> str:
    """Return a path along columns; equal neighbours are one stroke."""
    strokes = [(value, width * len(list(same))) for value, same in groupby(values)]
    return "V".join(f"{_number(value)}h{_number(length)}" for value, length in strokes)


def _number(value: float | None) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _level(style: str, value: float, top: float) -> str:
    return f'<path class="{style}" d="M0 {_y(value, top)}h{WIDTH}"/>'


def _svg(name: str, drawn: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name)}">{drawn}</svg>'
    )


def _label(side: str, at: float, text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<span{kind} style="{side}:{100 * at:.1f}%">{escape(text)}</span>'


def _time_labels(times: Sequence[tuple[float, str]]) -> str:
    return f'<div class="x"><div>{"".join(_label("left", *each) for each in times)}</div></div>'


def _figure(title: str, legend: str, body: str) -> str:
    below = f'<div class="legend">{legend}</div>' if legend else ""
    return f"<figure><figcaption>{title}</figcaption>{below}{body}</figure>"


# ---- comparison ----------------------------------------------------------------------------------
# `forebay.compare`: what differs between two reports.
#
# The files may come from anybody: their data is read, never executed, and every value is checked.

MAX_SETTINGS = 100
# A ratio closer to 1 does not count as a difference: rates vary as much from run to run.
LEAST_CHANGE = 0.02


class Difference(NamedTuple):
    """One thing that differs: its values in the first report and in the second."""

    name: str
    first: str
    second: str
    change: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """What differs between two reports; its `str` says it line by line.

    Attributes:
        first: Title of the first report.
        second: Title of the second.
        verdicts: The verdict of each; "" where there is none.
        figures: Rates, waits and counts that differ.
        settings: Arguments that differ.
        environment: Versions and machines that differ.
    """

    first: str
    second: str
    verdicts: tuple[str, str]
    figures: tuple[Difference, ...]
    settings: tuple[Difference, ...]
    environment: tuple[Difference, ...]

    def __str__(self) -> str:
        """Return the differences, one a line."""
        lines = [f"first   {self.first}", f"second  {self.second}"]
        for name, found in self._parts().items():
            if not found:
                lines.append(f"{name}: no difference")
                continue
            lines.append(name)
            width = max(len(each.name) for each in found)
            for each in found:
                change = f" ({each.change})" if each.change else ""
                values = f"{each.first or 'none'} → {each.second or 'none'}"
                lines.append(f"  {each.name:<{width}}  {values}{change}")
        for name, verdict in zip(("first", "second"), self.verdicts, strict=True):
            if verdict:
                lines.append(f"verdict of the {name}: {verdict}")
        return "\n".join(lines)

    __repr__ = __str__

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison to a self-contained HTML file; see `DataLoader.report`."""
        names = ("", "first", "second", "change")
        rows = [("first", self.first, self.verdicts[0]), ("second", self.second, self.verdicts[1])]
        shown = 3 if any(self.verdicts) else 2
        titles = table(("", "report", "verdict")[:shown], [row[:shown] for row in rows])
        sections = [section("Reports", titles)]
        for name, found in self._parts().items():
            differences = table(names, found) or paragraph("No difference.")
            sections.append(section(name.capitalize(), differences))
        data = {"format": 1, "kind": "comparison", "first": self.first, "second": self.second}
        title = "What differs between two reports"
        return write_report(page(title, "forebay compare", sections, data), path)

    def _parts(self) -> dict[str, tuple[Difference, ...]]:
        names = ("figures", "settings", "environment")
        return {name: getattr(self, name) for name in names}


def compare(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Comparison:
    """Say what differs between two reports: rate, waits, settings, environment, verdict.

    Args:
        first: A file written by `loader.report()`, or by the `report.save()` of a run.
        second: Another of the same kind.

    Returns:
        The comparison, which prints as text and has `save(path)` for HTML.

    Raises:
        InputError: A file is not a report, or damaged.
        OptionError: One is of a loader and the other of a run.
        OSError: A file cannot be read.
    """
    one, two = read_report(first), read_report(second)
    kinds = [_kind(each) for each in (one, two)]
    if kinds[0] != kinds[1] or "comparison" in kinds:
        raise OptionError(
            f"{os.fspath(first)!r} is the report of a {kinds[0]} and {os.fspath(second)!r} that of "
            f"a {kinds[1]}\n  Nothing was compared. Name two reports of loaders, or two of runs."
        )
    return Comparison(
        first=_title(one, first),
        second=_title(two, second),
        verdicts=(checked_text(one.get("verdict")), checked_text(two.get("verdict"))),
        figures=tuple(_figures(one, two, kinds[0])),
        settings=tuple(_texts(_mapping(one, "settings"), _mapping(two, "settings"))),
        environment=tuple(_texts(_mapping(one, "environment"), _mapping(two, "environment"))),
    )


def _kind(summary: Mapping[str, Any]) -> str:
    kind = summary.get("kind")
    return str(kind) if kind in ("loader", "comparison") else "run"


def _title(summary: Mapping[str, Any], path: str | os.PathLike[str]) -> str:
    name = one_line(os.path.basename(os.fspath(path)), MAX_TEXT)
    return f"{name}: {checked_text(summary.get('title'))}"


def _figures(one: Mapping[str, Any], two: Mapping[str, Any], kind: str) -> list[Difference]:
    found, units = [], {checked_text(each.get("unit")) for each in (one, two)}
    unit = units.pop() if len(units) == 1 else ""
    totals = _mapping(one, "totals"), _mapping(two, "totals")
    for figure in figures_of(kind):
        before, after = (checked_number(each.get(figure.key)) for each in totals)
        if before is None or after is None or before == after:
            continue
        change = after / before - 1 if before else math.inf
        if abs(change) < LEAST_CHANGE:
            continue
        # The percentage of a percentage only confuses.
        said = f"{change:+.0%}" if before and figure.shown is not percent else ""
        name = figure.name(math.inf, unit or "input")
        found.append(Difference(name, figure.shown(before), figure.shown(after), said))
    return found


def _texts(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[Difference]:
    names = list(dict.fromkeys([*one, *two]))[:MAX_SETTINGS]
    found = [Difference(*map(checked_text, (name, one.get(name), two.get(name)))) for name in names]
    return [each for each in found if each.first != each.second]


def _mapping(summary: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = summary.get(name)
    return value if isinstance(value, dict) else {}
