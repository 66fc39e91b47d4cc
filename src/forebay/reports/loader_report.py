"""The report of a loader: its summary as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.reports.charts import (
    Mark,
    Series,
    bars_chart,
    columns_chart,
    histogram_bars,
    lanes_chart,
    time_ticks,
)
from forebay.reports.html_page import facts, page, paragraph, section, table, tiles, verdict_box
from forebay.reports.timeline import per_second
from forebay.units import byte_size, byte_unit, duration, noun_for, short_number

# Wanted batches above this many times the highest other rate are cut off.
HEADROOM = 1.6
# Slow samples in the table; all of them are in the data.
SHOWN_SLOWEST = 10


def loader_html(summary: Mapping[str, Any]) -> str:
    """Return the report of a loader as HTML."""
    totals, timeline = summary["totals"], summary["timeline"]
    sections = [verdict_box(summary["verdict"]), _figures(totals)]
    if timeline["columns"]:
        times = _times(summary)
        sections += [
            section("Batches made and wanted", _rates(summary, times), _ready(summary, times)),
            section("Workers", _lanes(summary, times), _count(summary, times)),
        ]
    else:
        sections.append(section("Batches", paragraph("No batch was made yet.")))
    sections += [
        section("Waits", _waits(summary)),
        section("Slowest samples", _slowest(summary)),
        section("Settings", facts(summary["settings"])),
        section("Environment", facts(summary["environment"])),
    ]
    subtitle = (
        f"forebay loader · from {summary['began'][:16].replace('T', ' ')} UTC · "
        f"{duration(totals['seconds'])}"
    )
    return page(summary["title"], subtitle, sections, summary)


def _figures(totals: Mapping[str, Any]) -> str:
    figures = [
        ("batches/s", short_number(totals["rate"])),
        ("of the whole run training waited", f"{totals['wait_share']:.0%}"),
        ("batches taken", f"{totals['taken']:,}"),
        ("median wait", duration(totals["wait_p50_s"])),
        ("99% of waits are shorter", duration(totals["wait_p99_s"])),
        (noun_for(totals["num_workers"], "worker"), f"{totals['num_workers']:,}"),
    ]
    for name, singular in (("restarts", "restart"), ("failures", "skipped sample")):
        if totals[name]:
            figures.append((noun_for(totals[name], singular), f"{totals[name]:,}"))
    return tiles(figures)


def _times(summary: Mapping[str, Any]) -> list[tuple[float, str]]:
    timeline = summary["timeline"]
    return time_ticks(timeline["seconds"] * timeline["columns"])


def _rates(summary: Mapping[str, Any], times: list[tuple[float, str]]) -> str:
    """Return the chart of batches made, taken and wanted, each second."""
    timeline = summary["timeline"]
    made, taken = (per_second(timeline[name], timeline) for name in ("made", "taken"))
    unhindered = per_second(timeline["taken"], timeline, timeline["waited_s"])
    wanted = [each or None for each in unhindered]
    waits = per_second([100 * each for each in timeline["waited_s"]], timeline)
    known = sorted(each for each in [*made, *taken] if each is not None)
    limit = (known[-1] if known else 1.0) * HEADROOM
    seen = [each for each in wanted if each is not None]
    limit = min(limit, max([*seen, *known], default=limit))
    rates = columns_chart(
        "Batches per second",
        [
            Series("taken by training", "taken", taken, "area"),
            Series("made by workers", "made", made),
            Series("wanted: the rate of training while it did not wait", "wanted", wanted),
        ],
        times,
        unit="batches/s",
        limit=limit,
    )
    if not any(timeline["waited_s"]):
        return rates
    shares = [Series("training waits for a batch", "wait", waits, "area")]
    return rates + columns_chart(
        "Share of time that training waited", shares, times, unit="%", limit=100
    )


def _ready(summary: Mapping[str, Any], times: list[tuple[float, str]]) -> str:
    """Return the chart of batches between workers and trainer, by number and by bytes."""
    timeline, marks = summary["timeline"], summary["marks"]
    most = [each for each in timeline["most_ready"] if each is not None]
    if not most or not max(most):
        return ""
    limit, lines = max(most), []
    if (high := marks.get("max_batches")) is not None and high <= 4 * max(most):
        limit, lines = max(limit, high), [Mark(high, f"max_batches={high:,}")]
    band = Series(
        "fewest to most ready when training asked",
        "ready",
        timeline["most_ready"],
        "band",
        timeline["least_ready"],
    )
    fewest = Series("fewest", "ready", timeline["least_ready"])
    ready = columns_chart(
        "Batches ready, between workers and training",
        [band, fewest],
        times,
        unit="batches",
        limit=limit,
        marks=lines,
    )
    held = [each or 0.0 for each in timeline["held_bytes"]]
    if not max(held):
        return ready
    size = max(held)
    high = marks.get("max_bytes")
    lines = [] if high is None or high > 4 * size else [Mark(high, f"max_bytes={byte_size(high)}")]
    size = max(size, *(each.value for each in lines)) if lines else size
    unit, factor = byte_unit(size)
    scaled = Series("ready or in use", "ready", [each / factor for each in held], "area")
    lines = [Mark(each.value / factor, each.label) for each in lines]
    return ready + columns_chart(
        "Memory of these batches", [scaled], times, unit=unit, limit=size / factor, marks=lines
    )


def _lanes(summary: Mapping[str, Any], times: list[tuple[float, str]]) -> str:
    timeline = summary["timeline"]
    lanes = []
    for label, shares in timeline["workers"].items():
        known = [each for each in shares if each is not None]
        busy = sum(known) / len(known) if known else 0.0
        lanes.append((label, shares, f"{busy:.0%}"))
    if not lanes:
        return ""
    return lanes_chart("Busy making batches: a gap is a worker without work", lanes, times)


def _count(summary: Mapping[str, Any], times: list[tuple[float, str]]) -> str:
    """Return the number of workers over time, where it changed, and the decisions about it."""
    timeline, decisions = summary["timeline"], summary["decisions"]
    numbers = timeline["num_workers"]
    # A column before the workers started counts none.
    began = [each for each in numbers if each]
    shown = ""
    if len(set(began)) > 1:
        whole = timeline["seconds"] * timeline["columns"]
        shown = columns_chart(
            "Number of workers",
            [Series("workers", "other", numbers, "area")],
            times,
            unit="workers",
            limit=max(began),
            events=[at / whole for at, _ in decisions],
        )
    rows = [[duration(at), sentence] for at, sentence in decisions]
    return shown + table(["at", "decision"], rows)


def _waits(summary: Mapping[str, Any]) -> str:
    """Return the histogram of waits: by power of two, as many bars as are needed."""
    bins, without = summary["wait_bins"], summary["steps_without_wait"]
    if not without and not any(bins):
        return paragraph("No batch was taken yet.")
    bars = [("no wait", without, "ready"), *histogram_bars(bins, "wait")]
    note = f"Training waited for {sum(bins):,} of {without + sum(bins):,} batches."
    return bars_chart("How long training waited for a batch", bars, note)


def _slowest(summary: Mapping[str, Any]) -> str:
    if not summary["slowest"]:
        return ""
    rows = []
    for each in summary["slowest"][:SHOWN_SLOWEST]:
        call = f"loader.replay(epoch={each['epoch']}, batch={each['batch']})"
        row = [duration(each["seconds"]), each["index"]]
        rows.append(
            [*row, call if summary["replays"] else f"epoch {each['epoch']}, batch {each['batch']}"]
        )
    note = "" if summary["replays"] else paragraph("With a seed, loader.replay() rebuilds a batch.")
    last = "its batch again, for a debugger" if summary["replays"] else "batch"
    code = (1, 2) if summary["replays"] else (1,)
    return table(["time", "index", last], rows, code=code) + note
