"""Numbers and values in sentences."""

from __future__ import annotations

_MOST_SHOWN = 200


class OptionError(ValueError):
    """An argument is impossible, or what was given cannot be checked; nothing was run."""


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: "1 step", "1,000 steps"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def shortened(value: object) -> str:
    """Return the repr of a value, shortened to fit into a message."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + " ..."


def one_line(text: str, most: int) -> str:
    """Return a string on one line of at most `most` characters, safe to print on a terminal."""
    line = " ".join(text[:most].split())
    shown = (each if each.isprintable() else ascii(each)[1:-1] for each in line)
    return "".join(shown)[:most]


def message_of(error: BaseException) -> str:
    """Return the message of an exception on one line, even if its `__str__` raises."""
    try:
        return one_line(str(error), 300)
    except Exception as second:  # noqa: BLE001 - the user's __str__
        return f"<its __str__ raised {type(second).__name__}>"
