"""What the kept heap of 16 workers costs in memory and saves in time.

As a program it is one run: `python -m benchmarks.kept_heap KEPT SIZES FOLDER`, where KEPT is "kept"
or "returned", and SIZES a key of `SIZES`. The parent process reads the memory of the workers.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.loading.memory import pss_mib
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

WORKERS = 16
INPUTS, QUICK_INPUTS = 160, 32
ROUNDS, QUICK_ROUNDS = 3, 1
LIMIT_S = 300.0
EVERY_S = 0.2
# The smallest and the largest array of an input, in MiB. glibc takes arrays above 32 MiB from the
# system each time, whatever is set.
SIZES = {"1-30": (1, 30), "33-64": (33, 64)}
KEPT = {"returned": "freed memory returned", "kept": "freed memory kept"}
_FRAME = 512


def features(path: Path, _: Any = None) -> dict[str, float]:
    """Return a number from the spectrum of a large array: rfft, abs, matmul, eigvalsh."""
    import numpy as np

    before = resource.getrusage(resource.RUSAGE_SELF)
    number, low, high = map(int, Path(path).name.split("-"))
    # The sizes of successive inputs differ much, so that no array has just the size of a freed one.
    mib = low + (high - low) * (number * 37 % 100) / 99
    audio = np.full(int(mib * 2**18) // _FRAME * _FRAME, 0.5, np.float32)
    frames = audio.reshape(-1, _FRAME) * np.hanning(_FRAME).astype(np.float32)
    power = np.abs(np.fft.rfft(frames)) ** 2
    largest = np.linalg.eigvalsh(power.T @ power / len(power))[-1]
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "value": float(largest),
        "faults": float(after.ru_minflt - before.ru_minflt),
        "system_s": after.ru_stime - before.ru_stime,
        "user_s": after.ru_utime - before.ru_utime,
    }


def kept_heap(ground: Ground, quick: bool) -> None:
    """Print the memory of all workers, and inputs per second."""
    inputs = QUICK_INPUTS if quick else INPUTS
    print(f"spectra of float32 arrays; {WORKERS} workers of preprocess; {inputs} inputs")
    rows = Rows()
    for sizes in SIZES:
        runs: dict[str, list[dict[str, float]]] = {kept: [] for kept in KEPT}
        for turn in range(QUICK_ROUNDS if quick else ROUNDS):
            for kept in KEPT:
                folder = ground.root / f"heap-{sizes}-{kept}-{turn}"
                runs[kept].append(_run(kept, sizes, inputs, folder))
        for kept, words in KEPT.items():
            middle = {
                key: statistics.median(run[key] for run in runs[kept]) for key in runs[kept][0]
            }
            rows.append(
                (
                    f"arrays of {sizes} MiB, {words}",
                    f"{middle['rate']:.1f}",
                    f"{middle['pss_mib']:,.0f} MiB",
                    f"{middle['peak_mib']:,.0f} MiB",
                    f"{middle['faults']:,.0f}",
                    f"{middle['system_ms']:.0f} ms",
                    f"{middle['user_ms']:.0f} ms",
                )
            )
    columns = ("", "inputs/s", "memory", "at most", "page faults", "system", "user")
    show(columns, rows)
    print(
        f"Medians of {ROUNDS} runs in turns. memory: the PSS of all workers together, read every\n"
        f"{EVERY_S:g} s, median and maximum. Page faults and processor time are those of one\n"
        "input. freed memory returned: the default of the C library."
    )


def _run(kept: str, sizes: str, inputs: int, folder: Path) -> dict[str, float]:
    """Return the figures of a run."""
    # With the threads of OpenBLAS in it, the driver would not fork the process that its change is
    # for. The workers have one thread each anyway.
    settings = {"OPENBLAS_NUM_THREADS": "1"}
    looks = []
    with Call("benchmarks.kept_heap", kept, sizes, str(inputs), str(folder), **settings) as call:
        while call.process.poll() is None:
            workers = _workers(call)
            if len(workers) == WORKERS:
                looks.append(pss_mib(workers))
            time.sleep(EVERY_S)  # polled: nothing signals a change of memory
        found = dict(json.loads(call.answer(LIMIT_S)))
    return found | {"pss_mib": statistics.median(looks), "peak_mib": max(looks)}


def _workers(call: Call) -> list[int]:
    """Return the processes that have no children: neither the driver nor the one that forks."""
    parents = {}
    for pid in call.left():
        try:
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[pid] = int(status[1])
    return [pid for pid in parents if pid not in parents.values() and pid != call.process.pid]


def main(kept: str, sizes: str, inputs: str, folder: str) -> None:
    """Make one call and print its figures, as JSON."""
    import forebay
    from forebay.pools import zygote

    def keep_nothing() -> None:
        changed.write_text("")

    output = Path(folder)
    output.mkdir()
    changed = output / "unchanged heap"
    if kept == "returned":
        zygote.keep_freed = keep_nothing
    low, high = SIZES[sizes]
    paths = [output / f"{at:04}-{low}-{high}" for at in range(int(inputs))]
    for path in paths:
        path.write_bytes(b"")
    began = time.perf_counter()
    report = forebay.preprocess(
        features, paths, output / "table", num_workers=WORKERS, progress=False
    )
    seconds = time.perf_counter() - began
    if changed.exists() != (kept == "returned"):
        raise RuntimeError("the heap was not left as it is in the workers")
    table = report.metadata.to_pydict()
    print(
        json.dumps(
            {
                "rate": len(paths) / seconds,
                "faults": statistics.mean(table["faults"]),
                "system_ms": statistics.mean(table["system_s"]) * 1e3,
                "user_ms": statistics.mean(table["user_s"]) * 1e3,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
