"""torch's DataLoader with default settings: the reference of all ratios."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, Dataset


def loader(dataset: Dataset[Any], **arguments: Any) -> Iterable[Any]:
    return DataLoader(dataset, **arguments)
