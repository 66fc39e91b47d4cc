"""Collate the fields of samples one by one, and rebuild the container."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

from forebay.collating.misfits import Misfit, Path, described, named, odd_one, refusal, shown
from forebay.collating.rules import Collation, Rule, applied, default
from forebay.errors import OptionError


@dataclass(frozen=True)
class ByField(Collation):
    """The collate function that `by_field` returns.

    Attributes:
        rules: A rule for each field that has one.
    """

    rules: dict[Any, Rule]

    def collate(self, samples: Sequence[Any], path: Path) -> Any:
        """See `by_field`."""
        first = samples[0]
        misfit = odd_one(path, [_described_fields(sample) for sample in samples])
        if misfit is not None:
            advice = "Return the same fields for every sample: they are collated one by one."
            raise refusal(misfit, len(samples), advice)
        fields = fields_of(first)
        if fields is None:
            advice = "Fields are those of dicts, NamedTuples, dataclasses and tuples."
            raise refusal(Misfit(path, None, described(first), ""), len(samples), advice)
        unknown = [field for field in self.rules if field not in fields]
        if unknown:
            raise OptionError(
                f"by_field has a rule for {', '.join(map(repr, unknown))}, but the samples have "
                f"the fields {', '.join(map(repr, fields))}\n"
                f"  They are {_described_fields(first)}"
                f"{f', at {shown(path)}' if path else ''}. The batch was not made. Name a field "
                "that exists; use the index for an item of a tuple."
            )
        batches = [
            applied(self.rules.get(field, default), [get(one) for one in samples], (*path, field))
            for field, get in fields.items()
        ]
        return _rebuilt(first, dict(zip(fields, batches, strict=True)))


def fields_of(sample: Any) -> dict[Hashable, Callable[[Any], Any]] | None:
    """Return how to get each field of a sample; None if it has none."""
    if isinstance(sample, Mapping):
        return {key: itemgetter(key) for key in sample}
    if dataclasses.is_dataclass(sample):
        names = [field.name for field in dataclasses.fields(sample) if field.init]
    elif isinstance(sample, tuple | list):
        names = list(getattr(sample, "_fields", ()))
        if not names:
            return {index: itemgetter(index) for index in range(len(sample))}
    else:
        return None
    return {name: attrgetter(name) for name in names}


def _described_fields(sample: Any) -> str:
    fields = fields_of(sample)
    if fields is None:
        return described(sample, exactly=False)
    if isinstance(sample, Mapping):
        return f"{named(sample)} with {', '.join(sorted(map(repr, fields)))}"
    if 0 in fields or not fields:
        return f"{named(sample)} of {len(fields)}"
    return named(sample)


def _rebuilt(sample: Any, batches: dict[Any, Any]) -> Any:
    """Return a container like the sample that holds the batches."""
    if isinstance(sample, MutableMapping):
        whole = copy.copy(sample)  # a defaultdict keeps its default
        whole.update(batches)
        return whole
    if isinstance(sample, Mapping):
        return type(sample)(batches)  # type: ignore[call-arg]  # as torch makes them
    if dataclasses.is_dataclass(sample):
        return dataclasses.replace(sample, **batches)  # type: ignore[type-var]
    if hasattr(sample, "_fields"):
        return type(sample)(**batches)
    return type(sample)(batches.values())
