"""Charts as inline SVG: columns over time, lanes and bars, without text in the SVG.

Each chart is a string of HTML. The SVG is stretched to the width of the page, so labels are HTML
beside it and keep their size on a phone. Colours come from the style sheet of `html_page.py`, by
class. Values are columns of equal width; None leaves a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from forebay.base.formatting import duration, short_number

# Units of the drawing, before it is stretched.
WIDTH, HEIGHT = 1000, 100

Column = float | None


class Series(NamedTuple):
    """One set of columns in a chart.

    Attributes:
        kind: "line", "area" (filled from 0), or "band" (filled from `low`).
    """

    name: str
    style: str
    values: Sequence[Column]
    kind: str = "line"
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
    """Return a chart of columns over time.

    Args:
        times: Labels of the time axis: position from 0 to 1, and text.
        events: Vertical lines, at positions from 0 to 1.
    """
    top = ceiling(limit)
    drawn = [_grid(top)]
    drawn += [_drawn(each, top) for each in series]
    drawn += [_rule(each.value, top) for each in marks if each.value <= top]
    drawn += [_vertical(at) for at in events]
    labels = [(value / top, short_number(value)) for value in (0.0, top / 2, top)]
    noted = [(each.value / top, each.label) for each in marks if each.value <= top]
    legend = "".join(
        f'<span class="key"><i class="{each.style} {each.kind}"></i>{escape(each.name)}</span>'
        for each in series
    )
    return _figure(
        f"{escape(title)} <small>{escape(unit)}</small>",
        legend,
        _plot(title, "".join(drawn), labels, noted) + _time_labels(times),
    )


def lanes_chart(
    title: str,
    lanes: Sequence[tuple[str, Sequence[Column], str]],
    times: Sequence[tuple[float, str]],
) -> str:
    """Return a chart with one lane for each worker.

    Args:
        lanes: Label, columns from 0 to 1, and a note at the right end, for each lane.
    """
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
    """Return labels for a time axis from 0 to so many seconds, about five of them."""
    if seconds <= 0:
        return [(0.0, "0 s")]
    sizes = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400)
    wanted = seconds / 5
    days = 86400.0 * math.ceil(wanted / 86400)
    step = seconds / 2 if seconds < 3 else next((each for each in sizes if each >= wanted), days)
    count = int(seconds / step + 1e-9)
    return [(number * step / seconds, duration(number * step)) for number in range(count + 1)]


# ---- shapes ------------------------------------------------------------------------------------


def _drawn(series: Series, top: float) -> str:
    values = [_y(value, top) for value in series.values]
    if series.kind == "line":
        return f'<path class="{series.style} line" d="{_edge(values)}"/>'
    low = [_y(value, top) for value in series.low] or [float(HEIGHT)] * len(values)
    return f'<path class="{series.style} area" d="{_filled(values, low)}"/>'


def _y(value: Column, top: float) -> float | None:
    return None if value is None else round(HEIGHT * (1 - min(max(value / top, 0.0), 1.0)), 1)


def _runs(values: Sequence[float | None]) -> list[tuple[int, int]]:
    """Return begin and end of each stretch of columns without a gap."""
    runs, begin = [], None
    for index, value in enumerate([*values, None]):
        if value is not None and begin is None:
            begin = index
        elif value is None and begin is not None:
            runs.append((begin, index))
            begin = None
    return runs


def _steps(values: Sequence[float | None], indices: Sequence[int]) -> str:
    """Return the rest of a path along columns, whose first point is drawn."""
    width, parts = WIDTH / max(len(values), 1), []
    backwards = len(indices) > 1 and indices[0] > indices[1]
    last: float | None = values[indices[0]]
    pending = 0.0
    for index in indices:
        if values[index] != last:
            parts.append(f"h{_number(pending)}V{_number(values[index])}")
            last, pending = values[index], 0.0
        pending += -width if backwards else width
    return "".join([*parts, f"h{_number(pending)}"])


def _edge(values: Sequence[float | None]) -> str:
    width = WIDTH / max(len(values), 1)
    return "".join(
        f"M{_number(begin * width)} {_number(values[begin])}{_steps(values, range(begin, end))}"
        for begin, end in _runs(values)
    )


def _filled(high: Sequence[float | None], low: Sequence[float | None]) -> str:
    width, parts = WIDTH / max(len(high), 1), []
    for begin, end in _runs(high):
        parts.append(f"M{_number(begin * width)} {_number(high[begin])}")
        parts.append(_steps(high, range(begin, end)))
        back = [HEIGHT if each is None else each for each in low]
        parts.append(f"V{_number(back[end - 1])}")
        parts.append(_steps(back, range(end - 1, begin - 1, -1)) if end - begin > 1 else "")
        parts.append("Z")
    return "".join(parts)


def _number(value: float | None) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _grid(top: float) -> str:
    return "".join(
        f'<path class="grid" d="M0 {_y(value, top)}h{WIDTH}"/>' for value in (0.0, top / 2, top)
    )


def _rule(value: float, top: float) -> str:
    return f'<path class="mark" d="M0 {_y(value, top)}h{WIDTH}"/>'


def _vertical(at: float) -> str:
    return f'<path class="event" d="M{_number(WIDTH * min(max(at, 0.0), 1.0))} 0v{HEIGHT}"/>'


# ---- what surrounds them -----------------------------------------------------------------------


def _svg(name: str, drawn: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name)}">{drawn}</svg>'
    )


def _plot(
    name: str,
    drawn: str,
    labels: Sequence[tuple[float, str]],
    noted: Sequence[tuple[float, str]],
) -> str:
    left = "".join(f'<span style="bottom:{100 * at:.1f}%">{text}</span>' for at, text in labels)
    inside = "".join(
        f'<span class="note" style="bottom:{100 * at:.1f}%">{escape(text)}</span>'
        for at, text in noted
    )
    return f'<div class="plot"><div class="y">{left}</div>{_svg(name, drawn)}{inside}</div>'


def _time_labels(times: Sequence[tuple[float, str]]) -> str:
    spans = "".join(
        f'<span style="left:{100 * at:.1f}%">{escape(text)}</span>' for at, text in times
    )
    return f'<div class="x"><div>{spans}</div></div>'


def _figure(title: str, legend: str, body: str) -> str:
    below = f'<div class="legend">{legend}</div>' if legend else ""
    return f"<figure><figcaption>{title}</figcaption>{below}{body}</figure>"
