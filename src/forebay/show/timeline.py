"""The spans of a record as charts: joined to columns, with long work spread over them. PURE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forebay.base.formatting import duration
from forebay.observe.record import BaseTrace
from forebay.show.html import Part, Series

# Columns of a chart.
MAX_COLUMNS = 160
# More workers than this share lanes.
_MAX_LANES = 32


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


def spread_back(seconds: Sequence[float], lengths: Sequence[float]) -> list[float]:
    """Move seconds that do not fit into a span of a length to the spans before it."""
    # Work is recorded in the span in which it ended, even 5 s in a span of 0.25 s.
    spread, excess = [0.0] * len(seconds), 0.0
    for index in range(len(seconds) - 1, -1, -1):
        excess += seconds[index]
        spread[index] = min(excess, lengths[index])
        excess -= spread[index]
    return spread


class Timeline:
    """The spans of a record, joined to the columns of a chart."""

    def __init__(self, record: BaseTrace, seconds: float) -> None:
        self.spans, span_s = list(record.spans), record.spans.seconds
        self._size = size = group_size(len(self.spans), MAX_COLUMNS)
        self._span_s = [span_s] * len(self.spans)
        if self.spans:
            self._span_s[-1] = min(max(seconds - (len(self.spans) - 1) * span_s, 0.0), span_s)
        self.lengths: list[float] = by_column(self._span_s, size)
        self.seconds = size * span_s * len(self.lengths)

    def of(self, name: str, one_of: Callable[..., Any] = sum) -> list[Any]:
        """Return the sums, or the least or highest values, of an attribute of the spans."""
        return by_column([getattr(span, name) for span in self.spans], self._size, one_of)

    def spent(self, *seconds: Sequence[float]) -> list[float]:
        """Return the sums of seconds by span that may have begun in spans before."""
        spread = [spread_back(each, self._span_s) for each in seconds]
        return by_column([sum(parts) for parts in zip(*spread, strict=True)], self._size)

    def per_second(
        self, counts: Sequence[float], left_out: Sequence[float] | None = None
    ) -> list[float | None]:
        """Return counts by column as rates, for the time without the seconds that are left out.

        None where that time is much shorter than a column, unless it is the only one.
        """
        least = 0.2 * self.seconds / len(self.lengths) if len(self.lengths) > 1 else 0.0
        pairs = zip(counts, self.lengths, left_out or [0.0] * len(counts), strict=True)
        times = [(count, length - out) for count, length, out in pairs]
        return [count / time if time > least else None for count, time in times]

    def chart(self, title: str, unit: str, limit: float, *series: Series, **more: Any) -> Part:
        """Return a chart of series."""
        known = {"title": title, "unit": unit, "seconds": self.seconds, "limit": limit}
        return "columns", {**known, "series": series, **more}

    def lanes(self) -> list[Part]:
        """Return a chart of the share of time for which workers were busy, if there are some."""
        ids = sorted({worker_id for span in self.spans for worker_id in span.busy_s})
        together, lanes = group_size(len(ids), _MAX_LANES), {}
        for sharing in (ids[start : start + together] for start in range(0, len(ids), together)):
            busy = self.spent(*([s.busy_s.get(each, 0.0) for s in self.spans] for each in sharing))
            label = f"{sharing[0]}" if len(sharing) == 1 else f"{sharing[0]}-{sharing[-1]}"
            lanes[label] = [
                round(total / (length * len(sharing)) if length else 0.0, 2)
                for total, length in zip(busy, self.lengths, strict=True)
            ]
        title = "Busy making batches: a gap is a worker without work"
        return (
            [("lanes", {"title": title, "seconds": self.seconds, "lanes": lanes})] if lanes else []
        )


def group_size(count: int, most: int) -> int:
    """Return how many neighbours to join so that at most `most` are left."""
    return max(-(-count // most), 1)


def by_column(values: Sequence[Any], size: int, one_of: Callable[..., Any] = sum) -> list[Any]:
    """Return the sum, or another, of each `size` values; None where all of them are."""
    groups = (values[start : start + size] for start in range(0, len(values), size))
    known = ([each for each in group if each is not None] for group in groups)
    return [one_of(group) if group else None for group in known]
