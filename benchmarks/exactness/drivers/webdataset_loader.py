"""WebDataset: a pipeline from tars, which are split over ranks and workers; it has no state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import webdataset

from benchmarks.exactness.data import sample
from benchmarks.exactness.histories import SAMPLES
from benchmarks.exactness.record import Task

TITLE = "WebDataset"
NEEDS = ("webdataset", "torch")
DOCS = "https://github.com/webdataset/webdataset#webdataset"
LACKS = {
    "resume": "has no state",
    "mixture": "RandomMix draws without a promise of order",
}
UNCLAIMED = {"random-workers": "seeds depend on the workers"}
SHARDS = 12


class Loader:
    """12 tars, which all numbers of readers divide; shuffled in a buffer of all samples.

    Workers are started for each epoch. With a seed they would begin each with the same generators,
    and so in the same order; without one, they draw new ones.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        tars = f"{task.folder}/{{00..{SHARDS - 1:02}}}.tar"
        shuffles = task.kind != "stream"
        dataset = webdataset.WebDataset(
            tars, nodesplitter=webdataset.split_by_node, shardshuffle=SHARDS if shuffles else False
        )
        if shuffles:
            dataset = dataset.shuffle(SAMPLES)
        dataset = dataset.map(_made).batched(task.batch)
        self.loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=task.workers)
        # Workers end with a batch that is not whole, so that samples are batched again.
        self.loader = self.loader.unbatched().batched(task.batch)

    def batches(self) -> Iterator[Any]:
        for _ in range(self.task.epochs):
            for (rows,) in self.loader:
                yield rows

    def state(self) -> Any:
        raise NotImplementedError

    def load(self, states: list[Any]) -> None:
        raise NotImplementedError


def prepare(folder: Path) -> None:
    """Write the tars."""
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(folder / f"{shard:02}.tar")) as writer:
            for number in range(shard, SAMPLES, SHARDS):
                writer.write({"__key__": f"{number:03}", "txt": str(number)})


def _made(row: dict[str, Any]) -> tuple[torch.Tensor]:
    return (torch.from_numpy(sample(int(row["txt"]))),)
