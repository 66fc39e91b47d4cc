"""Rules, which collate one field of the samples; their errors name the field.

    Collation.collate(samples, path)     pad and by_field, which receive the path
    default(samples)                     torch's, with misfits named
    any function of a list               the user's, with a note

All of them are collate_fn objects as well. `collated` is how a loader calls any.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from operator import attrgetter, getitem, itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import default_collate

from forebay.base.batches import opened, rebuilt
from forebay.errors import InputError, OptionError

# ---- misfits -------------------------------------------------------------------------------------
# Find the sample that does not fit its batch, and describe it in the error.
#
#     samples ── find ──> the first place where one differs from most ── refusal ──> InputError
#
# It runs only after collating failed, so it need not be fast. Samples are numbered from 0 within
# the batch, as in the loader's note on the error.

# The path to a value within a sample: keys, names and positions.
Path = tuple[Hashable, ...]

# The types that default_collate accepts besides containers.
_COLLATED = (torch.Tensor, np.ndarray, np.generic, float, int, str, bytes)
_TEXTS = (str, bytes)


class Misfit(NamedTuple):
    """Why a batch cannot be collated.

    Attributes:
        number: Which sample of the batch, from 0; None if it is all of them.
    """

    path: Path
    number: int | None
    what: str
    others: str


def odd_one(path: Path, descriptions: Sequence[str]) -> Misfit | None:
    """Return the first sample whose description differs from most; None if all are equal."""
    counts = Counter(descriptions)
    if len(counts) < 2:
        return None
    # In a tie, the description that comes first in the batch counts as that of most.
    usual = counts.most_common(1)[0][0]
    number, what = next((at, one) for at, one in enumerate(descriptions) if one != usual)
    del counts[what]
    others = ", ".join(
        f"in {count} other{'s' * (count > 1)} it is {one}" for one, count in counts.most_common(3)
    )
    return Misfit(path, number, what, others + (", and more" if len(counts) > 3 else ""))


def refusal(
    misfit: Misfit, batch_size: int, advice: str, indices: Sequence[Any] = ()
) -> InputError:
    """Return the error that names a misfit; `advice` says what to do, in whole sentences.

    Args:
        indices: Those of the samples in the dataset; empty if they are not known.
    """
    field = f"field {shown(misfit.path)}" if misfit.path else ""
    if misfit.number is None:
        whose = f"{field} of every sample" if field else "every sample"
        first = f"a batch of {batch_size} cannot be made: {whose} is {misfit.what}"
        counting = ""
    else:
        first = (
            f"sample {misfit.number} of a batch of {batch_size} does not fit: {field or 'it'} is "
        )
        first += misfit.what + (f"; {misfit.others}" if misfit.others else "")
        counting = "  Samples count from 0, as in the list of samples that a loader adds below.\n"
        if len(indices) == batch_size:
            index = indices[misfit.number]  # a number, also as a tensor has it; or anything
            shown_index = index.item() if hasattr(index, "item") else index
            counting = f"  It is sample {shown_index!r} of the dataset.\n"
    if not misfit.path and "it is None" in f"it is {misfit.what}; {misfit.others}":
        advice = (
            "To leave out a sample that cannot be loaded, let the Dataset raise an exception "
            f"instead of returning None, and use on_error='skip', which lists it. {advice}"
        )
    return InputError(f"{first}\n{counting}  The batch was not made. {advice}")


def shown(path: Path) -> str:
    """Return a path in the usual notation: `image`, `boxes.corners` or `[0]['left eye']`."""
    parts = [
        f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]"
        for part in path
    ]
    return "".join(parts).removeprefix(".")


def described_value(value: Any, exactly: bool = True) -> str:
    """Describe what decides whether a value can be collated with others: shape, dtype or type."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return "a nested tensor"  # it has no shape
    if isinstance(value, torch.Tensor):
        dtype = f", {str(value.dtype).removeprefix('torch.')}" if exactly else ""
        device = "" if value.device.type == "cpu" else f", on {value.device}"
        layout = "" if value.layout is torch.strided else f", {value.layout}"
        return f"a tensor of shape {tuple(value.shape)}{dtype}{device}{layout}"
    if isinstance(value, np.ndarray):
        dtype = f", {value.dtype}" if exactly else ""
        return f"an array of shape {value.shape}{dtype}"
    if isinstance(value, Mapping):
        keys = ", ".join(repr(key) for key in value)
        return f"{named(value)} with {keys or 'no keys'}"
    if is_dataclass(value):
        return f"{named(value)}, a dataclass"
    if isinstance(value, int | float | np.number) and not exactly:
        return "a number"
    if isinstance(value, Sequence) and not isinstance(value, _TEXTS):
        return f"{named(value)} of {len(value)}"
    return "None" if value is None else named(value)


def named(value: Any) -> str:
    """Return the name of a value's type with its article: "a str", "an int"."""
    name = type(value).__name__
    return f"a{'n' * name.lower().startswith(tuple('aeiou'))} {name}"


def find(samples: Sequence[Any]) -> Misfit | None:
    """Return what makes default_collate fail on these samples, if it can be found."""
    return _find((), samples, exactly=False) or _find((), samples, exactly=True)


