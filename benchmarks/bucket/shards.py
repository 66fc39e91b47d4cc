"""Shards that others wrote, read in place: how fast, how soon, and what faults change."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.bucket import shard_readers
from benchmarks.bucket.ground import LIMIT_S, LINK, SHARED, Store, reason, store_of
from benchmarks.bucket.readers import BATCH
from benchmarks.bucket.shard_forms import COLUMNS, GROUP_ROWS, HUNDRED, samples_of
from benchmarks.bucket.stores import BUCKET
from benchmarks.machine import versions
from benchmarks.measure import Ground
from benchmarks.preprocess import show
from kit.range_faults import Fault

FAULTS = "slowdown", "reset", "short", "flip", "stall"
WINDOW = "256MB"
MODULE = "benchmarks.bucket.shards"
# Samples among which Zephon shuffles: about as many as forebay's window has.
BLOCKS = {"lines": 40_000, "rows": 40_000, "parquets": 2_000}
# A peer that takes so many times as long as bare GETs is not waited for.
SLOWEST = 20
# Seconds to the first byte between which round trips are counted.
LATENCIES = (0.0, 1.0)
RANDOM_READS = 20_000
# Samples of a large index, of each of its shards, and of each block.
LARGE, QUICK_LARGE, LARGE_SHARD, LARGE_BLOCK = 100_000_000, 1_000_000, 100_000, 40


@dataclass(frozen=True, slots=True)
class Peer:
    """A reader of some forms.

    Attributes:
        tried: Workers, and requests at once of each, of which the best count.
        form: What it reads if that is another form, with the same samples.
    """

    name: str
    title: str
    tried: tuple[tuple[int, int], ...]
    form: str = ""


FOREBAY = Peer("shards", "forebay.open_shards", ((0, 0), (1, 0), (2, 0)))
BY_COLUMN = Peer("shards-by-column", "forebay.from_table, no index", ((0, 0), (1, 0)))
HUGGING_FACE = Peer("huggingface-shards", "Hugging Face streaming", ((2, 0),))
LITDATA = Peer("litdata-tables", "LitData, ParquetLoader", ((2, 0),))
ZEPHON = Peer("zephon", "Zephon", ((0, 4), (0, 8)))
PEERS = {
    "tars": (
        FOREBAY,
        Peer("webdataset-shards", "WebDataset", ((2, 0), (4, 0))),
        Peer("litdata-raw", "LitData, raw: an object a sample", ((2, 0), (4, 0)), "objects"),
    ),
    "parquets": (FOREBAY, HUGGING_FACE, LITDATA, ZEPHON),
    "rows": (FOREBAY, BY_COLUMN, HUGGING_FACE, LITDATA, ZEPHON),
    "lines": (FOREBAY, ZEPHON),
    "mosaic": (FOREBAY, Peer("mosaic-shards", "Mosaic Streaming", ((2, 0),))),
}


def _store(ground: Ground, quick: bool, forms: tuple[str, ...]) -> Store:
    """Return the bucket with some forms and their indexes."""
    store = store_of(ground, quick, forms)
    for form in forms:
        if form in store.failed or form == "objects":
            continue
        if not (target := store.root / f"index-{form}").exists():
            store.server.set()
            with store.call(MODULE, "index", f"s3://{BUCKET}/{form}", str(target), "2") as call:
                call.answer(LIMIT_S)
    return store


def epochs(ground: Ground, quick: bool) -> None:
    """Print rates of shuffled epochs, with their start, each beside bare GETs."""
    store = _store(ground, quick, (*PEERS, "objects"))
    print(
        f"{len(store.samples):,} samples of 99 kB in tars, in Parquet files (2 of 6 columns, row "
        f"groups of {GROUP_ROWS}) and in MDS; {samples_of('rows', len(store.samples)):,} texts of "
        "5 kB\nin Parquet files (2 of 6 columns, row groups of 1,000) and in JSON lines; shuffled "
        f"by windows of {WINDOW}, batches of 64;\nthe link of bucket-epochs, and an index that was "
        "made before"
    )
    rows = []
    for form, peers in PEERS.items():
        if form in store.failed:
            rows.append((form, "", *[""] * 6, store.failed[form]))
            continue
        data = [_run(store, form, Peer("bare-shards", "", ()), 0, each) for each in (32, 64)]
        best = max(data, key=_rate)
        threads = (32, 64)[data.index(best)]
        rows.append((form, "bare GETs", f"{_rate(best):,.0f}", "1.00", *_rests(best), ""))
        for peer in peers:
            rows.append((form, peer.title, *_best(store, form, peer, threads)))
            print("measured:", *rows[-1], file=sys.stderr, flush=True)
    show(
        (
            *("", "", "samples/s", "of bare GETs", "first batch", "MB", "GETs", "CPU s a GB"),
            "",
        ),
        rows,
    )
    names = ("obstore", "webdataset", "litdata", "datasets", "zephon", "mosaicml-streaming")
    print(
        "A whole epoch with its start, divided by that of bare GETs just before it. CPU: of all\n"
        "processes, for what was fetched; the server's is not in it. "
        + ", ".join(f"{name} {each}" for name, each in versions(*names).items())
    )


def _best(store: Store, form: str, peer: Peer, threads: int) -> tuple[str, ...]:
    """Return the cells of the run that was the fastest beside bare GETs."""
    found, failed = [], ""
    for workers, at_once in peer.tried:
        try:
            alone = _run(store, form, Peer("bare-shards", "", ()), 0, threads)
            bare, limit_s = _rate(alone), SLOWEST * alone["epochs"][0]["seconds"]
            run = _run(store, form, peer, workers, at_once, limit_s)
            epoch = run["epochs"][0]
            # Some have no incomplete last batch.
            if epoch["lost"] >= BATCH or epoch["twice"]:
                raise RuntimeError(f"{epoch['lost']} lost, {epoch['twice']} twice")
            setting = f"{at_once} at once" if at_once else f"{workers} workers"
            found.append((_rate(run) / bare, run, setting))
        except RuntimeError as error:
            failed = reason(error)
    if not found:
        return *[""] * 6, failed
    share, run, setting = max(found, key=lambda each: each[0])
    return f"{_rate(run):,.0f}", f"{share:.2f}", *_rests(run), setting


def _run(
    store: Store, form: str, peer: Peer, workers: int, threads: int, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    options: dict[str, Any] = {"form": form, "columns": COLUMNS.get(form), "window": WINDOW}
    options["index"] = str(store.root / f"index-{form}")
    options["block"] = BLOCKS.get(form)
    store.server.set(**SHARED)
    given: dict[str, Any] = {"workers": workers, "threads": threads, "options": options}
    given["limit_s"] = limit_s
    return store.run(peer.name, epochs=1, count=samples_of(form, len(store.samples)), **given)


def _rate(run: dict[str, Any]) -> float:
    return run["epochs"][0]["samples"] / float(run["epochs"][0]["seconds"])


def _rests(run: dict[str, Any]) -> tuple[str, ...]:
    counters = run["epochs"][0]["counters"]
    return (
        f"{run['first_s']:.2f} s",
        f"{counters['bytes'] / 1e6:,.0f}",
        f"{counters['gets']:,}",
        f"{run['cpu_s'] / counters['bytes'] * 1e9:.1f}",
    )


def first(ground: Ground, quick: bool) -> None:
    """Print when the first batch is there: with an index, and without one."""
    forms = ("tars", "parquets", "hundred-tars", "hundred-parquets")
    store = _store(ground, quick, forms)
    print("first batch: from 0 and 1 s to the first byte, and no limit of the rate; medians")
    rows = []
    for form in forms:
        for is_indexed in (True, False):
            if not is_indexed and not form.startswith("hundred"):
                continue
            options: dict[str, Any] = {"form": form, "columns": COLUMNS.get(form), "stop": 1}
            options |= {"window": WINDOW}
            options |= {"index": str(store.root / f"index-{form}")} if is_indexed else {}
            given = {"workers": 0, "count": samples_of(form, len(store.samples))}
            middle = []
            for latency in LATENCIES:
                store.server.set(first_byte_s=latency)
                times = [
                    store.run("shards", options=options, **given)["first_s"]
                    for _ in range(1 if quick else 3)
                ]
                middle.append(statistics.median(times))
            trips = (middle[1] - middle[0]) / (LATENCIES[1] - LATENCIES[0])
            how = "with its index" if is_indexed else f"without: {HUNDRED} shards"
            rows.append((form, how, f"{trips:.1f}", *(f"{each:.2f} s" for each in middle)))
    show(("", "", "round trips", *(f"{each:g} s to the first byte" for each in LATENCIES)), rows)
    print(
        "From before the shards are opened, modules imported. Target: 2 round trips and 0.7 s; "
        "without an index, 3 s more."
    )


def local(ground: Ground, quick: bool) -> None:
    """Print how long a sample at random takes, of local tars that are in memory."""
    store = _store(ground, quick, ("tars", "parquets", "rows", "lines", "mosaic"))
    rows = []
    tried = [(form, "forebay") for form in PEERS] + [("tars", "wids"), ("tars", "webshart")]
    for form, peer in tried:
        try:
            with store.call(MODULE, "local", str(store.root / BUCKET / form), peer, form) as call:
                found = json.loads(call.answer(LIMIT_S))
        except RuntimeError as error:
            rows.append((form, peer, reason(error)))
            continue
        cells = f"{found['whole_us']:.1f} us", f"{found['copy_us']:.1f} us"
        rows.append((form, peer, *cells, f"{found['whole_us'] - found['copy_us']:.1f} us"))
    show(("", "", "ds[i]", "the copy alone", "beside it"), rows)
    print("Processor time, the least of five rounds; each sample at random, in the page cache.")


def index(ground: Ground, quick: bool) -> None:
    """Print how long it takes to index shards, and to open their index."""
    forms = ("tars", "parquets", "lines")
    store = _store(ground, quick, forms)
    rows = []
    for form in forms:
        folder = store.root / BUCKET / form
        nbytes = sum(path.stat().st_size for path in folder.iterdir())
        for where, workers in (("bucket", 1), ("bucket", 2), ("disk", 2)):
            store.server.set(**SHARED)
            location = f"s3://{BUCKET}/{form}" if where == "bucket" else str(folder)
            target = ground.fresh() / "index"
            with store.call(MODULE, "index", location, str(target), str(workers)) as call:
                found = json.loads(call.answer(LIMIT_S))
            rate = nbytes / found["index_s"]
            fetched = store.server.counters()["bytes"] if where == "bucket" else 0
            cells = f"{found['index_s']:.1f} s", f"{rate / 1e6:,.0f} MB/s"
            read = f"{fetched / found['index_s'] / 1e6:,.0f} MB/s" if fetched else ""
            hours, opened = 1e12 / rate / 3600, f"{found['open_s']:.2f} s"
            rows.append((form, where, f"{workers}", *cells, read, f"{hours:.1f} h", opened))
    show(
        ("shards", "in", "workers", "index", "of shards", "over the link", "a TB", "open"),
        rows,
    )
    print(f"The link gives {SHARED['link'] / 1e6:.0f} MB/s. A TB: by arithmetic, at this rate.")
    count = QUICK_LARGE if quick else LARGE
    with store.call(MODULE, "large", str(ground.fresh()), str(count)) as call:
        found = json.loads(call.answer(LIMIT_S))
    print(
        f"An index of {count:,} samples opens in {found['open_s']:.2f} s, and the process that "
        f"fetches has it after {found['ready_s']:.2f} s. Beyond a small one: private "
        f"{found['reader']:.0f} MB there, {found['fetcher']:.0f} MB in that process; shared "
        f"{found['shared']:.0f} MB.\nTarget: 2 s and 100 MB."
    )


def faults(ground: Ground, quick: bool) -> None:
    """Print whether broken answers change a batch."""
    forms = ("tars", "parquets", "rows", "lines", "mosaic")
    store = _store(ground, quick, forms)
    rows = []
    for form in forms:
        if form in store.failed:
            rows.append((form, store.failed[form]))
            continue
        whole = ""
        for kind in ("none", *FAULTS):
            if kind == "flip" and form not in ("tars", "lines"):  # a first arrival has no checksum
                continue
            broken = [Fault(kind, share=0.03, keys=f"{BUCKET}/{form}/*")] if kind != "none" else []
            store.server.set(**LINK, faults=broken)
            began = time.monotonic()
            arguments = f"s3://{BUCKET}/{form}", str(store.root / f"index-{form}"), form
            try:
                with store.call(MODULE, "hash", *arguments) as call:
                    found = json.loads(call.answer(LIMIT_S))
            except RuntimeError as error:
                rows.append((form, kind, "", reason(error)))
                continue
            whole = whole or found["hash"]
            seconds = f"{time.monotonic() - began:.1f} s"
            count = sum(store.server.counters()["faults"].values())
            rows.append((form, kind, f"{count:,}", str(found["hash"] == whole), seconds))
    show(("shards", "fault", "injected", "the same batches", "took"), rows)


# ---- programs ------------------------------------------------------------------------------------


def index_once(location: str, target: str, workers: str) -> dict[str, Any]:
    """Index shards, and open the index."""
    import forebay

    began = time.perf_counter()
    forebay.index_shards(location, target, num_workers=int(workers), progress=False)
    indexed = time.perf_counter()
    forebay.open_shards(location, index=target, progress=False)
    return {"index_s": indexed - began, "open_s": time.perf_counter() - indexed}


def hash_once(location: str, index: str, form: str) -> dict[str, Any]:
    """Read an epoch, and hash its batches."""
    import forebay

    given: dict[str, Any] = {"columns": COLUMNS.get(form), "window": "64MB", "progress": False}
    dataset = forebay.open_shards(location, index=index, **given)
    found = hashlib.sha256()
    loader = forebay.DataLoader(dataset, 64, shuffle=True, seed=0, num_workers=1, collate_fn=list)
    with loader:
        for batch in loader:
            for name, value in chain.from_iterable(sorted(each.items()) for each in batch):
                found.update(name.encode())
                found.update(value if isinstance(value, bytes) else repr(value).encode())
    return {"hash": found.hexdigest()}


def local_once(folder: str, peer: str, form: str) -> dict[str, Any]:
    """Measure one sample at random, and a copy of as many bytes from memory."""
    paths = sorted(str(path) for path in Path(folder).iterdir())
    if peer == "forebay":
        import forebay

        given: dict[str, Any] = {"columns": COLUMNS.get(form), "progress": False}
        dataset = forebay.open_shards(folder, **given)
        count, read = len(dataset), dataset.__getitem__
    else:
        count = 2_000
        read = getattr(shard_readers, f"{peer}_samples")(paths)
    reads = min(RANDOM_READS, count)
    order = random.Random(0).sample(range(count), reads)
    for path in paths:
        with open(path, "rb") as file:
            while file.read(1 << 24):
                pass
    source = memoryview(os.urandom(64 << 20))
    sizes = [_nbytes(read(at)) for at in order[:1000]]
    starts = random.Random(1).choices(range(len(source) - max(sizes)), k=len(sizes))
    whole, copy = [], []
    for _ in range(5):
        began = time.process_time()
        for at in order:
            read(at)
        whole.append((time.process_time() - began) / len(order))
        began = time.process_time()
        for start, size in zip(starts, sizes, strict=True):
            bytes(source[start : start + size])
        copy.append((time.process_time() - began) / len(sizes))
    return {"whole_us": min(whole) * 1e6, "copy_us": min(copy) * 1e6}


def large_once(folder: str, samples: str) -> dict[str, Any]:
    """Open a small index and a large one; say what that took, and how much memory."""
    import forebay
    from benchmarks.bucket.index import fetchers, memory
    from forebay.shards.sources import INDEX_NAME

    before: dict[str, int] = {}
    for name, count in (("small", LARGE_SHARD), ("large", int(samples))):
        index = Path(folder, name)
        index.mkdir()
        (index / INDEX_NAME).write_bytes(_made_index(count))
        mine, others = memory("self"), fetchers()
        began = time.perf_counter()
        dataset = forebay.open_shards(f"s3://{BUCKET}/{name}", index=index, progress=False)
        opened = time.perf_counter()
        assert dataset.remote is not None and len(dataset) == count
        dataset.remote.link()
        ready = time.perf_counter()
        (fetcher,) = set(fetchers()) - {*others}
        ours, theirs = memory("self"), memory(str(fetcher))
        found = {"reader": ours[0] - mine[0], "fetcher": theirs[0], "shared": theirs[1]}
        if name == "small":
            before, kept = found, dataset  # noqa: F841 - its process goes on
    return {
        "open_s": opened - began,
        "ready_s": ready - began,
        **{each: (found[each] - before[each]) / 1e6 for each in found},
    }


def _made_index(samples: int) -> bytes:
    """Return an index of tars that are not there."""
    import numpy as np

    from forebay.shards.format import FoundBlocks
    from forebay.shards.index import IndexedShard, ShardIndex
    from forebay.shards.location import Listed

    blocks, nbytes = LARGE_SHARD // LARGE_BLOCK, 4 << 20
    at = np.arange(blocks)
    extents = np.stack([at, at * nbytes, np.full(blocks, nbytes)], axis=1)
    starts = np.tile(np.arange(LARGE_BLOCK) * (nbytes // LARGE_BLOCK), blocks)
    found = FoundBlocks(np.full(blocks, LARGE_BLOCK), extents, starts=starts)
    shards = (
        IndexedShard(Listed(f"{number:08}.tar", blocks * nbytes, "tag"), "tar", "", found, at)
        for number in range(samples // LARGE_SHARD)
    )
    return bytes(ShardIndex.of(shards).data)


def _nbytes(sample: Any) -> int:
    values = sample.values() if isinstance(sample, dict) else sample
    sizes = {bytes: len, str: len, io.BytesIO: lambda each: each.getbuffer().nbytes}
    return sum(sizes[type(each)](each) for each in values if type(each) in sizes)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    calls = {"index": index_once, "hash": hash_once, "local": local_once, "large": large_once}
    print(json.dumps(calls[what](*arguments)))
