"""The loaders, one file each, with `loader(dataset, **arguments)` -> an iterable of batches.

The arguments are those of torch's DataLoader, the same for all; a peer that lacks one leaves it
out, and each says in its file how it is tuned. Importing a peer's file imports its library.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

WORKERS = 2

# By file: the name in a table, and the distribution whose version stands beside it.
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
    """Return a peer's name with the version of what is measured, where the head does not say it."""
    name, distribution = NAMES[peer]
    if distribution in (None, "torch"):
        return name
    try:
        return f"{name} {version(distribution)}"
    except PackageNotFoundError:
        return name
