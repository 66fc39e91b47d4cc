"""Real jobs with the libraries people use and their defaults: `preprocess` beside its peers.

As a program it is one run: `python -m benchmarks.jobs PEER JOB COUNT FOLDER OUTPUT`, which prints
the seconds of a whole call. Nothing about threads is set, except for the two bare processes, which
are the limit: each makes half of the inputs, with one thread a library and a kept heap.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

WORKERS = 2
ROUNDS, QUICK_ROUNDS = 3, 1
QUICK_SHARE = 5  # of the inputs, one in so many
LIMIT_S = 180.0
PEERS = ("bare", "forebay", "memory", "pool", "executor", "joblib", "datasets", "ray")
# forebay itself and the limit are no peers.
OURS = ("bare", "forebay", "memory")
# A folder in memory, where nothing is flushed to a disk.
MEMORY = Path("/dev/shm")
NAMES = {
    "bare": "two bare processes",
    "forebay": "forebay.preprocess",
    "memory": "output in memory",
    "pool": "Pool",
    "executor": "ProcessPoolExecutor",
    "joblib": "joblib",
    "datasets": "datasets.map",
    "ray": "Ray tasks",
}
# How many inputs of each job; they take five to ten seconds on two cores.
COUNTS = {
    "numpy audio features": 1_500,
    "torch.stft": 1_500,
    "soundfile splitting": 4_000,
    "Arrow group_by": 2_500,
    "polars group_by": 2_500,
    "pandas groupby": 1_000,
    "Pillow resize": 1_000,
    "OpenCV resize and warp": 1_500,
    "regular expressions": 1_000,
    "zlib": 1_000,
}
# The variables for the threads of libraries; the bare processes have one thread each.
THREADS = (
    *(f"{each}_NUM_THREADS" for each in ("OMP", "OPENBLAS", "MKL", "RAYON")),
    *("POLARS_MAX_THREADS", "OPENCV_FOR_THREADS_NUM"),
)


# ---- the jobs: a path to a number --------------------------------------------------------------


def numpy_features(path: Path) -> float:
    """Return a number from the spectrum of a second of audio: rfft, matmul, eigh."""
    import numpy as np

    audio = np.load(path)
    frames = np.lib.stride_tricks.sliding_window_view(audio, 512)[::64]
    power = np.abs(np.fft.rfft(frames * np.hanning(512))) ** 2
    covariance = power.T @ power / len(power)
    return float(np.linalg.eigvalsh(covariance)[-1])


def torch_stft(path: Path) -> float:
    """Return a number from a short-time Fourier transform and a matrix product."""
    import numpy as np
    import torch

    audio = torch.from_numpy(np.load(path)).float()
    power = torch.stft(audio, 512, 64, window=torch.hann_window(512), return_complex=True).abs()
    return float((power @ power.T).sum())


def soundfile_splitting(path: Path) -> float:
    """Return the loudness of the pieces of a recording."""
    import numpy as np
    import soundfile

    with soundfile.SoundFile(path) as file:
        return float(sum(np.abs(block).max() for block in file.blocks(16_000)))


def arrow_group_by(path: Path) -> float:
    """Return the sum of the largest values of groups."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.feather

    table = pa.feather.read_table(path)
    return float(pc.sum(table.group_by("key").aggregate([("value", "max")])["value_max"]).as_py())


def polars_group_by(path: Path) -> float:
    """Return the sum of the largest values of groups."""
    import polars as pl

    table = pl.read_ipc(path)
    return float(table.group_by("key").agg(pl.col("value").max())["value"].sum())


def pandas_groupby(path: Path) -> float:
    """Return the sum of the largest values of groups."""
    import pandas as pd

    return float(pd.read_feather(path).groupby("key")["value"].max().sum())


def pillow_resize(path: Path) -> float:
    """Return a pixel of a decoded and smaller image."""
    from PIL import Image

    with Image.open(path) as image:
        return float(image.convert("RGB").resize((224, 224)).getpixel((3, 3))[0])


def opencv_warp(path: Path) -> float:
    """Return a pixel of a decoded, smaller and turned image."""
    import cv2

    image = cv2.resize(cv2.imread(str(path)), (512, 512), interpolation=cv2.INTER_AREA)
    turn = cv2.getRotationMatrix2D((256, 256), 30, 1.2)
    return float(cv2.GaussianBlur(cv2.warpAffine(image, turn, (512, 512)), (9, 9), 2)[3, 3, 0])


