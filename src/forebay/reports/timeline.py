"""The spans of a record as columns of a chart: joined to fewer, and spread over time. PURE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import sub
from typing import Any

# Columns of a chart.
MAX_COLUMNS = 160


def group_size(count: int, most: int = MAX_COLUMNS) -> int:
    """Return how many spans to join so that at most so many columns are left."""
    return max(-(-count // most), 1)


def summed(values: Sequence[float], size: int) -> list[float]:
    """Return the sum of each `size` values; the last group may be smaller."""
    return [sum(values[at : at + size]) for at in range(0, len(values), size)]


def lowest(values: Sequence[float | None], size: int) -> list[float | None]:
    """Return the lowest of each `size` values; None where all of them are."""
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    return [min((each for each in group if each is not None), default=None) for group in groups]


def highest(values: Sequence[float | None], size: int) -> list[float | None]:
    """Return the highest of each `size` values; None where all of them are."""
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    return [max((each for each in group if each is not None), default=None) for group in groups]


def spread_back(seconds: Sequence[float], lengths: Sequence[float]) -> list[float]:
    """Move what does not fit into a span to those before it.

    What took long is recorded in the span in which it ended: a batch that took 5 s, in a span of
    0.25 s.

    Args:
        seconds: By span, seconds recorded there.
        lengths: By span, its length in seconds.

    Returns:
        By span, seconds up to its length. What does not fit even into the first is left out.
    """
    spread, excess = [0.0] * len(seconds), 0.0
    for place in range(len(seconds) - 1, -1, -1):
        excess += seconds[place]
        spread[place] = min(excess, lengths[place])
        excess -= spread[place]
    return spread


def per_second(
    counts: Sequence[float], timeline: Mapping[str, Any], left_out: Sequence[float] | None = None
) -> list[float | None]:
    """Return counts by column as rates, for the time without the seconds that are left out.

    None where this is much less than a column, unless there is no other: it says nothing.
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
