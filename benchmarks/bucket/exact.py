"""The same batches: for any world, workers and disk, with broken answers, and after kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bucket.ground import LINK, Store, reason, store_of
from benchmarks.bucket.train import LOG, STATE, processes
from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show
from kit.range_faults import Fault

WORLDS, WORKERS, DISKS = (1, 2, 3, 4, 6, 8), (0, 1, 2, 5), (0.0, 0.1, 0.5, 1.0)
# Steps of each cell; the whole grid with whole epochs would take an hour.
STEPS, QUICK_STEPS = 60, 12
WINDOW = 96_000_000
LIMIT_S = 200.0
KINDS = ("slowdown", "reset", "short", "flip")
KILLS, QUICK_KILLS = 10, 2


def grid(ground: Ground, quick: bool) -> None:
    """Print whether all worlds, workers and disks give the same global batches."""
    store = store_of(ground, quick)
    store.server.set(first_byte_s=0.005)
    steps = QUICK_STEPS if quick else STEPS
    wanted, rows, seen, count = None, [], set(), 0
    print(f"one hash of {steps} global batches of 48: each world with each number of workers")
    for at, world in enumerate(WORLDS):
        cells = []
        for number, workers in enumerate(WORKERS):
            disk = DISKS[(at + number) % len(DISKS)]
            try:
                found = _cell(store, [(world, steps, None)], workers, disk)
                wanted = wanted or found["hash"]
                seen.add(found["hash"])
                count += 1
                cells.append(f"{'same' if found['hash'] == wanted else found['hash']} ({disk:.0%})")
            except RuntimeError as error:
                cells.append(reason(error))
        rows.append((f"{world}", *cells))
    show(("ranks", *(f"{each} workers" for each in WORKERS)), rows)
    third = steps // 3
    parts = [(3, third, 0.5), (4, third, 0.5), (2, steps - 2 * third, 0.5)]
    found = _cell(store, parts, 0, 0.5)
    word = "the same hash" if found["hash"] == wanted else f"another hash, {found['hash']}"
    print(
        f"In brackets: share of the data on disk, a fourth of the grid of {len(WORLDS)} x "
        f"{len(WORKERS)} x {len(DISKS)}.\n{count} cells, {len(seen)} hash. 3, then 4, then 2 ranks "
        f"in mid-epoch, each on an empty disk: {word}."
    )


def _cell(
    store: Store, parts: list[tuple[int, int, Any]], workers: int, disk: float
) -> dict[str, Any]:
    given = {
        "window": WINDOW,
        "workers": workers,
        "disk": int(disk * store.cache_bytes),
        "directory": tempfile.mkdtemp(dir=store.scratch),
        "parts": [
            (world, steps, tempfile.mkdtemp(dir=store.scratch) if own else None)
            for world, steps, own in parts
        ],
    }
    with store.call("benchmarks.bucket.train", "cells", json.dumps(given)) as call:
        return dict(json.loads(call.answer(LIMIT_S)))


def faults(ground: Ground, quick: bool) -> None:
    """Print what 10 % of broken answers change: the time."""
    store = store_of(ground, quick)
    print(
        "a tenth of the answers broken: 503, reset, too short, a bit flipped; an epoch, 2 workers"
    )
    rows, wanted = [], ""
    for share in (0.0, 0.1):
        each = [Fault(kind, share=share / len(KINDS), keys="*/shard-*") for kind in KINDS]
        store.server.set(**LINK, faults=each if share else [])
        found = _cell(store, [(1, 10**9, None)], 2, 0.0)
        wanted = wanted or found["hash"]
        met = store.server.counters()["faults"]
        word = "same" if found["hash"] == wanted else "another"
        broken = ", ".join(f"{count} {kind}" for kind, count in sorted(met.items())) or "none"
        rows.append((f"{share:.0%}", broken, word, f"{found['s']:.1f} s"))
    show(("broken", "answers", "hash", "epoch"), rows)


def kills(ground: Ground, quick: bool) -> None:
    """Print what is left, and whether batches are the same, after kills."""
    store = store_of(ground, quick)
    count = ground.kills or (QUICK_KILLS if quick else KILLS)
    print(f"{count} times kill -9 of each, at random times; 2 workers, half of the data on disk")
    store.server.set(**LINK)
    options = {
        "window": WINDOW,
        "workers": 2,
        "disk": store.cache_bytes // 2,
        "epochs": 1,
        "pace_s": 0.02,
    }
    whole = _trained(store, options, None, 0)[0]
    rows = Rows()
    for victim in ("fetcher", "worker", "trainer"):
        try:
            lines, killed, left, adopted = _trained(store, options, victim, count)
        except RuntimeError as error:
            rows.append((victim, reason(error)))
            continue
        same = "same" if lines == whole else "others"
        rows.append((victim, f"{killed}", same, f"{left}", adopted))
    show(("killed", "times", "batches", "processes, files left", "bytes fetched / data"), rows)
    print(
        "A trainer notes each batch and then its state; a batch that was noted twice, because a\n"
        "kill came between, counts once. A batch whose worker is killed twice ends the program,\n"
        "which is started again, as after a kill. Left after 10 s: processes of the run, files in\n"
        "/dev/shm."
    )


def _trained(
    store: Store, options: dict[str, Any], victim: str | None, count: int
) -> tuple[list[str], int, int, str]:
    """Train with kills; return the batches, the kills, what is left, and what was fetched."""
    folder = Path(tempfile.mkdtemp(dir=store.scratch))
    given = options | {"directory": tempfile.mkdtemp(dir=store.scratch)}
    drawn, killed, left = random.Random(7), 0, 0
    shared = {*os.listdir("/dev/shm")}
    store.server.set(**LINK)
    until = time.monotonic() + LIMIT_S + 12 * count
    error = ""
    while True:
        with store.call("benchmarks.bucket.train", str(folder), json.dumps(given)) as call:
            while call.process.poll() is None and killed < count:
                if time.monotonic() > until:
                    raise RuntimeError(f"the run did not end after {killed} kills")
                _wait_for_batches(call, folder, drawn.randint(1, 8))
                pids = processes(call.process.pid, call.left())[victim] if victim else []
                if pids and call.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(drawn.choice(pids), signal.SIGKILL)
                        killed += 1
                    if victim == "trainer":
                        call.process.wait()
            if call.process.poll() is None:
                try:
                    call.answer(LIMIT_S)
                except RuntimeError as failure:
                    error = reason(failure)
            code = call.process.wait()
            end = time.monotonic() + 10
            while call.left() and time.monotonic() < end:
                time.sleep(0.05)
            left += len(call.left())
        if code == 0:
            break
        if code != -signal.SIGKILL:
            error = error or reason(RuntimeError(call.process.communicate()[1]))
            if victim != "worker" or "WorkerDiedError" not in error:
                raise RuntimeError(f"ended with {code} after {killed} kills: {error}")
            error = ""  # one batch met two kills: the program is started again, as after a crash
    left += len({*os.listdir("/dev/shm")} - shared)
    lines = list(dict.fromkeys((folder / LOG).read_text().splitlines()))
    assert (folder / STATE).exists()
    fetched = f"{store.server.counters()['bytes'] / store.cache_bytes:.2f}"
    return lines, killed, left, fetched


def _wait_for_batches(call: Call, folder: Path, count: int) -> None:
    """Wait until so many more batches are noted, or the program has ended."""
    log = folder / LOG
    begin = log.stat().st_size if log.exists() else 0
    line = len("0 ") + 16 + 1
    while call.process.poll() is None:
        if log.exists() and log.stat().st_size >= begin + count * line:
            return
        time.sleep(0.01)
