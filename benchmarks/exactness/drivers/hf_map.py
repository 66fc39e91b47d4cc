"""Hugging Face's map-style Dataset, which torch's DataLoader reads."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from benchmarks.exactness.data import sample
from benchmarks.exactness.drivers import torch_loader
from benchmarks.exactness.histories import SAMPLES
from benchmarks.exactness.record import Task

TITLE = "Hugging Face, map-style"
NEEDS = ("datasets", "torch")
DOCS = "https://huggingface.co/docs/datasets/use_with_pytorch"
LACKS = torch_loader.LACKS | {"stream": "see the iterable one"}
UNCLAIMED = torch_loader.UNCLAIMED


class Loader(torch_loader.Loader):
    """The map of samples is `with_transform`, as augmentations are."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        rows = Dataset.from_dict({"id": list(range(SAMPLES))}).with_transform(_made)
        options: dict[str, Any] = {"num_workers": task.workers}
        if self.sampler is None:
            options |= {"shuffle": True, "generator": torch.Generator().manual_seed(task.seed)}
        else:
            options["sampler"] = self.sampler
        self.loader = DataLoader(rows, task.batch, collate_fn=_stacked, **options)


def _made(rows: dict[str, list[int]]) -> dict[str, list[Any]]:
    return {"row": [sample(each) for each in rows["id"]]}


def _stacked(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(each["row"]) for each in rows])
