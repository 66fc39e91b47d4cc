"""The samples of a Dataset as inputs, and the Datasets that they come from.

    Subset(ConcatDataset([a, b]), indices) ──> bases (a, b), places ──> numbers 30, 31, …

A sample is known by its origin and its number there (`base/origins.py`), by the name that its
Dataset gives it, or else by its number: the index in the Dataset that it comes from, after the
samples of the Datasets before. Whatever selects, joins and reorders, it stays the same one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple

from forebay.base.files import is_url
from forebay.base.origins import NumberedOrigins, Origin, as_array, origins_of, placed
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
        """Whether some of the samples have names."""
        return any(map(has_names, self.bases))

    @property
    def have_identities(self) -> bool:
        """Whether some of the samples are known by more than an index."""
        return self.have_names or any(map(_origins_of, self.bases))

    def name_of(self, index: int) -> str | None:
        """Return the name of a sample; None if it has none."""
        if not self.have_names:
            return None
        place, firsts = int(self.places[index]), [*accumulate(self.lengths[:-1], initial=0)]
        at = bisect_right(firsts, place) - 1
        return sample_name(self.bases[at], place - firsts[at])

    def identified(self) -> Identified:
        """Return what the samples are known by."""
        import numpy as np

        places, first = as_array(self.places), 0
        at = np.empty(len(places), np.int64)
        parts, counts, firsts = list[Input](), list[int](), list[int | None]()
        given = zip(self.bases, self.lengths, self.numbers, self.extents, strict=True)
        for base, length, number, extents in given:
            is_own = (places >= first) & (places < first + length)
            own, end = places[is_own] - first, sum(counts)
            if origins := _origins_of(base):
                parts += [Input(each.name, f"{number} {each.name}", each.stamp) for each in origins]
                counts += [each.samples for each in origins]
                firsts += [0] * len(origins)
            elif names_samples(base):
                chosen, own = np.unique(own, return_inverse=True)
                names = _Names(base, length, number)
                parts += [names.input(index, "") for index in chosen.tolist()]
                counts += [1] * len(chosen)
                firsts += [None] * len(chosen)
            else:
                parts += [Input("", f"{number} from {begin}", "") for begin, _ in extents]
                counts += [count for _, count in extents]
                firsts += [begin for begin, _ in extents]
            at[is_own], first = end + own, first + length
        return Identified(parts, counts, firsts, at)

    def inputs(self) -> Iterator[Input]:
        """Yield the samples as inputs; one that is selected again has "#2" behind what it is."""
        keys = self.keys()
        again = None if type(keys) is range else _occurrences(keys)
        names = [_Names(*each) for each in zip(self.bases, self.lengths, self.numbers, strict=True)]
        some_known = any(each.are_known for each in names)
        if again is None and not self.have_identities:
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
                text, stamp = f"{key}{more}", names[at].stamp_of(place - firsts[at])
                yield Input(text, text if some_known else None, stamp)


class Identified(NamedTuple):
    """What samples are known by.

    Attributes:
        parts: Each of one identity: a sample that has a name, a shard, a stretch of a Dataset that
            names none.
        counts: How many samples each part has.
        firsts: The number that the first sample of each part has in its name; None for a part that
            is a sample with its name.
        at: The place of each sample in the concatenation of the parts.
    """

    parts: Sequence[Input]
    counts: Sequence[int]
    firsts: Sequence[int | None]
    at: Any

    @classmethod
    def of(cls, inputs: Sequence[Input]) -> Identified:
        """Return the identities of inputs, of which each is a sample."""
        import numpy as np

        return cls(inputs, [1] * len(inputs), [None] * len(inputs), np.arange(len(inputs)))

    def names(self) -> list[str]:
        """Return the name of each sample, or its number in its part if that has no name."""
        import numpy as np

        ends = np.cumsum(self.counts)
        number = np.searchsorted(ends, self.at, "right")
        within = self.at - ends[number] + np.asarray(self.counts)[number]
        sources = [each.source for each in self.parts]
        heads = [f"{name}#" * bool(name) for name in sources]
        return [
            sources[part] if (first := self.firsts[part]) is None else f"{heads[part]}{first + at}"
            for part, at in zip(_integers(number), _integers(within), strict=True)
        ]


class _Names:
    """The names that a base gives its samples."""

    def __init__(self, base: Any, length: int, number: int) -> None:
        self._base, self._number = base, number
        origins = _origins_of(base)
        self._origins = NumberedOrigins(origins) if origins else None
        self.are_known = has_names(base)
        self._again: Any = None
        if self.are_known and not origins:
            import numpy as np

            self._parts = [*parts_of_samples(base, length).values()]
            self._again = _occurrences(np.fromiter(map(self._hash, range(length)), np.int64))

    def input(self, index: int, more: str) -> Input:
        """Return a sample as an input.

        Args:
            more: Tells a sample that is selected again from the first.
        """
        if self._origins is not None:
            name = self._origins.name_of(index)
            return Input(name, f"{self._number} 1{more} {name}", self.stamp_of(index))
        found = sample_name(self._base, index)
        assert found is not None, "only of a base that names its samples"
        name = found
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

    def stamp_of(self, index: int) -> str:
        """Return what changes with a sample, of one of forebay's readers."""
        return "" if self._origins is None else self._origins.at(index)[0].stamp

    def _hash(self, index: int) -> int:
        try:
            return hash(sample_name(self._base, index))
        except Exception:  # noqa: BLE001 - it is raised again if the sample is selected
            return hash((index,))


def sample_name(base: Any, index: int) -> str | None:
    """Return the name that a Dataset gives a sample; None if it gives none."""
    if origins := _origins_of(base):
        return NumberedOrigins(origins).name_of(index) or None
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
    found = placed(dataset)
    firsts = accumulate(found.lengths[:-1], initial=0)
    extents = [(each,) for each in zip(firsts, found.lengths, strict=True)]
    return Samples(*found, range(len(found.bases)), extents)


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
    """Return whether a Dataset gives its samples names, one by one."""
    return callable(getattr(dataset, "source_of", None))


def has_names(dataset: Any) -> bool:
    """Return whether the samples of a Dataset have names."""
    return names_samples(dataset) or any(each.name for each in _origins_of(dataset))


def _origins_of(dataset: Any) -> Sequence[Origin]:
    return origins_of(dataset) if hasattr(type(dataset), "origins") else ()


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
    these samples are compared one by one, as those of forebay's readers are.
    """
    bases: list[Base] = []
    first = 0
    for dataset, length in zip(datasets, lengths, strict=True):
        found = describe(dataset, aside=parts_of_samples(dataset, length))
        is_fixed = fixed and not (names_samples(dataset) or _origins_of(dataset))
        parameters = found.parameters + (("len()", str(length)),) * is_fixed
        bases.append(Base(found.name, found.code, parameters, ((first, length),)))
        first += length
    return tuple(bases)
