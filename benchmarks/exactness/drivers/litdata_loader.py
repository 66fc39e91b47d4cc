"""LitData's StreamingDataset and StreamingDataLoader, from chunks in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, optimize

from benchmarks.exactness.data import sample
from benchmarks.exactness.epoch_loop import EpochLoop
from benchmarks.exactness.histories import SAMPLES, SECOND_SOURCE
from benchmarks.exactness.record import Task

TITLE = "LitData"
NEEDS = ("litdata", "torch")
DOCS = "https://github.com/Lightning-AI/litData#features"
LACKS = {"stream": "reads its own chunks"}
UNCLAIMED = {
    "random-workers": "seeds depend on the workers",
    "random-resumed": "generators of workers are not in the state",
}


class Made(StreamingDataset):
    """The augmentation is in `__getitem__`, as its documentation shows."""

    def __getitem__(self, index: Any) -> Any:
        return torch.from_numpy(sample(int(super().__getitem__(index)["id"])))


class Loader(EpochLoop):
    """Epochs are the loader's, which counts them: a state after the last batch begins the next."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        options: dict[str, Any] = {"shuffle": True, "seed": task.seed, "drop_last": False}
        folder = Path(task.folder)
        if task.kind == "mixture":
            parts = [Made(str(folder / name), **options) for name in ("first", "second")]
            dataset: Any = CombinedStreamingDataset(
                parts, weights=[0.75, 0.25], seed=task.seed, iterate_over_all=False
            )
        else:
            dataset = Made(str(folder / "first"), **options)
        self.loader = StreamingDataLoader(dataset, batch_size=task.batch, num_workers=task.workers)

    def batches(self) -> Iterator[Any]:
        while self.loader.restore or self.loader.current_epoch < self.task.epochs:
            yield from self.loader


def prepare(folder: Path) -> None:
    """Write chunks of six samples."""
    for name, begin in (("first", 0), ("second", SECOND_SOURCE)):
        inputs = list(range(begin, begin + SAMPLES))
        optimize(_row, inputs, str(folder / name), chunk_size=6, num_workers=1)


def _row(number: int) -> dict[str, int]:
    return {"id": number}
