"""Numbers and tables for people: as text, and as HTML that a notebook shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from forebay.errors import printable

# ---- units ---------------------------------------------------------------------------------------
# Durations, sizes and counts as short strings. PURE.
#
# They are ASCII, because logs and terminals may not be able to encode anything else.

_SHORT = (("us", 1e6), ("ms", 1e3))
_LONG = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
_BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12), ("PB", 1e15))
_NUMBERS = (("T", 1e12), ("G", 1e9), ("M", 1e6))


def duration(seconds: float, digits: int = 3) -> str:
    """Return a duration: "30 us", "24.6 ms", "1.5 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"."""
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


# ---- notebook html -------------------------------------------------------------------------------
# Summaries as HTML: what a notebook shows of a report, a diagnosis, statistics or a dataset.
#
# Each is one element without scripts, styles or references to anything outside it. All text is
# escaped: a file's name, and what an exception says, may be anything.

# Characters of one value and of the sentences, and how many failures are listed.
MAX_LENGTH = 200
MAX_TEXT = 1000
MAX_LISTED = 10

_LEFT = ' style="text-align: left"'


def summary(
    title: str,
    facts: Mapping[str, object],
    failures: Sequence[object] = (),
    failed: int = 0,
    text: str = "",
) -> str:
    """Return a title, a text, a table of facts, and a list of failures that can be opened."""
    rows = "".join(
        f"<tr><th{_LEFT}>{_escaped(name)}</th><td{_LEFT}>{_shown(value)}</td></tr>"
        for name, value in facts.items()
    )
    paragraph = f"<div>{_escaped(text, MAX_TEXT)}</div>" if text else ""
    # The classes keep MathJax from typesetting a name that contains dollar signs.
    return (
        '<div class="tex2jax_ignore mathjax_ignore">'
        f"<strong>{_escaped(title)}</strong>{paragraph}<table>{rows}</table>"
        f"{_listed(failures, failed)}</div>"
    )


def preformatted(title: str, text: str) -> str:
    """Return a title, and a text in lines as it is printed."""
    lines = "\n".join(_escaped(line, MAX_TEXT) for line in text.splitlines())
    return (
        '<div class="tex2jax_ignore mathjax_ignore">'
        f"<strong>{_escaped(title)}</strong><pre>{lines}</pre></div>"
    )


def _listed(failures: Iterable[object], failed: int) -> str:
    shown = [f"<li>{_escaped(str(each))}</li>" for each in list(failures)[:MAX_LISTED]]
    if not shown:
        return ""
    if failed > len(shown):
        shown.append(f"<li>… and {failed - len(shown):,} more</li>")
    heading = counted(failed, "failure")
    return f"<details><summary>{heading}</summary><ul>{''.join(shown)}</ul></details>"


def _shown(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _escaped(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _escaped(text: str, most: int = MAX_LENGTH) -> str:
    if len(text) > most:
        text = text[:most] + "…"
    import html  # a thousand names, which few calls need

    return html.escape(printable(text))
