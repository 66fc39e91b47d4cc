"""The reports of loaders and runs: plain records of what happened, and their HTML."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from operator import sub
from typing import Any

from forebay.base.formatting import byte_size, byte_unit, counted, duration
from forebay.base.process import usable_memory
from forebay.errors import shown_location, without_credentials
from forebay.failures import Failure, Group, grouped
from forebay.observe.figures import numbers_in, shown_figures
from forebay.observe.progress import Progress
from forebay.observe.record import Record, Span, Trace
from forebay.options import PreprocessOptions, whole_cores
from forebay.show.html import (
    Mark,
    Series,
    bars_chart,
    columns_chart,
    facts,
    histogram_bars,
    lanes_chart,
    page,
    paragraph,
    section,
    table,
    tiles,
    time_ticks,
    verdict_box,
)

# ---- timeline ------------------------------------------------------------------------------------
# Turn the spans of a record into columns of a chart: join them, and spread long work. PURE.

# Columns of a chart.
MAX_COLUMNS = 160


def group_size(count: int, most: int) -> int:
    """Return how many spans to join so that at most `most` columns are left."""
    return max(-(-count // most), 1)


def summed(values: Sequence[float], size: int) -> list[float]:
    """Return the sum of each `size` values; the last group may be smaller."""
    return [sum(group) for group in _groups(values, size)]


def joined(
    values: Sequence[float | None], size: int, one_of: Callable[..., Any] = max
) -> list[float | None]:
    """Return the highest, or another, of each `size` values; None where all of them are."""
    groups = _groups(values, size)
    return [one_of((each for each in group if each is not None), default=None) for group in groups]


def spread_back(seconds: Sequence[float], lengths: Sequence[float]) -> list[float]:
    """Move seconds that do not fit into a span of a length to the spans before it."""
    # Work is recorded in the span in which it ended, even 5 s in a span of 0.25 s.
    spread, excess = [0.0] * len(seconds), 0.0
    for index in range(len(seconds) - 1, -1, -1):
        excess += seconds[index]
        spread[index] = min(excess, lengths[index])
        excess -= spread[index]
    return spread


def per_second(
    counts: Sequence[float], timeline: Mapping[str, Any], left_out: Sequence[float] | None = None
) -> list[float | None]:
    """Return counts by column as rates, for the time without the seconds that are left out.

    None where that time is much shorter than a column, unless it is the only one.
    """
    seconds, columns = timeline["seconds"], timeline["columns"]
    least = 0.2 * seconds if columns > 1 else 0.0
    lengths = [seconds] * (columns - 1) + [timeline["last_seconds"]]
    times = map(sub, lengths, left_out or [0.0] * columns)
    pairs = zip(counts, times, strict=True)
    return [count / time if time > least else None for count, time in pairs]


def rounded(values: Sequence[float | None], digits: int = 4) -> list[float | None]:
    """Return the values with few significant digits, whole numbers as such: a file is smaller."""
    return [None if value is None else significant(value, digits) for value in values]


def significant(value: float, digits: int = 4) -> float:
    """Return a number with few significant digits."""
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() else number


def _groups(values: Sequence[float | None], size: int) -> Iterator[Sequence[Any]]:
    return (values[start : start + size] for start in range(0, len(values), size))


# ---- the page ------------------------------------------------------------------------------------
# A summary as HTML: what happened first, then the charts of a loader or of a run.

# Wanted batches above this many times the highest other rate are cut off.
HEADROOM = 1.6
# Slow samples in the table; all of them are in the data.
SHOWN_SLOWEST = 10


def report_html(summary: Mapping[str, Any]) -> str:
    """Return the report of a loader or a run as HTML."""
    is_loader, unit = summary["kind"] == "loader", summary.get("unit", "input")
    totals = summary["totals"]
    figures = [(name, value) for _, value, name in shown_figures(summary["kind"], totals, unit)]
    began = f"from {summary['began'][:16].replace('T', ' ')} UTC" if "began" in summary else ""
    took = duration(totals["seconds" if is_loader else "elapsed_s"])
    ended = took if is_loader else f"{counted(totals.get('ended', 0), unit)} in {took}"
    sections = [
        verdict_box(summary["verdict"]),
        tiles(figures),
        *(_loader_sections(summary) if is_loader else _run_sections(summary)),
        section("Settings", facts(summary.get("settings", {}))),
        section("Environment", facts(summary.get("environment", {}))),
    ]
    subtitle = " · ".join(filter(None, ["forebay" + " loader" * is_loader, began, ended]))
    return page(summary["title"], subtitle, sections, summary)


# ---- loader report -------------------------------------------------------------------------------


def _loader_sections(summary: Mapping[str, Any]) -> list[str]:
    sections = [section("Batches", paragraph("No batch was made yet."))]
    if summary["timeline"]["columns"]:
        times = _times(summary)
        sections = [
            section("Batches made and wanted", _rates(summary, times), _ready(summary, times)),
            section("Workers", _lanes(summary, times), _count(summary, times)),
        ]
    waits, slowest = _waits(summary), _slowest_samples(summary)
    return [*sections, section("Waits", waits), section("Slowest samples", slowest)]


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
    known = [each for each in [*made, *taken] if each is not None]
    limit = max(known, default=1.0) * HEADROOM
    limit = min(limit, max([*known, *filter(None, wanted)], default=limit))
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
    if high is None or high > 4 * size:
        high = 0.0
    size = max(size, high)
    unit, factor = byte_unit(size)
    lines = [Mark(high / factor, f"max_bytes={byte_size(high)}")] if high else []
    scaled = Series("ready or in use", "ready", [each / factor for each in held], "area")
    return ready + columns_chart(
        "Memory of these batches", [scaled], times, unit=unit, limit=size / factor, marks=lines
    )


def _lanes(summary: Mapping[str, Any], times: list[tuple[float, str]]) -> str:
    lanes = [
        (label, shares, f"{sum(shares) / len(shares):.0%}")
        for label, shares in summary["timeline"]["workers"].items()
    ]
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


def _slowest_samples(summary: Mapping[str, Any]) -> str:
    if not summary["slowest"]:
        return ""
    last, batch, note = "batch", "epoch {epoch}, batch {batch}", ""
    if summary["replays"]:
        last = "its batch again, for a debugger"
        batch = "loader.replay(epoch={epoch}, batch={batch})"
    else:
        note = paragraph("With a seed, loader.replay() rebuilds a batch.")
    rows = [
        [duration(each["seconds"]), each["index"], batch.format(**each)]
        for each in summary["slowest"][:SHOWN_SLOWEST]
    ]
    return table(["time", "index", last], rows, code=(1, 2) if summary["replays"] else (1,)) + note


# ---- summaries -----------------------------------------------------------------------------------
# What a report shows, as a plain record that is JSON-serializable.
#
# trace, settings ──> summary ──> JSON in the file
#                        └──────> HTML

FORMAT = 1
# More workers than this share lanes.
MAX_LANES = 32
MAX_TEXT = 200
MAX_DECISIONS = 50


def _summary(
    kind: str, title: str, verdict: str, totals: Mapping[str, Any], others: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": kind,
        **others,
        "title": cut(title, 1000),
        "verdict": cut(verdict, 4000),
        "totals": {
            name: value if isinstance(value, int) else significant(value, 6)
            for name, value in numbers_in(totals).items()
        },
    }


def _began(ago_s: float) -> str:
    return datetime.fromtimestamp(time.time() - ago_s, UTC).isoformat(timespec="seconds")


def loader_summary(
    trace: Trace,
    *,
    title: str,
    settings: Mapping[str, str],
    verdict: str,
    marks: Mapping[str, int | None],
    failures: int,
    replays: bool,
) -> dict[str, Any]:
    """Return the summary of a loader."""
    totals = {**trace.snapshot(), "failures": failures}
    others = {
        "began": _began(time.perf_counter() - trace.began_at),
        "marks": {name: value for name, value in marks.items() if value is not None},
        "timeline": _timeline(trace, totals["seconds"]),
        "wait_bins": list(trace.wait_bins),
        "steps_without_wait": max(trace.taken_count - sum(trace.wait_bins), 0),
        "epochs": [[number, significant(at - trace.began_at, 6)] for number, at in trace.epochs],
        "decisions": [
            [significant(max(at - trace.began_at, 0.0), 6), cut(sentence)]
            for at, sentence in list(trace.decisions)[-MAX_DECISIONS:]
        ],
        "slowest": [
            {
                "seconds": significant(each.seconds),
                "index": cut(_shown(each.index)),
                "epoch": each.epoch,
                "batch": each.batch,
            }
            for each in trace.slowest
        ],
        "replays": replays,
        "settings": {cut(name): cut(value, 1000) for name, value in settings.items()},
        "environment": environment(),
    }
    return _summary("loader", title, verdict, totals, others)


def _timeline(record: Record, seconds: float) -> dict[str, Any]:
    """Return what happened in so many seconds, as columns."""
    spans, span_s = list(record.spans), record.spans.seconds
    if not spans:
        return {"seconds": 0.0, "columns": 0, "workers": {}}
    lengths = [span_s] * len(spans)
    lengths[-1] = min(max(seconds - (len(spans) - 1) * span_s, 0.0), span_s)
    size = group_size(len(spans), MAX_COLUMNS)
    held = summed(lengths, size)

    def total(name: str) -> list[float | None]:
        return rounded(summed([float(getattr(span, name)) for span in spans], size), 9)

    timeline = {
        "seconds": significant(size * span_s),
        "last_seconds": significant(held[-1]),
        "columns": len(held),
    }
    if not isinstance(record, Trace):
        return timeline | {name: total(name) for name in ("done", "failed")}
    waited = summed(spread_back([span.waited_s for span in spans], lengths), size)
    return timeline | {
        **{name: total(name) for name in ("made", "taken", "restarts")},
        "waited_s": rounded(waited),
        "least_ready": joined([span.least_ready for span in spans], size, min),
        "most_ready": joined([span.most_ready for span in spans], size),
        "held_bytes": rounded(joined([float(span.held_bytes) for span in spans], size)),
        "num_workers": joined([float(span.num_workers) for span in spans], size),
        "workers": _worker_lanes(spans, lengths, size, held),
    }


def _worker_lanes(
    spans: list[Span], lengths: list[float], size: int, held: list[float]
) -> dict[str, list[float | None]]:
    """Return the share of time for which workers were busy: by lane, by column."""
    ids = sorted({worker_id for span in spans for worker_id in span.busy_s})
    together = group_size(len(ids), MAX_LANES)
    lanes: dict[str, list[float | None]] = {}
    for sharing in _groups(ids, together):
        own = [spread_back([s.busy_s.get(each, 0.0) for s in spans], lengths) for each in sharing]
        busy = summed([sum(parts) for parts in zip(*own, strict=True)], size)
        shares = [
            total / (length * len(sharing)) if length else 0.0
            for total, length in zip(busy, held, strict=True)
        ]
        label = f"{sharing[0]}" if len(sharing) == 1 else f"{sharing[0]}-{sharing[-1]}"
        lanes[label] = rounded(shares, 2)
    return lanes


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - the user's __repr__
        return f"<its __repr__ raised {type(error).__name__}>"


def cut(text: str, most: int = MAX_TEXT) -> str:
    """Return a string without credentials, cut off if it is longer than `most` characters."""
    text = without_credentials(text)
    return text if len(text) <= most else text[: most - 1] + "…"


# ---- environment ---------------------------------------------------------------------------------
# Where a run took place: versions, system, cores, memory. No names of machines or users.

PACKAGES = ("forebay", "torch", "numpy", "pyarrow")


def environment() -> dict[str, str]:
    """Return what a report says about the machine and the software."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            # What is loaded says its build as well, such as 2.13.0+cu130.
            found[name] = str(getattr(sys.modules.get(name), "__version__", "") or version(name))
        except PackageNotFoundError:  # not installed
            continue
    found["system"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    cores, usable = os.cpu_count() or 1, whole_cores()
    found["cores"] = f"{usable}" if cores == usable else f"{usable} usable of {cores}"
    memory = usable_memory()
    if memory is not None:
        found["memory"] = byte_size(memory)
    return found


# ---- run summary ---------------------------------------------------------------------------------

# Groups of failures; what exceeds that is counted together.
MAX_GROUPS = 30


def run_details(
    progress: Progress,
    verb: str,
    work: str,
    name_of: Callable[[int], str],
    options: PreprocessOptions,
) -> dict[str, Any]:
    """Return the part of a summary that is known when a run ends."""
    trace = progress.trace
    given = {each.name: getattr(options, each.name) for each in fields(options)}
    del given["progress"]
    totals = trace.snapshot()
    return {
        "kind": verb,
        "work": cut(work),
        "unit": progress.unit,
        "began": _began(time.monotonic() - trace.began_at),
        "totals": totals,
        "timeline": _timeline(trace, totals["seconds"]),
        "bins": list(trace.bins),
        "slowest": [[significant(each), cut(name_of(task))] for each, task in trace.slowest],
        "settings": {name: cut(str(value)) for name, value in given.items() if value is not None},
    }


def run_summary(report: Any) -> dict[str, Any]:
    """Return the summary of a run, from what `preprocess` or `predict` returned."""
    details, known = report.details, report.details.get("totals", {})
    folder = shown_location(os.fspath(report.output)).rstrip("/").rpartition("/")[2]
    kind = details.get("kind", "run")
    title = " ".join(filter(None, [kind, details.get("work", ""), f"→ {folder}"]))
    totals = {
        **known,
        "done": report.done,
        "failed": report.failed,
        "resumed": report.resumed,
        "elapsed_s": report.elapsed_s,
        "rate": known.get("ended", 0) / report.elapsed_s if report.elapsed_s else 0.0,
    }
    others = {
        **details,
        **({"environment": environment()} if details else {}),
        "failures": failure_groups(report.failures),
        "failures_known": len(report.failures),
        "notes": [cut(each, 1000) for each in getattr(report, "notes", ())],
    }
    return _summary(kind, title, str(report.diagnosis), totals, others)


def failure_groups(failures: Iterable[Failure]) -> list[dict[str, Any]]:
    """Return the failures by error, the most frequent first."""
    groups = grouped(failures)
    shown, rest = groups[:MAX_GROUPS], groups[MAX_GROUPS:]
    if rest:
        count = sum(group.count for group in rest)
        shown.append(Group(f"{len(rest):,} other errors", count, ()))
    return [
        {
            "error": cut(group.error, 400),
            "count": group.count,
            "examples": [cut(each, 400) for each in group.examples],
        }
        for group in shown
    ]


# ---- run report ----------------------------------------------------------------------------------


def _run_sections(summary: Mapping[str, Any]) -> list[str]:
    sections = [section("Throughput", paragraph("Nothing was left to be done."))]
    if summary.get("timeline", {}).get("columns"):
        task = "input" if summary["unit"] == "input" else "range of samples"
        bars = histogram_bars(summary["bins"], "made")
        durations = bars_chart(f"How long one {task} took", bars) if bars else ""
        rows = [[duration(each), name] for each, name in summary["slowest"][:SHOWN_SLOWEST]]
        slowest = table(["time", f"slowest {task}"], rows, code=(1,))
        throughput = section("Throughput", _throughput(summary))
        sections = [throughput, section("Durations", durations, slowest)]
    notes = "".join(paragraph(each) for each in summary.get("notes", ()))
    return [section("Notes", notes), section("Failures", _failures(summary)), *sections]


def _throughput(summary: Mapping[str, Any]) -> str:
    timeline, unit = summary["timeline"], summary["unit"]
    done, failed = (per_second(timeline[name], timeline) for name in ("done", "failed"))
    series = [Series("done", "ready", done, "area")]
    if any(timeline["failed"]):
        series.append(Series("failed", "wait", failed, "area"))
    return columns_chart(
        f"{unit.capitalize()}s per second",
        series,
        _times(summary),
        unit=f"{unit}s/s",
        limit=max([each for each in [*done, *failed] if each is not None], default=1.0),
    )


def _failures(summary: Mapping[str, Any]) -> str:
    rows = [
        [f"{group['count']:,}", group["error"], "\n".join(group["examples"])]
        for group in summary["failures"]
    ]
    if not rows:
        return ""
    known, failed = summary["failures_known"], summary["totals"]["failed"]
    note = paragraph(f"Of {failed:,} failures, the first {known:,}.") if known < failed else ""
    return note + table(["count", "error", "examples"], rows, code=(2,))
