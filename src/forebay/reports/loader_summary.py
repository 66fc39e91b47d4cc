"""What a report of a loader shows, as a plain record that is JSON-serializable.

trace, settings ──> loader_summary ──> JSON in the file ──> loader_report.py: HTML
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from forebay.observe.statistics import totals_of
from forebay.observe.trace import Span, Trace
from forebay.reports.timeline import (
    group_size,
    highest,
    lowest,
    rounded,
    significant,
    spread_back,
    summed,
)

FORMAT = 1
# More workers than this share lanes.
MAX_LANES = 32
MAX_TEXT = 200
MAX_DECISIONS = 50


def loader_summary(
    trace: Trace,
    *,
    title: str,
    settings: Mapping[str, str],
    environment: Mapping[str, str],
    verdict: str,
    marks: Mapping[str, int | None],
    failures: int,
    replays: bool,
    now: float,
    wall: float,
) -> dict[str, Any]:
    """Return the summary of a loader.

    Args:
        trace: What happened.
        title: The loader in one line.
        settings: Its arguments, as strings.
        environment: See `environment.py`.
        verdict: Why training waits, in sentences; "" if it is not known.
        marks: The buffer's `max_bytes` and `max_batches`, where it has them.
        failures: Samples that were skipped.
        replays: Whether `loader.replay` can rebuild a batch: with a seed.
        now: The present time on the trace's clock.
        wall: The same in seconds since 1970.
    """
    end = max([each.got_at for each in list(trace.steps)[-1:]], default=trace.began_at)
    end = max([end, *(each.ended_at for each in list(trace.batches)[-1:])])
    seconds = max(end - trace.began_at, 0.0)
    totals = {
        "seconds": seconds,
        "made": trace.made_count,
        "taken": trace.taken_count,
        "rate": trace.taken_count / seconds if seconds else 0.0,
        "wait_share": min(trace.waited_s / seconds, 1.0) if seconds else 0.0,
        "held_bytes": trace.held_bytes,
        "failures": failures,
        **totals_of(trace),
    }
    began = wall - (now - trace.began_at)
    return {
        "format": FORMAT,
        "kind": "loader",
        "title": cut(title, 1000),
        "verdict": cut(verdict, 4000),
        "began": datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
        "totals": {
            name: significant(value, 6)
            for name, value in totals.items()
            if isinstance(value, int | float)  # others are sentences
        },
        "marks": {name: value for name, value in marks.items() if value is not None},
        "timeline": _timeline(trace, seconds),
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
        "environment": dict(environment),
    }


def _timeline(trace: Trace, seconds: float) -> dict[str, Any]:
    """Return what happened in so many seconds, as columns."""
    spans = list(trace.spans)
    if not spans:
        return {"seconds": 0.0, "columns": 0, "workers": {}}
    lengths = [trace.spans.seconds] * len(spans)
    before_s = (len(spans) - 1) * trace.spans.seconds
    lengths[-1] = min(max(seconds - before_s, 0.0), trace.spans.seconds)
    size = group_size(len(spans))
    held = summed(lengths, size)
    made = summed([float(span.made) for span in spans], size)
    taken = summed([float(span.taken) for span in spans], size)
    waited = summed(spread_back([span.waited_s for span in spans], lengths), size)
    return {
        "seconds": significant(size * trace.spans.seconds),
        "last_seconds": significant(held[-1]),
        "columns": len(held),
        "made": rounded(made, 9),
        "taken": rounded(taken, 9),
        "waited_s": rounded(waited),
        "least_ready": lowest([span.least_ready for span in spans], size),
        "most_ready": highest([span.most_ready for span in spans], size),
        "held_bytes": rounded(highest([float(span.held_bytes) for span in spans], size)),
        "num_workers": highest([float(span.num_workers) for span in spans], size),
        "restarts": rounded(summed([float(span.restarts) for span in spans], size), 9),
        "workers": _lanes(spans, lengths, size, held),
    }


def _lanes(
    spans: list[Span], lengths: list[float], size: int, held: list[float]
) -> dict[str, list[float | None]]:
    """Return the share of time for which workers were busy: by lane, by column."""
    ids = sorted({worker_id for span in spans for worker_id in span.busy_s})
    each = group_size(len(ids), MAX_LANES)
    lanes: dict[str, list[float | None]] = {}
    for at in range(0, len(ids), each):
        sharing = ids[at : at + each]
        busy = [0.0] * len(held)
        for worker_id in sharing:
            own = spread_back([span.busy_s.get(worker_id, 0.0) for span in spans], lengths)
            busy = [total + more for total, more in zip(busy, summed(own, size), strict=True)]
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
    """Return a string, cut off if it is longer than `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"