def regular_expressions(path: Path) -> float:
    """Return the number of words and dates of a text."""
    text = path.read_text()
    words = re.findall(r"[A-Za-z']+", text)
    return float(len(words) + len(re.findall(r"\d{4}-\d{2}-\d{2}", re.sub(r"\s+", " ", text))))


def zlib_compress(path: Path) -> float:
    """Return the size of a compressed text."""
    return float(len(zlib.compress(path.read_bytes(), 6)))


JOBS: dict[str, tuple[Callable[[Path], float], str]] = {
    "numpy audio features": (numpy_features, "audio.npy"),
    "torch.stft": (torch_stft, "audio.npy"),
    "soundfile splitting": (soundfile_splitting, "audio.flac"),
    "Arrow group_by": (arrow_group_by, "table.arrow"),
    "polars group_by": (polars_group_by, "table.arrow"),
    "pandas groupby": (pandas_groupby, "table.arrow"),
    "Pillow resize": (pillow_resize, "image.jpg"),
    "OpenCV resize and warp": (opencv_warp, "image.jpg"),
    "regular expressions": (regular_expressions, "text.txt"),
    "zlib": (zlib_compress, "text.txt"),
}


# ---- the inputs --------------------------------------------------------------------------------


def _write(folder: Path) -> None:
    """Write one input of each kind; links to it are the inputs."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.feather
    import soundfile
    from PIL import Image

    rng = np.random.default_rng(0)
    folder.mkdir()
    audio = np.cumsum(rng.standard_normal(48_000)).astype(np.float64) / 500
    np.save(folder / "audio.npy", audio[:16_000])
    soundfile.write(folder / "audio.flac", np.clip(np.tile(audio, 4) / 4, -1, 1), 16_000)
    keys, values = rng.integers(0, 1000, 300_000), rng.random(300_000)
    table = pa.table({"key": keys, "value": values})
    pyarrow.feather.write_feather(table, folder / "table.arrow", compression="uncompressed")
    small = Image.fromarray(rng.integers(0, 255, (40, 50, 3), np.uint8))
    small.resize((1000, 800)).save(folder / "image.jpg", quality=90)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 10)))) for _ in range(2000)]
    drawn = rng.integers(0, 2000, 60_000)
    (folder / "text.txt").write_text(" ".join(words[at] for at in drawn) + " 2026-11-23\n")


# ---- the peers ---------------------------------------------------------------------------------


def _row(source: Path, _: Any = None, *, job: str) -> dict[str, float]:
    return {"value": JOBS[job][0](Path(source))}


def _call(peer: str, job: str, paths: list[Path], output: Path) -> list[float]:
    """Return the numbers of all inputs, by one call of a peer."""
    import functools

    row: Any = functools.partial(_row, job=job)
    if peer in ("forebay", "memory"):
        import forebay

        report = forebay.preprocess(row, paths, output, num_workers=WORKERS, progress=False)
        return [float(each) for each in report.metadata["value"].to_pylist()]
    if peer == "pool":
        from multiprocessing import Pool

        with Pool(WORKERS) as pool:
            return [each["value"] for each in pool.map(row, paths)]
    if peer == "executor":
        from concurrent.futures import ProcessPoolExecutor

        with ProcessPoolExecutor(WORKERS) as executor:
            return [each["value"] for each in executor.map(row, paths)]
    if peer == "joblib":
        from joblib import Parallel, delayed

        return [each["value"] for each in Parallel(WORKERS)(delayed(row)(path) for path in paths)]
    if peer == "datasets":
        import datasets

        datasets.disable_progress_bars()
        table = datasets.Dataset.from_dict({"path": [str(path) for path in paths]})
        found = table.map(lambda each: row(each["path"]), num_proc=WORKERS)
        return [float(each) for each in found["value"]]
    if peer == "ray":
        import logging

        import ray

        ray.init(
            num_cpus=WORKERS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        task = ray.remote(lambda path: row(path)["value"])
        found = ray.get([task.remote(path) for path in paths])
        ray.shutdown()
        return [float(each) for each in found]
    return _bare(row, paths)


def _bare(row: Callable[[Path], dict[str, float]], paths: list[Path]) -> list[float]:
    """Make half of the inputs in each of two processes."""
    from multiprocessing import Pipe, get_context

    from forebay.base.libraries import keep_freed

    def half(first: int, pipe: Any) -> None:
        keep_freed()
        pipe.send([row(path)["value"] for path in paths[first::2]])

    found: list[float] = [0.0] * len(paths)
    running = []
    for first in range(2):
        here, there = Pipe(duplex=False)
        process = get_context("fork").Process(target=half, args=(first, there))
        process.start()
        running.append((first, here, process))
    for first, here, process in running:
        found[first::2] = here.recv()
        process.join()
    return found


# ---- the table ---------------------------------------------------------------------------------


def jobs(ground: Ground, quick: bool) -> None:
    """Print inputs per second of each job and peer."""
    folder = ground.root / "inputs"
    _write(folder)
    rows = Rows()
    for job, inputs in COUNTS.items():
        count = inputs // QUICK_SHARE if quick else inputs
        runs: dict[str, list[float]] = {peer: [] for peer in PEERS}
        for turn in range(QUICK_ROUNDS if quick else ROUNDS):
            for peer in PEERS if MEMORY.is_dir() else filter("memory".__ne__, PEERS):
                output = ground.root / f"{job}-{peer}-{turn}"
                seconds = _run(peer, job, count, folder, output)
                if seconds is not None:
                    runs[peer].append(count / seconds)
                elif peer == PEERS[0]:  # which needs nothing but the job's library
                    break
        rates = {peer: statistics.median(found) for peer, found in runs.items() if found}
        rows.append(_cells(job, count, rates) if rates else (job, "not installed"))
    columns = "x best peer", "of the bare", "a flush costs", "x without it"
    show(("inputs/s", *(NAMES[peer] for peer in PEERS), *columns), rows)
    print(
        "Whole calls with two workers, the imports of libraries by these included; medians, and\n"
        "more is better. Each library with its defaults: no variable for threads is set. bare:\n"
        "half of the inputs in each of two processes, with one thread a library and a kept heap.\n"
        "forebay also keeps a ledger and writes the table. -: not installed, or it failed.\n"
        "output in memory: the same call of forebay where a flush costs nothing. What it takes\n"
        "less is the price of the flushes of ledger and table; last, its ratio to the best peer."
    )


def _cells(job: str, count: int, rates: dict[str, float]) -> tuple[str, ...]:
    """Return the row of a job.

    Args:
        rates: Inputs per second of each peer that has any.
    """
    best, ours = max(rates[each] for each in rates.keys() - {*OURS}), rates["forebay"]
    flush = ("-", "-")
    if "memory" in rates:
        price_s = max(count / ours - count / rates["memory"], 0.0)
        flush = f"{price_s * 1e3:.0f} ms", f"{rates['memory'] / best:.2f}"
    return (
        job,
        *(f"{rates[peer]:.0f}" if peer in rates else "-" for peer in PEERS),
        f"{ours / best:.2f}",
        f"{ours / rates['bare']:.2f}",
        *flush,
    )


def _run(peer: str, job: str, count: int, folder: Path, output: Path) -> float | None:
    """Return the seconds of a call; None if the peer's library, or the job's, is missing."""
    settings = dict.fromkeys(THREADS, "1") if peer == "bare" else {}
    with Call(
        "benchmarks.jobs", peer, job, str(count), str(folder), str(output), **settings
    ) as call:
        try:
            return float(json.loads(call.answer(LIMIT_S))["seconds"])
        except RuntimeError as error:
            if peer in ("forebay", "memory"):
                raise
            print(f"{NAMES[peer]}, {job}: {str(error).splitlines()[-1][:100]}", file=sys.stderr)
            return None


def main(peer: str, job: str, count: str, folder: str, output: str) -> None:
    """Make one call and print its seconds, as JSON."""
    for name in os.environ.keys() & set(THREADS):
        if peer != "bare":
            del os.environ[name]
    function, name = JOBS[job]
    # The inputs are links to one file, which can have 65,000: one set for all peers and turns.
    links = Path(folder) / job
    paths = [links / f"{at:05}-{name}" for at in range(int(count))]
    if not links.exists():
        links.mkdir()
        for path in paths:
            os.link(Path(folder) / name, path)
    with tempfile.TemporaryDirectory(dir=MEMORY if peer == "memory" else None) as folder:
        target = Path(folder, "output") if peer == "memory" else Path(output)
        began = time.perf_counter()
        found = _call(peer, job, paths, target)
        seconds = time.perf_counter() - began
    expected = function(paths[0])
    is_near = [abs(each - expected) <= 1e-6 * abs(expected) for each in found]
    if len(found) != len(paths) or not all(is_near):
        raise RuntimeError(f"{peer} returned {found[:3]}, not {expected}")
    print()
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
