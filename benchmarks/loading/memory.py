"""The memory of a process tree while a loader reads many small Python objects once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.call import Call
from benchmarks.loading.turns import Found, Turns, answer
from benchmarks.measure import Ground

EVERY_S = 0.2
# And the run of each.
PEERS = {"torch": "memory", "forebay": "memory", "packed": "packed"}


def memory(ground: Ground, quick: bool) -> None:
    """Print the table."""
    count = 1_000_000 if quick else 10_000_000
    print(f"{count:,} short strings, in lists unless named, shuffled, batch 1000; 2 workers")
    turns = Turns(ground, "names", count)
    for peer, what in PEERS.items():
        turns.add(what, peer, _watched)

    def cells(peer: str) -> tuple[str, ...]:
        found = turns.found[peer][0]
        before, peak = found["before_mib"], found["peak_mib"]
        return (
            f"{before:,.0f} MiB",
            f"{peak:,.0f} MiB",
            f"{peak - before:,.0f} MiB",
            f"{found['seconds']:.1f} s",
        )

    columns = ("", "before", "peak", "grew by", "epoch")
    turns.show(columns, PEERS, cells)
    print(
        f"PSS of all processes together, looked at every {EVERY_S:g} s: a page that several share\n"
        "counts once. The order of a shuffled epoch is in it for all, and libraries too."
    )


def pss_mib(pids: Iterable[int]) -> float:
    """Return the resident memory of processes together, each shared page counted once."""
    kib = 0
    for pid in pids:
        # A process that has just ended counts as 0.
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    kib += int(line.split()[1])
    return kib / 1024


def peak_resident_mib() -> float:
    """Return this process's largest resident memory; rusage would count its parent's too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def _watched(call: Call) -> Found:
    """Return the result of a run, and the peak memory of all its processes."""
    peak = 0.0
    while call.process.poll() is None:
        peak = max(peak, pss_mib(call.left()))
        time.sleep(EVERY_S)  # polled: nothing signals a change of memory
    return answer(call) | {"peak_mib": peak}
