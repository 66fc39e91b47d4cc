"""MosaicML's StreamingDataset and StreamingDataLoader, from MDS shards in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.bucket import mosaic as importable
from benchmarks.exactness.data import sample
from benchmarks.exactness.histories import SAMPLES, SECOND_SOURCE
from benchmarks.exactness.record import Task

importable.prepare()
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset  # noqa: E402

TITLE = "Mosaic Streaming"
NEEDS = ("mosaicml-streaming", "torch")
DOCS = "https://docs.mosaicml.com/projects/streaming/en/stable/dataset_configuration/shuffling.html"
LACKS = {"stream": "reads its own shards"}
UNCLAIMED = {
    "random-workers": "seeds depend on the workers",
    "random-resumed": "generators of workers are not in the state",
}


class Made(StreamingDataset):
    """The augmentation is in `__getitem__`, as its documentation shows."""

    def __getitem__(self, index: Any) -> Any:
        return torch.from_numpy(sample(int(super().__getitem__(index)["id"])))


class Loader:
    """`num_canonical_nodes` is fixed, which elastic determinism needs."""

    def __init__(self, task: Task) -> None:
        self.task, self.epoch = task, 0
        options: dict[str, Any] = {
            "shuffle": True, "shuffle_seed": task.seed, "batch_size": task.batch,
            "num_canonical_nodes": 1,
        }  # fmt: skip
        folder = Path(task.folder)
        if task.kind == "mixture":
            parts = [
                Stream(local=str(folder / name), proportion=share)
                for name, share in (("first", 0.75), ("second", 0.25))
            ]
            dataset = Made(streams=parts, **options)
        else:
            dataset = Made(local=str(folder / "first"), **options)
        self.loader = StreamingDataLoader(dataset, batch_size=task.batch, num_workers=task.workers)

    def batches(self) -> Iterator[Any]:
        for epoch in range(self.epoch, self.task.epochs):
            self.epoch = epoch
            yield from self.loader

    def state(self) -> Any:
        return {"epoch": self.epoch, "loader": self.loader.state_dict()}

    def load(self, states: list[Any]) -> None:
        self.epoch = states[0]["epoch"]
        self.loader.load_state_dict(states[0]["loader"])


def prepare(folder: Path) -> None:
    """Write shards of a few samples."""
    for name, begin in (("first", 0), ("second", SECOND_SOURCE)):
        with MDSWriter(out=str(folder / name), columns={"id": "int"}, size_limit=200) as writer:
            for number in range(begin, begin + SAMPLES):
                writer.write({"id": number})
