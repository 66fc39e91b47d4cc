"""Shards that others wrote, read in place: how fast, how soon, and what faults change."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bucket.ground import LIMIT_S, LINK, SHARED, Store, reason, store_of
from benchmarks.bucket.stores import BUCKET, SHARD_BYTES, Samples
from benchmarks.machine import versions
from benchmarks.measure import Ground
from benchmarks.preprocess import show
from kit.range_faults import Fault

FAULTS = "slowdown", "reset", "short", "flip", "stall"
# Samples of a row group of images, and what a small row has beside its image.
GROUP_ROWS = 100
WINDOW = "256MB"


def write_tars(samples: Samples, folder: Path) -> None:
    """Write tars as WebDataset has them."""
    folder.mkdir(parents=True)
    each = max(SHARD_BYTES * len(samples) // samples.nbytes, 1)
    for first in range(0, len(samples), each):
        with tarfile.open(folder / f"{first // each:05}.tar", "w") as tar:
            for number in range(first, min(first + each, len(samples))):
                sample = samples[number]
                for name, data in (("jpg", sample["image"]), ("cls", str(number).encode())):
                    info = tarfile.TarInfo(f"{number:08}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def write_parquet(samples: Samples, folder: Path) -> None:
    """Write Parquet files of six columns, of which two are read."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True)
    for first in range(0, len(samples), 10 * GROUP_ROWS):
        some = [samples[at] for at in range(first, min(first + 10 * GROUP_ROWS, len(samples)))]
        columns: dict[str, Any] = {"image": [each["image"] for each in some]}
        columns["label"] = [each["label"] for each in some]
        for name in ("a", "b", "c", "d"):  # not read: a fifth of an image each
            columns[name] = [each["image"][-len(each["image"]) // 5 :] for each in some]
        path = folder / f"{first:08}.parquet"
        options = {"compression": "none", "use_dictionary": False}
        parquet.write_table(pa.table(columns), path, row_group_size=GROUP_ROWS, **options)


FORMS = {"tars": write_tars, "parquets": write_parquet}
COLUMNS = {"parquets": ["image", "label"]}


def _store(ground: Ground, quick: bool) -> Store:
    store = store_of(ground, quick)
    for form, write in FORMS.items():
        if not (folder := store.root / BUCKET / form).exists():
            write(store.samples, folder)
        target = str(store.root / f"index-{form}")
        with store.call("benchmarks.bucket.shards", f"s3://{BUCKET}/{form}", target, "2") as call:
            call.answer(LIMIT_S)
    return store


def epochs(ground: Ground, quick: bool) -> None:
    """Print rates of shuffled epochs, with their start."""
    store = _store(ground, quick)
    print(
        f"{len(store.samples):,} samples of 99 kB in tars, and in Parquet files (2 of 6 columns, "
        f"row groups of {GROUP_ROWS}), shuffled by windows of {WINDOW}, batches of 64; the link\n"
        "of bucket-epochs, and an index that was made before"
    )
    rows = []
    for form in FORMS:
        bare = 0.0
        peers = [("bare GETs of the same bytes", "bare-shards", ((0, 32), (0, 64)))]
        peers += [("forebay.open_shards", "shards", ((0, 0), (1, 0), (2, 0)))]
        if form == "tars":
            peers += [("WebDataset", "webdataset-tars", ((2, 0), (4, 0)))]
        else:
            peers += [("Hugging Face streaming", "huggingface-parquets", ((2, 0),))]
        for title, name, tried in peers:
            found, failed = [], ""
            for workers, threads in tried:
                store.server.set(**SHARED)
                given = {"form": form, "columns": COLUMNS.get(form), "window": WINDOW}
                given["index"] = str(store.root / f"index-{form}")
                setting = {"workers": workers, "threads": threads}
                try:
                    run = store.run(name, epochs=1, options=given, **setting)
                    first = run["epochs"][0]
                    if first["lost"] or first["twice"]:
                        raise RuntimeError(f"{first['lost']} lost, {first['twice']} twice")
                    found.append((first["samples"] / first["seconds"], run, workers, threads))
                except RuntimeError as error:
                    failed = reason(error)
            if not found:
                rows.append((form, title, *[""] * 4, failed))
                continue
            rate, run, workers, threads = max(found, key=lambda each: each[0])
            bare = bare or rate
            cells = [f"{rate:,.0f}", f"{rate / bare:.2f}", f"{run['first_s']:.2f} s"]
            cells += [f"{run['epochs'][0]['counters']['bytes'] / 1e6:,.0f} MB"]
            rows.append(
                (form, title, *cells, f"{threads} at once" if threads else f"{workers} workers")
            )
    show(("shards", "", "samples/s", "x bare", "first batch", "fetched", ""), rows)
    names = ("obstore", "webdataset", "datasets", "pyarrow")
    print(", ".join(f"{name} {each}" for name, each in versions(*names).items()))


def index(ground: Ground, quick: bool) -> None:
    """Print how long it takes to index tars, and to open their index."""
    store = _store(ground, quick)
    rows = []
    for form in FORMS:
        nbytes = sum(path.stat().st_size for path in (store.root / BUCKET / form).iterdir())
        for where, workers in (("bucket", 1), ("bucket", 2), ("disk", 2)):
            store.server.set(**SHARED)
            folder = store.root / BUCKET / form
            location = f"s3://{BUCKET}/{form}" if where == "bucket" else str(folder)
            target = ground.fresh() / "index"
            with store.call(
                "benchmarks.bucket.shards", location, str(target), str(workers)
            ) as call:
                found = json.loads(call.answer(LIMIT_S))
            rate = nbytes / found["index_s"]
            cells = f"{found['index_s']:.1f} s", f"{rate / 1e6:,.0f} MB/s"
            hours = 1e12 / rate / 3600
            opened = f"{found['open_s']:.2f} s"
            rows.append((form, where, f"{workers}", *cells, f"{hours:.1f} h", opened))
    show(("shards", "in", "workers", "index", "of shards", "a TB", "open with it"), rows)


def faults(ground: Ground, quick: bool) -> None:
    """Print whether broken answers change a batch."""
    store = _store(ground, quick)
    rows = []
    for form in FORMS:
        whole = ""
        for kind in ("none", *FAULTS):
            if kind == "flip" and form != "tars":  # of what is read first there is no checksum
                continue
            broken = [Fault(kind, share=0.03, keys=f"{BUCKET}/{form}/*")] if kind != "none" else []
            store.server.set(**LINK, faults=broken)
            began = time.monotonic()
            location = f"s3://{BUCKET}/{form}"
            with store.call("benchmarks.bucket.shards", location, "", form) as call:
                found = json.loads(call.answer(LIMIT_S))
            whole = whole or found["hash"]
            seconds = f"{time.monotonic() - began:.1f} s"
            count = sum(store.server.counters()["faults"].values())
            rows.append((form, kind, f"{count:,}", found["hash"] == whole, seconds))
    show(("shards", "fault", "injected", "the same batches", "took"), rows)


def _index(location: str, target: str, workers: int) -> dict[str, Any]:
    import forebay

    began = time.perf_counter()
    forebay.index_shards(location, target, num_workers=workers, progress=False)
    indexed = time.perf_counter()
    forebay.open_shards(location, index=target, progress=False)
    return {"index_s": indexed - began, "open_s": time.perf_counter() - indexed}


def _hash(location: str, form: str) -> dict[str, Any]:
    import forebay

    dataset = forebay.open_shards(
        location, columns=COLUMNS.get(form), window="64MB", progress=False
    )
    found = hashlib.sha256()
    with forebay.DataLoader(
        dataset, 64, shuffle=True, seed=0, num_workers=1, collate_fn=list
    ) as loader:
        for batch in loader:
            for sample in batch:
                found.update(repr(sorted(sample.items())).encode())
    return {"hash": found.hexdigest()}


if __name__ == "__main__":
    import sys

    location, target, last = sys.argv[1:]
    answer = _index(location, target, int(last)) if target else _hash(location, last)
    print(json.dumps(answer))
