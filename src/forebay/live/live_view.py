"""The data of a page, checked: what a file says is bounded, and safe to print on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.errors import one_line
from forebay.live.recent_work import MAX_LANES, SECONDS

MAX_TEXT = 400
_HIGHEST = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a page shows of a loader or a run.

    Attributes:
        kind: "loader", "preprocess", "predict" or "cache".
        pid: Its process.
        program: The name of the program's file.
        title: The loader in one line, or the output of the run.
        began: When it began, in seconds since 1970.
        at: When the page was written, likewise.
        rate: Batches, inputs or samples per second, in the last seconds.
        num_workers: Its workers.
        restarts: Attempts that ended with the death of a worker.
        verdict: Why training waits, in sentences; "" if not known.
        epoch: The epoch of the last batch; -1 before the first.
        batch: Batches of that epoch that were taken.
        ready: Batches that wait to be taken.
        held_bytes: Bytes of these and of those in use.
        max_bytes: The buffer's high mark; 0 if it has none.
        max_batches: The same in batches.
        refill_below: The low mark: a share of a full buffer up to 1, or batches; 0 if none.
        wait_share: Share of the last seconds that training waited.
        waits: The same by second, as digits up to 9.
        lanes: By worker: how busy it was, by second, as digits up to 9.
        unit: What a run counts.
        done: How many of them are done.
        failed: How many failed.
        total: How many there are.
        longest: The input that has been running for longest; "" if none has for long.
        longest_since: When it began, in seconds since 1970.
    """

    kind: str
    pid: int
    program: str
    title: str
    began: float
    at: float
    rate: float
    num_workers: int
    restarts: int
    verdict: str = ""
    epoch: int = -1
    batch: int = 0
    ready: int = 0
    held_bytes: float = 0.0
    max_bytes: float = 0.0
    max_batches: float = 0.0
    refill_below: float = 0.0
    wait_share: float = 0.0
    waits: str = ""
    lanes: tuple[str, ...] = ()
    unit: str = ""
    done: int = 0
    failed: int = 0
    total: int = 0
    longest: str = ""
    longest_since: float = 0.0

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> View | None:
        """Return what a page shows; None if it is not one of a loader or a run."""
        kind = data.get("kind")
        if kind not in ("loader", "preprocess", "predict", "cache"):
            return None
        lanes = data.get("lanes")
        return cls(
            kind=kind,
            pid=_count(data, "pid"),
            program=_text(data, "program"),
            title=_text(data, "title"),
            began=_number(data, "began"),
            at=_number(data, "at"),
            rate=_number(data, "rate"),
            num_workers=_count(data, "num_workers"),
            restarts=_count(data, "restarts"),
            verdict=_text(data, "verdict"),
            epoch=_count(data, "epoch", -1),
            batch=_count(data, "batch"),
            ready=_count(data, "ready"),
            held_bytes=_number(data, "held_bytes"),
            max_bytes=_number(data, "max_bytes"),
            max_batches=_number(data, "max_batches"),
            refill_below=_number(data, "refill_below"),
            wait_share=min(_number(data, "wait_share"), 1.0),
            waits=_digits(data.get("waits")),
            lanes=tuple(_digits(lane) for lane in lanes[:MAX_LANES])
            if isinstance(lanes, list)
            else (),
            unit=_text(data, "unit"),
            done=_count(data, "done"),
            failed=_count(data, "failed"),
            total=_count(data, "total"),
            longest=_text(data, "longest"),
            longest_since=_number(data, "longest_since"),
        )


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    return one_line(value, MAX_TEXT) if isinstance(value, str) else ""


def _number(data: Mapping[str, Any], name: str) -> float:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    is_usable = abs(value) <= _HIGHEST and math.isfinite(value)
    return max(float(value), 0.0) if is_usable else 0.0


def _count(data: Mapping[str, Any], name: str, low: int = 0) -> int:
    value = data.get(name)
    return value if type(value) is int and low <= value <= _HIGHEST else low


def _digits(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    return value[:SECONDS] if value[:SECONDS].isascii() and value[:SECONDS].isdigit() else ""
