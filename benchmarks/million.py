"""A million trivial inputs: rate, the driver's memory, and how long a finished run takes to resume.

As a program it is one call: `python -m benchmarks.million PEER MANIFEST FOLDER`, where a peer is
"forebay"; "pool", which reads the manifest, calls the function by a Pool and writes the table, all
by hand; or "datasets".
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
import sys
import time
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.loading.memory import peak_resident_mib
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

LIMIT_S = 400.0
# Rows that a Pool sends to a worker at once.
CHUNK = 1000


def count(row: dict[str, str], out: Any) -> dict[str, int]:  # noqa: ARG001 - forebay calls it so
    """Return a row without any work."""
    return {"n": 1}


def million(ground: Ground, quick: bool) -> None:
    """Print the table."""
    rows = Rows()
    for inputs in (10_000, 100_000) if quick else (50_000, 1_000_000):
        manifest = ground.root / f"{inputs}.csv"
        with manifest.open("w") as file:
            file.write("name\n")
            file.writelines(f"{at}\n" for at in range(inputs))
        folder = ground.fresh()
        first = _drive("forebay", manifest, folder)
        again = _drive("forebay", manifest, folder)
        pool = _drive("pool", manifest, ground.fresh())["seconds"]
        has_datasets = importlib.util.find_spec("datasets") is not None
        mapped = _drive("datasets", manifest, ground.fresh())["seconds"] if has_datasets else None
        if first["done"] != inputs or again["done"] != inputs or again["resumed"] != inputs:
            raise RuntimeError(f"not all of {inputs:,} inputs: {first}, then {again}")
        rows.append(
            (
                f"{inputs:,}",
                f"{first['seconds']:.1f} s",
                f"{inputs / first['seconds'] / 1000:.1f} k",
                f"{first['peak_mib']:.0f} MiB",
                f"{again['seconds']:.1f} s",
                f"{again['peak_mib']:.0f} MiB",
                f"{pool:.1f} s",
                "-" if mapped is None else f"{mapped:.1f} s",
                f"{first['seconds'] / pool:.1f}",
            )
        )
    print("trivial inputs, rows of a CSV manifest, no outputs, one dict each; forebay, 2 workers")
    columns = ("inputs", "call", "inputs/s", "driver's peak", "resuming it finished", "its peak")
    show((*columns, "a Pool by hand", "datasets.map", "x the Pool"), rows)
    print(
        "The whole call: enrolling the manifest, running, writing the table. The peak is the\n"
        "driver's resident memory, libraries included. The Pool reads all rows, sends a thousand\n"
        "at once, and writes a Parquet file; what it made is lost if it does not come to its end."
    )


def _drive(peer: str, manifest: Path, folder: Path) -> dict[str, Any]:
    """Make one call and return its report."""
    with Call("benchmarks.million", peer, str(manifest), str(folder)) as call:
        return dict(json.loads(call.answer(LIMIT_S)))


def by_hand(manifest: str, folder: str) -> None:
    """Call the function for each row of a manifest by a Pool, and write the table."""
    import pyarrow
    import pyarrow.parquet

    from benchmarks.million import count as work

    with open(manifest, newline="") as file:
        rows = list(csv.DictReader(file))
    with Pool(2) as pool:
        found = pool.map(functools.partial(work, out=None), rows, CHUNK)
    table = [row | more for row, more in zip(rows, found, strict=True)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), f"{folder}/table.parquet")


def mapped(manifest: str, folder: str) -> None:
    """Call the function for each row of a manifest by datasets.map, and write the table."""
    import datasets

    from benchmarks.million import count as work

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_csv(manifest, cache_dir=folder)
    table = table.map(functools.partial(work, out=None), num_proc=2)
    table.to_parquet(f"{folder}/table.parquet")


def main(peer: str, manifest: str, folder: str) -> None:
    """Run a peer over a manifest and print time and memory, as JSON."""
    if peer != "forebay":
        began = time.perf_counter()
        (by_hand if peer == "pool" else mapped)(manifest, folder)
        print(json.dumps({"seconds": time.perf_counter() - began}))
        return
    import benchmarks.peers.forebay  # noqa: F401 - imported beforehand, as in every benchmark
    import forebay
    from benchmarks.million import count as work  # imported under the name that a worker can import

    began = time.perf_counter()
    report = forebay.preprocess(work, manifest, output=folder, num_workers=2, progress=False)
    seconds = time.perf_counter() - began
    answer = {
        "seconds": seconds,
        "done": report.done,
        "resumed": report.resumed,
        "peak_mib": peak_resident_mib(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
