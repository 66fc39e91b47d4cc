"""The samples of a Dataset as inputs, and the Datasets that they come from.

    Subset(ConcatDataset([a, b]), indices) ──> bases (a, b), places ──> numbers 30, 31, …

A sample is known by the name that its Dataset gives it, or else by its number: the index in the
Dataset that it comes from, after the samples of the Datasets before. Whatever selects, joins and
reorders, it stays the same one.

A wrapper of torch or of forebay that only selects or joins is looked through. What cannot be, such
as a Subset of keys that are no indices, or a wrapper with a `__getitem__` of its own, is a base
itself.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise, repeat
from typing import Any

from forebay.base.datasets import is_map_style
from forebay.base.files import is_url
from forebay.errors import InputError, shown_location
from forebay.inputs.listing import Listing, name_text, seen_identity, with_storable_names
from forebay.ledger.records import Input
from forebay.runs.fingerprint import Base, Extents, describe, text_of_part
from forebay.runs.source_code import is_sequence, state_of

# Numbers that are made Python's at once.
_PAGE = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The samples of a map-style Dataset.

    Attributes:
        bases: The Datasets that they come from, each once.
        lengths: How many samples each of these has.
        places: Of each sample, its index in the concatenation of the bases: a range, or an array
            of int64.
        numbers: The number of each base in the output folder.
        extents: Where the output folder numbers the samples of each base; see `Base`.
    """

    bases: tuple[Any, ...]
    lengths: tuple[int, ...]
    places: Any
    numbers: Sequence[int]
    extents: Sequence[Extents]

    def __len__(self) -> int:
        return len(self.places)

    def numbered(self, bases: Sequence[Base], numbers: Sequence[int]) -> Samples:
        """Return the samples with the numbers that they have in an output folder.

        Args:
            bases: The Datasets that the folder knows.
            numbers: Which of these are the samples' own, in their order.
        """
        extents = [bases[number].extents for number in numbers]
        return replace(self, numbers=numbers, extents=extents)

    def keys(self) -> Any:
        """Return the number of each sample in the output folder, like `places`."""
        at, starts, shifts = 0, [], []
        for length, extents in zip(self.lengths, self.extents, strict=True):
            end = at + length
            for first, count in extents:
                starts.append(at)
                shifts.append(first - at)
                at = min(at + count, end)  # the base may have had more samples
        if not any(shifts):
            return self.places
        import numpy as np

        places = as_array(self.places)
        return places + np.array(shifts)[np.searchsorted(starts, places, "right") - 1]

    @property
    def have_names(self) -> bool:
        """Whether some of the Datasets name their samples."""
        return any(map(names_samples, self.bases))

    def name_of(self, index: int) -> str | None:
        """Return the name that its Dataset gives a sample; None if it gives none."""
        if not self.have_names:
            return None
        place, firsts = int(self.places[index]), [*accumulate(self.lengths[:-1], initial=0)]
        at = bisect_right(firsts, place) - 1
        return sample_name(self.bases[at], place - firsts[at])

    def inputs(self) -> Iterator[Input]:
        """Yield the samples as inputs; one that is selected again has "#2" behind what it is."""
        keys = self.keys()
        again = None if type(keys) is range else _occurrences(keys)
        names = [_Names(*each) for each in zip(self.bases, self.lengths, self.numbers, strict=True)]
        some_known = any(each.are_known for each in names)
        if again is None and not some_known:
            yield from map(Input, map(str, _integers(keys)))
            return
        firsts = [*accumulate(self.lengths[:-1], initial=0)]
        counts = repeat(1) if again is None else _integers(again)
        for place, key, count in zip(_integers(self.places), _integers(keys), counts, strict=False):
            more = f"#{count}" if count > 1 else ""
            at = bisect_right(firsts, place) - 1
            if names[at].are_known:
                yield names[at].input(place - firsts[at], more)
            else:  # with a row, beside names, it is a string in the table, too
                yield Input(text := f"{key}{more}", text if some_known else None)


class _Names:
    """The names that a base gives its samples."""

    def __init__(self, base: Any, length: int, number: int) -> None:
        self._base, self._number = base, number
        self.are_known = names_samples(base)
        self._again: Any = None
        if self.are_known:
            import numpy as np

            self._parts = [*parts_of_samples(base, length).values()]

            self._again = _occurrences(np.fromiter(map(self._hash, range(length)), np.int64))

    def input(self, index: int, more: str) -> Input:
        """Return a sample as an input.

        Args:
            more: Tells a sample that is selected again from the first.
        """
        name = sample_name(self._base, index)
        assert name is not None, "only of a base that names its samples"
        # Samples with one name are numbered in the order of the base.
        count = 1 if self._again is None else int(self._again[index])
        row = f"{self._number} {count}{more} {name}"
        for part in self._parts:
            # What the Dataset has of a sample beside its name, such as its label.
            value = part[index]
            shown = shown_location(value) if type(value) is str else ""
            if not shown or not f"/{name}".endswith(f"/{shown}"):
                row += f" {text_of_part(value)}"
        return Input(name, row, "" if is_url(name) else seen_identity(name))

    def _hash(self, index: int) -> int:
        try:
            return hash(sample_name(self._base, index))
        except Exception:  # noqa: BLE001 - it is raised again if the sample is selected
            return hash((index,))


