"""Watch the memory of a run, and end the run before the machine runs out of memory."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.loading.memory import pss_mib

# A run is ended when the machine has less than this left.
SPARE_MIB = 1536.0
# Reading the PSS of a large process takes long, so it is read less often there: it must not slow
# the run that it measures.
EVERY_S, COST_SHARE = 0.1, 0.05


class EndedError(Exception):
    """A run was ended; the message says why in a few words."""


def available_mib() -> float:
    """Return the memory that processes can still take without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def cpu_s(pids: Iterable[int]) -> float:
    """Return the processor time that processes have used, user and system."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def kill_this_first() -> None:
    """Make the kernel kill this process and its children first if memory runs out."""
    Path("/proc/self/oom_score_adj").write_text("1000")


def watched(call: Call, limit_s: float) -> dict[str, Any]:
    """Return the result that a run printed, with the peak memory of its processes as `peak_mib`.

    A run may print a peak that it has measured itself as `peak_mib`; the larger one counts.

    Raises:
        EndedError: Less than `SPARE_MIB` was left, or the run took longer than `limit_s`.
        RuntimeError: The run failed.
    """
    began = time.monotonic()
    peak = next_look = 0.0
    while call.process.poll() is None:
        now = time.monotonic()
        if now - began > limit_s:
            call.end()
            raise EndedError(f"ended after {limit_s:g} s")
        if available_mib() < SPARE_MIB:
            call.end()
            raise EndedError("ended: no memory left")
        if now >= next_look:
            peak = max(peak, pss_mib(call.left()))
            cost = time.monotonic() - now
            next_look = now + cost + max(EVERY_S, cost / COST_SHARE)
        time.sleep(EVERY_S / 2)
    found = dict(json.loads(call.answer(limit_s)))
    found["peak_mib"] = max(peak, found["peak_mib"])
    return found
