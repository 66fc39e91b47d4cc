"""Rules, which collate one field of the samples; their errors name the field.

    Collation.collate(samples, path)     pad and by_field, which receive the path
    default(samples)                     torch's, with misfits named
    any function of a list               the user's, with a note

All of them are collate_fn objects as well. `collated` is how a loader calls any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate

from forebay.collating.misfits import Misfit, Path, find, refusal, shown

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


def collated(collate_fn: Rule, samples: Any) -> Any:
    """Call a loader's `collate_fn`; add a note to errors of torch's default that names the misfit.

    The type and message of the error stay torch's.
    """
    try:
        return collate_fn(samples)
    except Exception as error:
        misfit = find(samples) if collate_fn is default_collate and samples else None
        if misfit is not None:
            error.add_note(f"forebay: {refusal(misfit, len(samples), _advice(misfit))}")
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