def sample_name(base: Any, index: int) -> str | None:
    """Return the name that a Dataset gives a sample; None if it gives none."""
    if not names_samples(base):
        return None
    given = base.source_of(index)
    given = str(given) if isinstance(given, int) else given
    return name_text(given, f"the Dataset's source_of({index})")


def _occurrences(keys: Any) -> Any:
    """Return for each key how many are equal to it up to there; None if no key is there twice."""
    import numpy as np

    order = np.argsort(keys, kind="stable")
    is_first = np.diff(keys[order], prepend=keys[order[:1]] - 1) != 0
    if is_first.all():
        return None
    at = np.arange(len(keys))
    counts = np.empty(len(keys), np.int64)
    counts[order] = at - np.maximum.accumulate(np.where(is_first, at, 0)) + 1
    return counts


def sample_listing(samples: Samples) -> Listing:
    """List samples as inputs; the file that one is named after counts for changes."""
    n = len(samples)
    if n < 1:
        raise InputError(f"inputs: the Dataset has {n} samples\n  There is nothing to process.")
    description = f"a Dataset of {n} sample{'s' * (n != 1)}"
    listing = Listing("indices", (), description, samples.inputs, total=n, samples=samples)
    return listing.through(with_storable_names)


def samples_of(dataset: Any) -> Samples:
    """Return what the samples of a map-style Dataset are made of."""
    bases: dict[int, tuple[Any, int, int]] = {}
    places = _places(dataset, bases)
    found, firsts, lengths = zip(*bases.values(), strict=True)
    extents = [(each,) for each in zip(firsts, lengths, strict=True)]
    return Samples(found, lengths, places, range(len(found)), extents)


def _places(dataset: Any, bases: dict[int, tuple[Any, int, int]]) -> Any:
    """Return the places of a Dataset's samples, and add the bases that are new.

    Args:
        bases: By id: a base, its first place, its length.
    """
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


def _integers(numbers: Any) -> Iterator[int]:
    """Return numbers as Python's integers."""
    if type(numbers) is range:
        return iter(numbers)
    firsts = range(0, len(numbers), _PAGE)
    return chain.from_iterable(numbers[first : first + _PAGE].tolist() for first in firsts)


def number_bases(
    known: Sequence[Base], found: Sequence[Base], *, accepts: bool
) -> tuple[tuple[Base, ...], list[int]]:
    """Return the Datasets of a ledger and of a call together, and where those of the call are.

    New Datasets and the new samples of one that grew get the numbers after all others.

    Args:
        accepts: Whether a Dataset that changed is still the same one.
    """
    bases, numbers = list(known), []
    end = max((first + count for each in known for first, count in each.extents), default=0)
    pairs = paired(known, found, accepts=accepts)
    for each, at in zip(found, pairs, strict=True):
        number = len(bases) if at is None else at
        extents = () if at is None else bases[at].extents
        more = sum(count for _, count in each.extents) - sum(count for _, count in extents)
        if more > 0:
            extents, end = (*extents, (end, more)), end + more
        bases[number : number + 1] = [each._replace(extents=extents)]
        numbers.append(number)
    return tuple(bases), numbers


def paired(known: Sequence[Base], found: Sequence[Base], *, accepts: bool) -> list[int | None]:
    """Return which of the known Datasets each found one is; None if it is new.

    Two are the same one if the first rule, or a later one, gives both the same value. Several are
    so in their order, but by a later rule only if there are as many in both.
    """
    pairs: list[int | None] = [None] * len(found)
    for number, rule in enumerate(_SAME if accepts else _SAME[:1]):
        left: dict[object, list[int]] = {}
        wanted: dict[object, list[int]] = {}
        taken = {*pairs}
        for at, each in enumerate(known):
            if at not in taken:
                left.setdefault(rule(each), []).append(at)
        for place, each in enumerate(found):
            if pairs[place] is None:
                wanted.setdefault(rule(each), []).append(place)
        for value, places in wanted.items():
            others = left.get(value, [])
            if number == 0 or len(others) == len(places):
                for place, at in zip(places, others, strict=False):
                    pairs[place] = at
    return pairs


# What two descriptions of one Dataset have in common; all but the first if it changed.
_SAME: tuple[Callable[[Base], object], ...] = (
    lambda base: (base.code, base.parameters),
    lambda base: (base.name, base.parameters),
    lambda base: base.name,
    lambda _: None,
)


def names_samples(dataset: Any) -> bool:
    """Return whether a Dataset gives its samples names."""
    return callable(getattr(dataset, "source_of", None))


def parts_of_samples(dataset: Any, length: int) -> dict[str, Sequence[Any]]:
    """Return the attributes of a Dataset that have one element for each of its named samples."""
    if not names_samples(dataset):
        return {}
    found = state_of(dataset)
    return {name: each for name, each in found.items() if is_sequence(each) and len(each) == length}


def describe_bases(
    datasets: Sequence[Any], lengths: Sequence[int], *, fixed: bool
) -> tuple[Base, ...]:
    """Describe the Datasets that samples come from; `fixed` if another length is a change.

    What a Dataset that names its samples has for each of them does not count, nor does its length:
    these samples are compared one by one.
    """
    bases: list[Base] = []
    first = 0
    for dataset, length in zip(datasets, lengths, strict=True):
        found = describe(dataset, aside=parts_of_samples(dataset, length))
        is_fixed = fixed and not names_samples(dataset)
        parameters = found.parameters + (("len()", str(length)),) * is_fixed
        bases.append(Base(found.name, found.code, parameters, ((first, length),)))
        first += length
    return tuple(bases)