def _find(path: Path, values: Sequence[Any], exactly: bool) -> Misfit | None:
    first, get = values[0], cast(Any, getitem)
    misfit = odd_one(path, [described_value(_unordered(value), exactly) for value in values])
    if misfit is not None:
        return misfit
    if isinstance(first, Mapping):
        keys = list(first)
    elif isinstance(first, Sequence) and not isinstance(first, _TEXTS):
        names = getattr(first, "_fields", None)
        keys, get = list(names or range(len(first))), getattr if names else get
    elif isinstance(first, _COLLATED) and _is_stacked(first):
        return None
    else:
        return Misfit(path, None, described_value(first), "")
    for key in keys:
        below = [get(value, key) for value in values]
        misfit = _find((*path, key), below, exactly)
        if misfit is not None:
            return misfit
    return None


def _is_stacked(value: Any) -> bool:
    """Return whether default_collate can stack values of this type and dtype."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value.is_nested
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, _TEXTS):
        try:
            torch.as_tensor(np.zeros(0, value.dtype))
        except (TypeError, ValueError):  # such as dates, and the other byte order
            return False
    return True


def _unordered(value: Any) -> Any:
    """Return a dict with its keys sorted, since dicts may differ only in their order."""
    return dict.fromkeys(sorted(value, key=repr)) if isinstance(value, Mapping) else value


# ---- rules ---------------------------------------------------------------------------------------

Rule = Callable[[list[Any]], Any]


class Collation(ABC):
    """A collate_fn that is told its path in the samples."""

    def __call__(self, samples: list[Any]) -> Any:
        """Collate whole samples, as a `collate_fn`."""
        return self.collate(samples, ())

    @abstractmethod
    def collate(self, samples: Sequence[Any], path: Path) -> Any:
        """Collate the values of the samples at this path."""


def default(samples: list[Any]) -> Any:
    """Do what torch's default_collate does, but name the sample that does not fit.

    Raises:
        InputError: A sample or a field of it differs from the others, or cannot be stacked.
    """
    return default_at(samples, ())


def collated(collate_fn: Rule, samples: Any, indices: Sequence[Any] = ()) -> Any:
    """Call a loader's `collate_fn`; add a note to errors of torch's default that names the misfit.

    The type and message of the error stay torch's.

    Args:
        indices: Those of the samples in the dataset; empty if they are not known.
    """
    try:
        return collate_fn(samples)
    except Exception as error:
        misfit = find(samples) if collate_fn is default_collate and samples else None
        if misfit is not None:
            words = refusal(misfit, len(samples), _advice(misfit), indices)
            error.add_note(f"forebay: {words}")
        raise


def applied(rule: Rule, values: list[Any], path: Path) -> Any:
    """Collate a field; errors name it."""
    if isinstance(rule, Collation):
        return rule.collate(values, path)
    if rule is default:
        return default_at(values, path)
    try:
        return rule(values)
    except Exception as error:
        error.add_note(f"forebay.collate: it was raised by the rule for field {shown(path)}")
        raise


def default_at(samples: Sequence[Any], path: Path) -> Any:
    """Do what `default` does, for values at this path of the samples."""
    try:
        return default_collate(list(samples))
    except Exception as error:
        misfit = find(samples) if samples else None
        if misfit is None:
            if path:
                error.add_note(f"forebay.collate: it was raised for field {shown(path)}")
            raise
        misfit = misfit._replace(path=(*path, *misfit.path))
        others = " Keep the other rules of by_field." if path else ""
        raise refusal(misfit, len(samples), _advice(misfit) + others) from error


def _advice(misfit: Misfit) -> str:
    rules = {"as_list": "to keep a list"}
    if misfit.number is not None and misfit.what.startswith(("a tensor", "an array", "a list")):
        rules = {"pad()": "to pad to the largest shape", **rules}
    if misfit.number is None and misfit.what.endswith("a dataclass"):
        rules = {"by_field(FIELD=default)": "to stack its fields (FIELD: any of them)", **rules}
    ways = " or ".join(f"{_rule_at(misfit.path, rule)} {why}" for rule, why in rules.items())
    return f"Use collate_fn={ways}; these are in forebay.collate."


def _rule_at(path: Path, rule: str) -> str:
    """Return the code of a collate_fn that has this rule at this path."""
    for part in reversed(path):
        is_name = isinstance(part, str) and part.isidentifier()
        rule = f"by_field({part}={rule})" if is_name else f"by_field({{{part!r}: {rule}}})"
    return rule


# ---- fields --------------------------------------------------------------------------------------
# Collate the fields of samples one by one, and rebuild the container.


@dataclass(frozen=True)
class ByField(Collation):
    """The collate function that `by_field` returns."""

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
            raise refusal(Misfit(path, None, described_value(first), ""), len(samples), advice)
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
        return described_value(sample, exactly=False)
    if isinstance(sample, Mapping):
        return f"{named(sample)} with {', '.join(sorted(map(repr, fields)))}"
    if 0 in fields or not fields:
        return f"{named(sample)} of {len(fields)}"
    return named(sample)


def _rebuilt(sample: Any, batches: dict[Any, Any]) -> Any:
    """Return a container like the sample that holds the batches."""
    if dataclasses.is_dataclass(sample):
        return dataclasses.replace(sample, **batches)  # type: ignore[type-var]
    branch = opened(sample)
    assert branch is not None, "it has fields"
    return rebuilt(sample, branch, [*batches.values()])
