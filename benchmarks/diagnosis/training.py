"""Train with a planted cause, and measure."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.diagnosis.planted import BATCH, Measured, Planted, Planting
from forebay import DataLoader

QUICK_STEP_S = 0.001
# Steps before the measurement begins: the buffer fills, and workers start.
FIRST = 10


def train(planting: Planting, seed: int, advice: Mapping[str, Any] | None = None) -> Measured:
    """Train, with the advice followed where there is some, and return what it came to."""
    count = planting.steps()
    epoch = planting.epoch or count
    dataset = Planted(epoch * BATCH, planting.sample, seed)
    settings = {**planting.settings, **(advice or {})}
    if planting.start_s:
        settings["worker_init_fn"] = partial(_start, planting.start_s)
    strangers = planting.strangers if advice is None else 0
    waits, spent, got_at = [], [], []
    with _strangers(strangers), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with DataLoader(dataset, batch_size=BATCH, **settings) as loader:
            asked = time.perf_counter()
            while len(got_at) < count:
                for _ in loader:
                    got = time.perf_counter()
                    waits.append(got - asked)
                    got_at.append(got)
                    if len(got_at) >= count:
                        break
                    _step(planting, len(got_at))
                    asked = time.perf_counter()
                    spent.append(asked - got)
            diagnosis = loader.diagnose()
            trace = loader._loader_progress.trace
    rate = (len(got_at) - 1 - FIRST) / (got_at[-1] - got_at[FIRST])
    made = [each.ended_at for each in trace.batches]
    return Measured(rate, waits, spent, diagnosis, _readiness(made, got_at))


def _start(seconds: float, _worker_id: int) -> None:
    time.sleep(seconds)


def _step(planting: Planting, number: int) -> None:
    if not planting.burst:
        time.sleep(planting.step_s)
    elif number % planting.burst:
        time.sleep(QUICK_STEP_S)
    else:
        time.sleep(planting.step_s * planting.burst - QUICK_STEP_S * (planting.burst - 1))


def _readiness(made: list[float], taken: list[float]) -> float:
    """Return 1 less the part of the time that no batch was ready: SPDL's readiness of data."""
    events = sorted([(at, 1) for at in made] + [(at, -1) for at in taken])
    empty, ready, before = 0.0, 0, taken[0]
    for at, change in events:
        if ready <= 0 and at > before:
            empty += at - before
        before, ready = max(at, before), ready + change
    return 1.0 - empty / max(taken[-1] - taken[0], 1e-9)


@contextlib.contextmanager
def _strangers(count: int) -> Iterator[None]:
    """Have so many other processes use the processor."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for each in processes:
        each.start()
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.join()


def _spin() -> None:
    while True:
        pass
