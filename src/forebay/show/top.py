"""The data of a page, checked: what a file says is bounded, and safe to print on a terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from textwrap import wrap
from typing import Any, NamedTuple

from forebay.base.formatting import byte_size, counted, duration, short_number
from forebay.base.process import kernel
from forebay.errors import one_line
from forebay.observe.figures import MOST, checked_number, top_figures
from forebay.show.page import (
    MAX_LANES,
    SECONDS,
    candidates,
    is_dead,
    is_private,
    pages_in,
    read_page,
    remove_dead,
)

MAX_TEXT = 400


# The last seconds, one digit up to 9 for each.
Digits = str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a page shows of a loader or a run: times since 1970, rates and waits of `SECONDS`."""

    kind: str = ""
    pid: int = 0
    program: str = ""
    title: str = ""
    began: float = 0.0
    at: float = 0.0
    rate: float = 0.0
    num_workers: int = 0
    verdict: str = ""
    epoch: int = -1
    batch: int = 0
    ready: int = 0
    held_bytes: float = 0.0
    max_bytes: float = 0.0
    max_batches: float = 0.0
    refill_below: float = 0.0
    wait_share: float = 0.0
    waits: Digits = ""
    lanes: tuple[Digits, ...] = ()
    unit: str = ""
    done: int = 0
    failed: int = 0
    total: int = 0
    longest: str = ""
    longest_since: float = 0.0
    totals: Mapping[str, float] = field(default_factory=dict)  # of the whole run

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> View | None:
        """Return what a page shows; None if it is not one of a loader or a run."""
        if data.get("kind") not in ("loader", "preprocess", "predict", "cache"):
            return None
        shown = {**data, "totals": data}
        found = {each.name: _CLEANED[str(each.type)](shown.get(each.name)) for each in fields(cls)}
        return cls(**{name: value for name, value in found.items() if value is not None})


def _text(value: Any) -> str | None:
    return one_line(value, MAX_TEXT) if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST else None


def _digits(value: Any) -> Digits | None:
    digits = value[:SECONDS] if isinstance(value, str) else ""
    return digits if digits.isascii() and digits.isdigit() else None


def _lanes(value: Any) -> tuple[Digits, ...] | None:
    lanes = value[:MAX_LANES] if isinstance(value, list) else []
    return tuple(_digits(lane) or "" for lane in lanes)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: checked_number(each) or 0.0 for name, each in values.items()}


# By the type of a field: what makes any JSON a value of it, or None for the default.
_CLEANED: dict[str, Callable[[Any], Any]] = {
    "str": _text,
    "int": _whole,
    "float": checked_number,
    "Digits": _digits,
    "tuple[Digits, ...]": _lanes,
    "Mapping[str, float]": _numbers,
}


# ---- top screen ----------------------------------------------------------------------------------
# The text of `forebay top`: pure, from what the pages show to lines of a given width.

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
    """Return the lines to show, none longer than `columns`."""
    width = min(columns, WIDEST)
    lines: list[str] = []
    for view in views:
        lines_of = _loader if view.kind == "loader" else _run
        shown = lines_of(view, now, width, signs)
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
    seconds = max(len(view.waits), 1)  # there are no more in the first half minute
    rates = f"{short_number(view.rate)} batches/s, training waited {view.wait_share:.0%}"
    facts = [where, f"last {seconds} s: {rates}", *top_figures(view.kind, view.totals)]
    texts = _title(view, now, signs), view.title, view.verdict, f" {signs.dot} ".join(facts)
    lines = [line for text in texts for line in _wrapped(text, width)]
    lines.append(f"{'buffer':<{LABEL}}{_buffer(view, width, signs)}")
    lines.append(_levels("waits", view.waits, view.wait_share, width, signs))
    shown = view.lanes[:MAX_SHOWN]
    for number, lane in enumerate(shown):
        busy = sum(map(int, lane)) / (9 * len(lane)) if lane else 0.0
        label = f"worker {number}" if view.num_workers else "trainer"
        lines.append(_levels(label, lane, busy, width, signs))
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
        *top_figures(view.kind, view.totals),
    ]
    state = f" {signs.dot} ".join(filter(None, facts))
    name = f"{view.kind} {view.title}"
    lines = [*_wrapped(_title(view, now, signs), width), name, *_wrapped(state, width)]
    if view.longest:
        took = duration(max(now - view.longest_since, 0.0))
        lines += _wrapped(f"longest-running input ({took}): {view.longest}", width)
    return lines


def _title(view: View, now: float, signs: Signs) -> str:
    quiet = now - view.at
    age = f"nothing new for {duration(quiet)}" if quiet > QUIET_S else ""
    parts = [view.program, f"pid {view.pid}", duration(max(now - view.began, 0.0)), age]
    return f" {signs.dot} ".join(filter(None, parts))


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


def _levels(label: str, digits: str, share: float, width: int, signs: Signs) -> str:
    room = max(min(SECONDS, width - LABEL - 6), 1)
    levels = "".join(signs.levels[int(each)] for each in digits[-room:])
    return f"{label:<{LABEL}}{levels:>{room}} {share:4.0%}"


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text on as many lines as it needs."""
    return wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


# ---- top display ---------------------------------------------------------------------------------
# `forebay top` on a terminal: looks at the pages every second, and draws what they show.

REDRAW_S = 1.0
# Pages that are looked at, in each folder.
MAX_PAGES = 256

# To another screen without a cursor, and back; to its top; clear the rest of a line, of the screen.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def live_views() -> list[View]:
    """Return what this user's loaders and runs on this machine show, oldest first."""
    views, here = [], kernel()
    for folder in filter(is_private, candidates()):
        remove_dead(folder)
        for path in pages_in(folder)[:MAX_PAGES]:
            data = read_page(path)
            # A process of another container, which this one cannot see, may have ended.
            if data is None or data.get("kernel") != here or is_dead(data):
                continue
            if (view := View.of(data)) is not None:
                views.append(view)
    return sorted(views, key=lambda view: (view.began, view.pid))


def text_of(views: Sequence[View], columns: int, signs: Signs) -> list[str]:
    """Return the lines that show the views now."""
    now = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    return [headline(views, clock, signs)[:columns], "", *screen(views, now, columns, signs)]


def signs_for(encoding: str | None) -> Signs:
    """Return the characters that a stream with this encoding can show."""
    try:
        "".join(UNICODE).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def watch(lines_now: Callable[[int, Signs], Sequence[str]]) -> None:
    """Draw lines every second, until Ctrl-C. stdout is a terminal."""
    signs = signs_for(sys.stdout.encoding)
    # Waited for, not handled: a handler that set an Event could find its lock held by this thread.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    sys.stdout.write(_ENTER)
    try:
        while True:
            columns, rows = os.get_terminal_size(sys.stdout.fileno())
            # Some terminals report no size.
            lines = lines_now(columns or 80, signs)[: (rows or 24) - 1]
            drawn = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)
            sys.stdout.write(f"{_HOME}{drawn}{_CLEAR_BELOW}")
            sys.stdout.flush()
            signal.sigtimedwait({signal.SIGWINCH}, REDRAW_S)
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
