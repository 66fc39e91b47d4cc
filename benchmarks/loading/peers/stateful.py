"""torchdata's StatefulDataLoader: torch's loader with a state; it takes torch's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader


def loader(dataset: Dataset[Any], **arguments: Any) -> Iterable[Any]:
    return StatefulDataLoader(dataset, **arguments)
