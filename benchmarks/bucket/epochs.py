"""How fast epochs are, how soon the first batch is there, and how much is fetched."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.bucket.ground import LIMIT_S, LINK, SHARED, Store, reason, store_of
from benchmarks.machine import versions
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

WINDOW = 256_000_000
EPOCHS = 2


@dataclass(frozen=True, slots=True)
class Peer:
    """A reader.

    Attributes:
        title: Its name in the table.
        tried: Workers, and requests at once of each, of which the best count.
        form: What of the bucket it reads.
        stop: After so many samples, where an epoch would take minutes.
    """

    name: str
    title: str
    tried: tuple[tuple[int, int], ...]
    form: str
    stop: int | None = None


PEERS = (
    Peer("bare", "bare GETs of 4 MiB by obstore", ((0, 32), (0, 64)), "forebay"),
    Peer("forebay", "forebay", ((0, 0), (1, 0), (2, 0)), "forebay"),
    Peer("litdata", "LitData", ((2, 0),), "litdata"),
    Peer("webdataset", "WebDataset", ((2, 0), (4, 0)), "webdataset"),
    Peer("mosaic", "Mosaic Streaming", ((2, 0),), "mosaic"),
    Peer("obstore", "Dataset over obstore, torch", ((2, 16), (2, 32)), "objects", 6_400),
    Peer("boto3", "Dataset over boto3, torch", ((2, 8), (4, 8)), "objects", 3_200),
    Peer("s3fs", "Dataset over s3fs, torch", ((2, 16),), "objects", 1_280),
    Peer("huggingface", "Hugging Face streaming", ((2, 0),), "parquet"),
)
LATENCIES = (0.0, 1.0)
# For a first batch at most, with the imports: what takes longer has hung.
FIRST_S = 60.0
# Until what is fetched ahead is there, where bytes are counted.
LINGER_S = 4.0


def epochs(ground: Ground, quick: bool) -> None:
    """Print rates of shuffled epochs."""
    store = store_of(ground, quick, {peer.form for peer in PEERS})
    data = store.samples.nbytes
    print(
        f"{len(store.samples):,} samples of {data / len(store.samples) / 1e3:.0f} kB in a bucket, "
        "shuffled, batches of 64:\n30 ms to the first byte, one answer in a hundred half a second "
        "later, 75 MB/s a connection, 150 MB/s in all"
    )
    rows, best = [], {}
    bare = 0.0
    for peer in PEERS:
        try:
            found, setting = _best(store, peer, SHARED)
        except RuntimeError as error:
            rows.append((peer.title, *[""] * 8, reason(error)))
            continue
        best[peer.name] = setting
        first, last = found["epochs"][0], found["epochs"][-1]
        rate = _rate(first)
        bare = bare or rate
        cells = [f"{rate:,.0f}", f"{rate / bare:.2f}"]
        again = f"{_rate(last):,.0f}" if len(found["epochs"]) > 1 else ""
        link = _link(first, last) if again else ""
        cells += [again, link, f"{found['first_s']:.2f} s", *_rests(found, first, data)]
        workers, threads = setting
        words = [f"{workers} workers"] * (peer.name != "bare") + [f"{threads} at once"] * bool(
            threads
        )
        rows.append((peer.title, *cells, ", ".join(words)))
    show(
        (
            *("", "samples/s", "x bare", "epoch 2", "MB/s fetched in it", "first batch", "fetched"),
            *("GETs", "CPU s a GB", ""),
        ),
        rows,
    )
    names = ("litdata", "webdataset", "mosaicml-streaming", "datasets", "obstore", "boto3", "s3fs")
    print(
        "Samples per second of a whole epoch, with its start. Fetched: bytes of the epoch, with\n"
        "what is fetched ahead, as a share of the data. CPU: of all processes, for what was\n"
        f"fetched; the server's is not in it. forebay: window={WINDOW / 1e6:.0f} MB.\n"
        + ", ".join(f"{name} {each}" for name, each in versions(*names).items())
    )
    print()
    _unshared(store)
    print()
    _first(store, best)


def _best(store: Store, peer: Peer, link: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return the run with the highest rate, and its setting."""
    if peer.form in store.failed:
        raise RuntimeError(f"Its writer failed: {store.failed[peer.form]}")
    found, failed = [], None
    for workers, threads in peer.tried:
        store.server.set(**link)
        options = {"stop": peer.stop} if peer.stop else {}
        try:
            run = store.run(
                peer.name,
                workers=workers,
                threads=threads,
                epochs=1 if peer.stop else EPOCHS,
                options=options,
            )
            each = run["epochs"][0]
            if each["twice"] or (each["lost"] and not peer.stop):
                raise RuntimeError(f"{each['lost']} samples lost, {each['twice']} twice")
            found.append((run, (workers, threads)))
        except RuntimeError as error:
            failed = error
    if failed is not None and not found:
        raise failed
    return max(found, key=lambda each: _rate(each[0]["epochs"][0]))


def _rate(epoch: dict[str, Any]) -> float:
    return epoch["samples"] / float(epoch["seconds"])


def _link(first: dict[str, Any], last: dict[str, Any]) -> str:
    """Return how fast bytes came in the last epoch."""
    return f"{(last['counters']['bytes'] - first['counters']['bytes']) / last['seconds'] / 1e6:.0f}"


def _rests(found: dict[str, Any], epoch: dict[str, Any], data: int) -> tuple[str, ...]:
    counters = found["epochs"][-1]["counters"]
    share = epoch["counters"]["bytes"] / data
    return (
        f"{share:.2f}",
        f"{epoch['counters']['gets']:,}",
        f"{found['cpu_s'] / counters['bytes'] * 1e9:.1f}",
    )


