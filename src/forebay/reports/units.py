"""Times, sizes and foreign text as short strings."""

from __future__ import annotations

from forebay.errors import printable
from forebay.observe.progress import duration


def seconds_text(seconds: float) -> str:
    """Return a short time: "3 µs", "12 ms", "1.5 s"."""
    if not seconds:
        return "0 s"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return duration(seconds) if seconds >= 60 else f"{seconds:.3g} s"


def bytes_text(nbytes: float) -> str:
    """Return a size: "12 kB", "1.5 GB"."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def two_digits(value: float) -> float:
    """Return a number with two significant digits."""
    return float(f"{value:.2g}")


def one_line(text: str, most: int) -> str:
    """Return a string of at most so many characters, safe to print on a terminal."""
    return printable(" ".join(text[:most].split()))[:most]
