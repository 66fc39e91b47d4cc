"""How full the buffer is after a pause of the trainer that began with its first batch.

As a program it is one run: `python -m benchmarks.buffer CASE SECONDS`. Spawned workers import
this file, so it imports nothing heavy by itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.call import Call, own_processes
from benchmarks.loading.memory import pss_mib
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show
from benchmarks.watch import EndedError, available_mib, kill_this_first, watched

WORKERS = 2
LIMIT_S = 300.0
# The pause ends earlier when nothing has been made for so long.
REST_S = 1.0
MARKS = {"max_bytes": "1GB", "max_batches": 1000, "refill_below": 800}
SMALL, LARGE = 36, 148_437  # floats in a sample, 64 of which are 9 kB and 38 MB
MINUTE_S = 60.0
CASES: dict[str, tuple[str, float, int]] = {
    # By name: its title, the longest pause in seconds, and the memory that it needs in MiB.
    "shuffled": ("1,000 batches of 9 kB, shuffled", 10.0, 0),
    "seeded": ("the same, seeded", 10.0, 0),
    "sampler": ("the same, a sampler of the user", 10.0, 0),
    "threads": ("the same, threads", 10.0, 0),
    "epochs": ("the same, epochs of 300 samples", 10.0, 0),
    "iterable": ("the same, an iterable dataset", 10.0, 0),
    "bytes": ("32 MB of batches of 9 kB", 20.0, 0),
    "bytes-sampler": ("the same, a sampler of the user", 20.0, 0),
    "bytes-iterable": ("the same, an iterable dataset", 20.0, 0),
    "large": ("12 GB of batches of 38 MB", 120.0, 16_000),
    "minute": ("a million batches of 100 bytes, a pause of a minute", MINUTE_S, 6_000),
}


def buffer_fills(_: Ground, quick: bool) -> None:
    """Print the table."""
    print(f"the buffer after one next() and a pause of the trainer; {WORKERS} workers")
    rows = Rows()
    for name, (title, pause_s, needed_mib) in CASES.items():
        if needed_mib and (quick or needed_mib > available_mib()):
            rows.append((title, "not run"))
            continue
        try:
            with Call("benchmarks.buffer", name, str(pause_s)) as call:
                found = watched(call, LIMIT_S)
        except EndedError as ended:
            rows.append((title, str(ended)))
            continue
        rows.append(
            (
                title,
                f"{found['of_mark']:.3f}",
                f"{found['ready']:,}",
                f"{found['ready_bytes'] / 1e6:,.1f} MB",
                f"{found['full_s']:.1f} s",
                f"{found['rate'] / 1000:.1f} k",
                f"{found['refill']:,}" if found["refill"] else "-",
                f"{found['peak_mib']:,.0f} MiB",
            )
        )
    columns = ("", "of the mark", "ready", "size", "until then", "then taken/s", "refilled below")
    show((*columns, "peak memory"), rows)
    print(
        "of the mark: batches that are ready, of the high mark that they reach first. until then:\n"
        "the pause, which ends when nothing more is made. refilled below: batches left when more\n"
        "were made again; the low mark is 800. then taken/s: all that were ready, one after the\n"
        "other. peak memory: of all processes."
    )


def _loader(name: str) -> Any:
    import torch
    from torch.utils.data import Dataset, IterableDataset, RandomSampler

    from forebay import Buffer, DataLoader

    class Small(Dataset[torch.Tensor]):
        def __init__(self, count: int, floats: int) -> None:
            self._count, self._floats = count, floats

        def __len__(self) -> int:
            return self._count

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((self._floats,), float(index))

    class Numbers(Dataset[int]):
        def __len__(self) -> int:
            return 10_000_000

        def __getitem__(self, index: int) -> int:
            return index

    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return (torch.full((SMALL,), float(index)) for index in range(1_000_000))

    dataset: Any = Small(100_000, SMALL)
    arguments: dict[str, Any] = {"shuffle": True}
    kind, buffer = name.removeprefix("bytes-"), Buffer(**MARKS)  # type: ignore[arg-type]
    if name.startswith("bytes"):
        buffer = Buffer("32MB")
    if kind == "seeded":
        arguments["seed"] = 0
    elif kind == "sampler":
        arguments = {"sampler": RandomSampler(dataset)}
    elif kind == "threads":
        arguments["backend"] = "thread"
    elif kind == "epochs":
        dataset = Small(300, SMALL)
    elif kind == "iterable":
        dataset, arguments = Stream(), {}
    elif kind == "large":
        dataset, buffer = Small(100_000, LARGE), Buffer("12GB")
    elif kind == "minute":
        return DataLoader(
            Numbers(), 2, shuffle=True, num_workers=WORKERS, buffer=Buffer(max_batches=1_000_000)
        )
    return DataLoader(dataset, 64, num_workers=WORKERS, buffer=buffer, **arguments)


def _until(loader: Any, is_over: Callable[[Any], bool], seconds: float) -> float:
    """Wait until something holds of the statistics; return the seconds, without the rest."""
    began = changed = time.perf_counter()
    before = -1
    while True:
        now, stats = time.perf_counter(), loader.statistics()
        if stats.ready_batches != before:
            before, changed = stats.ready_batches, now
        if now - began >= seconds or (is_over(stats) and now - changed >= REST_S):
            return changed - began
        time.sleep(0.02)


def main(name: str, seconds: str) -> None:
    """Do one run and print its result, as JSON."""
    kill_this_first()
    loader = _loader(name)
    iterator = iter(loader)
    next(iterator)
    if name == "minute":  # counting so many takes time from those who make more
        time.sleep(full_s := float(seconds))
    else:
        full_s = _until(loader, lambda stats: not stats.in_flight, float(seconds))
    full, buffer = loader.statistics(), loader.buffer
    marks = [full.ready_batches / buffer.max_batches] if buffer.max_batches else []
    marks += [full.ready_bytes / buffer.nbytes] if buffer.nbytes else []
    of_mark = max(marks)
    refill = 0
    if name == "minute":  # how many there could be
        of_mark = min(full.ready_batches / (MINUTE_S * 10_000), 1.0)
    elif name in ("shuffled", "seeded", "sampler", "threads"):
        while not refill:
            next(iterator)
            time.sleep(0.001)
            now = loader.statistics()
            refill = now.ready_batches if now.in_flight else 0
        _until(loader, lambda stats: not stats.in_flight, float(seconds))
    ready = loader.statistics().ready_batches
    began, taken = time.perf_counter(), 0
    while taken < ready - 1:
        for _batch in iterator:
            taken += 1
            if taken == ready - 1:
                break
        else:
            iterator = iter(loader)
    rate = taken / (time.perf_counter() - began)
    found = {
        "of_mark": of_mark,
        "ready": full.ready_batches,
        "ready_bytes": full.ready_bytes,
        "full_s": full_s,
        "rate": rate,
        "refill": refill,
        "peak_mib": pss_mib(own_processes()),
    }
    loader.close()
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
