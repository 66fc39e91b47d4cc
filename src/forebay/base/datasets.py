"""What forebay looks for in a user's dataset: its style, and how it is read."""

from __future__ import annotations

import sys
from typing import Any


def defines(thing: Any, *names: str) -> bool:
    """Return whether an object has methods of a protocol, by its class or as its own attributes.

    What its `__getattr__` answers does not count: that of a proxy, a mock or a dict with attributes
    may answer to any name.
    """
    own = getattr(thing, "__dict__", None)
    own = own if type(own) is dict else {}
    if isinstance(thing, type):
        return False
    return all(callable(own.get(name) or getattr(type(thing), name, None)) for name in names)


def is_map_style(dataset: object) -> bool:
    """Return whether samples have an index: whether there are `__getitem__` and `__len__`.

    An IterableDataset of torch may have a length, and inherits a `__getitem__` that only raises.
    """
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(dataset, torch_data.IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def getitems_of(dataset: Any) -> Any:
    """Return what reads several samples with one call; None if a dataset reads one at a time."""
    subset = getattr(sys.modules.get("torch.utils.data"), "Subset", None)
    if type(dataset) is subset and getitems_of(dataset.dataset) is None:
        return None  # its own one only calls `__getitem__` for each
    return dataset.__getitems__ if defines(dataset, "__getitems__") else None


def sequence_rows(dataset: Any) -> dict[str, Any]:
    """Return the datasets of `pack_sequences` and `batch_by_length`: this one, or those it mixes.

    The name of one that is not in a mixture is "dataset".
    """
    kind = getattr(sys.modules.get("forebay.lengths"), "SequenceRows", None)
    parts = dataset.datasets if is_mixture(dataset) else {"dataset": dataset}
    return {name: each for name, each in parts.items() if type(each) is kind}


def cached_samples(dataset: Any) -> Any | None:
    """Return what says how the samples of one of forebay's datasets are read by blocks.

    That is a dataset of `cache`, `open_cache` or `open_shards` itself. None for other ones, and
    for subclasses of these, whose samples may be others.
    """
    own = type(dataset).__module__.startswith("forebay.")
    return getattr(dataset, "by_blocks", None) if own else None


def is_mixture(dataset: object) -> bool:
    """Return whether a dataset was made by `forebay.mix`."""
    mixing = sys.modules.get("forebay.mixing")
    return mixing is not None and type(dataset) is mixing.MixedDataset


def is_made_once(dataset: Any) -> bool:
    """Return whether a dataset, or one within it, says that its samples cannot be made twice."""
    for _ in range(8):
        own = getattr(dataset, "__dict__", None)
        own = own if type(own) is dict else {}
        if own.get("made_once", getattr(type(dataset), "made_once", False)) is True:
            return True
        if "dataset" not in own:
            break
        dataset = own["dataset"]
    return False
