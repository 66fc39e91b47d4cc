"""The text of `forebay top`: pure, from what the pages show to lines of a given width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forebay.live.live_view import View
from forebay.live.recent_work import SECONDS
from forebay.units import byte_size, counted, duration, short_number

# A page is written about once a second; when it is older, nothing was made or taken since.
QUIET_S = 5.0
WIDEST = 110
# Workers that are shown one by one; of more, as many as fit.
MAX_SHOWN = 16
LABEL = 9


class Signs(NamedTuple):
    """The characters that bars are drawn with."""

    full: str
    empty: str
    mark: str
    levels: str  # ten of them, for the digits
    dot: str


UNICODE = Signs("█", "░", "│", " ▁▂▃▄▅▆▇██", "·")
ASCII = Signs("#", "-", "|", " .:-=+*%##", "-")


def screen(views: Sequence[View], now: float, columns: int, signs: Signs) -> list[str]:
    """Return the lines to show, none longer than `columns`.

    Args:
        views: What there is.
        now: Seconds since 1970.
        columns: Width of the terminal.
        signs: What the terminal can show.
    """
    width = min(columns, WIDEST)
    lines: list[str] = []
    for view in views:
        shown = (
            _loader(view, now, width, signs)
            if view.kind == "loader"
            else _run(view, now, width, signs)
        )
        lines += [line.rstrip()[:columns] for line in [*shown, ""]]
    return lines[:-1]


def headline(views: Sequence[View], clock: str, signs: Signs) -> str:
    """Return the first line: how much there is, and when it was looked at."""
    loaders = sum(view.kind == "loader" for view in views)
    found = [counted(loaders, "loader")] if loaders else []
    found += [counted(len(views) - loaders, "run")] if len(views) > loaders else []
    return f"forebay top {signs.dot} {', '.join(found) or 'nothing'} {signs.dot} {clock}"


def _loader(view: View, now: float, width: int, signs: Signs) -> list[str]:
    where = f"epoch {view.epoch}, batch {view.batch:,}" if view.epoch >= 0 else "no batch yet"
    facts = [where, f"{short_number(view.rate)} batches/s", _waiting(view)]
    if view.restarts:
        facts.append(counted(view.restarts, "restart"))
    texts = _title(view, now, signs), view.title, view.verdict, f" {signs.dot} ".join(facts)
    lines = [line for text in texts for line in _wrapped(text, width)]
    lines.append(f"{'buffer':<{LABEL}}{_buffer(view, width, signs)}")
    lines.append(
        f"{'waits':<{LABEL}}{_levels(view.waits, width, signs)} {_percent(view.wait_share)}"
    )
    shown = view.lanes[:MAX_SHOWN]
    for number, lane in enumerate(shown):
        busy = sum(map(int, lane)) / (9 * len(lane)) if lane else 0.0
        label = f"worker {number}" if view.num_workers else "trainer"
        lines.append(f"{label:<{LABEL}}{_levels(lane, width, signs)} {_percent(busy)}")
    if view.num_workers > len(shown):
        lines.append(f"{'':<{LABEL}}and {counted(view.num_workers - len(shown), 'more worker')}")
    return lines


def _run(view: View, now: float, width: int, signs: Signs) -> list[str]:
    left = view.total - view.done - view.failed
    time_left = f"{duration(left / view.rate)} left" if view.rate and left > 0 else ""
    facts = [
        f"{view.done:,} of {counted(view.total, view.unit or 'input')} done",
        f"{view.failed:,} failed",
        f"{short_number(view.rate)} {view.unit or 'input'}s/s",
        time_left,
        counted(view.num_workers, "worker") if view.num_workers else "in this process",
    ]
    state = f" {signs.dot} ".join(filter(None, facts))
    name = f"{view.kind} {view.title}"
    lines = [*_wrapped(_title(view, now, signs), width), name, *_wrapped(state, width)]
    if view.longest:
        took = duration(max(now - view.longest_since, 0.0))
        lines += _wrapped(f"longest at work, for {took}: {view.longest}", width)
    return lines


def _title(view: View, now: float, signs: Signs) -> str:
    quiet = now - view.at
    age = f"nothing new for {duration(quiet)}" if quiet > QUIET_S else ""
    parts = [view.program, f"pid {view.pid}", duration(max(now - view.began, 0.0)), age]
    return f" {signs.dot} ".join(filter(None, parts))


def _waiting(view: View) -> str:
    seconds = max(len(view.waits), 1)  # there are no more in the first half minute
    return f"training waited {view.wait_share:.0%} of the last {seconds} s"


def _buffer(view: View, width: int, signs: Signs) -> str:
    """Return a bar in bytes, or in batches where the buffer has no limit in bytes."""
    number = f"{view.ready:,} ready"
    if view.max_bytes:
        level, high = view.held_bytes, view.max_bytes
        amount = f"{byte_size(level)} of {byte_size(high)}, {number}"
    elif view.max_batches:
        level, high = float(view.ready), view.max_batches
        amount = f"{view.ready:,} of {high:,.0f} batches ready"
    else:
        return f"{byte_size(view.held_bytes)}, {number}"
    room = max(min(SECONDS, width - LABEL - len(amount) - 1), 8)
    filled = round(room * min(level / high, 1.0))
    bar = list(signs.full * filled + signs.empty * (room - filled))
    share = view.refill_below
    if share > 1:
        share = share / view.max_batches if view.max_batches else 0.0
    if 0 < share < 1:
        bar[min(int(room * share), room - 1)] = signs.mark
    return f"{''.join(bar)} {amount}"


def _levels(digits: str, width: int, signs: Signs) -> str:
    room = max(min(SECONDS, width - LABEL - 6), 1)
    return "".join(signs.levels[int(each)] for each in digits[-room:]).rjust(room)


def _percent(share: float) -> str:
    return f"{share:4.0%}"


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text on as many lines as it needs."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return [line for line in lines if line]
