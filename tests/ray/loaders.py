"""Loaders that a cluster feeds, or local processes for comparison."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Squares

import forebay

# How many samples the datasets have, where nothing else is said.
COUNT = 40


class Large(Squares):
    """Samples of 48 KB with random numbers."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((300, 40), float(index)), torch.rand(3)


def loader_of(dataset: Any, **options: Any) -> forebay.DataLoader:
    """Return a loader with a worker on the cluster, unless the options say otherwise."""
    defaults = {"batch_size": 4, "num_workers": 1, "backend": "ray", "seed": 3}
    settings = defaults | options
    # Coming up takes seconds on a cluster.
    settings["persistent_workers"] = settings["num_workers"] > 0
    return forebay.DataLoader(dataset, **settings)


def batches_of(dataset: Any, epochs: int = 1, **options: Any) -> list[Any]:
    """Return all batches of some epochs of such a loader."""
    with loader_of(dataset, **options) as loader:
        return [batch for _ in range(epochs) for batch in loader]
