"""Grain's Dataset API: shuffled, repeated, batched, in processes by `mp_prefetch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain

from benchmarks.exactness.data import Samples, second_source
from benchmarks.exactness.record import Task

TITLE = "Grain"
NEEDS = ("grain",)
DOCS = "https://google-grain.readthedocs.io/en/latest/tutorials/dataset_advanced_tutorial.html"
_STATE = "a state is of one number of workers"
_RANKS = "a state is of its process; ElasticIterDatasetIterator is experimental"
LACKS = {"stream": "sources have random access"}
UNCLAIMED = {
    "workers-3": _STATE,
    "workers-0": _STATE,
    "ranks-1-2": _RANKS,
    "ranks-2-3": _RANKS,
    "ranks-3-1": _RANKS,
    "random-workers": "only `random_map` gets a generator of the sample's own",
    "random-resumed": "only `random_map` gets a generator of the sample's own",
}


class Loader:
    """One iterator for all epochs; each is shuffled anew."""

    def __init__(self, task: Task) -> None:
        self.task = task
        if task.kind == "mixture":
            parts = [self._shuffled(Samples()), self._shuffled(second_source())]
            dataset = grain.MapDataset.mix(parts, weights=[0.75, 0.25])
        else:
            dataset = self._shuffled(Samples())
        dataset = dataset[task.rank :: task.ranks]
        batches = dataset.to_iter_dataset().batch(task.batch)
        if task.workers:
            options = grain.multiprocessing.MultiprocessingOptions(num_workers=task.workers)
            batches = batches.mp_prefetch(options)
        self.iterator = iter(batches)

    def _shuffled(self, source: Any) -> Any:
        return grain.MapDataset.source(source).shuffle(seed=self.task.seed).repeat(self.task.epochs)

    def batches(self) -> Iterator[Any]:
        yield from self.iterator

    def state(self) -> Any:
        return self.iterator.get_state()

    def load(self, states: list[Any]) -> None:
        self.iterator.set_state(states[self.task.rank % len(states)])
