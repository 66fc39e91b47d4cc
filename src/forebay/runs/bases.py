"""The Datasets that samples come from, and the numbers of their samples in an output folder.

A Dataset has the same numbers in every call, whichever others are used with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forebay.runs.fingerprint import Base, describe
from forebay.runs.source_code import is_sequence, state_of


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
