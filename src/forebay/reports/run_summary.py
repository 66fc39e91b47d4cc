"""What a report of a run shows, as a plain record that is JSON-serializable.

trace, counts, failures ──> run_summary ──> JSON in the file ──> run_report.py: HTML
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from forebay.failures import Failure
from forebay.observe.progress import Progress
from forebay.options import PreprocessOptions
from forebay.reports.environment import environment
from forebay.reports.loader_summary import FORMAT, cut
from forebay.reports.timeline import group_size, rounded, significant, summed

# Kinds of failures, and examples of each.
MAX_GROUPS = 30
MAX_EXAMPLES = 3
# What differs from one input to the next in the same message: quoted strings, paths, numbers.
_DIFFERS = re.compile(r"'[^']*'|\"[^\"]*\"|\S*/\S+|0x[0-9a-fA-F]+|\d[\d.,]*")


def run_details(
    progress: Progress,
    verb: str,
    work: str,
    num_workers: int,
    name_of: Callable[[int], str],
    options: PreprocessOptions,
) -> dict[str, Any]:
    """Return the part of a summary that is known when a run ends.

    Args:
        progress: What was done, and when.
        verb: The entry point.
        work: Name of the function, model or dataset.
        num_workers: Its workers, where the options name some; otherwise it worked in the calling
            process.
        name_of: Returns the name of an input, or range, by its number.
        options: The arguments.
    """
    trace = progress.trace
    given = {each.name: getattr(options, each.name) for each in fields(options)}
    del given["progress"]
    seconds = max(trace.ended_at - trace.began_at, 0.0)
    size = group_size(len(trace.spans))
    columns = len(range(0, len(trace.spans), size))
    width = size * trace.spans.seconds
    return {
        "kind": verb,
        "work": cut(work),
        "unit": progress.unit,
        "began": datetime.fromtimestamp(
            time.time() - (time.monotonic() - trace.began_at), UTC
        ).isoformat(timespec="seconds"),
        "seconds": significant(seconds, 6),
        "ended": trace.done + trace.failed,
        "num_workers": options.workers and num_workers,
        "busy_s": significant(trace.busy_s, 6),
        "retries": trace.retries,
        "timeline": {
            "seconds": significant(width),
            "last_seconds": significant(min(max(seconds - width * (columns - 1), 0.0), width)),
            "columns": columns,
            "done": rounded(summed([float(span.done) for span in trace.spans], size), 9),
            "failed": rounded(summed([float(span.failed) for span in trace.spans], size), 9),
        },
        "bins": list(trace.bins),
        "slowest": [[significant(each), cut(name_of(task))] for each, task in trace.slowest],
        "settings": {name: cut(str(value)) for name, value in given.items() if value is not None},
    }


def run_summary(
    details: Mapping[str, Any],
    *,
    title: str,
    counts: Mapping[str, int],
    elapsed_s: float,
    failures: Sequence[Failure],
    verdict: str,
) -> dict[str, Any]:
    """Return the summary of a run.

    Args:
        details: What `run_details` returned; empty if nothing was left to be done.
        title: The run in one line.
        counts: "done", "failed" and "resumed".
        elapsed_s: Seconds that the call took.
        failures: The failures that are known one by one.
        verdict: Why workers were idle, in sentences; "" if it is not known.
    """
    seconds, ended = details.get("seconds", 0.0), details.get("ended", 0)
    capacity = seconds * max(details.get("num_workers", 1), 1)
    return {
        "format": FORMAT,
        "kind": "run",
        **details,
        **({"environment": environment()} if details else {}),
        "title": cut(title, 1000),
        "verdict": cut(verdict, 4000),
        "totals": {
            **counts,
            "elapsed_s": significant(elapsed_s, 6),
            "rate": significant(ended / elapsed_s, 6) if elapsed_s else 0.0,
            "busy_share": significant(min(details.get("busy_s", 0.0) / capacity, 1.0), 4)
            if capacity
            else 0.0,
        },
        "failures": failure_groups(failures),
        "failures_known": len(failures),
    }


def failure_groups(failures: Iterable[Failure]) -> list[dict[str, Any]]:
    """Return the failures by error and message, the most frequent first.

    Messages that differ only in names and numbers are one group. What exceeds `MAX_GROUPS` is
    counted together.
    """
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for failure in failures:
        line = failure.message.strip().partition("\n")[0]
        key = failure.error, _DIFFERS.sub("…", line[:300])
        group = groups.setdefault(
            key, {"error": cut(failure.error), "message": cut(key[1]), "count": 0, "examples": []}
        )
        group["count"] += 1
        if len(group["examples"]) < MAX_EXAMPLES:
            name = failure.source if isinstance(failure.source, str) else repr(failure.source)
            group["examples"].append({"source": cut(name), "message": cut(line, 300)})
    found = sorted(groups.values(), key=lambda group: -group["count"])
    shown, rest = found[:MAX_GROUPS], found[MAX_GROUPS:]
    if rest:
        count = sum(group["count"] for group in rest)
        message = f"{len(rest):,} other messages"
        shown.append({"error": "others", "message": message, "count": count, "examples": []})
    return shown
