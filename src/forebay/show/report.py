"""What the reports of loaders and runs show, as plain JSON; `html.py` draws it."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from forebay.base.formatting import byte_size, byte_unit, counted, duration
from forebay.base.machine import machine_memory, usable_memory
from forebay.errors import shown_location, without_credentials
from forebay.failures import Failure, Group, grouped
from forebay.observe.figures import numeric_values, shown_figures
from forebay.observe.progress import Progress, RunTrace
from forebay.observe.record import Trace
from forebay.options import PreprocessOptions, whole_cores
from forebay.show.html import REPORT_FORMAT, Part, Section
from forebay.show.timeline import Timeline, histogram_bars

# Wanted batches above this many times the highest other rate are cut off.
_HEADROOM = 1.6
# Slow samples, decisions, and groups of failures that are shown.
_SHOWN_SLOWEST, _SHOWN_DECISIONS, MAX_GROUPS = 10, 50, 30
# Packages whose versions are shown.
_PACKAGES = ("forebay", "torch", "numpy", "pyarrow")


def _report(
    kind: str,
    title: str,
    verdict: object,
    totals: Mapping[str, Any],
    sections: Sequence[Section],
    *,
    began: str,
    took: str,
    unit: str = "input",
    **others: Any,
) -> dict[str, Any]:
    name, start = "forebay loader" if kind == "loader" else "forebay", began[:16].replace("T", " ")
    return {
        "format": REPORT_FORMAT,
        "kind": kind,
        "unit": unit,
        "title": cut(title, 1000),
        "subtitle": " · ".join(filter(None, [name, start and f"from {start} UTC", took])),
        "verdict": cut(str(verdict), 4000),
        "totals": _short(numeric_values(totals), 6),
        "figures": [[value, name] for _, value, name in shown_figures(kind, totals, unit)],
        "sections": _short(sections),
        **others,
    }


def _short(value: Any, digits: int = 4) -> Any:
    """Return JSON with few significant digits, whole numbers as such: a file is smaller."""
    if isinstance(value, dict):
        return {name: _short(each, digits) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each, digits) for each in value]
    return significant(value, digits) if isinstance(value, float) else value


def significant(value: float, digits: int = 4) -> float:
    """Return a number with few significant digits."""
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() else number


def cut(text: str, most: int = 200) -> str:
    """Return a string without credentials, cut off if it is longer than `most` characters."""
    text = without_credentials(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _began(ago_s: float) -> str:
    return datetime.fromtimestamp(time.time() - ago_s, UTC).isoformat(timespec="seconds")


def environment() -> dict[str, str]:
    """Return what a report says about machine and software; it names no host and no user."""
    found = {"Python": platform.python_version()}
    found |= {name: number for name in _PACKAGES if (number := installed_version(name))}
    found["system"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    cores, usable = os.cpu_count() or 1, whole_cores()
    found["cores"] = f"{usable}" if cores == usable else f"{usable} usable of {cores}"
    total, free = machine_memory(), usable_memory()
    if total is not None and free is not None:
        whole = byte_size(total)
        found["memory"] = whole if free == total else f"{byte_size(free)} usable of {whole}"
    return found


def installed_version(name: str) -> str:
    """Return the version of a package, which is not imported for it; "" if it is not installed."""
    try:
        # What is loaded says its build as well, such as 2.13.0+cu130.
        return str(getattr(sys.modules.get(name), "__version__", "") or version(name))
    except PackageNotFoundError:
        return ""


# ---- parts ---------------------------------------------------------------------------------------


def _text(text: str) -> Part:
    return "text", {"text": text}


def _bars(title: str, bars: Sequence[tuple[str, int, str]], **more: str) -> Part:
    return "bars", {"title": title, "bars": bars, **more}


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], *code: int) -> list[Part]:
    return [("table", {"names": names, "rows": rows, "code": code})] if rows else []


# ---- loader --------------------------------------------------------------------------------------


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
    """Return the report of a loader."""
    totals = {**trace.snapshot(), "failures": failures}
    timeline = Timeline(trace, totals["seconds"])
    made: list[Section] = [("Batches", [_text("No batch was made yet.")])]
    if timeline.spans:
        made = [
            ("Batches made and wanted", [*_rates(timeline), *_ready(timeline, marks)]),
            ("Workers", [*timeline.lanes(), *_number_of_workers(timeline, trace)]),
        ]
    return _report(
        "loader",
        title,
        verdict,
        totals,
        [*made, ("Waits", [_waits(trace)]), ("Slowest samples", _slowest_samples(trace, replays))],
        began=_began(time.perf_counter() - trace.began_at),
        took=duration(totals["seconds"]),
        settings={cut(name): cut(value, 1000) for name, value in settings.items()},
        environment=environment(),
    )


def _rates(timeline: Timeline) -> list[Part]:
    """Return the charts of batches made, taken and wanted, each second, and of waits."""
    waited = timeline.spent([span.waited_s for span in timeline.spans])
    made, taken = (timeline.per_second(timeline.of(name)) for name in ("made", "taken"))
    wanted = [each or None for each in timeline.per_second(timeline.of("taken"), waited)]
    waits = timeline.per_second([100 * each for each in waited])
    known = [each for each in [*made, *taken] if each is not None]
    limit = max(known, default=1.0) * _HEADROOM
    limit = min(limit, max([*known, *filter(None, wanted)], default=limit))
    series = (
        ("taken by training", "taken", "area", taken),
        ("made by workers", "made", "line", made),
        ("wanted: the rate of training while it did not wait", "wanted", "line", wanted),
    )
    rates = timeline.chart("Batches per second", "batches/s", limit, *series)
    waiting = ("training waits for a batch", "wait", "area", waits)
    shares = timeline.chart("Share of time that training waited", "%", 100, waiting)
    return [rates, shares] if any(waited) else [rates]


def _ready(timeline: Timeline, marks: Mapping[str, int | None]) -> list[Part]:
    """Return the charts of batches between workers and trainer, by number and by bytes."""
    most, least = timeline.of("most_ready", max), timeline.of("least_ready", min)
    held, limits = (
        timeline.of("held_bytes", max),
        [marks.get("max_batches"), marks.get("max_bytes")],
    )
    if not any(most):
        return []
    # A limit that is far above what was reached is not drawn.
    highest = [max(filter(None, most)), max(held)]
    (batches, size) = (
        limit if limit and limit <= 4 * value else 0
        for limit, value in zip(limits, highest, strict=True)
    )
    parts = [
        timeline.chart(
            "Batches ready, between workers and training",
            "batches",
            max(highest[0], batches),
            ("fewest to most ready when training asked", "ready", "band", most, least),
            ("fewest", "ready", "line", least),
            marks=[(batches, f"max_batches={batches:,}")] if batches else [],
        )
    ]
    if any(held):
        unit, factor = byte_unit(max(highest[1], size))
        scaled = ("ready or in use", "ready", "area", [each / factor for each in held])
        lines = [(size / factor, f"max_bytes={byte_size(size)}")] if size else []
        limit = max(highest[1], size) / factor
        parts.append(timeline.chart("Memory of these batches", unit, limit, scaled, marks=lines))
    return parts


def _number_of_workers(timeline: Timeline, trace: Trace) -> list[Part]:
    """Return the number of workers over time, where it changed, and the decisions about it."""
    numbers = timeline.of("num_workers", max)
    decisions = [
        (max(at - trace.began_at, 0.0), cut(sentence))
        for at, sentence in list(trace.decisions)[-_SHOWN_DECISIONS:]
    ]
    parts = _table(["at", "decision"], [[duration(at), sentence] for at, sentence in decisions])
    if len({*numbers} - {0}) > 1:  # a column before the workers started counts none
        series, events = ("workers", "other", "area", numbers), [at for at, _ in decisions]
        places = [at / timeline.seconds for at in events]
        chart = timeline.chart("Number of workers", "workers", max(numbers), series, events=places)
        return [chart, *parts]
    return parts


def _waits(trace: Trace) -> Part:
    """Return the histogram of waits: by power of two, as many bars as are needed."""
    waits = sum(trace.wait_bins)
    without = max(trace.taken_count - waits, 0)
    if not without + waits:
        return _text("No batch was taken yet.")
    bars = [("no wait", without, "ready"), *histogram_bars(trace.wait_bins, "wait")]
    note = f"Training waited for {waits:,} of {without + waits:,} batches."
    return _bars("How long training waited for a batch", bars, note=note)


def _slowest_samples(trace: Trace, replays: bool) -> list[Part]:
    last, batch, note = (
        "batch",
        "epoch {}, batch {}",
        "With a seed, loader.replay() rebuilds a batch.",
    )
    if replays:
        last, batch = "its batch again, for a debugger", "loader.replay(epoch={}, batch={})"
    rows = [
        [duration(each.seconds), cut(_shown(each.index)), batch.format(each.epoch, each.batch)]
        for each in list(trace.slowest)[:_SHOWN_SLOWEST]
    ]
    table = _table(["time", "index", last], rows, *([1, 2] if replays else [1]))
    return [*table, _text(note)] if table and not replays else table


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - the user's __repr__
        return f"<its __repr__ raised {type(error).__name__}>"


# ---- run -----------------------------------------------------------------------------------------


def run_details(
    progress: Progress,
    verb: str,
    work: str,
    name_of: Callable[[int], str],
    options: PreprocessOptions,
) -> dict[str, Any]:
    """Return the part of a report that is known when a run ends."""
    trace, unit = progress.trace, progress.unit
    given = {each.name: getattr(options, each.name) for each in fields(options)}
    del given["progress"]
    totals = trace.snapshot()
    return {
        "kind": verb,
        "work": cut(work),
        "unit": unit,
        "began": _began(time.monotonic() - trace.began_at),
        "totals": totals,
        "sections": _run_sections(trace, Timeline(trace, totals["seconds"]), unit, name_of),
        "settings": {name: cut(str(value)) for name, value in given.items() if value is not None},
    }


def _run_sections(
    trace: RunTrace, timeline: Timeline, unit: str, name_of: Callable[[int], str]
) -> list[Section]:
    if not timeline.spans:
        return []
    task = "input" if unit == "input" else "range of samples"
    bars = histogram_bars(trace.bins, "made")
    durations = [_bars(f"How long one {task} took", bars)] if bars else []
    slowest = [
        [duration(each), cut(name_of(number))]
        for each, number in list(trace.slowest)[:_SHOWN_SLOWEST]
    ]
    done, failed = (timeline.per_second(timeline.of(name)) for name in ("done", "failed"))
    series = [("done", "ready", "area", done), ("failed", "wait", "area", failed)]
    limit = max([each for each in [*done, *failed] if each is not None], default=1.0)
    shown = series if any(timeline.of("failed")) else series[:1]
    rates = timeline.chart(f"{unit.capitalize()}s per second", f"{unit}s/s", limit, *shown)
    table = _table(["time", f"slowest {task}"], slowest, 1)
    return [("Throughput", [rates]), ("Durations", [*durations, *table])]


def run_summary(report: Any) -> dict[str, Any]:
    """Return the report of a run, from what `preprocess` or `predict` returned."""
    details, known = report.details, report.details.get("totals", {})
    folder = shown_location(os.fspath(report.output)).rstrip("/").rpartition("/")[2]
    kind, unit = details.get("kind", "run"), details.get("unit", "input")
    notes = [_text(cut(each, 1000)) for each in getattr(report, "notes", ())]
    nothing = [("Throughput", [_text("Nothing was left to be done.")])]
    return _report(
        kind,
        " ".join(filter(None, [kind, details.get("work", ""), f"→ {folder}"])),
        report.diagnosis,
        {
            **known,
            "done": report.done,
            "failed": report.failed,
            "resumed": report.resumed,
            "elapsed_s": report.elapsed_s,
            "rate": known.get("ended", 0) / report.elapsed_s if report.elapsed_s else 0.0,
        },
        [
            ("Notes", notes),
            ("Failures", _failures(report)),
            *(details.get("sections") or nothing),
        ],
        began=details.get("began", ""),
        took=f"{counted(known.get('ended', 0), unit)} in {duration(report.elapsed_s)}",
        unit=unit,
        settings=details.get("settings", {}),
        environment=environment() if details else {},
    )


def _failures(report: Any) -> list[Part]:
    rows = [
        [f"{group.count:,}", cut(group.error, 400), "\n".join(cut(e, 400) for e in group.examples)]
        for group in failure_groups(report.failures)
    ]
    known, failed = len(report.failures), report.failed
    note = [_text(f"Of {failed:,} failures, the first {known:,}.")] if known < failed else []
    return [*note, *_table(["count", "error", "examples"], rows, 2)] if rows else []


def failure_groups(failures: Iterable[Failure]) -> list[Group]:
    """Return the failures by error, the most frequent first; the last group has all others."""
    groups = grouped(failures)
    shown, rest = groups[:MAX_GROUPS], groups[MAX_GROUPS:]
    others = [Group(f"{len(rest):,} other errors", sum(each.count for each in rest), ())]
    return [*shown, *(others if rest else [])]
