"""What the audit of a loader with seed= costs: of the trainer and of the process that it forks.

Each is a reading of processor time, so that other programs hardly matter; what is shared with the
audit, such as digests that workers make, is in the workers' time. As a program:
`python -m benchmarks.audit SAMPLE_MS NUM_WORKERS EPOCHS`; its last line is what it found, as JSON.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

SAMPLES, BATCH_SIZE = 2000, 20
EPOCHS, QUICK_EPOCHS = 20, 3
# Milliseconds of processor time of a sample, and workers.
CASES = ((0.0, 2), (1.0, 2), (10.0, 2), (1.0, 0))
TARGET = 0.005
LIMIT_S = 900.0


class Samples:
    """Two small tensors each, after some milliseconds of work."""

    def __init__(self, sample_ms: float) -> None:
        self._seconds = sample_ms / 1000

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        until = time.process_time() + self._seconds
        while time.process_time() < until:
            pass
        return torch.rand(4), index


def audit(_: Ground, quick: bool) -> None:
    """Print what the audit costs.

    Args:
        quick: Whether to measure few epochs.
    """
    epochs = QUICK_EPOCHS if quick else EPOCHS
    print(f"processor time of the audit: {SAMPLES:,} samples an epoch, batch_size={BATCH_SIZE}")
    rows = Rows()
    for sample_ms, num_workers in CASES:
        with Call("benchmarks.audit", str(sample_ms), str(num_workers), str(epochs)) as call:
            found = json.loads(call.answer(LIMIT_S))
        spent, later = found["spent_s"], found["spent_s"][1:]
        made_s = found["made_s"] / epochs
        rows.append(
            (
                f"samples of {sample_ms:g} ms, num_workers={num_workers}",
                f"{made_s:.2f} s",
                f"{spent[0] * 1e3:.1f} ms",
                f"{statistics.mean(later) * 1e3:.2f} ms",
                f"{statistics.mean(later) / made_s:.2%}",
                str(found["audited"]),
            )
        )
    show(("", "an epoch", "first audit", "a later epoch", "share", "samples"), rows)
    print(f"(Target: at most {TARGET:.1%} of the time of the workers in each later epoch.)")


class Spent:
    """Counts the processor time of the audit in this process, and of processes that it forks."""

    def __init__(self) -> None:
        from forebay.loading import audit_process
        from forebay.loading.audit import LoaderAudit

        self.seconds, self._depth = 0.0, 0
        for name in ("begin", "add", "poll", "end"):
            setattr(LoaderAudit, name, self._counted(vars(LoaderAudit)[name], time.process_time))
        ended: Any = audit_process._end
        audit_process._end = self._counted(ended, children_s, always=True)

    def _counted(
        self, call: Callable[..., Any], clock: Callable[[], float], *, always: bool = False
    ) -> Any:
        def counted(*args: Any) -> Any:
            is_outer, began = always or not self._depth, clock()
            self._depth += 1
            try:
                return call(*args)
            finally:
                self._depth -= 1
                self.seconds += (clock() - began) * is_outer

        return counted


def children_s() -> float:
    """Return the processor time of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(sample_ms: str, num_workers: str, epochs: str) -> None:
    """Measure, and print the seconds of the audit by epoch, and those of the batches."""
    from forebay import DataLoader

    spent, found = Spent(), list[float]()
    count = int(num_workers)
    loader: Any = DataLoader(
        Samples(float(sample_ms)), BATCH_SIZE, seed=0, num_workers=count, shuffle=True
    )
    began = time.process_time() if not count else children_s()
    for _ in range(int(epochs)):
        before = spent.seconds
        for _ in loader:
            pass
        found.append(spent.seconds - before)
    audited = loader.statistics().audited
    loader.close()
    made_s = (time.process_time() if not count else children_s()) - began - sum(found)
    print()
    print(json.dumps({"spent_s": found, "made_s": made_s, "audited": audited}))


if __name__ == "__main__":
    main(*sys.argv[1:])
