"""Turn the spans of a record into columns of a chart: join them, and spread long work. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import sub
from typing import Any

# Columns of a chart.
MAX_COLUMNS = 160


def group_size(count: int, most: int = MAX_COLUMNS) -> int:
    """Return how many spans to join so that at most `most` columns are left."""
    return max(-(-count // most), 1)


def summed(values: Sequence[float], size: int) -> list[float]:
    """Return the sum of each `size` values; the last group may be smaller."""
    return [sum(group) for group in _groups(values, size)]


def lowest(values: Sequence[float | None], size: int) -> list[float | None]:
    """Return the lowest of each `size` values; None where all of them are."""
    return [min(known, default=None) for known in _known_groups(values, size)]


def highest(values: Sequence[float | None], size: int) -> list[float | None]:
    """Return the highest of each `size` values; None where all of them are."""
    return [max(known, default=None) for known in _known_groups(values, size)]


def spread_back(seconds: Sequence[float], lengths: Sequence[float]) -> list[float]:
    """Move seconds that do not fit into a span to the spans before it.

    Work is recorded in the span in which it ended, even a batch that took 5 s in a span of 0.25 s.

    Args:
        seconds: By span, seconds recorded there.
        lengths: By span, its length in seconds.

    Returns:
        By span, seconds up to its length. What does not fit even into the first is left out.
    """
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


def _known_groups(values: Sequence[float | None], size: int) -> Iterator[list[float]]:
    """Yield the values that are not None of each `size` values."""
    return ([each for each in group if each is not None] for group in _groups(values, size))
