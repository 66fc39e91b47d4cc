"""What a loader recorded, in formats of other tools: Prometheus' text, and Chrome's traces. PURE.

Sources: Prometheus, "Exposition formats", text format 0.0.4; "Trace Event Format", JSON object
form, which Perfetto and chrome://tracing read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from forebay.observe.measurements import MadeRecord, StepRecord

# ---- Prometheus ----------------------------------------------------------------------------------

PREFIX = "forebay_loader"
# Numbers that only grow while a loader exists; all others go up and down.
_TOTALS = frozenset(
    [
        *("waited_s", "fetch_s", "collate_s", "cpu_s", "queued_s", "idle_s", "copy_s"),
        *("restarts", "failures", "copied_batches", "copied_bytes", "staged_bytes"),
        *("fetched_bytes", "fetch_requests", "fetch_hits"),
    ]
)
# What a number of one source is called: (before its name, after it) in `Statistics.to_dict()`.
_BY_SOURCE = {
    ("sources/", "/samples"): "source_samples_total",
    ("sources/", "/epochs"): "source_epochs_total",
    ("tokens/", "/filled"): "tokens_filled",
    ("tokens/", ""): "tokens_total",
}


def prometheus_text(numbers: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Return numbers of `Statistics.to_dict()` as metrics, each with these labels."""
    lines: dict[str, list[str]] = {}
    for key, value in numbers.items():
        name, source = _metric(key)
        own = {**labels, "source": source} if source is not None else labels
        shown = ",".join(f'{each}="{_escaped(text)}"' for each, text in own.items())
        line = f"{PREFIX}_{name}{{{shown}}} {value:g}" if shown else f"{PREFIX}_{name} {value:g}"
        lines.setdefault(name, []).append(line)
    found = []
    for name, samples in lines.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        found += [f"# TYPE {PREFIX}_{name} {kind}", *samples]
    return "\n".join(found) + "\n"


def _metric(key: str) -> tuple[str, str | None]:
    """Return the name of a number, and of its source; None for one of the whole loader."""
    for (before, after), name in _BY_SOURCE.items():
        if key.startswith(before) and key.endswith(after):
            return name, key[len(before) : len(key) - len(after)]
    name = f"{key.removesuffix('_s')}_seconds" if key.endswith("_s") else key
    return f"{name}_total" if key in _TOTALS else name, None


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# ---- Chrome --------------------------------------------------------------------------------------

_TRAINING = 0  # the row of the trainer; those of workers follow


def chrome_trace(
    steps: Sequence[StepRecord], batches: Sequence[MadeRecord], title: str, offset_s: float
) -> dict[str, Any]:
    """Return the last steps and batches as a trace, with times of the day in microseconds.

    Args:
        steps: As they were recorded, likewise `batches`.
        offset_s: Seconds from the clock of the records to that of the day.
    """
    events = [*_training(steps), *_workers(batches)]
    for event in events:
        event["ts"] = round((event["ts"] + offset_s) * 1e6, 1)
        event["pid"] = 1
        if "dur" in event:
            event["dur"] = round(event["dur"] * 1e6, 1)
    rows = {_TRAINING: "training"} | {
        each["tid"]: f"worker {each['tid'] - 1}" for each in events if each["tid"] != _TRAINING
    }
    names = [_named("process_name", 0, title)]
    names += [_named("thread_name", row, name) for row, name in sorted(rows.items())]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": row, "args": {"name": name}}


def _training(steps: Sequence[StepRecord]) -> Iterable[dict[str, Any]]:
    """Yield waits, what the trainer did between them, and how many batches were ready."""
    row: dict[str, Any] = {"tid": _TRAINING}
    ready: dict[str, Any] = row | {"ph": "C", "name": "ready"}
    for each in steps:
        if each.waited_s:
            yield row | {"ph": "X", "name": "wait", "ts": each.asked_at, "dur": each.waited_s}
        yield ready | {"ts": each.asked_at, "args": {"batches": each.ready}}
    for before, after in pairwise(steps):
        begin, count = before.asked_at + before.waited_s, after.taken - before.taken
        if after.asked_at > begin and not after.is_first:
            name = "step" if count == 1 else f"{count:,} steps"
            yield row | {"ph": "X", "name": name, "ts": begin, "dur": after.asked_at - begin}


def _workers(batches: Sequence[MadeRecord]) -> Iterable[dict[str, Any]]:
    for each in batches:
        yield {
            "ph": "X",
            "name": "batch",
            "tid": each.worker_id + 1,
            "ts": each.ended_at - each.seconds,
            "dur": each.seconds,
            "args": {"bytes": each.nbytes, "slowest_sample_s": round(each.slowest_s, 6)},
        }
