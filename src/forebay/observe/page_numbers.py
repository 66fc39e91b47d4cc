"""What a loader has measured, as numbers on its page in `forebay top`, and back.

    Trace ── Measured ── as_numbers ──> page ── from_numbers ──> Measured ──> Diagnosis

A diagnosis takes a tenth of a second, so a training does not make one for its page: it writes
numbers, and `forebay top` makes the diagnosis of those.
"""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from operator import sub
from typing import Any, TypeVar

from forebay.errors import printable
from forebay.observe.figures import LARGEST_NUMBER
from forebay.observe.measurements import (
    Fetched,
    MadeRecord,
    Measured,
    Setup,
    SlowSample,
    StepRecord,
)

# How many of the last steps, and of the last batches, a page has.
ON_PAGE = 128
# What is believed of a page, at most.
MOST_WORKERS, MOST_TRIED, MAX_SETUP_TEXT = 4096, 256, 100

_Record = TypeVar("_Record", MadeRecord, StepRecord)

# On a page: times since the earliest one, totals since those of the first record.

_STEP_TOTALS = ("taken", "total_waited_s", "trainer_cpu_s", "trainer_queued_s", "cores_idle_s")
_MADE_TOTALS = tuple(name for name in MadeRecord._fields if name.startswith(("made", "total_")))
_COUNTS = frozenset(
    ["ready", "taken", "nbytes", "made", "total_read_bytes", "total_faults", "worker_id"]
)  # which are whole numbers


def as_numbers(found: Measured, setup: Setup) -> dict[str, Any]:
    """Return the last `ON_PAGE` steps and batches and the setup, JSON-serializable."""
    steps, batches = found.steps[-ON_PAGE:], found.batches[-ON_PAGE:]
    begins = [*(each.asked_at for each in steps[:1]), *(each.ended_at for each in batches[:1])]
    origin = min(begins, default=0.0)
    slow = found.slowest
    return {
        "steps": _packed(steps, {"asked_at": origin}, _STEP_TOTALS),
        "batches": _packed(batches, {"ended_at": origin}, _MADE_TOTALS),
        "slowest": [slow.seconds, slow.index] if slow and type(slow.index) is int else None,
        "since": found.since,
        "run_rate": found.run_rate,
        "setup": asdict(setup),
    }


def _packed(records: Sequence[Any], origins: dict[str, float], totals: Sequence[str]) -> str:
    """Return the numbers of records as 32-bit floats; -1 for None."""
    if not records:
        return ""
    first = records[0]
    origins = origins | {name: getattr(first, name) or 0.0 for name in totals}
    from_zero = [origins.get(name, 0.0) for name in first._fields]
    numbers = array("f")
    for record in records:
        if None in record:
            pairs = zip(record, from_zero, strict=True)
            numbers.extend(-1.0 if value is None else value - zero for value, zero in pairs)
        else:  # nearly always, and several times as fast
            numbers.extend(map(sub, record, from_zero))
    return base64.b64encode(numbers.tobytes()).decode()


def from_numbers(data: Any) -> tuple[Measured, Setup]:
    """Return what `as_numbers` was called with; anything may be in `data`.

    Raises:
        ValueError: It is none of that.
    """
    try:
        steps = _unpacked(data["steps"], StepRecord)
        batches = _unpacked(data["batches"], MadeRecord)
        slow = data["slowest"]
        slowest = slow and SlowSample(_number(slow[0]), int(_number(slow[1])), 0, 0)
        since = str(data["since"])[:100]
        found = Measured(steps, batches, slowest, since, _number(data["run_rate"]))
        return found, _setup(data["setup"])
    except (KeyError, TypeError, IndexError, OverflowError, AttributeError) as error:
        raise ValueError(f"no measurements: {error}") from error


def _unpacked(text: str, kind: type[_Record]) -> list[_Record]:
    numbers, width = array("f"), len(kind._fields)
    numbers.frombytes(base64.b64decode(text, validate=True))
    rows = len(numbers) // width
    if len(numbers) % width or rows > ON_PAGE or not all(map(math.isfinite, numbers)):
        raise ValueError("no records")
    found = []
    for row in range(rows):
        values: dict[str, Any] = dict(
            zip(kind._fields, numbers[row * width : (row + 1) * width], strict=True)
        )
        for name in _COUNTS & values.keys():
            values[name] = round(values[name])
        if kind is StepRecord:
            values["is_first"] = values["is_first"] > 0
            if values["cores_idle_s"] < 0:
                values["cores_idle_s"] = None
        found.append(kind(**values))
    return found


def _number(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= LARGEST_NUMBER
    ):
        raise ValueError(f"{value!r} is not a number of a page")
    return value


def _setup(data: Mapping[str, Any]) -> Setup:
    known: dict[str, Any] = {}
    for each in fields(Setup):
        value: Any = data[each.name]
        if each.name == "tried":
            value = {int(count): _number(rate) for count, rate in list(value.items())[:MOST_TRIED]}
        elif each.name == "fetched":
            value = value and _fetched(value)
        elif isinstance(value, str):
            value = value[:MAX_SETUP_TEXT]
        elif value is not None and not isinstance(value, bool):
            value = _number(value)
        known[each.name] = value
    setup = Setup(**known)
    if max(setup.num_workers, setup.most_workers or 0, setup.auto_workers) > MOST_WORKERS:
        raise ValueError(f"{setup.num_workers} workers")
    return setup


def _fetched(data: Mapping[str, Any]) -> Fetched:
    known: dict[str, Any] = {str(name): _number(value) for name, value in data.items()}
    return Fetched(**known)


def verdict_of(data: Any) -> str:
    """Return the diagnosis of a page's numbers in sentences; "" where they do not allow one."""
    try:
        return _verdict(json.dumps(data))
    except Exception:  # noqa: BLE001 - of numbers that no loader has written
        return ""


@lru_cache(maxsize=64)
def _verdict(text: str) -> str:
    from forebay.observe.diagnosis import diagnose  # not in a training

    return printable(str(diagnose(*from_numbers(json.loads(text)))))[:1000]
