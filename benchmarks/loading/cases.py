"""The tables of rates: what is loaded, and the unit of the rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """One table of rates.

    Attributes:
        title: The line above the table.
        dataset: The function of `datasets` that makes it.
        arguments: Arguments of every loader, besides the number of workers.
        unit: What a rate counts.
        per_batch: How many units a batch has.
        collate: The function of `datasets` that is `collate_fn`, if there is one.
        seconds: How long one run is measured.
        random: Whether the numbers in a batch differ from run to run.
        of_cores: Whether the work itself takes the time, so that the use of the cores is shown.
    """

    title: str
    dataset: str
    arguments: Mapping[str, Any]
    unit: str
    per_batch: float
    collate: str | None = None
    seconds: float = 1.2
    random: bool = False
    of_cores: bool = False


CASES = {
    "big": Case(
        "38 MB float32 batches: 64 of 3x224x224, made beforehand",
        "image",
        {"batch_size": 64},
        "GB/s",
        64 * 3 * 224 * 224 * 4 / 1e9,
    ),
    "single": Case("batch_size=1, two small tensors", "pair", {"batch_size": 1}, "batches/s", 1),
    "fields": Case(
        "a dict of 50 small tensors a sample, batch 32",
        "fields",
        {"batch_size": 32},
        "batches/s",
        1,
    ),
    "numpy": Case(
        "19 MB NumPy batches from a collate_fn: 32 of 3x224x224, made beforehand",
        "array",
        {"batch_size": 32},
        "GB/s",
        32 * 3 * 224 * 224 * 4 / 1e9,
        collate="stack",
    ),
    "tiny": Case(
        "tuples of five Python numbers, batch 1024",
        "tiny",
        {"batch_size": 1024},
        "k samples/s",
        1.024,
    ),
    "tensors": Case(
        "TensorDataset of 1,024,000 rows, shuffled, batch 1024, persistent_workers",
        "tensors",
        {"batch_size": 1024, "shuffle": True, "persistent_workers": True},
        "k samples/s",
        1.024,
        random=True,
    ),
    "jpeg": Case(
        "JPEGs of 500x400: decode, short side 256-480, crop 224, three colour changes; batch 50",
        "jpegs",
        {"batch_size": 50},
        "images/s",
        50,
        seconds=4.0,
        random=True,
        of_cores=True,
    ),
}
