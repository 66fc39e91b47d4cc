"""Ten and a hundred million inputs: the first input at work, memory, the ledger, resuming.

A run over ten million rows with two real workers is one table. The other runs the driver alone,
with workers that answer at once (`benchmarks/instant.py`), on a ledger in which 99 of 100 inputs
are done: that ledger is written as runs write it, but without running. Then that run is continued
to its end, with the table of all inputs.

As a program it writes such a ledger: `python -m benchmarks.many MANIFEST FOLDER DONE`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

LIMIT_S = 4 * 3600.0


def ten_million(ground: Ground, quick: bool) -> None:
    """Print the table of a real run: trivial inputs, rows of a Parquet manifest, two workers."""
    inputs = 200_000 if quick else 10_000_000
    manifest, folder = _manifest(ground, inputs), ground.fresh()
    rows = Rows()
    for what in ("first call", "the same call again"):
        with Call("benchmarks.million", "forebay", str(manifest), str(folder)) as call:
            facts = json.loads(call.answer(LIMIT_S))
        if facts["done"] != inputs:
            raise RuntimeError(f"not all of {inputs:,} inputs: {facts}")
        rate = f"{inputs / facts['seconds'] / 1000:.1f} k"
        rows.append((what, f"{facts['seconds']:.1f} s", rate, f"{facts['peak_mib']:.0f} MiB"))
    print(f"{inputs:,} trivial inputs, rows of a Parquet manifest, one dict each; 2 workers")
    show(("", "call", "inputs/s", "driver's peak"), rows)
    size = os.path.getsize(Path(folder, ".forebay", "ledger.sqlite")) / inputs
    print(f"The ledger takes {size:.1f} bytes an input. The call includes the table.")


def hundred_million(ground: Ground, quick: bool) -> None:
    """Print the table of the driver alone."""
    inputs = 200_000 if quick else 100_000_000
    manifest, worked = _manifest(ground, inputs), inputs // 2000
    rows = Rows()
    for what, done, stops in (
        ("nothing done", 0, (worked,)),
        ("99 of 100 done", inputs // 100 * 99, (worked,)),
        ("99 of 100 done, to the end", inputs // 100 * 99, ()),
    ):
        if stops:
            folder = ground.fresh()
            with Call("benchmarks.many", str(manifest), str(folder), str(done)) as call:
                call.answer(LIMIT_S)
        size = os.path.getsize(Path(folder, ".forebay", "ledger.sqlite"))
        with Call("benchmarks.instant", str(manifest), str(folder), *map(str, stops)) as call:
            facts = json.loads(call.answer(LIMIT_S))
        if not stops and facts["done"] != inputs:
            raise RuntimeError(f"not all of {inputs:,} inputs: {facts}")
        each = f"{size / done:.1f}" if done else "-"
        first, whole = f"{facts['first_s']:.2f} s", f"{facts['seconds']:.0f} s"
        table = "-" if stops else f"{facts['table_s']:.0f} s"
        rows.append((what, first, whole, table, f"{facts['peak_mib']:.0f} MiB", each))
    print(f"{inputs:,} inputs, rows of a Parquet manifest; workers that answer at once")
    columns = ("", "first input at work", "call", "of it, table", "driver's peak")
    show((*columns, "bytes per done input"), rows)
    print(f"The first two calls are interrupted after {worked:,} inputs.")


def _manifest(ground: Ground, inputs: int) -> Path:
    path = ground.root / f"{inputs}.parquet"
    if not path.exists():
        write_manifest(path, inputs)
    return path


def write_manifest(path: Path, inputs: int) -> None:
    """Write a manifest of two columns, a string and a number, in groups of 100,000 rows."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([("name", pyarrow.string()), ("label", pyarrow.int64())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for first in range(0, inputs, 100_000):
            numbers = pyarrow.array(range(first, min(first + 100_000, inputs)), pyarrow.int64())
            columns = [numbers.cast(pyarrow.string()), numbers]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))


def fill(manifest: str, folder: str, done: int) -> None:
    """Write the ledger of a run over a manifest of which the first inputs are done."""
    from benchmarks.instant import METADATA, count
    from forebay.inputs.listing import list_inputs
    from forebay.ledger.database import DONE, write_counts
    from forebay.ledger.ledger import Ledger
    from forebay.ledger.records import Counts
    from forebay.runs.fingerprint import describe

    listing = list_inputs(manifest)
    assert listing.fingerprint, "it is large"
    first_row = next(iter(listing)).row
    if first_row != _row(0):
        raise RuntimeError(f"a row of a manifest is {first_row!r} now, not {_row(0)!r}")
    with Ledger.open(Path(folder, ".forebay")) as ledger:
        ledger.enrol(iter(()), listing.columns, True, ahead=0, fingerprint=listing.fingerprint)
        ledger.set_meta("work", describe(count).to_json(), verb="preprocess")
        ledger.set_meta("trial", "no")
        with ledger.transaction() as db:
            db.executemany(
                "INSERT INTO inputs(source, row, identity, state, attempts, seconds, outputs, "
                "metadata) VALUES('', ?, '', ?, 1, ?, '[]', ?)",
                ((_row(at), DONE, at % 256 / 1e6, METADATA) for at in range(done)),
            )
            write_counts(db, Counts(done, done, 0))
    print(done)


def _row(number: int) -> str:
    """Return a row of the manifest as JSON."""
    return f'{{"name":"{number}","label":{number}}}'


if __name__ == "__main__":
    fill(sys.argv[1], sys.argv[2], int(sys.argv[3]))
