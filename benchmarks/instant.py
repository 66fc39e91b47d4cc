"""Runs without workers' time: a pool in the driver's process that answers at once.

What is left is the driver's own work: listing, planning, the ledger and the table. As a program it
is one driver: `python -m benchmarks.instant MANIFEST FOLDER [STOP_AFTER]`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loading.memory import peak_resident_mib
from forebay.pools.base import Pool
from forebay.pools.events import Assignment, Event, TaskFinished, WorkerStarted

METADATA = '[{"n":1}]'


class InstantPool(Pool):
    """Answers each task as soon as it is sent, with one row of metadata and no file.

    Args:
        stop_after: Raise KeyboardInterrupt once so many tasks were answered; None for never.

    Attributes:
        first_at: When the first task was sent, by `time.perf_counter`; None before that.
        last_at: When the last one was sent.
    """

    def __init__(self, stop_after: int | None = None) -> None:
        self.first_at: float | None = None
        self.last_at = 0.0
        self._events: list[Event] = []
        self._left = stop_after

    def start(self, incarnation: int, worker_id: int) -> None:
        """Start a worker, which is this process."""
        self._events.append(WorkerStarted(incarnation))

    def send_to_all(self, groups: Sequence[tuple[int, Sequence[Assignment]]]) -> None:
        """Answer."""
        for group in groups:
            self._answer(*group)

    def _answer(self, incarnation: int, assignments: Sequence[Assignment]) -> None:
        self.last_at = time.perf_counter()
        if self.first_at is None:
            self.first_at = self.last_at
        if self._left is not None:
            self._left -= len(assignments)
            if self._left < 0:
                raise KeyboardInterrupt
        self._events += [
            TaskFinished(incarnation, task, attempt, ((), METADATA, ""), len(METADATA), 1e-4)
            for task, attempt, _ in assignments
        ]

    def kill(self, incarnation: int) -> None:
        """Do nothing: no task hangs."""

    def take_stacks(self, incarnation: int) -> None:
        """Do nothing: no task takes time."""

    def stop(self, incarnation: int) -> None:
        """Do nothing."""

    def wait(self, timeout: float | None) -> list[Event]:
        """Return the answers."""
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """Do nothing: `wait` never waits."""

    def close(self) -> None:
        """Do nothing."""


def count(row: dict[str, Any], out: Any) -> dict[str, int]:  # noqa: ARG001 - it is never called
    """Return a row without any work."""
    return {"n": 1}


def main(manifest: str, folder: str, stop_after: str = "") -> None:
    """Run forebay over a manifest and print what it took, as JSON."""
    import pyarrow.parquet  # noqa: F401 - imported beforehand, as in every benchmark

    from forebay import preprocess
    from forebay.runs import run as runs_run

    pool = InstantPool(int(stop_after) if stop_after else None)
    runs_run.workers_for = lambda *_: (pool, 1)  # type: ignore[attr-defined]
    began, cpu = time.perf_counter(), time.process_time()
    facts: dict[str, Any] = {}
    try:
        report = preprocess(count, manifest, output=folder, num_workers=1, progress=False)
        facts = {"done": report.done, "resumed": report.resumed}
    except KeyboardInterrupt:
        pass
    ended = time.perf_counter()
    facts |= {
        "seconds": ended - began,
        "cpu_s": time.process_time() - cpu,
        "first_s": None if pool.first_at is None else pool.first_at - began,
        "table_s": ended - (pool.last_at or began),
        "peak_mib": peak_resident_mib(),
        "ledger_bytes": os.path.getsize(Path(folder, ".forebay", "ledger.sqlite")),
    }
    print(
        json.dumps(
            {
                key: each if isinstance(each, int) else each and round(each, 2)
                for key, each in facts.items()
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
