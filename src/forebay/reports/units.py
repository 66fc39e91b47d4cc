"""Times, sizes and foreign text as short strings."""

from __future__ import annotations

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


def printable(text: str, most: int) -> str:
    """Return a string without control characters, such as those that move a cursor."""
    shown = "".join(each if each.isprintable() else " " for each in text[:most])
    return " ".join(shown.split())
