"""What `loader.diagnose()` says of a real disk: throttled, cold, warm, and with added latency.

It needs root: reading is limited by a control group, and the page cache is emptied before each
run. As a program it is one run: `python -m benchmarks.disk FOLDER SECONDS EPOCHS BATCHES WORKERS
LIMIT`.
Spawned workers import this file, so it imports nothing heavy by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import show

FILES, QUICK_FILES = 12_000, 1500
# Bytes of a file: a JPEG of some megapixels.
LEAST, MOST = 600_000, 800_000
BATCH, STEP_S = 16, 0.001
# A run, one that is to find the number of workers by itself, and the part of it that counts.
SECONDS, AUTO_SECONDS, LAST_S = 6.0, 14.0, 4.0
WORKERS = ("1", "2", "4", "8", "auto")
LATENCY_US = 5000
# With a limit, a run takes as long as so many batches do.
LEAST_BATCHES = 60
LIMIT_S = 120.0
# So many batches are compared with an advice and without it.
COMPARED = 600
# An advice has to gain so much, and an expected rate may be off by no more than this.
GAIN, NEAR = 1.1, 0.15
GROUP = "forebay-benchmark"
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void wait_for(const char *path) {
    const char *folder = getenv("SLOW_FOLDER");
    if (folder && path && !strncmp(path, folder, strlen(folder))) usleep(atoi(getenv("SLOW_US")));
}
#define MODE int mode = 0; va_list list; va_start(list, flags); mode = va_arg(list, int); \
    va_end(list)
int open64(const char *path, int flags, ...) {
    MODE; wait_for(path);
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64"))(path, flags, mode);
}
int open(const char *path, int flags, ...) {
    MODE; wait_for(path);
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open"))(path, flags, mode);
}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of storage.

    Attributes:
        title: Its name in the table.
        limit: Bytes per second that may be read; 0 for no limit.
        is_warm: Whether all files are in the page cache.
        latency_us: What opening a file takes in addition.
    """

    title: str
    limit: int = 0
    is_warm: bool = False
    latency_us: int = 0


CASES = (
    Case("50 MB/s", limit=50_000_000),
    Case("150 MB/s", limit=150_000_000),
    Case("500 MB/s", limit=500_000_000),
    Case("cold, no limit"),
    Case("warm", is_warm=True),
    Case("5 ms to open a file", is_warm=True, latency_us=LATENCY_US),
)


def disk(ground: Ground, quick: bool) -> None:
    """Print what is said of each case, and what following the advice gives."""
    if os.geteuid():
        print("disk: not run, it needs root")
        return
    folder = ground.root / "files"
    _write(folder, QUICK_FILES if quick else FILES)
    shim = _compiled(ground.root)
    rows, right, runs, advised, kept, promised, met = [], 0, 0, 0, 0, 0, 0
    cases = CASES[1:5:3] if quick else CASES
    for case in cases:
        found = {each: _run(folder, case, each, shim) for each in WORKERS}
        best = max(each["rate"] for each in found.values())
        for workers, one in found.items():
            advice, expected, gained = one["advice"], one["expected"], 0.0
            is_right = one["cause"] in _causes(case, workers, one, best)
            right, runs = right + is_right, runs + 1
            if advice:
                again = str(advice["num_workers"])
                gained = _gained(folder, case, workers, again, shim)
                advised, kept = advised + 1, kept + (gained >= GAIN)
            if advice and expected:
                after = _run(folder, case, again, shim)["rate"]
                promised, met = promised + 1, met + (abs(expected / after - 1.0) <= NEAR)
            rows.append(
                (
                    case.title,
                    workers,
                    f"{one['rate']:.1f}",
                    f"{one['read'] / 1e6:,.0f} MB/s",
                    one["cause"] + "" * is_right + " (wrong)" * (not is_right),
                    ", ".join(f"{name}={value!r}" for name, value in advice.items()),
                    f"{gained:.2f}" if gained else "",
                    "" if not expected else f"{expected:.1f}",
                )
            )
    columns = ("storage", "workers", "batches/s", "read", "cause", "advice", "gained", "expected")
    show(columns, rows)
    print(
        f"{right} of {runs} causes are right. {kept} of {advised} advices gain 10 % or more, and\n"
        f"{met} of {promised} expected rates are within 15 %. {len(os.listdir(folder)):,} files of "
        f"{LEAST / 1e3:.0f}-{MOST / 1e3:.0f} kB, read whole;\n"
        f"batches of {BATCH}, steps of {STEP_S * 1e3:g} ms. The limits are those of a control\n"
        f"group. auto: the last seconds. gained: in the time of {COMPARED} batches, the search of\n"
        "auto included."
    )


def _gained(folder: Path, case: Case, workers: str, advice: str, shim: Path) -> float:
    """Return how much faster the same batches come with an advice followed."""
    seconds = {workers: 0.0, advice: 0.0}
    # In turns: virtual disks are fast at times, and slow at others.
    for each in (workers, advice, advice, workers):
        seconds[each] += _run(folder, case, each, shim, COMPARED)["seconds"]
    return seconds[workers] / seconds[advice]


