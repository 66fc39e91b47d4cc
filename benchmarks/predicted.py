"""forebay.predict with a trivial model, compared with iterating the loader that it uses.

Both load the same samples in the same batches, with two workers; predict also calls the model,
writes its parts and commits them. Each run is a separate process, in turns. As a program:
`python -m benchmarks.predicted WAY KIND FOLDER SAMPLES`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

BATCH, WORKERS = 64, 2
ROUNDS = 5
LIMIT_S = 300.0


class Images:
    """Images of 3x224x224 uint8, held in memory."""

    samples, quick = 65_536, 8_192

    def __init__(self, count: int) -> None:
        import torch

        self._count = count
        self._images = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._images[index % 64]


class Features:
    """Vectors of 128 numbers, held in memory: they show the time per sample, not per byte."""

    samples, quick = 524_288, 65_536

    def __init__(self, count: int) -> None:
        import torch

        self._count = count
        self._rows = torch.rand(4096, 128)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._rows[index % 4096]


KINDS = {"images": Images, "features": Features}


def nothing(batch: Any) -> Any:
    """Return one number of each sample, as the model."""
    return batch.flatten(1)[:, 0]


def iterate(dataset: Any, _: Path) -> int:
    """Iterate forebay's DataLoader."""
    import forebay

    loader = forebay.DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)
    return sum(len(nothing(batch)) for batch in loader)


def predict(dataset: Any, output: Path) -> int:
    """Predict."""
    import forebay

    report = forebay.predict(
        nothing, dataset, output, batch_size=BATCH, num_workers=WORKERS, progress=False
    )
    return report.done


WAYS: dict[str, Callable[[Any, Path], int]] = {"iterate": iterate, "predict": predict}


def predicted(ground: Ground, quick: bool) -> None:
    """Print the table."""
    print(f"a model that costs nothing, batch {BATCH}, {WORKERS} workers")
    rows = Rows()
    for kind, dataset in KINDS.items():
        samples = dataset.quick if quick else dataset.samples
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _turn in range(1 if quick else ROUNDS):
            for way, rates in found.items():
                rates.append(_once(way, kind, ground.fresh(), samples))
        base = statistics.median(found["iterate"])
        for way, rates in found.items():
            rate = statistics.median(rates)
            spread = f"{min(rates):,.0f}-{max(rates):,.0f}"
            rows.append(
                (f"{way}, {samples:,} {kind}", f"{rate:,.0f}", f"{rate / base:.2f}", spread)
            )
    show(("", "samples/s", "x iterating", "slowest-fastest"), rows)


def _once(way: str, kind: str, folder: Path, samples: int) -> float:
    with Call("benchmarks.predicted", way, kind, str(folder), str(samples)) as call:
        return float(json.loads(call.answer(LIMIT_S)))


def main(way: str, kind: str, folder: str, samples: str) -> None:
    """Do one run and print its rate; imports and the first start of workers are not in it."""
    dataset, small = KINDS[kind](int(samples)), KINDS[kind](BATCH * 4)
    output = Path(tempfile.mkdtemp(dir=folder))
    WAYS[way](small, output / "small")
    began = time.perf_counter()
    done = WAYS[way](dataset, output / "whole")
    elapsed = time.perf_counter() - began
    if done != len(dataset):
        raise RuntimeError(f"{done} samples instead of {len(dataset)}")
    print()
    print(json.dumps(done / elapsed))


if __name__ == "__main__":
    main(*sys.argv[1:])
