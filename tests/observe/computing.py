"""Work in threads that Python's main thread waits for, as a library would do it."""

from __future__ import annotations

import threading
import time


def compute_in_threads(seconds: float) -> None:
    """Use that much processor time in each of two more threads."""

    def spin() -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
