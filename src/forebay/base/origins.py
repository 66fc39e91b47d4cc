"""Where samples come from: what each is known by, whichever dataset selects or joins them.

    Subset(ConcatDataset([a, b]), indices) ──> bases (a, b), places ──> origins of a, origins of b

A base that is one of forebay's readers has a method `origins()`. The number of a sample within its
origin, and the origin's name and stamp, are its identity: the ledger, the ranges of `cache` and
`predict`, the states of loaders and the column `source` of tables use no other one. A user's
Dataset names single samples, by `source_of(index)`, or none, and then the index is the identity.

A wrapper of torch or of forebay that only selects or joins is looked through. What cannot be, such
as a Subset of keys that are no indices, or a wrapper with a `__getitem__` of its own, is a base
itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from zlib import crc32


class Origin(NamedTuple):
    """Consecutive samples of one shard, file or table.

    Attributes:
        name: That of the shard or file; "" for what has none.
        stamp: Changes with what it holds. The part before the colon changes only if the samples are
            certainly others; what is behind it, also if the file was written again, or copied.
        samples: How many there are.
    """

    name: str
    stamp: str
    samples: int


class Placed(NamedTuple):
    """The samples of a map-style Dataset.

    Attributes:
        bases: The Datasets that they come from, each once.
        lengths: How many samples each of these has.
        places: Of each sample, its index in the concatenation of the bases: a range, or an array
            of int64.
    """

    bases: tuple[Any, ...]
    lengths: tuple[int, ...]
    places: Any


def origins_of(base: Any, *, reads: bool = True) -> Sequence[Origin]:
    """Return the origins of the samples of one of forebay's readers, in order; none of all else.

    Args:
        reads: Whether columns in memory may be read for their stamp.
    """
    method = getattr(type(base), "origins", None)
    if not getattr(method, "__module__", "").startswith("forebay."):
        return ()
    found: Sequence[Origin] = base.origins(reads=reads)
    return found


def digest_of_origins(origins: Iterable[Origin]) -> str:
    """Return a hash of some origins."""
    text = "\0".join(map("\0".join, ((name, stamp, f"{n}") for name, stamp, n in origins)))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def content_digests(dataset: Any, samples: int | None = None) -> str | None:
    """Return what the state of a loader has of the first so many samples, to notice other ones.

    Two strings with a colon between: the first differs if samples were replaced, the second if
    they may have been. None if nothing is known of them. What was added behind changes neither.

    Args:
        samples: How many; None for all.
    """
    from forebay.base.datasets import is_map_style

    if not (type(dataset).__module__.startswith(("forebay.", "torch.")) and is_map_style(dataset)):
        return None  # no `__len__` of the user is called
    bases, lengths, places = placed(dataset)
    origins = [origins_of(base, reads=False) for base in bases]
    places = places[:samples]
    if not any(origins) or not len(places):
        return None
    is_range = type(places) is range
    last = max(places[0], places[-1]) if is_range else int(places.max())
    certain, others, at = list[str](), list[str](), 0
    for own, length in zip(origins, lengths, strict=True):
        for name, stamp, count in own or (Origin("", "-", length),):
            first, _, second = stamp.partition(":")
            if at <= last < at + count - 1 and not first:
                return None  # it may have grown
            if at <= last:
                certain.append(f"{first} {count}")
                others.append(f"{name}\0{second}")
            at += count
    if places != range(len(places)) if is_range else True:
        certain.append(repr(places) if is_range else f"{crc32(places.data):08x}")
    texts = ("\n".join(each).encode("utf-8", "surrogatepass") for each in (certain, others))
    return ":".join(f"{crc32(text):08x}" for text in texts)


def placed(dataset: Any) -> Placed:
    """Return what the samples of a map-style Dataset are made of."""
    bases: dict[int, tuple[Any, int, int]] = {}
    places = _places(dataset, bases)
    found, _, lengths = zip(*bases.values(), strict=True)
    return Placed(found, lengths, places)


def _places(dataset: Any, bases: dict[int, tuple[Any, int, int]]) -> Any:
    """Return the places of a Dataset's samples, and add the bases that are new.

    Args:
        bases: By id: a base, its first place, its length.
    """
    from forebay.base.datasets import is_map_style

    torch_data, mixing = sys.modules.get("torch.utils.data"), sys.modules.get("forebay.mixing")
    if torch_data is not None and _only_selects(dataset, torch_data.Subset):
        inner = dataset.dataset
        indices = _checked(dataset.indices, len(inner)) if is_map_style(inner) else None
        if indices is not None:
            return _taken(_places(inner, bases), indices)
    parts: Iterable[Any] = ()
    if torch_data is not None and _only_selects(dataset, torch_data.ConcatDataset):
        parts = dataset.datasets
    elif mixing is not None and _only_selects(dataset, mixing.MixedDataset):
        parts = dataset.datasets.values()
    if parts and sum(map(len, parts)) == len(dataset):  # the parts may have grown
        return _joined([_places(part, bases) for part in parts])
    if id(dataset) not in bases:
        _, first, length = next(reversed(bases.values()), (None, 0, 0))
        bases[id(dataset)] = dataset, first + length, len(dataset)
    _, first, length = bases[id(dataset)]
    return range(first, first + length)


def _only_selects(dataset: Any, kind: type) -> bool:
    """Return whether a Dataset finds and names its samples as this class of wrappers does."""
    own = type(dataset)
    if not issubclass(own, kind) or callable(getattr(dataset, "source_of", None)):
        return False
    names = ("__getitem__", "__getitems__", "__len__")
    return all(getattr(own, name, None) is getattr(kind, name, None) for name in names)


def _checked(indices: Any, length: int) -> Any:
    """Return indices as a range or an array, counted from 0; None if some are no indices."""
    import numpy as np

    if type(indices) is range and indices and min(indices[0], indices[-1]) >= 0:
        return indices if max(indices[0], indices[-1]) < length else None
    try:
        found = np.asarray(indices)
    except Exception:  # noqa: BLE001 - a tensor on a device, a sequence that raises
        return None
    if found.ndim == 1 and not found.size:
        return range(0)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        return None
    if found.min() < -length or found.max() >= length:
        return None
    found = found.astype(np.int64)
    return np.where(found < 0, found + length, found)


def _taken(places: Any, indices: Any) -> Any:
    """Return the places at these indices."""
    if type(places) is not range:
        return places[as_array(indices)]
    first, step = places.start, places.step
    if type(indices) is not range:
        return first + step * indices
    return range(first + step * indices.start, first + step * indices.stop, step * indices.step)


def _joined(parts: list[Any]) -> Any:
    """Return places one after the other; they are a range if they are consecutive."""
    parts = [part for part in parts if len(part)] or [range(0)]
    are_ranges = all(type(part) is range and part.step == 1 for part in parts)
    if are_ranges and all(one.stop == other.start for one, other in pairwise(parts)):
        return range(parts[0].start, parts[-1].stop)
    import numpy as np

    return np.concatenate([as_array(part) for part in parts])


def as_array(places: Any) -> Any:
    """Return places, a range or an array, as an array."""
    import numpy as np

    if type(places) is range:
        return np.arange(places.start, places.stop, places.step, dtype=np.int64)
    return places


class NumberedOrigins:
    """Finds the origin of a sample by its number.

    Args:
        origins: Those of a dataset, in order.
    """

    def __init__(self, origins: Sequence[Origin]) -> None:
        import numpy as np

        self.origins = origins
        self._ends = np.array([*accumulate(each.samples for each in origins)], np.int64)

    def at(self, index: int) -> tuple[Origin, int]:
        """Return the origin of a sample, and its number there."""
        number = int(self._ends.searchsorted(index, "right"))
        found = self.origins[number]
        return found, index - int(self._ends[number]) + found.samples

    def name_of(self, index: int) -> str:
        """Return the name of a sample: "train-00003.tar#17"; "" if its origin has none."""
        found, number = self.at(index)
        return f"{found.name}#{number}" if found.name else ""
