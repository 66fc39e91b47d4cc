"""What one run took, in sums: by its loop, its workers and its commits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Sums of one run. Times are in seconds, and None if not known."""

    inputs: int
    committed: int
    elapsed_s: float
    num_workers: int
    busy_s: float
    cpu_s: float | None
    flush_s: float
    record_s: float
    cores: float | None
    decisions: tuple[str, ...] = ()
    at_once: int = 1  # inputs of each worker
    system_s: float = 0.0
    faults: int = 0
    threads_s: float = 0.0
    queued_s: float = 0.0
    keeps_freed: bool = True
