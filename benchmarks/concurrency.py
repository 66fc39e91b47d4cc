"""Many small objects behind a network: samples at once in threads of one worker."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import torch

from benchmarks.measure import Ground
from benchmarks.preprocess import show
from forebay import DataLoader
from kit.range_server import RangeServer

OBJECTS, QUICK_OBJECTS = 20_000, 1_280
# One at a time, so many are enough to know the rate, at 30 ms each.
ALONE, QUICK_ALONE = 1_280, 128
FIRST_BYTE_S, SIZE, CONCURRENCY, BATCH = 0.03, 50_000, 16, 64
FILES = 64  # that the objects are links to


class Objects(torch.utils.data.Dataset[torch.Tensor]):
    """Objects of a bucket; each thread has a connection of its own."""

    def __init__(self, url: str, count: int) -> None:
        self.url, self.count = url, count
        self.local: threading.local | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "local": None}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        local = self.local = self.local or threading.local()
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(urlsplit(self.url).netloc)
        local.connection.request("GET", f"/bucket/{index:05d}")
        body = local.connection.getresponse().read()
        assert len(body) == SIZE
        return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def concurrency(ground: Ground, quick: bool) -> None:
    """Print the rates of bare threads, and of one worker with and without `concurrency`."""
    count, alone = (QUICK_OBJECTS, QUICK_ALONE) if quick else (OBJECTS, ALONE)
    bucket = ground.fresh() / "bucket"
    bucket.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        name = bucket / f"{number:05d}"
        if number < FILES:
            name.write_bytes(random.bytes(SIZE))
        else:
            os.link(bucket / f"{number % FILES:05d}", name)
    with RangeServer(bucket.parent, first_byte_s=FIRST_BYTE_S) as server:
        bare = _rate(count, lambda: _by_threads(Objects(server.url, count)))
        one = _rate(alone, lambda: _by_loader(Objects(server.url, alone), 1))
        many = _rate(count, lambda: _by_loader(Objects(server.url, count), CONCURRENCY))
        two = _rate(count, lambda: _by_loader(Objects(server.url, count), CONCURRENCY // 2, 2))
    rates = {
        f"{CONCURRENCY} bare threads": bare,
        "1 worker": one,
        f"1 worker, concurrency={CONCURRENCY}": many,
        f"2 workers, concurrency={CONCURRENCY // 2}": two,
    }
    what = f"{count:,} objects of {SIZE:,} B, first byte after {FIRST_BYTE_S * 1e3:.0f} ms"
    show(
        (what, "samples/s", "times one at a time", "of bare threads"),
        [
            (name, f"{rate:,.0f}", f"{rate / one:.1f}", f"{rate / bare:.0%}")
            for name, rate in rates.items()
        ],
    )


def _rate(count: int, read: Callable[[], None]) -> float:
    began = time.perf_counter()
    read()
    return count / (time.perf_counter() - began)


def _by_threads(objects: Objects) -> None:
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        for _ in threads.map(objects.__getitem__, range(len(objects))):
            pass


def _by_loader(objects: Objects, at_once: int, num_workers: int = 1) -> None:
    with DataLoader(
        objects,
        batch_size=BATCH,
        shuffle=True,
        seed=0,
        num_workers=num_workers,
        concurrency=at_once,
    ) as loader:
        for _ in loader:
            pass
