"""How long a cache of a hundred million samples takes to open, and how much memory."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np

from benchmarks.bucket.ground import SHARED, store_of
from benchmarks.bucket.stores import BUCKET
from benchmarks.measure import Ground
from benchmarks.preprocess import show

SAMPLES, QUICK_SAMPLES = 100_000_000, 10_000_000
ROWS, BLOCKS_PER_SHARD = 40, 16
BLOCK_BYTES = 4 << 20


def index(ground: Ground, quick: bool) -> None:
    """Print what opening a large cache costs; only its index is there."""
    from forebay.caching.layout import BLOCKS, INDEX

    store = store_of(ground, quick)
    count = QUICK_SAMPLES if quick else SAMPLES
    folder = store.root / BUCKET / "large"
    record = json.loads((store.root / BUCKET / "forebay" / INDEX).read_bytes())
    shards = -(-count // (ROWS * BLOCKS_PER_SHARD))
    table = _blocks(count)
    record["plan"] |= {"samples": count, "per_shard": ROWS * BLOCKS_PER_SHARD}
    record |= {
        "sizes": [BLOCKS_PER_SHARD * BLOCK_BYTES + 4096] * shards,
        "outside": [0] * shards,
        "layout_of": [0] * shards,
        "blocks": {"count": len(table) // 24, "crc32": zlib.crc32(table)},
    }
    for name, data in ((INDEX, json.dumps(record).encode()), (BLOCKS, table)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    store.server.set(**SHARED | {"link": None, "rate": None})
    print(f"{count:,} samples, {len(table) // 24:,} blocks, {shards:,} shards: the index opened")
    found = []
    for _ in range(1 if quick else 3):
        with store.call("benchmarks.bucket.index") as call:
            found.append(json.loads(call.answer(120)))
    middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
    show(
        ("first process", "second process", "fetcher, private", "reader, private", "shared by all"),
        [
            (
                f"{middle['first_s']:.2f} s",
                f"{middle['second_s']:.2f} s",
                *(f"{middle[name]:.0f} MB" for name in ("fetcher", "reader", "shared")),
            )
        ],
    )
    print("Memory beyond that of the same with the small cache. Target: 2 s and 60 MB a node.")


def _blocks(count: int) -> bytes:
    from forebay.caching.layout import BLOCK

    number = np.arange(-(-count // ROWS))
    table = np.zeros(len(number), BLOCK)
    table["first"] = number * ROWS
    table["offset"] = number % BLOCKS_PER_SHARD * BLOCK_BYTES + 2048
    table["length"] = table["nbytes"] = BLOCK_BYTES
    return table.tobytes()


def _open() -> None:
    """Open the small cache, then the large one, and say what that took."""
    import forebay

    small = forebay.open_cache(f"s3://{BUCKET}/forebay")
    small[0]
    mine, known = memory("self"), fetchers()
    small_fetcher = memory(str(known[0]))
    began = time.perf_counter()
    large = forebay.open_cache(f"s3://{BUCKET}/large")
    first_s = time.perf_counter() - began
    ours, (other,) = memory("self"), [each for each in fetchers() if each not in known]
    fetcher = memory(str(other))
    program = (
        "import time, forebay, forebay.caching.bucket_reader; began = time.perf_counter();"
        f"forebay.open_cache('s3://{BUCKET}/large'); print(time.perf_counter() - began)"
    )
    second_s = float(subprocess.check_output([sys.executable, "-c", program]).split()[-1])
    print()
    print(
        json.dumps(
            {
                "first_s": first_s,
                "second_s": second_s,
                "fetcher": (fetcher[0] - small_fetcher[0]) / 1e6,
                "reader": (ours[0] - mine[0]) / 1e6,
                "shared": (fetcher[1] - small_fetcher[1]) / 1e6,
            }
        ),
        flush=True,
    )
    del large, small


def fetchers() -> list[int]:
    from benchmarks.call import own_processes

    found = []
    for pid in own_processes():
        if b"forebay.caching.fetcher" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
    return found


def memory(pid: str) -> tuple[int, int]:
    """Return the private and the shared bytes of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {
        name: int(rest.split()[0]) * 1024 for name, rest in (each.split(":") for each in lines)
    }
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return private, sizes["Shared_Clean"] + sizes["Shared_Dirty"]


if __name__ == "__main__":
    _open()
