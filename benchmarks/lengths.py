"""Rows and batches by tokens: how full, how fast, and how equal the ranks' costs are."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
LARGER = ((8, 1), (8, 2), (8, 4), (8, 16), (64, 4), (64, 8), (512, 4))
# Rows that Grain fills at a time, and samples that torchtitan chooses from: few, as examples have
# it, and many, which fill better and make a checkpoint larger.
GRAIN, TITAN = (64, 1024), (100, 2048)
WORLDS, WORKERS = (1, 2, 3, 4, 6, 8, 12), (0, 1, 2, 5)


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

    samples = grain.MapDataset.source(lengths.tolist()).map(_zeros).to_iter_dataset()
    packed = FirstFitPackIterDataset(samples, length_struct={"tokens": SIZE}, num_packing_bins=bins)
    return sum(1 for _ in packed)


def _zeros(length: int) -> dict[str, Any]:
    return {"tokens": np.zeros(length, np.int32)}


def _titan(lengths: Lengths, buffer: int) -> int:
    import torch
    from torchtitan.hf_datasets.multimodal.utils.packing import MMSamplePacker

    logging.disable(logging.WARNING)
    packer = MMSamplePacker(SIZE, buffer_size=buffer, batch_size=1)
    names = "input_ids", "labels", "positions"
    for length in lengths.tolist():
        packer.add_sample(dict.fromkeys(names, torch.empty(length, dtype=torch.int8)))
        # It keeps a row that is not full, and looks for a full one again with each sample: when
        # the buffer has twice its size, all that is there is packed.
        if len(packer._sample_buffer) >= 2 * buffer:
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
    **{f"torchtitan, {size:,} samples": partial(_titan, buffer=size) for size in TITAN},
    "one row after another": _in_order,
}


def fill(quick: bool) -> None:
    """Print the share of the rows that is tokens."""
    count = QUICK_WINDOW if quick else WINDOW
    print(f"packed rows of {SIZE:,} tokens, {count:,} samples: tokens in them; and time")
    rows = []
    for name, packer in PACKERS.items():
        cells, took = [], 0.0
        for kind in KINDS:
            lengths = drawn(kind, count)
            began = time.perf_counter()
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    made = packer(lengths)
            except ImportError:
                break
            took += time.perf_counter() - began
            cells.append(f"{lengths.sum() / (made * SIZE):.4f}")
        else:
            rows.append((name, *cells, f"{took:.2f} s"))
    show(("", *KINDS, "all five"), rows)
    print(
        "Higher is better; 1 is full. Grain and TRL copy the tokens, too. Grain sees a sample\n"
        "once, in its order, as all that packs while it reads."
    )


# ---- many ----------------------------------------------------------------------------------------


def many(quick: bool) -> None:
    """Print how long the plan of many samples takes, and its memory."""
    count = QUICK_MANY if quick else MANY
    print(f"{count:,} samples: from their lengths to the first batch and to the end of the plan")
    rows = []
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.lengths", kind, str(count)]
        found = [
            [float(each) for each in subprocess.check_output(command).split()] for _ in range(3)
        ]
        rows_s, first_s, epoch_s, grown = map(statistics.median, zip(*found, strict=True))
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


def _plan(kind: str, count: str) -> None:
    """Print the seconds to rows, to a batch, and for an epoch's order, and the bytes grown."""
    import forebay
    from forebay.collate import as_list
    from forebay.loading.settings import Settings

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
        plan = Settings(loader).plan
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


def padding(quick: bool) -> None:
    """Print the share of padded batches that is padding."""
    count = QUICK_WINDOW if quick else WINDOW
    print(f"padded batches of up to {MAX_TOKENS:,} tokens, {count:,} samples: padding in them")
    ways = {"forebay": _by_length, "lhotse, 30 buckets": _lhotse, "random batches": _random}
    rows = []
    for name, way in ways.items():
        cells = []
        for kind in KINDS:
            lengths = drawn(kind, count)
            try:
                batches = list(way(lengths))
            except ImportError:
                break
            held = sum(len(batch) * int(batch.max()) for batch in batches)
            cells.append(f"{1 - sum(int(batch.sum()) for batch in batches) / held:.4f}")
        else:
            rows.append((name, *cells))
    show(("", *KINDS), rows)
    print("Lower is better.")


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


def ranks(quick: bool) -> None:
    """Print how equal the costs of ranks are, and what planning takes."""
    import forebay
    from forebay.plan import Plan

    count = QUICK_WINDOW if quick else WINDOW
    print(
        f"{RANKS} ranks, {ROWS_EACH} rows each: the most expensive rank of a step, times the mean"
    )
    rows = []
    for kind in KINDS:
        lengths = drawn(kind, count)
        made = forebay.pack_sequences(lengths, lengths, size=SIZE)
        shares, us = {}, 0.0
        for name, costs_of in {"dealt": made.costs_of, "as they come": None}.items():
            loads = []
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
                began = time.perf_counter()
                blocks = [block.indices for block in plan.blocks(0)]
                us = max(us, (time.perf_counter() - began) / plan.end() * RANKS * 1e6)
                indices = np.concatenate(blocks)
                loads.append(made.costs_of(indices.ravel()).reshape(indices.shape).sum(1))
            whole = np.stack(loads)
            shares[name] = whole.max(0) / whole.mean(0)
        dealt, plain = shares["dealt"], shares["as they come"]
        rows.append(
            (
                kind,
                f"{dealt.mean():.3f}",
                f"{dealt.max():.3f}",
                f"{plain.mean():.3f}",
                f"{plain.max():.3f}",
                f"{us:.1f} us",
            )
        )
    show(
        ("", "dealt: mean", "worst step", "as they come: mean", "worst step", "planning a row"),
        rows,
    )
    print(
        "Lower is better; 1 is equal. A row costs the sum of the squares of its lengths.\n"
        "Planning: in the trainer's thread, for each row of a rank."
    )


def lengths(_: Ground, quick: bool) -> None:
    """Print all tables of rows and batches by tokens."""
    for number, table in enumerate((fill, many, padding, ranks)):
        if number:
            print()
        table(quick)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    _plan(*sys.argv[1:])
