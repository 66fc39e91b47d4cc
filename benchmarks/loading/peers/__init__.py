"""The loaders, one file each: `loader(dataset, **arguments)` returns an iterable of batches.

The arguments are those of torch's DataLoader, the same for all; a peer ignores one that it does not
have, and each file says how the peer is tuned. Importing a peer's file imports its library.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

WORKERS = 2

# By file: the name in a table, and the distribution whose version is shown beside it.
NAMES = {
    "torch": ("torch DataLoader", "torch"),
    "tuned": ("torch DataLoader, tuned", "torch"),
    "forebay": ("forebay.DataLoader", None),
    "packed": ("forebay, PackedSequence", None),
    "stateful": ("torchdata StatefulDataLoader", "torchdata"),
    "spdl": ("SPDL", "spdl-core"),
    "grain": ("Grain", "grain"),
    "alone": ("one process alone, one thread", None),
}


def title(peer: str) -> str:
    """Return a peer's name, with its version if the head of the output does not show it."""
    name, distribution = NAMES[peer]
    if distribution in (None, "torch"):
        return name
    try:
        return f"{name} {version(distribution)}"
    except PackageNotFoundError:
        return name