def _unshared(store: Store) -> None:
    """Print the rates where the processors are the limit."""
    print("the same without a limit for all connections: the processors are the limit")
    rows, bare = [], 0.0
    for peer in PEERS[:2]:
        found, _ = _best(store, peer, LINK)
        rate = max(map(_rate, found["epochs"]))
        bare = bare or rate
        cells = [f"{rate:,.0f}", f"{rate / bare:.2f}"]
        if peer.name == "forebay":
            counters = found["epochs"][-1]["counters"]
            cells.append(f"{found['fetcher_s'] / counters['bytes'] * 1e9:.2f} s")
        rows.append((peer.title, *cells))
    show(("", "samples/s, best epoch", "x bare", "fetcher's processor time a GB"), rows)
    print("The fetcher's time includes its start. Target: a core for 1.5 GB/s is 0.67 s a GB.")


def _first(store: Store, best: dict[str, tuple[int, int]]) -> None:
    """Print how many answers must follow each other before the first batch is there."""
    print("first batch: round trips, from 0 and 1 s to the first byte, and no limit of the rate")
    rows = Rows()
    for peer in PEERS[1:]:
        if peer.name not in best:
            continue
        workers, threads = best[peer.name]
        seconds: list[float] = []
        try:
            for latency in LATENCIES:
                store.server.set(first_byte_s=latency)
                found = store.run(
                    peer.name,
                    workers=workers,
                    threads=threads,
                    limit_s=FIRST_S,
                    options={"stop": 1},
                )
                seconds.append(found["first_s"])
        except RuntimeError as error:
            rows.append((peer.title, reason(error)))
            continue
        trips = (seconds[1] - seconds[0]) / (LATENCIES[1] - LATENCIES[0])
        rows.append((peer.title, f"{trips:.1f}", *(f"{each:.2f} s" for each in seconds)))
    show(("", "round trips", *(f"{each:g} s to the first byte" for each in LATENCIES)), rows)
    print("From before the dataset is opened, its modules imported.")


# ---- disk ----------------------------------------------------------------------------------------


def disk(ground: Ground, quick: bool) -> None:
    """Print what is fetched in later epochs if a part is on disk."""
    store = store_of(ground, quick, ("forebay", "litdata", "mosaic"))
    data = store.cache_bytes
    window = WINDOW if not quick else WINDOW // 4
    print("a share of the data on disk: bytes fetched in a later epoch; and disk used, at most")
    rows = Rows()
    for share in (0.1, 0.5, 1.0):
        limit = int(share * data)
        scratch = tempfile.mkdtemp(dir=store.scratch)
        options = {"disk": limit, "directory": scratch, "window": window, "linger_s": LINGER_S}
        store.server.set(**LINK)
        rows.append(
            (f"forebay, {share:.0%}", *_disk_row(store, "forebay", share, limit, options, scratch))
        )
    for name, title in (("litdata", "LitData"), ("mosaic", "Mosaic Streaming")):
        limit = int(0.5 * data)
        store.server.set(**LINK)
        scratch = tempfile.mkdtemp(dir=store.scratch)
        options = {"disk": limit}
        rows.append((f"{title}, 50%", *_disk_row(store, name, 0.5, limit, options, scratch)))
    show(("", "epoch 2", "epoch 3", "at most, target", "most disk / limit"), rows)
    print("Shares of all bytes of the cache.")


def _disk_row(
    store: Store, name: str, share: float, limit: int, options: dict[str, Any], scratch: str
) -> tuple[str, ...]:
    try:
        found = store.run(name, workers=2, epochs=3, options=options, scratch=scratch)
    except RuntimeError as error:
        return (reason(error),)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    fetched = [each["counters"]["bytes"] for each in found["epochs"]]
    shares = [(later - one) / store.cache_bytes for one, later in pairwise(fetched)]
    return (
        *(f"{each:.3f}" for each in shares),
        f"{1 - share + 0.02:.2f}",
        f"{found['most_disk'] / limit:.3f}",
    )


# ---- ranks ---------------------------------------------------------------------------------------


def ranks(ground: Ground, quick: bool) -> None:
    """Print what 4 ranks of a node fetch."""
    store = store_of(ground, quick)
    world = 4
    print(f"{world} ranks on one node, each a process: bytes fetched, as a share of the data")
    window = WINDOW if not quick else WINDOW // 4
    totals, samples = [], 0
    for count in (1, 3):
        store.server.set(**LINK)
        with contextlib.ExitStack() as stack:
            calls = []
            for rank in range(world):
                options = {
                    "world": world,
                    "rank": rank,
                    "split": True,
                    "window": window,
                    "linger_s": LINGER_S,
                }
                scratch = str(store.scratch / f"rank {rank}")
                given = {"workers": 0, "epochs": count, "options": options, "scratch": scratch}
                calls.append(stack.enter_context(store.started("forebay", **given)))
            found = [json.loads(call.answer(LIMIT_S)) for call in calls]
        totals.append(store.server.counters()["bytes"])
        samples = sum(each["epochs"][0]["samples"] for each in found)
    data = store.cache_bytes
    rows = [
        ("first epoch, with what is fetched ahead", f"{totals[0] / data:.3f}"),
        ("each later epoch", f"{(totals[1] - totals[0]) / 2 / data:.3f}"),
        ("samples of an epoch, all ranks", f"{samples:,}"),
    ]
    show(("", "4 ranks"), rows)
    print(
        f"Target: at most 1.03. Window: {window / 1e6:.0f} MB; twice as much is fetched ahead, "
        "also of an epoch\nthat nobody reads."
    )
