"""Measure forebay beside its peers: `python -m benchmarks [--quick] [--json FILE] [TABLE ...]`.

Without a name, these tables are measured:

    tiny pieces life cpu            preprocess
    crash million jobs              preprocess: a kill, a million inputs, real jobs
    loading                         the DataLoader; loading-jobs: three real pipelines
    cached predicted lengths        cache, predict, rows and batches by tokens

These are measured only when they are named:

    diagnose                        an idle machine, half an hour: why training waits
    exactness                       an hour: what each loader gives after cuts and kills
    disk                            root, 9 GB of disk, 10 minutes: the same on a real disk
    auto                            an idle machine, half an hour: num_workers="auto"
    compression                     ten minutes: caches with and without compression
    concurrency                     three minutes: small objects behind a network, several at once
    audit                           ten minutes: what it costs to make samples a second time
    tracing                         an idle machine, two minutes: what the loader's record costs
    heap                            8 GiB of memory, three minutes: the freed memory workers keep
    large                           20 GiB of memory, half an hour: the DataLoader
    gpu                             batches on a GPU; without one, with device="cpu"
    ten-million hundred-million     4 GB of disk: preprocess
    ray                             a Ray cluster, on this machine
    nodes                           five minutes: a cluster of 64 simulated nodes
    bucket                          12 GB of disk, half an hour: training from a bucket
    shards                          9 GB of disk, 20 minutes: shards that others wrote, in place

A first word stands for all tables that begin with it: loading-big, loading-single and so on.

Best on an idle machine, and not just after many files were deleted: on ext4, creating files can
then be slower for a while, for every peer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import TextIO

from benchmarks.audit import audit
from benchmarks.auto import auto
from benchmarks.bucket import TABLES as BUCKET
from benchmarks.buffer import buffer_fills
from benchmarks.cached import cached
from benchmarks.columns import loading_columns
from benchmarks.compression import compression
from benchmarks.concurrency import concurrency
from benchmarks.crash import crash
from benchmarks.diagnosis.tables import diagnose
from benchmarks.disk import disk
from benchmarks.exactness.histories import MEANINGS
from benchmarks.exactness.table import exactness
from benchmarks.gpu import gpu
from benchmarks.jobs import jobs
from benchmarks.kept_heap import kept_heap
from benchmarks.kinds import loading_kinds, loading_sizes
from benchmarks.large_objects import objects
from benchmarks.large_order import order
from benchmarks.lengths import lengths
from benchmarks.life import life
from benchmarks.loading import TABLES as LOADING
from benchmarks.loading_jobs import loading_jobs
from benchmarks.loading_states import loading_states
from benchmarks.machine import describe
from benchmarks.many import hundred_million, ten_million
from benchmarks.measure import Ground
from benchmarks.million import million
from benchmarks.nodes import nodes
from benchmarks.predicted import predicted
from benchmarks.preprocess import five_ms, pieces, tiny
from benchmarks.ray import TABLES as RAY
from benchmarks.results import write
from benchmarks.tracing import tracing

USUAL = (
    {
        "tiny": tiny,
        "pieces": pieces,
        "life": life,
        "cpu": five_ms,
        "crash": crash,
        "million": million,
        "jobs": jobs,
    }
    | LOADING
    | {
        "loading-buffer": buffer_fills,
        "loading-columns": loading_columns,
        "loading-kinds": loading_kinds,
        "loading-sizes": loading_sizes,
        "loading-jobs": loading_jobs,
        "loading-states": loading_states,
    }
    | {"cached": cached, "predicted": predicted, "lengths": lengths}
)
# The others are measured only when they are named.
TABLES = (
    USUAL
    | RAY
    | BUCKET
    | {
        "diagnose": diagnose,
        "disk": disk,
        "exactness": exactness,
        "auto": auto,
        "compression": compression,
        "concurrency": concurrency,
        "audit": audit,
        "tracing": tracing,
        "heap": kept_heap,
        "large-order": order,
        "large-objects": objects,
        "gpu": gpu,
        "ten-million": ten_million,
        "hundred-million": hundred_million,
        "nodes": nodes,
    }
)
# The largest table's inputs.
SOURCES, QUICK_SOURCES = 20_000, 5_000


def main() -> None:
    """Print the tables that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables there, too")
    parser.add_argument("--quick", action="store_true", help="few inputs, one run: does it work?")
    parser.add_argument("--kills", type=int, default=0, help="of each process, in bucket-kills")
    parser.add_argument("--loaders", nargs="+", default=(), help="in exactness: only these")
    parser.add_argument(
        "--histories", nargs="+", default=(), choices=[*MEANINGS], help="in exactness: only these"
    )
    parser.add_argument("--page", action="store_true", help="in exactness: write its page")
    options = parser.parse_args()
    if options.page and options.quick:
        parser.error("--page is of whole runs: leave out --quick")
    # The first word of several tables' names means all of them.
    chosen = {name: [each for each in TABLES if _among(each, name)] for name in options.tables}
    for name, tables in chosen.items():
        if not tables:
            parser.error(f"no table {name!r}; there are {', '.join(TABLES)}")
    build = Path("build")  # not a temporary folder: that may be memory, and outputs go to disk
    build.mkdir(exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=build)).resolve()
    began = time.monotonic()
    copy = Copy(sys.stdout)
    try:
        with contextlib.redirect_stdout(copy):
            print(describe(root), flush=True)
            ground = Ground(
                root,
                QUICK_SOURCES if options.quick else SOURCES,
                options.kills,
                tuple(options.loaders),
                tuple(options.histories),
                options.page,
            )
            for name in dict.fromkeys(chain.from_iterable(chosen.values())) or USUAL:
                print(flush=True)
                TABLES[name](ground, options.quick)
    finally:
        shutil.rmtree(root)
    if options.json:
        write(options.json, copy.getvalue())
    print(f"\n{time.monotonic() - began:.0f} s in all")


class Copy(io.StringIO):
    """A stream that writes to another one and keeps what it wrote."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._stream.flush()


def _among(table: str, name: str) -> bool:
    return table == name or table.startswith(f"{name}-")


if __name__ == "__main__":
    main()
