"""Waiting for threads that were told to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

# How long the end of the interpreter waits at least for threads in the middle of their work.
EXIT_S = 5.0


def join_threads(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Wait until threads have ended, for at most `seconds` in all.

    At the interpreter's end it waits for up to `EXIT_S`: a daemon thread that comes out of an
    operation of torch when the interpreter is gone aborts the process (`std::terminate`).
    """
    if not threading.main_thread().is_alive():  # what runs at exit runs after it
        seconds = max(seconds, EXIT_S)
    until = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(until - time.monotonic(), 0.0))
