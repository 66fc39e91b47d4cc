"""What tracing costs on tiny batches, in processor time of the trainer and its workers.

Epochs with and without tracing take turns in one process, with the same workers, so that nothing
else differs. Without it, a worker times no batch, so that none is recorded, and the trainer notes
no step; what is left of the cost is three readings of the clock for each batch, about 0.1 us. As a
program: `python -m benchmarks.tracing NUM_WORKERS PAIRS`; its last line is what it found, as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

BATCHES = 1000
PAIRS, QUICK_PAIRS = 100, 4
WORKERS = (2, 0)
TARGET = 0.005
LIMIT_S = 600.0
# Indices of samples that switch tracing on and off in the worker that makes them.
ON, OFF = -1, -2


def nothing(*_: Any) -> None:
    """Record nothing."""


class Tracing:
    """Switches tracing on and off in this process, by methods that do nothing."""

    def __init__(self) -> None:
        from forebay.loading.batch_job import BatchTimer
        from forebay.observe.record import Trace

        calls = ((BatchTimer, "timing"), (Trace, "taken"), (Trace, "taken_at_once"))
        self._calls = [(cls, name, vars(cls)[name]) for cls, name in calls]

    def switch(self, *, is_on: bool) -> None:
        """Switch it on or off."""
        for cls, name, traced in self._calls:
            setattr(cls, name, traced if is_on else nothing)


class Pairs:
    """Samples of two small tensors; some indices switch tracing."""

    def __init__(self) -> None:
        self._sample = torch.zeros(4), torch.zeros(1)
        self._tracing: Tracing | None = None

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        if index < 0:
            self._tracing = self._tracing or Tracing()
            self._tracing.switch(is_on=index == ON)
        return self._sample


class Order:
    """The order of an epoch: each worker's first sample switches tracing there.

    Attributes:
        is_on: Whether the next epoch is traced.
    """

    def __init__(self, num_workers: int) -> None:
        self.is_on = True
        self._num_workers = num_workers

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Any:
        yield from [ON if self.is_on else OFF] * self._num_workers
        yield from range(BATCHES - self._num_workers)


def tracing(_: Ground, quick: bool) -> None:
    """Print what tracing costs.

    Args:
        quick: Whether to measure few pairs.
    """
    pairs = QUICK_PAIRS if quick else PAIRS
    print("processor time of a batch with and without tracing: batch_size=1, two small tensors")
    rows = Rows()
    for num_workers in WORKERS:
        with Call("benchmarks.tracing", str(num_workers), str(pairs)) as call:
            found = json.loads(call.answer(LIMIT_S))
        for process, times in found.items():
            on, off = times["on"], times["off"]
            more = [one - other for one, other in zip(on, off, strict=True)]
            shares = sorted(each / other for each, other in zip(more, off, strict=True))
            low, middle, high = statistics.quantiles(shares, n=4)
            rows.append(
                (
                    f"num_workers={num_workers}, {process}",
                    f"{statistics.median(off) * 1e6:.2f} us",
                    f"{statistics.median(more) * 1e6:+.2f} us",
                    f"{middle:+.2%}",
                    f"{low:+.2%} to {high:+.2%}",
                    str(pairs),
                )
            )
    show(("", "without", "tracing adds", "share", "quartiles", "pairs"), rows)
    print(f"(Target: less than {TARGET:.1%} of the sum of trainer and workers.)")


def main(num_workers: str, pairs: str) -> None:
    """Measure, and print processor time per batch by process: a list each, in pairs."""
    from forebay import DataLoader

    count = int(num_workers)
    order, here = Order(count), Tracing()
    loader: Any = DataLoader(
        Pairs(), 1, sampler=order, num_workers=count, persistent_workers=count > 0
    )
    found: dict[str, dict[str, list[float]]] = {}
    for pair in range(-1, int(pairs)):  # the first one only warms up
        for is_on in (True, False) if pair % 2 else (False, True):
            order.is_on = is_on
            here.switch(is_on=is_on)
            trainer_s, workers_s = _epoch(loader)
            spent = {"trainer": trainer_s, "workers": workers_s, "sum": trainer_s + workers_s}
            for process, seconds in spent.items():
                times = found.setdefault(process, {"on": [], "off": []})
                if pair >= 0 and (count or process == "sum"):
                    times["on" if is_on else "off"].append(seconds / BATCHES)
    print()
    print(json.dumps({name: times for name, times in found.items() if times["on"]}))


def _epoch(loader: Any) -> tuple[float, float]:
    """Return the processor time of the trainer and of its workers in an epoch."""
    batches = iter(loader)
    next(batches)  # the workers have started
    pids = [each.pid for each in batches._workers]
    trainer_s, workers_s = time.process_time(), _processor_time(pids)
    for _ in batches:
        pass
    return time.process_time() - trainer_s, _processor_time(pids) - workers_s


def _processor_time(pids: Sequence[int]) -> float:
    """Return the processor time of processes, in seconds; see clock_getcpuclockid(3)."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


if __name__ == "__main__":
    main(*sys.argv[1:])