def _causes(case: Case, workers: str, one: Mapping[str, Any], best: float) -> set[str]:
    """Return the causes that are right."""
    if case.latency_us:
        return {"storage"}
    if case.is_warm:
        return {"workers"} if workers == "1" else {"cpu", "healthy", "consumer"}
    # If more workers read faster, there are too few of them.
    return {"storage"} | ({"workers"} if one["rate"] * GAIN < best else set())


def _run(
    folder: Path, case: Case, workers: str, shim: Path, batches: int = sys.maxsize
) -> dict[str, Any]:
    seconds = AUTO_SECONDS if workers.startswith("auto") else SECONDS
    seconds = max(seconds, LEAST_BATCHES * BATCH * MOST / case.limit) if case.limit else seconds
    seconds = seconds if batches == sys.maxsize else LIMIT_S
    if case.is_warm:
        _read_all(folder)
    else:
        _empty_the_page_cache()
    settings = {}
    if case.latency_us:
        settings = {
            "LD_PRELOAD": str(shim),
            "SLOW_FOLDER": str(folder),
            "SLOW_US": str(case.latency_us),
        }
    epochs = 100 if case.is_warm else 1  # the second one would be warm
    arguments = (folder, seconds, epochs, batches, workers, case.limit)
    with Call("benchmarks.disk", *map(str, arguments), **settings) as call:
        return dict(json.loads(call.answer(2 * LIMIT_S)))


def _write(folder: Path, count: int) -> None:
    import numpy as np

    folder.mkdir()
    noise = np.random.default_rng(0)
    for at in range(count):
        (folder / f"{at:05}").write_bytes(noise.bytes(int(noise.integers(LEAST, MOST))))
    os.sync()


def _compiled(folder: Path) -> Path:
    source, made = folder / "slow.c", folder / "slow.so"
    source.write_text(SHIM)
    compiler = shutil.which("cc") or "gcc"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


def _empty_the_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def _read_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.read_bytes()


@contextlib.contextmanager
def limited(folder: Path, limit: int) -> Iterator[None]:
    """Limit what this process, and those that it starts, read from the disk of a folder."""
    if not limit:
        yield
        return
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    if Path(f"/sys/dev/block/{number}/partition").exists():  # the limit is for the whole disk
        number = Path(f"/sys/dev/block/{number}/../dev").read_text().strip()
    root = Path("/sys/fs/cgroup")
    if (root / "blkio").exists():
        group, file, line = root / "blkio" / GROUP, "blkio.throttle.read_bps_device", f"{limit}"
    else:
        (root / "cgroup.subtree_control").write_text("+io")
        group, file, line = root / GROUP, "io.max", f"rbps={limit}"
    group.mkdir(exist_ok=True)
    (group / file).write_text(f"{number} {line}")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))


def main(folder: str, seconds: str, epochs: str, batches: str, workers: str, limit: str) -> None:
    """Train on the files for some seconds or batches, and print what came of it, as JSON."""
    import torch
    from torch.utils.data import Dataset

    import forebay

    paths = sorted(Path(folder).iterdir())

    class Files(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> torch.Tensor:
            data = paths[index].read_bytes()
            return torch.frombuffer(bytearray(data), dtype=torch.uint8)[:1000].clone()

    count: Any = int(workers) if workers.isdecimal() else workers
    if not workers.isdecimal() and workers != "auto":
        count = forebay.AutoWorkers(max=int(workers.removeprefix("auto-")))
    taken: list[float] = []
    with limited(Path(folder), int(limit)):
        loader = forebay.DataLoader(
            Files(),
            batch_size=BATCH,
            shuffle=True,
            seed=0,
            num_workers=count,
            persistent_workers=count != 0,
        )
        began = time.perf_counter()
        for _batch in itertools.chain.from_iterable(itertools.repeat(loader, int(epochs))):
            taken.append(time.perf_counter())
            if taken[-1] - began > float(seconds) or len(taken) == int(batches):
                break
            time.sleep(STEP_S)
        found = loader.diagnose()
        loader.close()
    since = taken[0] if workers.isdecimal() else max(taken[0], taken[-1] - LAST_S)
    counted = [at for at in taken if at >= since]
    print()
    print(
        json.dumps(
            {
                "rate": (len(counted) - 1) / (counted[-1] - counted[0]),
                "seconds": taken[-1] - taken[0],
                "read": found.evidence.get("read_rate", 0.0),
                "cause": found.cause,
                "advice": {
                    name: f"auto-{int(value)}" if isinstance(value, forebay.AutoWorkers) else value
                    for name, value in found.advice.items()
                },
                "expected": found.expected_rate,
                "verdict": str(found),
                "evidence": dict(found.evidence),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
