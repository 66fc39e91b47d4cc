"""A million rows of numeric columns, shuffled: batches by column, beside NumPy and other loaders.

As a program it is one process, which runs all ways in turns (A B C A B C) over the same columns:
`python -m benchmarks.columns FOLDER ROWS TURNS`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import show

ROWS, QUICK_ROWS = 1_000_000, 200_000
TURNS, QUICK_TURNS = 5, 1
COLUMNS, BATCH = 20, 4096
# Slow ways are stopped after so many seconds, at the end of a batch.
LONGEST_S = 2.0
LIMIT_S = 900.0
BARE = "NumPy, permutation and a take of each column"
ROW_BY_ROW = "from_table(polars), row by row"
HUGGING_FACE = "Hugging Face dataset, torch format"
TABLES = "from_table(polars, columns=)", "from_table(Parquet, columns=)"
# The least that is asked for. Ratios are within a run, so other programs slow both sides down.
ROWS_PER_S, OF_NUMPY, OF_NO_WORKERS, OF_TORCH = 1e6, 0.5, 0.95, 20.0
Ways = dict[str, Callable[[], Iterable[Any]]]


def loading_columns(ground: Ground, quick: bool) -> None:
    """Print the table."""
    rows, turns = (QUICK_ROWS, QUICK_TURNS) if quick else (ROWS, TURNS)
    arguments = str(ground.fresh()), str(rows), str(turns)
    with Call("benchmarks.columns", *arguments) as call:
        found: dict[str, list[float]] = json.loads(call.answer(LIMIT_S))
    print(f"{rows:,} rows of {COLUMNS} numeric columns, shuffled, batches of {BATCH:,}; rows/s")
    table = []
    for way, rates in found.items():
        compared = found[BARE], found[_base(way, found)]
        ratios = [statistics.median(_ratios(rates, others)) for others in compared]
        spread = f"{min(rates):,.0f}-{max(rates):,.0f}"
        cells = f"{statistics.median(rates):,.0f}", *(f"{each:.2f}" for each in ratios), spread
        table.append((way, *cells))
    show(("", "rows/s", "x NumPy", "x torch, or 0 workers", "slowest-fastest"), table)
    print(
        f"Medians of {turns} turns, and of the ratios within each. Half of the columns are\n"
        "float32, the others float64 and int64. 2 workers: num_workers=2 and buffer='100MB', from\n"
        "the start of the loader, with nothing made before."
    )
    print()
    show(("", "at least", "found", ""), list(_reached(found)))


def _reached(found: dict[str, list[float]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of the table of targets, of medians."""

    def row(what: str, least: float, number: float) -> tuple[str, str, str, str]:
        return what, f"{least:,g}", f"{number:,.4g}", "reached" if number >= least else "missed"

    def ratio(way: str, other: str) -> float:
        return statistics.median(_ratios(found[way], found[other]))

    for name in TABLES:
        alone, workers = f"{name}: 0 workers", f"{name}: 2 workers"
        yield row(f"{alone}, rows/s", ROWS_PER_S, statistics.median(found[alone]))
        yield row(f"{alone}, x NumPy", OF_NUMPY, ratio(alone, BARE))
        yield row(f"{workers}, x 0 workers", OF_NO_WORKERS, ratio(workers, alone))
    alone, torch = f"{HUGGING_FACE}: 0 workers", f"{HUGGING_FACE}: torch"
    if alone in found:
        yield row(f"{alone}, x torch", OF_TORCH, ratio(alone, torch))


def _base(way: str, ways: Iterable[str]) -> str:
    """Return the way to compare with: the same dataset with torch, or else without workers."""
    kind, _, how = way.partition(": ")
    others = (f"{kind}: torch", f"{kind}: 0 workers") if how else ()
    return next((other for other in others if other in ways), way)


def _ratios(rates: list[float], others: list[float]) -> list[float]:
    return [rate / other for rate, other in zip(rates, others, strict=True)]


# ---- the process -------------------------------------------------------------------------------


def _ways(folder: Path, rows: int) -> Ways:
    """Return how to make the loaders, by name."""
    import numpy as np
    import polars
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import forebay

    generator = np.random.default_rng(0)
    kinds = ["float32"] * (COLUMNS // 2) + ["float64", "int64"] * (COLUMNS // 4)
    arrays = {
        f"c{at}": (generator.random(rows) * 1e6).astype(kind) for at, kind in enumerate(kinds)
    }
    frame = polars.DataFrame(arrays)
    frame.write_parquet(folder / "table.parquet")
    frame.write_ipc(folder / "table.arrow", compression="uncompressed", compat_level=None)
    tensors = TensorDataset(*map(torch.from_numpy, arrays.values()))
    datasets: dict[str, Any] = {
        "TensorDataset": tensors,
        "from_table(polars, columns=)": forebay.from_table(frame, columns=arrays),
        "from_table(pandas, columns=)": forebay.from_table(frame.to_pandas(), columns=arrays),
        "from_table(Parquet, columns=)": forebay.from_table(
            folder / "table.parquet", columns=arrays
        ),
        "from_table(mapped Arrow, columns=)": forebay.from_table(
            folder / "table.arrow", columns=arrays
        ),
    }
    try:
        datasets[HUGGING_FACE] = _hugging_face(arrays, folder)
    except ModuleNotFoundError:
        print("datasets is not installed", file=sys.stderr)

    def bare() -> Iterator[Any]:
        order = np.random.permutation(rows)
        for start in range(0, rows, BATCH):
            chosen = order[start : start + BATCH]
            yield {name: array.take(chosen) for name, array in arrays.items()}

    ways: Ways = {BARE: bare}
    settings = {"batch_size": BATCH, "shuffle": True}
    for name, dataset in datasets.items():
        if name in ("TensorDataset", HUGGING_FACE):
            ways[f"{name}: torch"] = lambda dataset=dataset: DataLoader(dataset, **settings)
        ways[f"{name}: 0 workers"] = lambda dataset=dataset: forebay.DataLoader(dataset, **settings)
        ways[f"{name}: 2 workers"] = lambda dataset=dataset: forebay.DataLoader(
            dataset, **settings, num_workers=2, buffer="100MB"
        )
    by_row = forebay.from_table(frame)
    ways[ROW_BY_ROW] = lambda: forebay.DataLoader(by_row, **settings)
    return ways


def _hugging_face(arrays: dict[str, Any], folder: Path) -> Any:
    """Return a dataset as the library has it: mapped from a file, in chunks of 1,000 rows."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(arrays).save_to_disk(folder / "hugging-face")
    return datasets.load_from_disk(folder / "hugging-face").with_format("torch")


def _rate(make: Callable[[], Iterable[Any]], rows: int) -> float:
    """Return rows per second of one epoch, or of its first seconds."""
    loader, seen, began = make(), 0, time.perf_counter()
    for batch in loader:
        seen += len(batch[0] if isinstance(batch, list) else next(iter(batch.values())))
        if time.perf_counter() - began > LONGEST_S:
            break
    elapsed = time.perf_counter() - began
    if hasattr(loader, "close"):
        loader.close()
    if seen != rows and elapsed < LONGEST_S:
        raise RuntimeError(f"{seen:,} rows instead of {rows:,}")
    return seen / elapsed


def main(folder: str, rows: str, turns: str) -> None:
    """Measure all ways in turns and print their rates, as JSON."""
    ways = _ways(Path(folder), int(rows))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(int(turns)):
        for name, make in ways.items():
            found[name].append(_rate(make, int(rows)))
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
