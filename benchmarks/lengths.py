"""Rows and batches by tokens: how full, how fast, one order for any ranks, and equal costs.

The peers are the packages themselves, where they are installed: Grain and `datasets` come with
forebay's extra `bench`, torchtitan with `frameworks`; `pip install trl lhotse` for the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.measure import Ground
from benchmarks.preprocess import show

Lengths = npt.NDArray[np.int64]

SIZE = 4096
WINDOW, QUICK_WINDOW = 65_536, 8_192
MANY, QUICK_MANY = 10_000_000, 1_000_000
MAX_TOKENS = 65_536
RANKS, ROWS_EACH = 8, 8
# Rows that Grain fills at a time: few, as examples have it, and many, which fill better and make a
# checkpoint larger.
GRAIN = (64, 1024)
WORLDS, WORKERS = (1, 2, 3, 4, 6, 8, 12), (0, 1, 2, 5)
QUICK_WORLDS, QUICK_WORKERS = (1, 2, 3), (0, 2)
TOGETHER = 24  # rows of a global batch, which all these worlds share evenly


class Reached(NamedTuple):
    """A number with a target, for the last table."""

    what: str
    target: str
    found: str
    is_reached: bool


def at_most(what: str, target: float, values: list[float], unit: str = "") -> Reached:
    """Return the largest of some values beside what it may be."""
    return Reached(
        what, f"at most {target:g}{unit}", f"{max(values):.4g}{unit}", max(values) <= target
    )


def drawn(kind: str, count: int) -> Lengths:
    """Return lengths like those of a kind of data, at most a row long."""
    rng = np.random.default_rng(0)
    found = {
        "lognormal": lambda: rng.lognormal(6.0, 1.0, count),
        "uniform": lambda: rng.uniform(1, SIZE + 1, count),
        "texts": lambda: rng.lognormal(5.6, 1.1, count),
        "speech": lambda: rng.normal(1250, 350, count),
        "proteins": lambda: rng.gamma(2.0, 180.0, count),
    }[kind]()
    return np.clip(found, 1, SIZE).astype(np.int64)


KINDS = ("lognormal", "uniform", "texts", "speech", "proteins")


# ---- fill ----------------------------------------------------------------------------------------


def _forebay(lengths: Lengths, window: int | None) -> int:
    import forebay

    return len(forebay.pack_sequences(lengths, lengths, size=SIZE, window=window))


def _in_order(lengths: Lengths) -> int:
    """Fill one row after another, a new one when a sample does not fit."""
    rows, left = 0, 0
    for length in lengths.tolist():
        if length > left:
            rows, left = rows + 1, SIZE
        left -= length
    return rows


def _grain(lengths: Lengths, bins: int) -> int:
    import grain
    from grain.experimental import FirstFitPackIterDataset

    # Without its threads, which take five times as long here: a sample is made in microseconds.
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    samples = grain.MapDataset.source(lengths.tolist()).map(_zeros).to_iter_dataset(reading)
    packed = FirstFitPackIterDataset(samples, length_struct={"tokens": SIZE}, num_packing_bins=bins)
    return sum(1 for _ in packed)


def _zeros(length: int) -> dict[str, Any]:
    return {"tokens": np.zeros(length, np.int32)}


def _titan(lengths: Lengths, buffer: int, most: int) -> int:
    import torch
    from torchtitan.hf_datasets.multimodal.utils.packing import MMSamplePacker

    logging.disable(logging.WARNING)
    packer = MMSamplePacker(SIZE, buffer_size=buffer, batch_size=1)
    names = "input_ids", "labels", "positions"
    for length in lengths.tolist():
        packer.add_sample(dict.fromkeys(names, torch.empty(length, dtype=torch.int8)))
        # It keeps a row that is not full, and looks for a full one again with each sample: when
        # the buffer has this many, all that is there is packed.
        if len(packer._sample_buffer) >= most:
            packer.flush()
    packer.flush()
    return len(packer.packed_samples)


def _trl(lengths: Lengths) -> int:
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    ends = np.concatenate([[0], np.cumsum(lengths)])
    import pyarrow as pa

    tokens = pa.array(np.zeros(int(ends[-1]), np.int32))
    column = pa.LargeListArray.from_arrays(pa.array(ends), tokens)
    samples = Dataset(pa.table({"input_ids": column}))
    return len(pack_dataset(samples, SIZE, "bfd", {"batch_size": len(lengths)}))


PACKERS: dict[str, Callable[[Lengths], int]] = {
    "forebay": partial(_forebay, window=None),
    "forebay, window=65,536": partial(_forebay, window=WINDOW),
    "TRL, best fit": _trl,
    **{f"Grain, first fit, {bins:,} rows": partial(_grain, bins=bins) for bins in GRAIN},
    "torchtitan, 100 samples": partial(_titan, buffer=100, most=200),  # its default
    # More at a time fill better; with each new sample it would look through all of them.
    "torchtitan, 4,096 samples": partial(_titan, buffer=4096 + 1, most=4096),
    "one row after another": _in_order,
}


def fill(quick: bool) -> list[Reached]:
    """Print the share of the rows that is tokens."""
    count = QUICK_WINDOW if quick else WINDOW
    print(f"packed rows of {SIZE:,} tokens, {count:,} samples: tokens in them; and time")
    rows, reached = [], []
    for name, packer in PACKERS.items():
        shares, took = [], 0.0
        for kind in KINDS:
            lengths = drawn(kind, count)
            began = time.perf_counter()
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    made = packer(lengths)
            except ImportError:
                rows.append((name, *["not installed"] * len(KINDS), ""))
                break
            took += time.perf_counter() - began
            shares.append(lengths.sum() / (made * SIZE))
        else:
            rows.append((name, *(f"{share:.4f}" for share in shares), f"{took:.2f} s"))
            if name.startswith("forebay"):
                least = min(shares)
                reached.append(
                    Reached(f"fill, {name}", "at least 0.99", f"{least:.4f}", least >= 0.99)
                )
    show(("", *KINDS, "all five"), rows)
    print(
        "Higher is better; 1 is full. Grain and TRL copy the tokens, too. Grain sees a sample\n"
        "once, in its order, as all that packs while it reads. Peers are the packages' own code:\n"
        "Grain's FirstFitPackIterDataset, TRL's pack_dataset, torchtitan's MMSamplePacker."
    )
    return reached


# ---- many ----------------------------------------------------------------------------------------


def many(quick: bool) -> list[Reached]:
    """Print how long the plan of many samples takes, and its memory."""
    count = QUICK_MANY if quick else MANY
    print(f"{count:,} samples: from their lengths to the first batch and to the end of the plan")
    rows, every = [], []
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.lengths", kind, str(count)]
        found = [
            [float(each) for each in subprocess.check_output(command).split()] for _ in range(3)
        ]
        rows_s, first_s, epoch_s, grown = map(statistics.median, zip(*found, strict=True))
        every.append((first_s, rows_s + epoch_s, grown / count))
        rows.append(
            (
                kind,
                f"{rows_s:.2f} s",
                f"{first_s:.2f} s",
                f"{epoch_s:.2f} s",
                f"{grown / count:.1f} B",
            )
        )
    show(("", "rows counted", "first batch", "order of an epoch", "memory a sample"), rows)
    print("Medians of 3 processes. Memory: what the process grew by at most, without the lengths.")
    first, whole, memory = map(list, zip(*every, strict=True))
    return [
        at_most(f"{count:,} lengths, first batch", 1, first, " s"),
        at_most(f"{count:,} lengths, whole epoch", 10, whole, " s"),
        at_most("memory a sample", 16, memory, " B"),
    ]


def _plan(kind: str, count: str) -> None:
    """Print the seconds to rows, to a batch, and for an epoch's order, and the bytes grown."""
    import forebay
    from forebay.collate import as_list

    lengths = drawn(kind, int(count)).astype(np.int32)
    samples = range(int(count))
    forebay.pack_sequences([1], [1], size=SIZE)  # imports
    with forebay.DataLoader([0, 1], batch_size=1, seed=0) as warm:
        next(iter(warm))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _peak()
    began = time.perf_counter()
    rows = forebay.pack_sequences(_Empty(samples, lengths), lengths, size=SIZE)
    rows_s = time.perf_counter() - began
    with forebay.DataLoader(rows, batch_size=8, shuffle=True, seed=0, collate_fn=as_list) as loader:
        next(iter(loader))
        first_s = time.perf_counter() - began
        grown = _peak() - before
        began = time.perf_counter()
        plan = loader._kind().plan
        assert plan is not None
        for _ in plan.blocks(0):
            pass
        epoch_s = time.perf_counter() - began
    print(rows_s, first_s, epoch_s, grown)


