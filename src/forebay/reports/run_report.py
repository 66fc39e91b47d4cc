"""The report of a run of `preprocess` or `predict`: its summary as HTML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from forebay.failures import Failure
from forebay.observe.diagnosis import Diagnosis
from forebay.reports.charts import Series, bars_chart, columns_chart, histogram_bars, time_ticks
from forebay.reports.html_page import facts, page, paragraph, section, table, tiles, verdict_box
from forebay.reports.report_file import write_report
from forebay.reports.run_summary import run_summary
from forebay.reports.timeline import per_second
from forebay.units import counted, duration, noun_for, short_number

SHOWN_SLOWEST = 10


class RunReport(Protocol):
    """What `preprocess` and `predict` return."""

    @property
    def output(self) -> Path | str: ...  # noqa: D102
    @property
    def done(self) -> int: ...  # noqa: D102
    @property
    def failed(self) -> int: ...  # noqa: D102
    @property
    def resumed(self) -> int: ...  # noqa: D102
    @property
    def failures(self) -> Sequence[Failure]: ...  # noqa: D102
    @property
    def elapsed_s(self) -> float: ...  # noqa: D102
    @property
    def diagnosis(self) -> Diagnosis: ...  # noqa: D102
    @property
    def details(self) -> Mapping[str, Any]: ...  # noqa: D102


def save(path: str | os.PathLike[str], report: RunReport) -> Path:
    """Write the report of a run to a self-contained HTML file.

    The file opens without a network, stays below 300 KB, and can be read by `forebay.compare`. It
    names the slowest inputs and up to three failed inputs for each error.

    Args:
        path: Where. An earlier report is replaced.
        report: The report.

    Returns:
        The path of the file.

    Raises:
        OptionError: There is a file that is not a report; it was left as it is.
        OSError: The file cannot be written.
    """
    return write_report(run_html(summary_of(report)), path)


def summary_of(report: RunReport) -> dict[str, Any]:
    """Return the summary of a run."""
    details = report.details
    folder = os.fspath(report.output).rstrip("/").rpartition("/")[2]
    work = details.get("work", "")
    return run_summary(
        details,
        title=" ".join(filter(None, [details.get("kind", "run"), work, f"→ {folder}"])),
        counts={"done": report.done, "failed": report.failed, "resumed": report.resumed},
        elapsed_s=report.elapsed_s,
        failures=report.failures,
        verdict=str(report.diagnosis),
    )


def run_html(summary: Mapping[str, Any]) -> str:
    """Return the report of a run as HTML."""
    unit = summary.get("unit", "input")
    sections = [verdict_box(summary["verdict"]), _figures(summary)]
    if summary.get("timeline", {}).get("columns"):
        sections += [
            section("Throughput", _throughput(summary)),
            section("Durations", _durations(summary), _slowest(summary)),
        ]
    else:
        sections.append(section("Throughput", paragraph("Nothing was left to be done.")))
    sections += [
        section("Failures", _failures(summary)),
        section("Settings", facts(summary.get("settings", {}))),
        section("Environment", facts(summary.get("environment", {}))),
    ]
    began = f"from {summary['began'][:16].replace('T', ' ')} UTC · " if "began" in summary else ""
    ended = counted(summary.get("ended", 0), unit)
    subtitle = f"forebay · {began}{ended} in {duration(summary['totals']['elapsed_s'])}"
    return page(summary["title"], subtitle, sections, summary)


def _figures(summary: Mapping[str, Any]) -> str:
    totals, unit = summary["totals"], summary.get("unit", "input")
    figures = [
        (f"{unit}s/s", short_number(totals["rate"])),
        ("done", f"{totals['done']:,}"),
        ("failed", f"{totals['failed']:,}"),
    ]
    if totals["resumed"]:
        figures.append(("of them done earlier", f"{totals['resumed']:,}"))
    figures.append(("in all", duration(totals["elapsed_s"])))
    if summary.get("num_workers"):
        figures.append((noun_for(summary["num_workers"], "worker"), f"{summary['num_workers']:,}"))
        figures.append(("of their time at work", f"{totals['busy_share']:.0%}"))
    if summary.get("retries"):
        figures.append(("attempts repeated", f"{summary['retries']:,}"))
    return tiles(figures)


def _throughput(summary: Mapping[str, Any]) -> str:
    timeline, unit = summary["timeline"], summary["unit"]
    done, failed = (per_second(timeline[name], timeline) for name in ("done", "failed"))
    series = [Series("done", "ready", done, "area")]
    if any(timeline["failed"]):
        series.append(Series("failed", "wait", failed, "area"))
    return columns_chart(
        f"{unit.capitalize()}s per second",
        series,
        time_ticks(timeline["seconds"] * timeline["columns"]),
        unit=f"{unit}s/s",
        limit=max([each for each in [*done, *failed] if each is not None], default=1.0),
    )


def _task(summary: Mapping[str, Any]) -> str:
    return "input" if summary["unit"] == "input" else "range of samples"


def _durations(summary: Mapping[str, Any]) -> str:
    bars = histogram_bars(summary["bins"], "made")
    return bars_chart(f"How long one {_task(summary)} took", bars) if bars else ""


def _slowest(summary: Mapping[str, Any]) -> str:
    rows = [[duration(each), name] for each, name in summary["slowest"][:SHOWN_SLOWEST]]
    return table(["time", f"slowest {_task(summary)}"], rows, code=(1,))


def _failures(summary: Mapping[str, Any]) -> str:
    groups = summary["failures"]
    if not groups:
        return ""
    rows = [
        [
            f"{group['count']:,}",
            f"{group['error']}: {group['message']}" if group["message"] else group["error"],
            "\n".join(
                f"{each['source']}: {each['message']}" if each["message"] else each["source"]
                for each in group["examples"]
            ),
        ]
        for group in groups
    ]
    known, failed = summary["failures_known"], summary["totals"]["failed"]
    note = paragraph(f"Of {failed:,} failures, the first {known:,}.") if known < failed else ""
    return note + table(["count", "error", "examples"], rows, code=(2,))
