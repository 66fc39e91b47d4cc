"""Whether a Dataset is map-style, and the names of its samples, also if it is wrapped.

Subset(ConcatDataset([named, unnamed]), indices) ──> indices[i] ──> named.source_of(…)
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

NameOf = Callable[[int], object]


def is_map_style(dataset: object) -> bool:
    """Tell whether samples have an index: whether there are `__getitem__` and `__len__`.

    An IterableDataset of torch may have a length, and inherits a `__getitem__` that only raises.
    """
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(dataset, torch_data.IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def names_of(dataset: Any) -> NameOf | None:
    """Return the function from a sample's index to its name; None if the Dataset knows no names.

    That is its method `source_of`. A `Subset`, a `ConcatDataset` and a mixture have the names of
    the Datasets that they are made of.
    """
    own = getattr(dataset, "source_of", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is None:  # without torch there are no wrappers, and importing it takes seconds
        return None
    if isinstance(dataset, torch_data.Subset):
        inner = names_of(dataset.dataset)
        return None if inner is None else lambda index: inner(dataset.indices[index])
    if isinstance(dataset, torch_data.ConcatDataset):
        return _names_of_joined(dataset.datasets)
    from forebay.mixing import MixedDataset

    return _names_of_joined(dataset.datasets.values()) if type(dataset) is MixedDataset else None


def _names_of_joined(datasets: Iterable[Any]) -> NameOf | None:
    """Return the names of Datasets one after the other; the index where one knows no names."""
    parts = list(datasets)
    names, ends = [names_of(part) for part in parts], list(accumulate(map(len, parts)))
    if not any(names):
        return None

    def name_of(index: int) -> object:
        at = bisect_right(ends, index)
        inner = names[at]
        return index if inner is None else inner(index - (ends[at - 1] if at else 0))

    return name_of