def _peak() -> int:
    """Return the most memory that this process had, in bytes."""
    line = next(
        each for each in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in each
    )
    return int(line.split()[1]) * 1024


class _Empty:
    """Samples of a length, with nothing in memory."""

    def __init__(self, samples: range, lengths: npt.NDArray[np.int32]) -> None:
        self._samples, self._lengths = samples, lengths

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> npt.NDArray[np.int32]:
        return np.zeros(self._lengths[index], np.int32)


# ---- padding -------------------------------------------------------------------------------------


def padding(quick: bool) -> list[Reached]:
    """Print the share of padded batches that is padding."""
    count = QUICK_WINDOW if quick else WINDOW
    print(f"padded batches of up to {MAX_TOKENS:,} tokens, {count:,} samples: padding in them")
    ways = {"forebay": _by_length, "lhotse, 30 buckets": _lhotse, "random batches": _random}
    rows, found = [], {}
    for name, way in ways.items():
        shares = []
        for kind in KINDS:
            lengths = drawn(kind, count)
            try:
                batches = list(way(lengths))
            except ImportError:
                rows.append((name, *["not installed"] * len(KINDS)))
                break
            held = sum(len(batch) * int(batch.max()) for batch in batches)
            shares.append(1 - sum(int(batch.sum()) for batch in batches) / held)
        else:
            rows.append((name, *(f"{share:.4f}" for share in shares)))
            found[name] = shares
    show(("", *KINDS), rows)
    print("Lower is better. lhotse's batches are those of its own DynamicBucketingSampler.")
    return [at_most("padding of batch_by_length", 0.05, found["forebay"])]


