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

from forebay.base.formatting import byte_size, counted, duration
from forebay.base.machine import machine_memory, usable_memory
from forebay.errors import shown_location, without_credentials
from forebay.failures import Failure, Group, grouped
from forebay.observe.figures import numeric_values, shown_figures
from forebay.observe.progress import Progress, RunTrace
from forebay.observe.record import Trace
from forebay.options import PreprocessOptions, whole_cores
from forebay.show.html import REPORT_FORMAT, Part, Section

# More workers than this share bars.
_MAX_BARS = 32
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
    failures: int,
    replays: bool,
) -> dict[str, Any]:
    """Return the report of a loader."""
    totals = {**trace.snapshot(), "failures": failures}
    workers = _workers(trace, totals["seconds"]) or [_text("No batch was made yet.")]
    return _report(
        "loader",
        title,
        verdict,
        totals,
        [
            ("Workers", workers),
            ("Waits", [_waits(trace)]),
            ("Slowest samples", _slowest_samples(trace, replays)),
        ],
        began=_began(time.perf_counter() - trace.began_at),
        took=duration(totals["seconds"]),
        settings={cut(name): cut(value, 1000) for name, value in settings.items()},
        environment=environment(),
    )


def _workers(trace: Trace, seconds: float) -> list[Part]:
    """Return how busy each worker was, and the decisions about their number."""
    busy, bars = sorted(trace.busy_s.items()), []
    together = max(-(-len(busy) // _MAX_BARS), 1)
    for at in range(0, len(busy), together):
        (first, _), (last, _) = (joined := busy[at : at + together])[0], joined[-1]
        share = sum(spent for _, spent in joined) / len(joined) / seconds if seconds else 0.0
        bars.append(
            (f"{first}" if first == last else f"{first}-{last}", round(100 * share), "made")
        )
    decisions = [
        [duration(max(at - trace.began_at, 0.0)), cut(sentence)]
        for at, sentence in list(trace.decisions)[-_SHOWN_DECISIONS:]
    ]
    title = "Percent of the time in which each worker made batches"
    shown = [_bars(title, bars)] if bars else []
    return [*shown, *_table(["at", "decision"], decisions)]


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
        "sections": _run_sections(trace, unit, name_of),
        "settings": {name: cut(str(value)) for name, value in given.items() if value is not None},
    }


def _run_sections(trace: RunTrace, unit: str, name_of: Callable[[int], str]) -> list[Section]:
    task = "input" if unit == "input" else "range of samples"
    bars = histogram_bars(trace.bins, "made")
    durations = [_bars(f"How long one {task} took", bars)] if bars else []
    slowest = [
        [duration(each), cut(name_of(number))]
        for each, number in list(trace.slowest)[:_SHOWN_SLOWEST]
    ]
    table = _table(["time", f"slowest {task}"], slowest, 1)
    return [("Durations", [*durations, *table])] if durations or table else []


def run_summary(report: Any) -> dict[str, Any]:
    """Return the report of a run, from what `preprocess` or `predict` returned."""
    details, known = report.details, report.details.get("totals", {})
    folder = shown_location(os.fspath(report.output)).rstrip("/").rpartition("/")[2]
    kind, unit = details.get("kind", "run"), details.get("unit", "input")
    notes = [_text(cut(each, 1000)) for each in getattr(report, "notes", ())]
    nothing = [("Durations", [_text("Nothing was left to be done.")])]
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
