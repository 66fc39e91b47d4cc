"""MosaicML's StreamingDataset and StreamingDataLoader, from MDS shards in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.bucket import mosaic as importable
from benchmarks.exactness.data import sample
from benchmarks.exactness.epoch_loop import EpochLoop
from benchmarks.exactness.histories import SAMPLES, SECOND_SOURCE
from benchmarks.exactness.record import Task

TITLE = "Mosaic Streaming"
NEEDS = ("mosaicml-streaming", "torch")
DOCS = "https://docs.mosaicml.com/projects/streaming/en/stable/dataset_configuration/shuffling.html"
LACKS = {"stream": "reads its own shards"}
UNCLAIMED = {
    "random-workers": "seeds depend on the workers",
    "random-resumed": "generators of workers are not in the state",
}


def _streaming() -> Any:
    """Import it, only in the processes that use it: it needs a stand-in for torchvision."""
    importable.prepare()
    import streaming

    return streaming


def _made(*given: Any, **options: Any) -> Any:
    """Return a dataset with its augmentation in `__getitem__`, as its documentation shows."""

    class Made(_streaming().StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return torch.from_numpy(sample(int(super().__getitem__(index)["id"])))

    return Made(*given, **options)


class Loader(EpochLoop):
    """`num_canonical_nodes` is fixed, which elastic determinism needs."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        streaming = _streaming()
        options: dict[str, Any] = {
            "shuffle": True, "shuffle_seed": task.seed, "batch_size": task.batch,
            "num_canonical_nodes": 1,
        }  # fmt: skip
        folder = Path(task.folder)
        if task.kind == "mixture":
            parts = [
                streaming.Stream(local=str(folder / name), proportion=share)
                for name, share in (("first", 0.75), ("second", 0.25))
            ]
            dataset = _made(streams=parts, **options)
        else:
            dataset = _made(local=str(folder / "first"), **options)
        self.loader = streaming.StreamingDataLoader(
            dataset, batch_size=task.batch, num_workers=task.workers
        )


def prepare(folder: Path) -> None:
    """Write shards of a few samples."""
    writer_of = _streaming().MDSWriter
    for name, begin in (("first", 0), ("second", SECOND_SOURCE)):
        with writer_of(out=str(folder / name), columns={"id": "int"}, size_limit=200) as writer:
            for number in range(begin, begin + SAMPLES):
                writer.write({"id": number})