def _by_length(lengths: Lengths) -> Iterator[Lengths]:
    import forebay

    groups = forebay.batch_by_length(lengths, lengths, max_tokens=MAX_TOKENS)
    for number in range(len(groups)):
        yield lengths[groups.members(number)]


def _random(lengths: Lengths) -> Iterator[Lengths]:
    """Take samples as they come, until the next one would not fit."""
    begin, longest = 0, 0
    for end, length in enumerate(lengths.tolist()):
        if max(longest, length) * (end + 1 - begin) > MAX_TOKENS:
            yield lengths[begin:end]
            begin, longest = end, 0
        longest = max(longest, length)
    yield lengths[begin:]


def _lhotse(lengths: Lengths) -> Iterator[Lengths]:
    from lhotse.cut import MonoCut
    from lhotse.dataset import DynamicBucketingSampler
    from lhotse.dataset.sampling.base import TokenConstraint  # noqa: F401 - a new enough lhotse

    cuts = [
        MonoCut(str(at), 0.0, float(length), channel=0)
        for at, length in enumerate(lengths.tolist())
    ]
    sampler = DynamicBucketingSampler(
        cuts, max_duration=float(MAX_TOKENS), num_buckets=30, shuffle=True, world_size=1, rank=0
    )
    for batch in sampler:
        yield np.array([int(cut.duration) for cut in batch])


# ---- ranks ---------------------------------------------------------------------------------------


def ranks(quick: bool) -> list[Reached]:
    """Print how equal the costs of ranks are, and what planning takes."""
    import forebay
    from forebay.plan import Plan

    count = QUICK_WINDOW if quick else WINDOW
    print(
        f"{RANKS} ranks, {ROWS_EACH} rows each: the most expensive rank of a step, times the mean"
    )
    rows, most, planning = [], [], []
    for kind in KINDS:
        lengths = drawn(kind, count)
        made = forebay.pack_sequences(lengths, lengths, size=SIZE)
        shares: dict[str, Any] = {}
        for name, costs_of in {"as they come": None, "dealt": made.costs_of}.items():
            loads, us = [], []
            for rank in range(RANKS):
                plan = Plan(
                    length=len(made),
                    batch_size=ROWS_EACH,
                    seed=0,
                    shuffle=True,
                    world_size=RANKS,
                    rank=rank,
                    drop_last=True,
                    by_epoch=True,
                    costs_of=costs_of,
                )
                began = time.thread_time()
                blocks = [block.indices for block in plan.blocks(0)]
                us.append((time.thread_time() - began) / plan.end() * RANKS * 1e6)
                indices = np.concatenate(blocks)
                loads.append(made.costs_of(indices.ravel()).reshape(indices.shape).sum(1))
            whole = np.stack(loads)
            shares[name] = whole.max(0) / whole.mean(0)
        dealt, plain = shares["dealt"], shares["as they come"]
        most.append(float(dealt.max()))
        planning.append(statistics.median(us))
        rows.append(
            (
                kind,
                f"{dealt.mean():.3f}",
                f"{dealt.max():.3f}",
                f"{plain.mean():.3f}",
                f"{plain.max():.3f}",
                f"{planning[-1]:.1f} us",
            )
        )
    show(
        ("", "dealt: mean", "worst step", "as they come: mean", "worst step", "planning a row"),
        rows,
    )
    print(
        "Lower is better; 1 is equal. A row costs the sum of the squares of its lengths.\n"
        "Planning: processor time of the trainer's thread for each row of its rank, to deal\n"
        "all of them; the median of the ranks."
    )
    return [
        at_most(f"costs of {RANKS} ranks, longest to mean", 1.03, most),
        at_most("planning a row", 5, planning, " us"),
    ]


# ---- orders --------------------------------------------------------------------------------------


class _Texts:
    """Random tokens; one of them kills its worker, once, if there is a path to note that."""

    def __init__(self, lengths: Lengths, killed: Path | None = None) -> None:
        self._lengths, self._killed = lengths, killed

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Any:
        import torch

        if self._killed is not None and index == 123 and not self._killed.exists():
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randint(1 << 30, (int(self._lengths[index]),))


