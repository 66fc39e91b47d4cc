"""`forebay top` on a terminal: looks at the pages every second, and draws what they show."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from forebay.live.live_folder import candidates, is_private
from forebay.live.live_page import is_dead, pages_in, read_page, remove_dead
from forebay.live.live_view import View
from forebay.live.top_screen import ASCII, UNICODE, Signs, headline, screen
from forebay.process_identity import kernel

REDRAW_S = 1.0
# Pages that are looked at, in each folder.
MAX_PAGES = 256

# To another screen without a cursor, and back; to its top; clear the rest of a line, of the screen.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def live_views() -> list[View]:
    """Return what this user's loaders and runs on this machine show, oldest first.

    Files of processes that have ended are removed.
    """
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
    """Draw lines every second, until Ctrl-C. stdout is a terminal.

    Args:
        lines_now: Returns the lines for a number of columns.
    """
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
