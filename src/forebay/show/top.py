"""`forebay top`: what the pages of loaders and runs show, as text on a terminal.

    page ── read_page ──> View ── screen ──> lines ── watch ──> terminal

What a page says is bounded when it is read, and safe to print.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from textwrap import wrap
from typing import Any, NamedTuple

from forebay.base.formatting import byte_size, counted, duration, short_number
from forebay.base.machine import is_private, private_folders
from forebay.base.process import kernel
from forebay.observe.figures import LARGEST_NUMBER, checked_number, checked_text, top_figures
from forebay.show.live_page import MAX_LANES, SECONDS, living_pages

# ---- view ----------------------------------------------------------------------------------------
# The data of a page, checked: what a file says is bounded, and safe to print on a terminal.

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


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= LARGEST_NUMBER else None


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
    "str": checked_text,
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


def screen(
    views: Sequence[View], now: float, columns: int, signs: Signs, rows: int | None = None
) -> list[str]:
    """Return the lines to show, none longer than `columns`.

    Args:
        rows: The most lines; the last one then says how many loaders and runs are not shown. None
            for as many as it takes.
    """
    width = min(columns, WIDEST)
    lines: list[str] = []
    for number, view in enumerate(views):
        lines_of = _loader if view.kind == "loader" else _run
        shown = lines_of(view, now, width, signs)
        more = [line.rstrip()[:columns] for line in ([""] if number else []) + shown]
        left = len(views) - 1 - number
        if rows is not None and len(lines) + len(more) + bool(left) > rows:
            # The first one is shown as far as it fits, the others whole.
            lines, left = (lines, left + 1) if number else (more[: rows - bool(left)], left)
            note = f"{left} more: `forebay top PID` shows one process"
            return [*lines, note[:columns]] if left else lines
        lines += more
    return lines


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

# To another screen without a cursor, and back; to its top; clear the rest of a line, of the screen.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def live_views() -> list[View]:
    """Return what this user's loaders and runs on this machine show, oldest first."""
    from forebay.observe.page_numbers import verdict_of  # not in a training

    views, here = [], kernel()
    for folder in filter(is_private, private_folders()):
        for data in living_pages(folder):
            # A process of another container, which this one cannot see, may have ended.
            if data.get("kernel") == here and (view := View.of(data)) is not None:
                verdict = verdict_of(data["measured"]) if data.get("measured") else ""
                verdict = f"{verdict} {checked_text(data.get('memory_note'))}".strip()
                views.append(replace(view, verdict=verdict))
    return sorted(views, key=lambda view: (view.began, view.pid))


def view_lines(
    views: Sequence[View], columns: int, signs: Signs, rows: int | None = None
) -> list[str]:
    """Return the lines that show the views now, at most `rows`."""
    now = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    head = [headline(views, clock, signs)[:columns], ""]
    return [*head, *screen(views, now, columns, signs, None if rows is None else rows - len(head))]


def signs_for(encoding: str | None) -> Signs:
    """Return the characters that a stream with this encoding can show."""
    try:
        "".join(UNICODE).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def watch(lines_now: Callable[[int, Signs, int], Sequence[str]]) -> None:
    """Draw lines every second, until q or Ctrl-C. stdout is a terminal.

    Args:
        lines_now: Returns them, for so many columns, characters, and at most so many rows.
    """
    signs = signs_for(sys.stdout.encoding)
    # A signal writes to the pipe: a handler that set an Event could find its lock held here.
    resized, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    sys.stdout.write(_ENTER)
    try:
        with _keys() as keys:
            while True:
                columns, rows = os.get_terminal_size(sys.stdout.fileno())
                rows = (rows or 24) - 1  # some terminals report no size
                lines = lines_now(columns or 80, signs, rows)[:rows]
                drawn = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)
                sys.stdout.write(f"{_HOME}{drawn}{_CLEAR_BELOW}")
                sys.stdout.flush()
                ready, _, _ = select.select([resized, *keys], [], [], REDRAW_S)
                if resized in ready:
                    os.read(resized, 4096)
                typed = [os.read(each, 4096) for each in keys if each in ready]
                if any(b"q" in each.lower() for each in typed):
                    break
                if b"" in typed:  # the terminal is gone
                    keys.clear()
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        signal.signal(signal.SIGWINCH, before)
        signal.set_wakeup_fd(-1)
        os.close(resized)
        os.close(wake)


@contextmanager
def _keys() -> Iterator[list[int]]:
    """Have keys arrive at once, without an echo; yield the descriptor to read them from, if any."""
    import termios
    import tty

    try:
        descriptor, earlier = sys.stdin.fileno(), None
        if os.isatty(descriptor) and not _is_in_background(descriptor):
            earlier = termios.tcgetattr(descriptor)
    except (AttributeError, OSError, ValueError, termios.error):  # stdin is closed, or no file
        earlier = None
    if earlier is None:
        yield []
        return
    try:
        tty.setcbreak(descriptor)
        yield [descriptor]
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, earlier)


def _is_in_background(terminal: int) -> bool:
    """Return whether the shell runs this program in the background: using keys would stop it."""
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:  # the terminal is not that of a shell
        return False
