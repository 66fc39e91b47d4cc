"""The feeds that are open, so that the interpreter's end closes them."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Any

from forebay.base.process import join_threads

# How long to wait for a thread that takes a batch, or processes it on a device, in seconds.
LEAVE_S = 5.0
CLOSED = (
    "this iterator was closed, with its loader or with its workers\n"
    "  It returns no more batches. Begin a new epoch: iter(loader)."
)
INTERRUPTED = (
    "this iterator was interrupted during its work and cannot continue\n"
    "  It returns no more batches. Begin a new epoch: iter(loader)."
)

OPEN_FEEDS: weakref.WeakSet[Any] = weakref.WeakSet()
EXIT = threading.Event()
_leaving: list[threading.Thread] = []


@atexit.register
def _close_all() -> None:
    """Stop the workers before the interpreter removes what their pools need."""
    EXIT.set()
    for feed in list(OPEN_FEEDS):
        feed.close()
    join_threads(_leaving, 0.0)


def leave_at_exit() -> None:
    """End a daemon thread that takes batches at the interpreter's end, without a traceback."""
    if EXIT.is_set() and threading.current_thread().daemon:
        _leaving.append(threading.current_thread())
        raise SystemExit