def _packed(lengths: Lengths, killed: Path | None = None) -> Any:
    import forebay

    return forebay.pack_sequences(_Texts(lengths, killed), lengths, size=SIZE)


def _mixed(lengths: Lengths) -> Any:
    import forebay

    parts = lengths[: len(lengths) // 3], lengths[len(lengths) // 3 :]
    sources = {name: (_packed(part), 1.0) for name, part in zip("ab", parts, strict=True)}
    return forebay.mix(sources, schedule={0: {"a": 0.8, "b": 0.2}, 5: {"a": 0.3, "b": 0.7}})


def _grouped(lengths: Lengths) -> Any:
    import forebay

    return forebay.batch_by_length(_Texts(lengths), lengths, max_tokens=SIZE)


def _run(rows: Any, world: int, workers: int = 0, state: Any = None, rows_each: int = 0) -> Any:
    """Return the rows of each global batch as one rank after another has them, and the state.

    Args:
        rows_each: Rows over all ranks to stop after; 0 for all of an epoch.
    """
    import forebay
    from forebay.collate import as_list

    is_grouped = hasattr(rows, "is_packed") and not rows.is_packed  # a batch is one of its samples
    size = None if is_grouped else TOGETHER // world
    every, states = [], []
    for rank in range(world):
        with forebay.DataLoader(
            rows,
            batch_size=size,
            shuffle=True,
            seed=0,
            num_workers=workers,
            world_size=world,
            rank=rank,
            collate_fn=as_list,
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            own = []
            for batch in islice(loader, rows_each // (size or 1) // world or None):
                made = [batch] if is_grouped else batch
                pairs = zip(made, loader.mask.tolist(), strict=True)
                own.append([_digest(row) for row, counts in pairs if counts])
            every.append(own)
            states.append(loader.state_dict())
    assert all(each == states[0] for each in states)
    together = TOGETHER // world if is_grouped else 1  # steps to compare with those of other worlds
    steps = [[*chain(*step)] for step in zip_longest(*every, fillvalue=[])]
    begins = range(0, len(steps), together)
    return [sorted(chain(*steps[at : at + together])) for at in begins], states[0]


def _digest(row: Any) -> bytes:
    found = hashlib.sha256()
    for each in row:
        found.update(b"%d:" % len(each) + each.numpy().tobytes())
    return found.digest()


def _hash(batches: list[list[bytes]]) -> str:
    return hashlib.sha256(b"".join(b"|" + b"".join(batch) for batch in batches)).hexdigest()[:12]


def orders(quick: bool) -> list[Reached]:
    """Print whether the global batches depend on ranks, workers, kills and resumes."""
    worlds = QUICK_WORLDS if quick else WORLDS
    workers = QUICK_WORKERS if quick else WORKERS
    lengths = drawn("texts", 1500)
    print(
        f"global batches of {TOGETHER} rows, an epoch, with random tokens: different hashes of all "
        f"of them\n(ranks {', '.join(map(str, worlds))}; workers {', '.join(map(str, workers))})"
    )
    table, different = [], []
    for name, make in {"packed": _packed, "mixed": _mixed, "by length": _grouped}.items():
        rows = make(lengths)
        hashes = {_hash(_run(rows, world, each)[0]) for world in worlds for each in workers}
        found, state = [], None
        for world, count in ((4, 3 * TOGETHER), (2, 2 * TOGETHER), (6, 0)):
            batches, state = _run(rows, world, 1, state, count)
            found += batches
        resumed = hashes | {_hash(found)}
        killed = "-"
        if make is _packed:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "killed")
                after = hashes | {_hash(_run(_packed(lengths, path), 1, 2)[0])}
                assert path.exists(), "no worker was killed"
            killed, resumed = str(len(after)), resumed | after
        different.append(float(len(resumed)))
        runs = str(len(worlds) * len(workers))
        table.append(
            (name, runs, str(len(hashes)), killed, str(len(hashes | {_hash(found)})), min(hashes))
        )
    show(("", "runs", "hashes", "with a killed worker", "4, 2, 6 ranks in an epoch", "hash"), table)
    print("1 is right. Mixed: by a schedule that changes the weights at step 5.")
    return [at_most("different orders of rows", 1, different)]


def lengths(_: Ground, quick: bool) -> None:
    """Print all tables of rows and batches by tokens."""
    reached = []
    for table in (fill, many, padding, orders, ranks):
        reached += table(quick)
        print()
    print("all targets, for the worst of the kinds of lengths")
    show(
        ("", "target", "found", ""),
        [(*each[:3], "reached" if each.is_reached else "MISSED") for each in reached],
    )


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    _plan(*sys.argv[1:])
