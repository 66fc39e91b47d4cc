"""How much memory this process shares with no other: also what it has copied since its fork."""

from __future__ import annotations

import time
from contextlib import suppress

from forebay.base.process import read_proc

# When it is measured first, and how often at most, in seconds; and the share of the time that this
# may take. The system walks all pages: 14 ms for 700 MB.
MEMORY_EVERY_S, MEMORY_SHARE = 10.0, 0.0005
# Copied memory is new pages: with fewer than so many there is nothing to measure.
LEAST_NEW_PAGES = 1 << 13


class PrivateMemory:
    """Measures the memory of this process that no other shares, now and then."""

    def __init__(self, now: float) -> None:
        self._due, self._faults = now + MEMORY_EVERY_S, 0

    def measured(self, now: float, faults: int) -> int:
        """Return the bytes; 0 if it is too early, or the process has hardly any new pages.

        Args:
            faults: Page faults since the last call.
        """
        self._faults += faults
        if now < self._due or self._faults < LEAST_NEW_PAGES:
            return 0
        began, found = time.perf_counter(), private_bytes()
        took_s = time.perf_counter() - began
        self._due, self._faults = now + max(MEMORY_EVERY_S, took_s / MEMORY_SHARE), 0
        return found


def private_bytes() -> int:
    """Return the bytes of memory that only this process has; 0 if the system does not say.

    Source: Linux, Documentation/filesystems/proc.rst, Private_Dirty of smaps_rollup.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in read_proc("self/smaps_rollup").splitlines():
            if line.startswith(b"Private_Dirty:"):
                return int(line.split()[1]) * 1024
    return 0
