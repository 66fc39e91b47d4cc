"""One run of one reader in a separate process; its last line is the result, as JSON.

As a program: `python -m benchmarks.bucket.run NAME TARGET`, the target as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.bucket.stores import number_of
from benchmarks.call import own_processes
from kit.range_server import control

# Imported before the clock starts.
IMPORTS = {
    "forebay": ("forebay", "forebay.caching.bucket_reader", "forebay.loading.kinds"),
    "shards": ("forebay", "forebay.shards.dataset", "forebay.shards.tar", "forebay.loading.kinds"),
    "bare-shards": ("obstore.store",),
    "shards-by-column": ("forebay", "forebay.shards.dataset", "forebay.loading.kinds"),
    "webdataset-shards": ("webdataset",),
    "huggingface-shards": ("datasets", "s3fs"),
    "litdata-tables": ("litdata", "polars"),
    "litdata-raw": ("litdata",),
    "zephon": ("zephon", "obstore.store"),
    "litdata": ("litdata",),
    "webdataset": ("webdataset",),
    "huggingface": ("datasets", "s3fs"),
    "obstore": ("obstore.store",),
    "boto3": ("boto3",),
    "s3fs": ("s3fs",),
    "bare": ("obstore.store", "forebay.caching.layout"),
}
TICKS = os.sysconf("SC_CLK_TCK")


def number_in(sample: Any) -> int:
    """Return the number of a sample, in any library's form."""
    if isinstance(sample, dict):
        if "number" in sample:
            return int(sample["number"])
        return number_of(sample["jpg"] if "jpg" in sample else sample["image"])
    if not isinstance(sample, bytes):
        sample = sample[0]
    return number_of(sample) if isinstance(sample, bytes | memoryview) else int(sample)


def measure(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Read epochs and say how long it took and what came."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    for each in IMPORTS.get(name, ()):
        importlib.import_module(each)
    if name.startswith("mosaic"):
        from benchmarks.bucket.mosaic import prepare

        prepare()
        importlib.import_module("streaming")
    from benchmarks.bucket import readers, shard_readers

    known = readers.READERS | shard_readers.READERS

    target = readers.Target(**given)
    stop = target.options.get("stop")
    found: dict[str, Any] = {"first_s": None, "epochs": []}
    cpu = _cpu_s()
    began = last = time.perf_counter()
    for epoch in known[name](target):
        seen = bytearray(target.count)
        samples = wrong = 0
        for batch in epoch:
            if found["first_s"] is None:
                found["first_s"] = time.perf_counter() - began
            if name.startswith("bare"):
                continue
            for each in batch:
                number = number_in(each)
                wrong += seen[number]
                seen[number] = 1
            samples += len(batch)
            if stop and samples >= stop:
                break
        now = time.perf_counter()
        time.sleep(target.options.get("linger_s", 0))  # until what is fetched ahead is there
        found["epochs"].append(
            {
                "seconds": now - last,
                "samples": target.count if name.startswith("bare") else samples,
                "lost": 0 if name.startswith("bare") else target.count - sum(seen),
                "twice": wrong,
                "counters": _counters(target.url),
            }
        )
        last = time.perf_counter()
        found["cpu_s"], found["fetcher_s"] = _cpu_s() - cpu, _cpu_s("forebay.caching.fetcher")
        if stop:
            break
    return found


def _cpu_s(which: str = "") -> float:
    """Return the processor time of this process and those that it started, or of some of them."""
    total = 0.0
    for pid in own_processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if which.encode() in words:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += sum(int(fields[at]) for at in (11, 12)) / TICKS
    if not which:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        total += children.ru_utime + children.ru_stime
    return total


def _counters(url: str) -> dict[str, Any]:
    counters = control(url)["counters"]
    return {"gets": counters["requests"].get("GET", 0), "bytes": counters["bytes"]}


if __name__ == "__main__":
    answer = measure(sys.argv[1], json.loads(sys.argv[2]))
    print()
    print(json.dumps(answer), flush=True)
    os._exit(0)  # some libraries wait at their end
