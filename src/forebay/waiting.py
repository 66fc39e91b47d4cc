"""Waits that may last: Ctrl-C ends each within a second, whenever it comes.

Python looks for signals before a wait. One that arrives between that look and the wait does not
interrupt a wait without a limit, and the program would ignore Ctrl-C until the wait ends by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

LONGEST_WAIT_S = 1.0


def wait_until(wait: Callable[[float], object]) -> None:
    """Call `wait(seconds)` until what it returns is true."""
    while not wait(LONGEST_WAIT_S):
        pass


def join(thread: threading.Thread) -> None:
    """Wait until a thread has ended."""
    while thread.is_alive():
        thread.join(LONGEST_WAIT_S)
