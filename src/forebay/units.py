"""Durations, sizes and counts as short strings. PURE.

They are ASCII, because logs and terminals may not be able to encode anything else.
"""

from __future__ import annotations

from itertools import pairwise

_SHORT = (("us", 1e6), ("ms", 1e3))
_LONG = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
_BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12), ("PB", 1e15))
_NUMBERS = (("T", 1e12), ("G", 1e9), ("M", 1e6))


def duration(seconds: float, digits: int = 3) -> str:
    """Return a duration: "30 us", "24.6 ms", "1.5 s", "3 min 20 s", "2 h 5 min", "3 d 4 h".

    Args:
        seconds: At least 0.
        digits: Significant digits below one minute.
    """
    if seconds <= 0:
        return "0 s"
    for unit, factor in _SHORT:
        if (value := _rounded(seconds * factor, digits)) < 1000:
            return f"{value:g} {unit}"
    if (value := _rounded(seconds, digits)) < 60:
        return f"{value:g} s"
    for (unit, length), (smaller, part) in pairwise(_LONG):
        count, rest = divmod(round(seconds / part), length // part)
        if count:
            return f"{count:,} {unit} {rest} {smaller}" if rest else f"{count:,} {unit}"
    raise AssertionError("a minute or more has minutes")


def byte_size(nbytes: float) -> str:
    """Return a size with three digits, in units of a thousand: "512 B", "12 kB", "1.5 GB"."""
    unit, factor = byte_unit(nbytes)
    value = _rounded(nbytes / factor, 3)
    return f"{value:g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def byte_unit(nbytes: float) -> tuple[str, float]:
    """Return the unit that a size is best shown in, and its bytes."""
    fitting = (each for each in _BYTES if _rounded(nbytes / each[1], 3) < 1000)
    return next(fitting, _BYTES[-1])


def counted(number: float, noun: str) -> str:
    """Return a count with its noun: "1 input", "1,000 inputs", "1.5 cores"."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {noun_for(number, noun)}"


def noun_for(number: float, noun: str) -> str:
    """Return a noun as it is after a number: "input", "inputs"."""
    return noun + "s" * (number != 1)


def short_number(value: float) -> str:
    """Return a number with few digits: "0.25", "12", "3,400", "1.2 M"."""
    for letter, power in _NUMBERS:
        if abs(value) >= power:
            return f"{value / power:.3g} {letter}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
