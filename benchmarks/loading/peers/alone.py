"""No loader: one thread makes each batch and consumes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


def loader(dataset: Dataset[Any], num_workers: int, **arguments: Any) -> Iterable[Any]:  # noqa: ARG001 - none
    torch.set_num_threads(1)
    return DataLoader(dataset, **arguments)
