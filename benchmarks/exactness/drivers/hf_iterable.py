"""Hugging Face's IterableDataset in torchdata's StatefulDataLoader, as its guide says."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, interleave_datasets
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.exactness.data import sample
from benchmarks.exactness.drivers.hf_map import _stacked
from benchmarks.exactness.epoch_loop import EpochLoop
from benchmarks.exactness.histories import SAMPLES, SECOND_SOURCE
from benchmarks.exactness.record import Task

TITLE = "Hugging Face, iterable"
NEEDS = ("datasets", "torchdata")
DOCS = "https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration"
_STATE = "a state is of one number of workers, and of its rank"
LACKS: dict[str, str] = {}
UNCLAIMED = {
    "workers-3": _STATE,
    "workers-0": _STATE,
    "ranks-1-2": _STATE,
    "ranks-2-3": _STATE,
    "ranks-3-1": _STATE,
    "random-workers": "seeds depend on the workers",
    "random-resumed": "generators of workers are not in the state",
}
SHARDS = 12


class Loader(EpochLoop):
    """`set_epoch` before each epoch; 12 shards, which all numbers of readers divide."""

    PER_RANK = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        # Shards in a random order, and no more: what a buffer has is not in the state, as its
        # documentation says, and with several shards at a time a state of workers does not load.
        dataset = _source(0).shuffle(seed=task.seed, buffer_size=1, max_buffer_input_shards=1)
        if task.kind == "mixture":
            parts = [dataset, _source(SECOND_SOURCE)]
            dataset = interleave_datasets(
                parts, probabilities=[0.75, 0.25], seed=task.seed, stopping_strategy="all_exhausted"
            )
        if task.ranks > 1:
            dataset = split_dataset_by_node(dataset, rank=task.rank, world_size=task.ranks)
        self.dataset = dataset.map(_made, remove_columns=["id"])
        self.loader = StatefulDataLoader(
            self.dataset, task.batch, num_workers=task.workers, collate_fn=_stacked
        )

    def begin(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)


def _source(begin: int) -> Any:
    rows = Dataset.from_dict({"id": list(range(begin, begin + SAMPLES))})
    return rows.to_iterable_dataset(num_shards=SHARDS)


def _made(row: dict[str, int]) -> dict[str, Any]:
    return {"row": sample(row["id"])}
