"""Compare the DataLoader with other loaders; each table is selected by its name."""

from __future__ import annotations

from functools import partial

from benchmarks.loading.cases import CASES
from benchmarks.loading.memory import memory
from benchmarks.loading.rates import rates
from benchmarks.loading.starts import starts
from benchmarks.loading.waits import waits

TABLES = {f"loading-{name}": partial(rates, name) for name in CASES} | {
    "loading-start": starts,
    "loading-memory": memory,
    "loading-wait": waits,
}
