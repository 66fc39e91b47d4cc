"""A million trivial inputs: rate, the driver's memory, and how long a finished run takes to resume.

As a program it is one driver: `python -m benchmarks.million MANIFEST FOLDER`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.loading.memory import peak_resident_mib
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

LIMIT_S = 400.0


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
        first = _drive(manifest, folder)
        again = _drive(manifest, folder)
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
            )
        )
    print("trivial inputs, rows of a CSV manifest, no outputs, one dict each; forebay, 2 workers")
    columns = ("inputs", "call", "inputs/s", "driver's peak", "resuming it finished", "its peak")
    show(columns, rows)
    print(
        "The whole call: enrolling the manifest, running, writing the table. The peak is the\n"
        "driver's resident memory, libraries included."
    )


def _drive(manifest: Path, folder: Path) -> dict[str, Any]:
    """Run one driver and return its report."""
    with Call("benchmarks.million", str(manifest), str(folder)) as call:
        return dict(json.loads(call.answer(LIMIT_S)))


def main(manifest: str, folder: str) -> None:
    """Run forebay over a manifest and print time and memory, as JSON."""
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
