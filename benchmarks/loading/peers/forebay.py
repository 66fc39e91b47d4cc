"""forebay's DataLoader, with torch's arguments alone unless a table says `buffer=`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import Dataset

from forebay import DataLoader


def loader(dataset: Dataset[Any], **arguments: Any) -> Iterable[Any]:
    return DataLoader(dataset, **arguments)
